"""Times every launch shape of the CUDA kernel in every cell: what the thresholds in kernels/cuda/shape.py rest on.

    python benchmarks/sweep_shapes.py --json FILE [--state-dtype bfloat16] [--prefetch 1,0] [--cells 12x1,12x2]

Each shape must first agree with float64, and with the first shape to the bit. Needs an NVIDIA GPU of SM90 or later.
"""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from fused_kda import gates
from fused_kda.bench.cells import Cell, make_layers
from fused_kda.bench.limit import limit_steps
from fused_kda.bench.results import document, write
from fused_kda.bench.timing import Step, time_providers
from fused_kda.contract import Tensors
from fused_kda.kernels.cuda.compile import compile_cubin
from fused_kda.kernels.cuda.launch import make_launch
from fused_kda.kernels.cuda.shape import Shape
from fused_kda.testing.compare import check_call, check_equal, expected
from fused_kda.testing.problems import Call

SHAPES = (
    Shape(256, 1, min_ctas=2),
    Shape(256, 2, chunk=2, min_ctas=3),
    Shape(128, 2, chunk=1, min_ctas=4),
    Shape(128, 2, chunk=2, min_ctas=4),
    Shape(128, 4, chunk=2, min_ctas=6),
    Shape(128, 4, chunk=4),
    Shape(128, 8, chunk=2),
    Shape(256, 1, bulk=True, chunk=2, min_ctas=3),
    Shape(128, 1, bulk=True, chunk=2, min_ctas=3),
    Shape(128, 1, bulk=True, chunk=2, min_ctas=5),
    Shape(128, 2, bulk=True, chunk=1, min_ctas=6),
    Shape(128, 2, bulk=True, chunk=2, min_ctas=6),
    Shape(128, 4, bulk=True, chunk=2, min_ctas=8),
)
#: Tiles (B * H) from a fraction of the SMs to many waves.
CELLS = (
    (12, 1),
    (12, 2),
    (12, 3),
    (12, 4),
    (12, 6),
    (12, 8),
    (12, 12),
    (12, 16),
    (12, 20),
    (12, 24),
    (12, 32),
    (12, 48),
)
CELLS += ((12, 64), (12, 128), (96, 1), (96, 64), (1, 1), (4, 1))


def name(shape: Shape) -> str:
    bulk = (" bulk" if shape.bulk else "") + (" hint" if shape.hint else "")
    return f"{shape.threads}/{shape.split}{bulk} chunk {shape.chunk} min {shape.min_ctas}"


def step(layer: Call, launch: Callable[[Tensors], None]) -> Callable[[], None]:
    tensors = Tensors(*(layer.arguments[field] for field in Tensors._fields))
    return lambda: launch(tensors)


def sweep(cell: Cell, prefetch: bool, replays: int) -> dict[str, dict[str, Any]]:
    """Microseconds per layer of the limit and of every shape that is right."""
    device = torch.device("cuda", torch.cuda.current_device())
    arch = gates.architecture(device)
    layers = make_layers(cell, device)
    problem = dataclasses.replace(layers[0].problem, prefetch=prefetch)
    shapes = (
        SHAPES if prefetch else [dataclasses.replace(shape, hint=hint) for shape in SHAPES for hint in (False, True)]
    )
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda shape: compile_cubin(problem.spec, shape, prefetch, arch), shapes))
    wanted = expected(layers[0])
    steps: dict[str, Sequence[Step]] = dict(limit_steps(layers))
    first: tuple[torch.Tensor, torch.Tensor] | None = None
    for shape in shapes:
        try:
            launch = make_launch(problem, shape, arch)
            call = layers[0].clone()
            step(call, launch)()
            out, state = call.arguments["out"], call.arguments["state"]
            check_call(call, out, wanted)
            if first is None:
                first = out, state
            check_equal("out", out, first[0])
            check_equal("state", state, first[1])
        except Exception as error:  # one shape that fails must not stop the sweep; it is reported and not timed
            print(f"NOT TIMED {cell} {name(shape)}: {type(error).__name__}: {error}", flush=True)
            continue
        steps[name(shape)] = [step(layer, launch) for layer in layers]
    times = time_providers(steps, device, replays=replays)
    return {key: timing.record() for key, timing in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--state-dtype", default="float32")
    parser.add_argument("--layout", default="SD")
    parser.add_argument("--prefetch", default="1")
    parser.add_argument("--cells", default=",".join(f"{heads}x{batch}" for heads, batch in CELLS))
    parser.add_argument("--replays", type=int, default=20)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results = []
    for early in options.prefetch.split(","):
        for size in options.cells.split(","):
            heads, batch = map(int, size.split("x"))
            cell = Cell(heads, batch, options.layout, getattr(torch, options.state_dtype))
            times = sweep(cell, early == "1", options.replays)
            torch.cuda.empty_cache()
            limit = min(entry["median"] for key, entry in times.items() if key.startswith("limit"))
            results.append({**cell.record(), "prefetch": early == "1", "us": times})
            print(f"\n{size} {options.state_dtype} prefetch={early}  limit {limit:.2f}", flush=True)
            ranked = sorted(times.items(), key=lambda item: item[1]["median"])
            for key, entry in ranked:
                print(f"  {key:<30} {entry['median']:8.2f}  {entry['median'] / limit:.3f}", flush=True)
    if options.json:
        device = torch.device("cuda", torch.cuda.current_device())
        write(document("shapes", shlex.join(["python", *sys.argv]), device, cells=results), options.json)


if __name__ == "__main__":
    main()
