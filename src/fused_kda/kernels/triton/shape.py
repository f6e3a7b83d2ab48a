"""Which launch shape: a pure function of what is asked. ``benchmarks/sweep_triton.py`` produced the figures.

Two parts, on purpose. What may change a bit (warps, tile rows, lanes over K) follows from the architecture, D and the
state's dtype alone, so a row's result is the same at every batch size. The rest (tiles in flight, order of the loads,
registers) cannot change a bit and may follow the batch.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...contract import Specialization


@dataclass(frozen=True, slots=True)
class Shape:
    """One launch shape.

    Attributes:
        warps: warps (NVIDIA) or waves (AMD) per program.
        block_v: value rows per tile.
        lane_k: K channels of one state row that lie side by side in a group of lanes.
        ahead: tiles in flight before the first is used.
        state_first: ask for the state before the small inputs.
        registers: NVIDIA: bound on registers per thread, so that enough programs fit on one multiprocessor.
        fenced: a barrier after each tile, so that the compiler does not ask for later tiles early and then spill.
    """

    warps: int
    block_v: int
    lane_k: int
    ahead: int
    state_first: bool = False
    registers: int | None = None
    fenced: bool = False


def choose(spec: Specialization, arch: str, batch: int, prefetch: bool) -> Shape:
    """The launch shape for a batch on an architecture ("sm_90", "gfx942")."""
    dim, itemsize = spec.head_dim, spec.state_dtype.itemsize
    # 16 lanes with 16 bytes each to a state row; as many threads as D on NVIDIA, so that each small input is loaded
    # once, by one thread an element.
    warps, lane_k = dim // 32, min(dim, 16 * 16 // itemsize)
    if spec.state_alignment < 16:
        return Shape(warps, block_v=16, lane_k=lane_k, ahead=1, fenced=True)
    if arch.startswith("gfx"):
        if dim == 256:
            return Shape(warps, block_v=16, lane_k=min(dim, 2 * lane_k), ahead=2, fenced=True)
        return Shape(warps, block_v=16, lane_k=lane_k, ahead=2, fenced=spec.has_initial_state)
    return Shape(warps, block_v=16, lane_k=lane_k, ahead=2 if dim == 256 else 4)
