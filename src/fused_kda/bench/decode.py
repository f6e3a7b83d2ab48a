"""Times the decode step cell by cell beside the measured limit, and refuses to time a backend that fails its check.

    python -m fused_kda.bench.decode --backend cuda,chain --heads 12 --batch 1,32 --layout SD,DS --json FILE

Prints one table (microseconds per layer, percentiles, GB/s over the named bytes, time over the limit) and writes a
results file. Needs an NVIDIA GPU of SM90 or later: the limit is measured with dependent launches, like the op.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from .. import gates
from ..testing.compare import Mismatch, check_call, expected
from ..testing.problems import Call
from .cells import TABLE, Cell, make_layers
from .limit import SHAPES, limit_steps
from .timing import time_graphs


def check(backend: str, layer: Call) -> None:
    """Run a copy of one layer's call and compare it with float64.

    Raises:
        Mismatch: the backend is beyond its budget; it must not be timed.
        NotImplementedError: its gate is closed.
    """
    call = layer.clone()
    wanted = expected(call, chain=backend == "chain")
    check_call(call, call.run(backend), wanted)


def measure(cell: Cell, backends: Sequence[str], replays: int, prefetch: bool = True) -> list[dict[str, Any]]:
    """One record per backend that passes its check, and one for the limit, all replayed in turns."""
    layers = make_layers(cell, torch.device("cuda", torch.cuda.current_device()))
    for layer in layers:
        layer.arguments["prefetch"] = prefetch
    limits = {f"limit {threads}x{vectors}": limit_steps(layers, threads, vectors) for threads, vectors in SHAPES}
    providers: dict[str, Sequence[Callable[[], object]]] = dict(limits)
    failed: dict[str, str] = {}
    for backend in backends:
        try:
            check(backend, layers[0])
        except (Mismatch, NotImplementedError) as error:
            failed[backend] = str(error)
            continue
        providers[backend] = [_step(layer, backend) for layer in layers]
    times = time_graphs(providers, replays=replays)
    least = min(limits, key=lambda name: times[name].median)
    times = {"limit": times[least]} | {name: timing for name, timing in times.items() if name not in limits}
    limit = times["limit"].median
    records: list[dict[str, Any]] = []
    for name, timing in times.items():
        moved = 2 * cell.state_bytes if name == "limit" else cell.step_bytes
        launches = 1 if name == "limit" else max((row.launches for row in gates.rows(name)), default=0)
        records.append(
            {
                **cell.record(),
                "provider": name,
                "prefetch": prefetch,
                "us": asdict(timing),
                "gb_per_s": moved / timing.median / 1e3,
                "over_limit": timing.median / limit,
                "launches": launches,
                "layers": cell.layers,
            }
        )
    for name, reason in failed.items():
        records.append({**cell.record(), "provider": name, "prefetch": prefetch, "not_timed": reason})
    return records


def _step(layer: Call, backend: str) -> Callable[[], object]:
    return lambda: layer.run(backend)


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "device": properties.name,
        "sms": properties.multi_processor_count,
        "l2_bytes": properties.L2_cache_size,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
    }


def command_line(module: str, given: Sequence[str]) -> str:
    """The command that a results file names: all but where it was told to write."""
    kept = [word for at, word in enumerate(given) if word != "--json" and (at == 0 or given[at - 1] != "--json")]
    return " ".join(["python", "-m", f"fused_kda.bench.{module}", *kept])


def line(record: dict[str, Any]) -> str:
    """One record as a line of the printed table."""
    name = f"{record['heads']:>3} {record['batch']:>5} {record['layout']:<3} {record['state_dtype']:<9}"
    if "not_timed" in record:
        return f"{name} {record['provider']:<10} not timed: {record['not_timed']}"
    us = record["us"]
    return (
        f"{name} {record['provider']:<10} {us['median']:8.2f} ({us['p20']:.2f}-{us['p80']:.2f}) "
        f"{record['gb_per_s']:6.0f} GB/s  {record['over_limit']:.3f} x limit  {record['launches']} launches"
    )


def geometric_means(records: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Geometric mean of time over limit per provider, layout, state dtype and prefetch."""
    groups: dict[str, list[float]] = {}
    for record in records:
        if record["provider"] != "limit" and "over_limit" in record:
            early = "" if record["prefetch"] else " no prefetch"
            key = f"{record['provider']} {record['layout']} {record['state_dtype']}{early}"
            groups.setdefault(key, []).append(record["over_limit"])
    return {key: math.exp(sum(map(math.log, ratios)) / len(ratios)) for key, ratios in groups.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="cuda", help="comma-separated backends")
    parser.add_argument("--heads", default="12,96")
    parser.add_argument("--batch", default="", help="comma-separated; default: those of the table")
    parser.add_argument("--layout", default="SD")
    parser.add_argument("--state-dtype", default="float32")
    parser.add_argument("--prefetch", default="1", help="1, 0 or both: 1,0")
    parser.add_argument("--replays", type=int, default=30)
    parser.add_argument("--json", type=Path, help="write the results here")
    options = parser.parse_args(arguments)
    heads = [int(value) for value in options.heads.split(",")]
    batches = [int(value) for value in options.batch.split(",")] if options.batch else None
    sizes = [(h, b) for h in heads for b in batches] if batches else [size for size in TABLE if size[0] in heads]
    records = []
    for dtype in options.state_dtype.split(","):
        for heads_, batch in sizes:
            for layout in options.layout.split(","):
                for early in options.prefetch.split(","):
                    cell = Cell(heads_, batch, layout, getattr(torch, dtype))
                    for record in measure(cell, options.backend.split(","), options.replays, early == "1"):
                        records.append(record)
                        print(line(record), flush=True)
                    torch.cuda.empty_cache()
    means = geometric_means(records)
    for key, mean in means.items():
        print(f"geometric mean {mean:.3f} x limit: {key}")
    if options.json:
        given = list(arguments if arguments is not None else sys.argv[1:])
        result = {
            "command": command_line("decode", given),
            "machine": machine(),
            "geometric_means": means,
            "cells": records,
        }
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if any("not_timed" in record for record in records) else 0


if __name__ == "__main__":
    sys.exit(main())
