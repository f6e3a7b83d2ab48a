"""Which launch shape: a pure function of what is asked. ``benchmarks/sweep_triton.py`` produced the figures.

Warps, the one thing here that changes the order of a sum, follow from D alone, so that a row's result has the same bits
at every batch size. All else may follow the batch.
"""

from __future__ import annotations

import math
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
        registers: NVIDIA: bound on registers per thread, so that enough programs fit on one multiprocessor.
        fenced: a barrier after each tile, so that the compiler does not ask for later tiles early and then spill.
    """

    warps: int
    lane_k: int
    ahead: int
    block_v: int = 16
    registers: int | None = None
    fenced: bool = False


#: Multiprocessors of the H200, on which the thresholds were measured.
SMS = 132


def has_pdl(arch: str) -> bool:
    """Whether the architecture can start a kernel before the one ahead has ended (NVIDIA, SM90 and later)."""
    return arch.startswith("sm_") and int(arch.removeprefix("sm_")) >= 90


def shapes(spec: Specialization, arch: str, prefetch: bool) -> tuple[tuple[float, Shape], ...]:
    """Every launch shape that a specialisation can be given: ``(most programs, shape)``, ascending.

    Args:
        spec: of the problem.
        arch: "sm_90", "gfx942" ...
        prefetch: whether the state may be read before the kernel ahead on the stream has ended.
    """
    early = prefetch and has_pdl(arch)
    dim, itemsize = spec.head_dim, spec.state_dtype.itemsize
    # As many threads as D on NVIDIA, so that each small input is loaded once, by one thread an element; 16 lanes with
    # 16 bytes each to a state row.
    warps, lane_k = dim // 32, min(dim, 256 // itemsize)
    if spec.state_alignment < 16:
        return ((math.inf, Shape(warps, lane_k, ahead=1, fenced=True)),)
    if arch.startswith("gfx"):
        # Never measured: what compiles to at most 256 registers, so that two waves fit on a SIMD.
        if dim == 256:
            return ((math.inf, Shape(warps, min(dim, 2 * lane_k), ahead=2, fenced=True)),)
        return ((math.inf, Shape(warps, lane_k, ahead=2, fenced=spec.has_initial_state)),)
    if dim == 256:
        return ((math.inf, Shape(warps, lane_k, ahead=2)),)
    tiles = dim // 16
    many = (math.inf, Shape(warps, lane_k, ahead=4))
    if tiles == 4:
        return (many,)
    if itemsize == 2:
        # Half the registers of fp32: all tiles of two programs fit beside each other, six tiles of four.
        some = Shape(warps, lane_k, ahead=6 if early else 4)
        return (2 * SMS, Shape(warps, lane_k, ahead=tiles)), (4 * SMS, some), many
    # One program to a multiprocessor: 8 lanes to a row, since exchanges cost more here than registers.
    few = Shape(warps, lane_k // 2, ahead=tiles if early else 6)
    some = Shape(warps, lane_k, ahead=6 if early else 4)
    return (SMS, few), (2 * SMS, some), many


def choose(spec: Specialization, arch: str, batch: int, prefetch: bool) -> Shape:
    """The launch shape for a batch: as many tiles in flight as registers allow the programs of one multiprocessor."""
    programs = batch * spec.heads
    return next(shape for most, shape in shapes(spec, arch, prefetch) if programs <= most)
