"""What each engine's models can get from the op: read by the docs' compatibility table and by ``fused-kda doctor``.

Which backend that is on which architecture is not said here but in :mod:`fused_kda.gates`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .. import gates
from ..layouts import LayoutKind
from ..shapes import shape_problem


@dataclass(frozen=True, slots=True)
class Entry:
    """One model in one engine.

    Attributes:
        engine, versions: the engine, and its versions whose source the adapter was written against.
        model: the model or layer.
        heads: heads on one rank, for every tensor-parallel size that divides them.
        lower_bound: of the model's gate; None for softplus.
        layouts, state_dtypes: of the pools that the engine makes.
        archs: what architectures' names begin with, where the adapter goes there.
        route: how a step gets to the op.
        refusal: why none does, or "".
    """

    engine: str
    versions: str
    model: str
    heads: tuple[int, ...]
    lower_bound: float | None
    layouts: tuple[LayoutKind, ...]
    state_dtypes: tuple[torch.dtype, ...]
    archs: tuple[str, ...] = ("sm_", "gfx")
    route: str = ""
    refusal: str = ""

    def backends(self, arch: str, layout: LayoutKind, state_dtype: torch.dtype) -> tuple[str, ...]:
        """Backends of one launch whose ranges hold this model for all its head counts, fastest first."""
        if self.refusal or not arch.startswith(self.archs):
            return ()
        problems = [
            shape_problem(heads=heads, layout=layout, state_dtype=state_dtype, lower_bound=self.lower_bound)
            for heads in self.heads
        ]
        return tuple(
            backend
            for backend in gates.BACKENDS
            for row in gates.rows(backend, arch)
            if row.launches == 1 and row.auto and not any(row.range_reasons(problem) for problem in problems)
        )


KIMI_K3 = (96, 48, 24, 12, 6, 3)
KIMI_LINEAR = (32, 16, 8, 4, 2, 1)
FP32, EITHER = (torch.float32,), (torch.float32, torch.bfloat16)

TABLE: tuple[Entry, ...] = (
    Entry(
        "vllm", "0.30 to 0.33", "Kimi-K3", KIMI_K3, -5.0, ("SD", "DS"), EITHER,
        route="fused_kda_decode, its gate widened",
    ),
    Entry(
        "vllm", "0.30 to 0.33", "Kimi-Linear", KIMI_LINEAR, None, ("SD", "DS"), FP32,
        route="a subclass of the layer",
    ),
    Entry(
        "sglang", "0.5.23", "Kimi-K3", KIMI_K3, -5.0, ("SD",), EITHER, ("sm_",),
        route="kda_fused_decode, covered and the layer's offer",
    ),
    Entry(
        "sglang", "0.5.23", "Kimi-Linear", KIMI_LINEAR, None, ("SD",), FP32,
        refusal="its layer offers no step to a fused op",
    ),
    Entry(
        "fla", "0.6.0", "KDAForCausalLM, any model with its KDA layer", (32, 16, 8, 4, 2, 1), None, ("DS",), FP32,
        route="forward of each layer, after patch(model)",
    ),
)  # fmt: skip
