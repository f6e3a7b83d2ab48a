"""Which launch shape a call gets: a pure function of its size and of the architecture. No tensors, no compiler.

Every shape computes the same bits (the kernel's reductions do not depend on it), so this is only about speed. The
thresholds come from ``benchmarks/sweep_shapes.py`` on an H200; its figures are in ``benchmarks/results/``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...contract import DecodeProblem, Specialization


@dataclass(frozen=True, slots=True)
class Shape:
    """How the work of one (row, head), a 128 x 128 tile of state, is laid over the machine.

    Attributes:
        threads: per CTA: 128, 256 or 512.
        split: CTAs per tile, each with 128 / split value rows; more than one form a cluster (SM90 on).
        bulk: the tile comes through the copy engine into shared memory (SM90 on) instead of into registers.
        chunk: passes over ``threads / 16`` rows that are computed together; with ``bulk``, also the span of a barrier.
        min_ctas: CTAs per SM that the compiler must leave registers for.
        hint: without prefetch, start the state's way into L2 before the previous kernel has finished (SM90 on).
    """

    threads: int
    split: int = 1
    bulk: bool = False
    chunk: int = 1
    min_ctas: int = 1
    hint: bool = False

    def shared_bytes(self, spec: Specialization) -> int:
        """Dynamic shared memory of one CTA."""
        return spec.head_dim**2 * spec.state_dtype.itemsize // self.split if self.bulk else 0


#: The state in registers, 64 floats a thread: no cluster, no copy engine, so every architecture can run it.
REGISTERS = Shape(threads=256, min_ctas=2)
#: A cluster per tile, the state in registers: the least latency, for grids that leave SMs idle.
EIGHTHS = Shape(threads=128, split=8, chunk=2)
QUARTERS = Shape(threads=128, split=4, chunk=4, min_ctas=5)
#: Through the copy engine: loads hold no registers and small loads do not queue behind them, for grids of many waves.
HALVES = Shape(threads=128, split=2, bulk=True, chunk=2, min_ctas=6)
WHOLE = Shape(threads=128, bulk=True, chunk=2, min_ctas=3)

#: Most tiles per SM for each shape, by bytes per state element, where state may be read ahead of the previous kernel.
#: fp32: just above one tile per SM, and just above two, whole tiles would leave most SMs idle in the last wave.
_PREFETCH = {
    4: ((0.125, EIGHTHS), (0.375, QUARTERS), (1.0, HALVES), (1.2, QUARTERS), (2.0, REGISTERS), (2.5, QUARTERS)),
    2: ((0.375, QUARTERS), (2.0, WHOLE), (4.5, HALVES)),
}
#: The same where it may not: what follows the wait is longer, so smaller tiles pay for longer.
_WAIT = {4: ((0.125, EIGHTHS), (0.375, QUARTERS)), 2: ((0.375, QUARTERS),)}


def choose(problem: DecodeProblem, arch: str, sms: int) -> Shape:
    """The launch shape for a problem on an architecture ("sm_80", "sm_90", "sm_90a", ...) with so many SMs."""
    spec = problem.spec
    if spec.state_alignment < 16 or not has_copy_engine(arch):
        return REGISTERS
    per_sm = problem.batch * spec.heads / sms
    size = spec.state_dtype.itemsize
    table, rest = (_PREFETCH[size], WHOLE) if problem.prefetch else (_WAIT[size], HALVES)
    shape = next((shape for most, shape in table if per_sm <= most), rest)
    # Many waves of fp32 tiles: the copy engine is busy anyway, and the hint only asks L2 twice.
    return shape if problem.prefetch else replace(shape, hint=size == 2 or per_sm <= 2.0)


def shapes(spec: Specialization, arch: str, prefetch: bool) -> tuple[Shape, ...]:
    """Every launch shape that :func:`choose` can give a specialisation on an architecture, whatever the batch."""
    if spec.state_alignment < 16 or not has_copy_engine(arch):
        return (REGISTERS,)
    size = spec.state_dtype.itemsize
    if prefetch:
        return tuple(dict.fromkeys((*(shape for _, shape in _PREFETCH[size]), WHOLE)))
    few = tuple(replace(shape, hint=True) for shape in (*(shape for _, shape in _WAIT[size]), HALVES))
    return few if size == 2 else (*few, HALVES)


def has_copy_engine(arch: str) -> bool:
    """Whether clusters and the copy engine are used: SM90 to SM103.

    SM120 has them too, but room for one fp32 tile per SM and little bandwidth to keep up with; it was not measured.
    """
    return major(arch) in (9, 10)


def major(arch: str) -> int:
    """Compute capability's major number of "sm_90a" and the like."""
    return int(arch.removeprefix("sm_").rstrip("af")) // 10
