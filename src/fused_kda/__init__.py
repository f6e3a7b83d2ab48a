"""fused-kda: one decode step of a Kimi Delta Attention layer as one kernel launch, on every conv-state layout."""

from . import ops as ops
from .api import Explanation, FallbackWarning, explain, fused_kda_decode, kernel_counts, stats, warmup

__version__ = "0.1.0"
__all__ = [
    "Explanation",
    "FallbackWarning",
    "__version__",
    "explain",
    "fused_kda_decode",
    "kernel_counts",
    "stats",
    "warmup",
]
