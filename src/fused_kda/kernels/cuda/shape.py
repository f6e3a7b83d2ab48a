"""Which launch shape a call gets: a pure function of its size and of the architecture. No tensors, no compiler.

Every shape computes the same bits (the kernel's reductions do not depend on it), so this is only about speed.
"""

from __future__ import annotations

from dataclasses import dataclass

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


def choose(problem: DecodeProblem, arch: str) -> Shape:
    """The launch shape for a problem on an architecture ("sm_80", "sm_90", "sm_90a", ...)."""
    return Shape(threads=256, min_ctas=2)


def major(arch: str) -> int:
    """Compute capability's major number of "sm_90a" and the like."""
    return int(arch.removeprefix("sm_").rstrip("af")) // 10
