"""Times launch shapes of the Triton kernel cell by cell: what kernels/triton/shape.py rests on. --chain: the chain's.

    python benchmarks/sweep_triton.py --json FILE [--state-dtype bfloat16] [--prefetch 1,0] [--cells 12x1,12x2]

Each shape must first agree with float64; whether it has the first shape's bits is printed beside it, since only shapes
that have may be mixed between batch sizes. Needs an NVIDIA GPU of SM90 or later.
"""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from fused_kda import gates
from fused_kda.bench.cells import Cell, make_layers
from fused_kda.bench.limit import limit_steps
from fused_kda.bench.results import document, write
from fused_kda.bench.timing import Step, time_providers
from fused_kda.contract import DecodeProblem, Specialization, Tensors
from fused_kda.kernels import chain, triton
from fused_kda.kernels.chain.launch import Shape as ChainShape
from fused_kda.kernels.jit import compiled
from fused_kda.kernels.triton.compile import decode_build
from fused_kda.kernels.triton.shape import Shape
from fused_kda.testing.compare import check_call, expected
from fused_kda.testing.problems import Call

CELLS = ((12, 1), (12, 2), (12, 4), (12, 8), (12, 16), (12, 32), (12, 64), (12, 256), (96, 1), (96, 16), (96, 64))


def triton_shapes(itemsize: int) -> list[Shape]:
    """Candidates for D = 128. The state needs 128 registers a thread in fp32 at 4 warps, half of it in bf16."""
    lane = 256 // itemsize
    return [
        Shape(4, lane, 4),
        Shape(4, lane, 3, registers=128),
        Shape(4, lane, 6),
        Shape(4, lane, 8),
        Shape(4, lane // 2, 4),
        Shape(4, lane // 2, 6),
        Shape(4, lane // 2, 8),
        Shape(4, lane, 2, block_v=32),
        Shape(8, lane, 4),
        Shape(2, lane, 2),
    ]


def chain_shapes() -> list[ChainShape]:
    return [
        ChainShape(block, warps, vector)
        for block, warps, vector in (
            (32, 4, 1), (32, 4, 4), (32, 2, 1), (16, 2, 1), (16, 4, 1), (64, 4, 1), (8, 1, 1), (16, 1, 1)
        )
    ]  # fmt: skip


def name(shape: Any) -> str:
    return " ".join(f"{key}={value}" for key, value in dataclasses.asdict(shape).items() if value not in (None, False))


def warm(job: tuple[Specialization, str, Shape, bool]) -> None:
    """Fill the disk cache; runs in a process of its own."""
    spec, arch, shape, prefetch = job
    compiled(decode_build(spec, arch, shape, prefetch), arch)


def step(layer: Call, launch: Callable[[Tensors], None]) -> Callable[[], None]:
    tensors = Tensors(*(layer.arguments[field] for field in Tensors._fields))
    return lambda: launch(tensors)


def bits(call: Call) -> tuple[bytes, ...]:
    outputs = (call.arguments["out"], call.arguments["state"][list(call.slots)], call.arguments["conv_state"])
    return tuple(tensor.contiguous().view(torch.uint8).cpu().numpy().tobytes() for tensor in outputs)


def sweep(
    cell: Cell, layers: Sequence[Call], problem: DecodeProblem, shapes: Sequence[Any], backend: str, replays: int
) -> dict[str, dict[str, Any]]:
    """Microseconds per layer of the limit and of every shape that is right."""
    wanted = expected(layers[0], chain=backend == "chain")
    prepare: Callable[[DecodeProblem, Any], Callable[[Tensors], None]] = (
        chain.prepare if backend == "chain" else triton.prepare
    )
    steps: dict[str, Sequence[Step]] = dict(limit_steps(layers))
    first = None
    for shape in shapes:
        label = name(shape)
        try:
            launch = prepare(problem, shape)
            call = layers[0].clone()
            step(call, launch)()
            check_call(call, call.arguments["out"], wanted)
        except Exception as error:  # one shape that fails must not stop the sweep; it is reported and not timed
            print(f"NOT TIMED {cell} {label}: {type(error).__name__}: {error}", flush=True)
            continue
        first = first or bits(call)
        same = "" if bits(call) == first else " (other bits)"
        steps[label + same] = [step(layer, launch) for layer in layers]
    times = time_providers(steps, problem.device, replays=replays)
    return {key: timing.record() for key, timing in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--state-dtype", default="float32")
    parser.add_argument("--layout", default="SD")
    parser.add_argument("--prefetch", default="1")
    parser.add_argument("--chain", action="store_true", help="sweep the chain's recurrence instead")
    parser.add_argument("--cells", default=",".join(f"{heads}x{batch}" for heads, batch in CELLS))
    parser.add_argument("--replays", type=int, default=20)
    parser.add_argument("--processes", type=int, default=16)
    parser.add_argument("--compile-only", action="store_true", help="fill Triton's cache, time nothing")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device = torch.device("cuda", torch.cuda.current_device())
    arch = gates.architecture(device)
    dtype = getattr(torch, options.state_dtype)
    backend = "chain" if options.chain else "triton"
    shapes: Sequence[Any] = chain_shapes() if options.chain else triton_shapes(dtype.itemsize)
    sizes = [tuple(map(int, size.split("x"))) for size in options.cells.split(",")]
    early = [flag == "1" for flag in options.prefetch.split(",")]

    if not options.chain:
        specs = {h: make_layers(Cell(h, 1, options.layout, dtype), device)[0].problem.spec for h, _ in sizes}
        jobs = [(spec, arch, shape, flag) for spec in specs.values() for shape in shapes for flag in early]
        with ProcessPoolExecutor(options.processes, get_context("spawn")) as pool:
            list(pool.map(warm, jobs))
    if options.compile_only:
        return

    results = []
    for flag in early:
        for heads, batch in sizes:
            cell = Cell(heads, batch, options.layout, dtype)
            layers = make_layers(cell, device)
            problem = dataclasses.replace(layers[0].problem, prefetch=flag)
            times = sweep(cell, layers, problem, shapes, backend, options.replays)
            del layers
            torch.cuda.empty_cache()
            limit = min(entry["median"] for key, entry in times.items() if key.startswith("limit"))
            results.append({**cell.record(), "backend": backend, "prefetch": flag, "us": times})
            print(f"\n{heads}x{batch} {options.state_dtype} {backend} prefetch={flag}  limit {limit:.2f}", flush=True)
            for key, entry in sorted(times.items(), key=lambda item: item[1]["median"]):
                print(f"  {key:<62} {entry['median']:8.2f}  {entry['median'] / limit:.3f}", flush=True)
    if options.json:
        write(document(f"{backend}-shapes", shlex.join(["python", *sys.argv]), device, cells=results), options.json)


if __name__ == "__main__":
    main()
