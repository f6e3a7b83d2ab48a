"""``fused-kda bench-model``: a decode step of a stack of KDA layers, and where its time goes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any

import torch
import typer
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from .. import gates
from ..bench import results
from ..bench.model import STACKS, Variant, measure_stacks, variants
from .bench import MIN_COLUMNS, SaveOption, keep
from .terminal import (
    FAILED,
    command_line,
    console,
    errors,
    parse_backends,
    parse_device,
    parse_numbers,
    print_json,
    small_work,
    stop,
)

NAMES = tuple(config.name for config in STACKS)


def command(
    ctx: typer.Context,
    model: Annotated[str, typer.Option(help=f"stacks, by comma: {', '.join(NAMES)}")] = ",".join(NAMES),
    batch: Annotated[str | None, typer.Option(help="rows, by comma; default 1,2,4,...,256 (CPU: 1)")] = None,
    backend: Annotated[
        str | None, typer.Option(help="the fused backend, then what it is compared with; default: the fastest, chain")
    ] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="KDA layers instead of the model's own")] = None,
    hidden: Annotated[int | None, typer.Option(min=16, help="hidden width instead of the model's own")] = None,
    heads: Annotated[int | None, typer.Option(min=1, help="heads instead of the model's own")] = None,
    graph: Annotated[
        bool | None, typer.Option("--graph/--eager", help="one CUDA graph (default on a GPU), or launch anew")
    ] = None,
    replays: Annotated[int, typer.Option(min=1, help="timed steps; every sample is kept")] = 50,
    device: Annotated[
        str | None, typer.Option(help="cpu or cuda[:number]; default: the first GPU, else the CPU")
    ] = None,
    save: SaveOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON document instead of the table")] = False,
) -> None:
    """Time one decode step of a model's KDA layers: TPOT, tokens/s, launches, and the shares of GEMMs, op and rest."""
    start = time.perf_counter()
    where = parse_device(device)
    small_work(where)
    if graph and where.type == "cpu":
        stop("--graph: expected a CUDA device (graphs are captured on no other), got cpu")
    wanted = [name.strip() for name in model.split(",")]
    if not set(wanted) <= set(NAMES):
        stop(f"--model: expected some of {', '.join(NAMES)}, got {model!r}")
    configs = [
        replace(config, layers=layers or config.layers, hidden=hidden or config.hidden, heads=heads or config.heads)
        for config in STACKS
        if config.name in wanted
    ]
    batches = parse_numbers("--batch", batch) if batch else (1,) if where.type == "cpu" else (2**n for n in range(9))
    compared = variants(parse_backends(backend) if backend else _default_backends(where))
    sizes = tuple(batches)
    with Progress(console=errors, transient=True) as progress:
        bar = progress.add_task("bench-model", total=len(configs) * len(sizes))

        def before(text: str) -> None:
            progress.update(bar, description=text)
            progress.advance(bar)

        with torch.inference_mode():
            records = measure_stacks(
                configs, sizes, compared, where, replays=replays, graph=graph is not False, progress=before
            )
    result = results.document(
        "model",
        command_line(ctx, ("as_json", "save")),
        where,
        graph=where.type != "cpu" and graph is not False,
        replays=replays,
        seconds=round(time.perf_counter() - start, 1),
        cells=records,
    )
    if as_json:
        print_json(result)
    else:
        show(result, compared)
    keep(result, save)
    wrong = sorted({record["backend"] for record in records if record.get("failed")})
    if wrong:
        stop(f"a check failed, so some steps were not timed: {', '.join(wrong)}", FAILED)
    if not any("us" in record for record in records):
        stop("nothing was timed", FAILED)


def _default_backends(device: torch.device) -> tuple[str, ...]:
    """The fastest backend of this machine, and the chain beside it."""
    arch = gates.architecture(device)
    here = [b for b in gates.BACKENDS if any(r.auto and not r.machine_reasons() for r in gates.rows(b, arch))]
    return (here[0], "chain") if here[0] != "chain" else ("chain",)


def show(result: dict[str, Any], compared: Sequence[Variant]) -> None:
    """Print a results document as one table."""
    machine = result["machine"]
    code = result["commit"] if result["commit"] != "unknown" else f"source {result['source']}"
    title = f"{machine['device']} ({machine['architecture']}), torch {machine['torch']}, {code}; KDA layers alone"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("model", "B", "backend", "layout", "state"):
        table.add_column(name, no_wrap=True)
    columns = ("TPOT ms mean", "P99", "tokens/s", "launches", "per layer", "GEMMs", "op", "rest", "/ first")
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    reasons: dict[str, None] = {}
    for record in result["cells"]:
        if "us" not in record:
            reasons[f"{record['backend']}: not timed: {record['not_timed']}"] = None
            continue
        early = "" if record["prefetch"] else " no prefetch"
        first = baseline(result["cells"], record)
        table.add_row(
            record["model"],
            str(record["batch"]),
            record["backend"] + early,
            record["layout"],
            record["state_dtype"],
            f"{record['us']['mean'] / 1e3:.3f}",
            f"{record['us']['p99'] / 1e3:.3f}",
            f"{record['tokens_per_s']:.0f}",
            "-" if record["launches"] is None else f"{record['launches']:g}",
            "-" if record["launches"] is None else f"{record['launches'] / record['layers']:.1f}",
            *(f"{share:.0%}" for share in shares(record)),
            "-" if first is None else f"{record['us']['median'] / first['us']['median']:.3f}",
        )
    Console(width=max(console.width, MIN_COLUMNS), highlight=False).print(table)
    for reason in reasons:
        console.print(reason, markup=False, soft_wrap=True)
    console.print(f"done in {result['seconds']:.0f} s; GEMMs and op: what they take alone; rest: the step less both")


def shares(record: dict[str, Any]) -> tuple[float, float, float]:
    """GEMMs, op and rest of a step, as shares of its median. The rest may be negative where kernels overlap."""
    step = record["us"]["median"]
    gemms, op = record["gemms_us"] / step, record["op_us"] / step
    return gemms, op, 1 - gemms - op


def baseline(records: Sequence[dict[str, Any]], record: dict[str, Any]) -> dict[str, Any] | None:
    """The first variant of the same model and batch: the fused step that the others are one change away from."""
    same = (r for r in records if "us" in r and (r["model"], r["batch"]) == (record["model"], record["batch"]))
    return next(same, None)
