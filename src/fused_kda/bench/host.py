"""Host time of one eager step: from the Python call until it returns, the launch queued.

    python -m fused_kda.bench.host --json FILE

Measures ``fused_kda_decode`` (with ``out`` given, and allocating it) and the backend's bare launch. The queue is
drained before it fills, so no call waits for the GPU.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from ..api import fused_kda_decode
from ..contract import Tensors, decode_problem
from .cells import Cell, make_layers
from .decode import command_line, machine

_CALLS, _ROUNDS = 200, 21


def host_times(backend: str, cell: Cell) -> dict[str, float]:
    """Median microseconds per call: "bare launch", "call", "call that allocates out"."""
    arguments = make_layers(cell, torch.device("cuda", torch.cuda.current_device()))[0].arguments
    tensors = Tensors(*(arguments[name] for name in Tensors._fields))
    problem = decode_problem(**arguments)
    launch = importlib.import_module(f"fused_kda.kernels.{backend}").prepare(problem)
    without = {**arguments, "out": None}
    return {
        "bare launch": _median(lambda: launch(tensors)),
        "call": _median(lambda: fused_kda_decode(**arguments, backend=backend)),
        "call that allocates out": _median(lambda: fused_kda_decode(**without, backend=backend)),
    }


def _median(call: Callable[[], object]) -> float:
    times = []
    for _ in range(_ROUNDS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(_CALLS):
            call()
        times.append((time.perf_counter() - start) / _CALLS * 1e6)
    return statistics.median(times)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="cuda", help="comma-separated backends")
    parser.add_argument("--json", type=Path, help="write the results here")
    options = parser.parse_args(arguments)
    results = {backend: host_times(backend, Cell(12, 1)) for backend in options.backend.split(",")}
    for backend, times in results.items():
        print(f"{backend}: " + ", ".join(f"{name} {us:.1f} us" for name, us in times.items()))
    if options.json:
        command = command_line("host", list(arguments if arguments is not None else sys.argv[1:]))
        options.json.write_text(json.dumps({"command": command, "machine": machine(), "us": results}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
