"""Models around the op: the KDA layer and what is built from it."""

from .kda import KimiDeltaAttention

__all__ = ["KimiDeltaAttention"]
