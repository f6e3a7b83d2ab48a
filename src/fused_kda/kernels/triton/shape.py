"""Which launch shape: a pure function of what is asked. ``benchmarks/sweep_triton.py`` produced the figures.

Warps, the one thing here that changes the order of a sum, follow from D alone, so that a row's result has the same bits
at every batch size. All else may follow the batch.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...contract import Specialization


@dataclass(frozen=True, slots=True)
class Shape:
    """One launch shape.

    Attributes:
        warps: warps (NVIDIA) or waves (AMD) per program.
        lane_k: K channels of one state row that lie side by side in a group of lanes.
        ahead: tiles in flight before the first is used.
        block_v: value rows per tile.
        state_first: ask for the state before the small inputs.
        registers: NVIDIA: bound on registers per thread, so that enough programs fit on one multiprocessor.
        fenced: a barrier after each tile, so that the compiler does not ask for later tiles early and then spill.
    """

    warps: int
    lane_k: int
    ahead: int
    block_v: int = 16
    state_first: bool = False
    registers: int | None = None
    fenced: bool = False


#: Up to as many programs as the smallest of today's large GPUs has SMs, every program has one to itself.
FEW_PROGRAMS = 128


def choose(spec: Specialization, arch: str, batch: int, prefetch: bool) -> Shape:
    """The launch shape for a batch on an architecture ("sm_90", "gfx942")."""
    dim, itemsize = spec.head_dim, spec.state_dtype.itemsize
    # As many threads as D on NVIDIA, so that each small input is loaded once, by one thread an element; 16 lanes with
    # 16 bytes each to a state row.
    warps, lane_k = dim // 32, min(dim, 256 // itemsize)
    if spec.state_alignment < 16:
        return Shape(warps, lane_k, ahead=1, fenced=True)
    if arch.startswith("gfx"):
        if dim == 256:
            return Shape(warps, min(dim, 2 * lane_k), ahead=2, fenced=True)
        return Shape(warps, lane_k, ahead=2, fenced=spec.has_initial_state)
    if dim == 256:
        return Shape(warps, lane_k, ahead=2)
    few = batch * spec.heads <= FEW_PROGRAMS
    return Shape(warps, lane_k, ahead=dim // 16 if few else 4, state_first=few and prefetch)
