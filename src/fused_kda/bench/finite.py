"""What the finite check adds to a step.

    python -m fused_kda.bench.finite [--json FILE]

Times a model's layers in one CUDA graph, with and without :meth:`fused_kda.finite.FiniteCheck.watch` after each, and
the host's share of an eager call of it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from ..finite import FiniteCheck
from ..pool import StatePool
from . import results
from .cells import Cell, make_layers
from .host import microseconds_per_call
from .timing import time_providers


@dataclass(frozen=True, slots=True)
class Cost:
    """Microseconds per layer at one size: the step alone, with the check, and the host's time of an eager check."""

    heads: int
    batch: int
    step: float
    step_and_check: float
    host: float

    @property
    def added(self) -> float:
        return self.step_and_check - self.step


def cost(cell: Cell, backend: str, device: torch.device) -> Cost:
    """Measure one size."""
    layers = make_layers(cell, device)
    pool = StatePool(len(layers), cell.batch + 1, 1, 1, device=device)  # for its slots and layers alone
    check = FiniteCheck(pool)
    watches = [
        lambda number=number, given=layer.arguments: check.watch(number, given["out"], given["state_indices"])
        for number, layer in enumerate(layers)
    ]

    def step(number: int) -> Callable[[], object]:
        return lambda: layers[number].run(backend)

    def both(number: int) -> Callable[[], object]:
        return lambda: (layers[number].run(backend), watches[number]())

    numbers = range(len(layers))
    timings = time_providers({"step": [step(n) for n in numbers], "both": [both(n) for n in numbers]}, device)
    if check.found():
        raise RuntimeError(f"finite: expected no finding on a sound run, got {check.found()}")
    host = microseconds_per_call(watches[0], device)
    return Cost(cell.heads, cell.batch, timings["step"].median, timings["both"].median, host)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--json", type=Path, help="write the results here")
    options = parser.parse_args(arguments)
    device = torch.device("cuda", torch.cuda.current_device())
    costs = [cost(Cell(12, batch), options.backend, device) for batch in (1, 8, 64, 256)]
    for one in costs:
        print(
            f"H={one.heads} B={one.batch}: {one.step:.2f} us a step, {one.step_and_check:.2f} with the check "
            f"(+{one.added:.2f}); host {one.host:.1f} us an eager check"
        )
    if options.json:
        records = [{**asdict(one), "added": one.added} for one in costs]
        results.write(
            results.document("finite", "python -m fused_kda.bench.finite", device, finite=records), options.json
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
