"""``fused-kda bench``: the decode step's time beside the memory system's limit, cell by cell."""

from __future__ import annotations

import csv
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from .. import gates
from ..bench import compare as comparison
from ..bench import results
from ..bench.cells import MODEL_LAYERS, SIZES, SIZES_CPU, Cell
from ..bench.decode import MEASURES, geometric_means, measure
from ..bench.host import host_times
from ..bench.peers import PEERS
from ..bench.plot import Panel, draw, latency_panels
from ..layouts import LAYOUTS
from .terminal import (
    FAILED,
    command_line,
    console,
    errors,
    parse_backends,
    parse_device,
    parse_dtypes,
    parse_layouts,
    parse_numbers,
    print_json,
    small_work,
    stop,
)

#: A row is only read as one if it stays on one line: narrower terminals wrap it, files keep it.
MIN_COLUMNS = 150
#: Results, plots and the like: where they go does not belong to what was measured.
OUTPUTS = ("as_json", "as_csv", "save", "plot", "compare", "threshold")

SaveOption = Annotated[
    Path | None,
    typer.Option(help="write the results file here; in a directory it is named <machine>-<date>.json"),
]
PlotOption = Annotated[Path | None, typer.Option(help="draw latency over batch into this PNG (needs matplotlib)")]


def command(
    ctx: typer.Context,
    layout: Annotated[str | None, typer.Option(help="conv layouts, by comma; default SD,DS")] = None,
    heads: Annotated[str | None, typer.Option(help="heads, by comma; default 12,96 (CPU: 12)")] = None,
    batch: Annotated[
        str | None, typer.Option(help="rows, by comma; default 1 to 256 for 12 heads, fewer for more (CPU: 1,4,16)")
    ] = None,
    state_dtype: Annotated[str | None, typer.Option(help="fp32, bf16 or both, by comma; default fp32")] = None,
    backend: Annotated[str | None, typer.Option(help="all, or names separated by commas; default all")] = None,
    against: Annotated[str, typer.Option(help=f"other projects' steps, by comma: {', '.join(PEERS)}")] = "",
    layers: Annotated[
        int, typer.Option(min=1, help="KDA layers of the model: fewest in a replay, and what a step's saving is for")
    ] = MODEL_LAYERS,
    graph: Annotated[
        bool | None, typer.Option("--graph/--eager", help="replay CUDA graphs (default on a GPU), or launch anew")
    ] = None,
    prefetch: Annotated[
        bool, typer.Option(help="let kernels read weights, pools and indices ahead of the kernel before them")
    ] = True,
    replays: Annotated[
        int | None, typer.Option(min=1, help="timed rounds, every sample of which is kept; default 30 (CPU: 5)")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu or cuda[:number]; default: the first GPU, else the CPU")
    ] = None,
    compare: Annotated[
        Path | None, typer.Option(help="an earlier results file: measure its cells and end with code 1 if slower")
    ] = None,
    threshold: Annotated[float, typer.Option(min=1.0, help="with --compare: the largest allowed ratio")] = 1.05,
    save: SaveOption = None,
    plot: PlotOption = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="print comma-separated values instead of the table")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON document instead of the table")] = False,
) -> None:
    """Time the decode step's backends beside the measured limit; what fails its check is not timed.

    Prints a table; --json and --csv print all of it on standard output instead. --save writes the JSON document, with
    every sample, as a file that `make docs-performance` and --compare read.
    """
    start = time.perf_counter()
    where = parse_device(device)
    small_work(where)
    if graph and where.type == "cpu":
        stop("--graph: expected a CUDA device (graphs are captured on no other), got cpu")
    graph = where.type != "cpu" if graph is None else graph
    replays = replays or (5 if where.type == "cpu" else 30)
    others = tuple(name.strip() for name in against.split(",") if name.strip())
    if not set(others) <= set(PEERS):
        stop(f"--against: expected some of {', '.join(PEERS)}, got {against!r}")
    old = None if compare is None else _old(compare, where, graph)
    named = _named(layout, heads, batch, state_dtype)
    if old is None:
        cells = _cells(named, where)
    else:
        cells = _cells_of(old["cells"], named)
        backend = backend or ",".join(_backends_of(old["cells"]))
    names = parse_backends(backend or "all")
    records: list[dict[str, Any]] = []
    with Progress(console=errors, transient=True) as progress:
        bar = progress.add_task("bench", total=len(cells))
        for cell in cells:
            progress.update(bar, description=f"H {cell.heads}, B {cell.batch}, {cell.layout}")
            records += measure(
                cell,
                names,
                device=where,
                against=others,
                model_layers=layers,
                replays=replays,
                graph=graph,
                prefetch=prefetch,
                by_name=backend not in (None, "all"),
            )
            progress.advance(bar)
            if where.type == "cuda":
                torch.cuda.empty_cache()
    timed = [name for name in names if any(r["provider"] == name and "us" in r for r in records)]
    more: dict[str, Any] = {}
    if where.type == "cuda" and not graph:
        kernels = [name for name in timed if any(row.launches for row in gates.rows(name))]
        more["host_us"] = {name: host_times(name, Cell(12, 1), where) for name in kernels}
    result = results.document(
        "bench",
        command_line(ctx, OUTPUTS),
        where,
        graph=graph,
        model_layers=layers,
        replays=replays,
        seconds=round(time.perf_counter() - start, 1),
        geometric_means=geometric_means(records),
        chain_means=geometric_means(records, "chain_over"),
        **more,
        cells=records,
    )
    if as_json:
        print_json(result)
    elif as_csv:
        _print_csv(records)
    else:
        show(result)
    keep(result, save)
    if plot is not None:
        draw_or_stop(latency_panels(records), plot)
    _finish(records, names, timed, backend)
    if old is not None:
        _compare(old, records, threshold, quiet=as_json or as_csv)


def _named(
    layout: str | None, heads: str | None, batch: str | None, state_dtype: str | None
) -> dict[str, tuple[Any, ...]]:
    """What the options say of a cell, by the names of its fields; empty where they say nothing."""
    return {
        "heads": parse_numbers("--heads", heads) if heads else (),
        "batch": parse_numbers("--batch", batch) if batch else (),
        "layout": parse_layouts(layout) if layout else (),
        "state_dtype": parse_dtypes(state_dtype) if state_dtype else (),
    }


def _cells(named: dict[str, tuple[Any, ...]], device: torch.device) -> list[Cell]:
    sizes = SIZES_CPU if device.type == "cpu" else SIZES
    fewest = min(sizes.values(), key=len)
    return [
        Cell(heads, batch, layout, dtype)
        for dtype in named["state_dtype"] or (torch.float32,)
        for heads in named["heads"] or sizes
        for batch in named["batch"] or sizes.get(heads, fewest)
        for layout in named["layout"] or LAYOUTS
    ]


def _old(path: Path, device: torch.device, graph: bool) -> dict[str, Any]:
    """The earlier results, which must be of this kind of machine."""
    try:
        old = results.read(path)
    except ValueError as error:
        stop(f"--compare: {error}")
    if "cells" not in old or "geometric_means" not in old:
        stop(f"--compare: expected a results file of `fused-kda bench`, got {path}")
    here, there = results.machine(device)["device"], old["machine"]["device"]
    if here != there:
        stop(f"--compare: expected results of this kind of machine ({here}), got those of {there}")
    if old.get("graph", True) != graph:
        stop("--compare: expected results of the same mode (--graph or --eager), got those of the other")
    return old


def _cells_of(old: Sequence[dict[str, Any]], named: dict[str, tuple[Any, ...]]) -> list[Cell]:
    """The old run's cells, those alone that fit what the options say."""
    timed = (record for record in old if "us" in record)
    cells = (Cell(r["heads"], r["batch"], r["layout"], getattr(torch, r["state_dtype"])) for r in timed)
    found = [
        cell
        for cell in dict.fromkeys(cells)
        if all(not values or getattr(cell, name) in values for name, values in named.items())
    ]
    if not found:
        stop("--compare: expected cells that both runs have, got none")
    return found


def _backends_of(old: Sequence[dict[str, Any]]) -> list[str]:
    timed = {record["provider"] for record in old if "us" in record}
    return [name for name in gates.BACKENDS if name in timed]


def show(result: dict[str, Any]) -> None:
    """Print a results document as one table."""
    records, machine = result["cells"], result["machine"]
    code = result["commit"] if result["commit"] != "unknown" else f"source {result['source']}"
    mode = "graph replay" if result["graph"] else "eager"
    title = f"{machine['device']} ({machine['architecture']}), torch {machine['torch']}, {code}, {mode}"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    layers = result["model_layers"]
    for name in ("H", "B"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("layout", "state", "provider"):
        table.add_column(name, no_wrap=True)
    for name in ("µs (p20-p80)", "GB/s", "% of limit", "launches", "x chain", f"ms saved in {layers} layers"):
        table.add_column(name, justify="right", no_wrap=True)
    for record in records:
        if "us" in record:
            table.add_row(*_cell(record), *_figures(record), style="dim" if record["provider"] in MEASURES else None)
    missing = _not_timed(records)
    for number, ((name, _), count) in enumerate(missing.items(), 1):
        scope = "all" if count == _cells_in(records) else f"{count} cells"
        table.add_row(scope, "", "", "", name, f"not timed ({number})")
    for key, mean in result["geometric_means"].items():
        chain = result["chain_means"].get(key)
        beside = "" if chain is None else f"{chain:.2f}"
        table.add_row("mean", "", *_split(key), "", "", f"{100 / mean:.1f}", "", beside, "")
    Console(width=max(console.width, MIN_COLUMNS), highlight=False).print(table)
    for number, (name, reason) in enumerate(missing, 1):
        console.print(f"({number}) {name}: {reason}", markup=False, soft_wrap=True)
    for name, times in result.get("host_us", {}).items():
        parts = ", ".join(f"{what} {us:.1f} µs" for what, us in times.items())
        console.print(f"host time of {name} (H 12, B 1): {parts}", markup=False, soft_wrap=True)
    console.print(f"{_cells_in(records)} cells in {result['seconds']:.0f} s", markup=False)


def _cell(record: dict[str, Any]) -> tuple[str, ...]:
    provider = record["provider"] if record["prefetch"] else f"{record['provider']} no prefetch"
    return (str(record["heads"]), str(record["batch"]), record["layout"], record["state_dtype"], provider)


def _figures(record: dict[str, Any]) -> tuple[str, ...]:
    us, launches = record["us"], record["launches"]
    return (
        f"{us['median']:.2f} ({us['p20']:.2f}-{us['p80']:.2f})",
        f"{record['gb_per_s']:.0f}",
        f"{100 / record['over_limit']:.1f}",
        "-" if launches is None else f"{launches:g}",
        "-" if record["chain_over"] is None else f"{record['chain_over']:.2f}",
        "-" if record["saved_us"] is None else f"{record['saved_us'] / 1e3:.2f}",
    )


def _split(key: str) -> tuple[str, str, str]:
    """The layout, state dtype and provider of a geometric mean's key."""
    provider, layout, dtype, *early = key.split(" ", 3)
    return layout, dtype, " ".join([provider, *early])


def _not_timed(records: Sequence[dict[str, Any]]) -> dict[tuple[str, str], int]:
    counts: dict[tuple[str, str], int] = {}
    for record in records:
        if "not_timed" in record:
            key = (record["provider"], record["not_timed"])
            counts[key] = counts.get(key, 0) + 1
    return counts


def _cells_in(records: Sequence[dict[str, Any]]) -> int:
    return sum(record["provider"] == "limit" for record in records)


def _print_csv(records: Sequence[dict[str, Any]]) -> None:
    columns = ("heads", "batch", "layout", "state_dtype", "provider", "prefetch", "layers")
    times = ("median", "p20", "p80")
    rest = ("gb_per_s", "over_limit", "launches", "chain_over", "saved_us", "not_timed")
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow([*columns, *(f"us_{name}" for name in times), *rest])
    for record in records:
        us = record.get("us", {})
        given = [record[name] for name in columns] + [us.get(name) for name in times]
        writer.writerow([*given, *(record.get(name) for name in rest)])


def keep(result: dict[str, Any], save: Path | None) -> None:
    """Write a results file where ``--save`` says, and say which."""
    if save is not None:
        errors.print(f"written: {results.write(result, save)}", markup=False, soft_wrap=True)


def draw_or_stop(panels: Sequence[Panel], path: Path) -> None:
    """Draw a picture and say where, or end the command where matplotlib is missing or nothing was measured."""
    try:
        draw(panels, path)
    except ModuleNotFoundError as missing:
        stop(f"--plot: needs the module {missing.name}: pip install 'fused-kda[plot]'")
    except ValueError as error:
        stop(f"--plot: {error}", FAILED)
    errors.print(f"written: {path}", markup=False, soft_wrap=True)


def _finish(records: Sequence[dict[str, Any]], names: Sequence[str], timed: Sequence[str], asked: str | None) -> None:
    wrong = sorted({record["provider"] for record in records if record.get("failed")})
    if wrong:
        stop(f"a check failed, so some cells were not timed: {', '.join(wrong)}", FAILED)
    idle = [name for name in names if name not in timed]
    if idle and (asked not in (None, "all") or not timed):
        stop(f"nothing was timed of {', '.join(idle)}", FAILED)


def _compare(old: dict[str, Any], records: Sequence[dict[str, Any]], threshold: float, quiet: bool) -> None:
    """Print the ratios and end with code 1 beyond the threshold."""
    found = comparison.ratios(old["cells"], records)
    if not any(one.gated for one in found):
        stop("--compare: expected steps that both runs have, got none (backends, --prefetch)")
    worse = [one for one in found if one.worse(threshold)]
    if not quiet:
        title = f"against {old['machine']['date']}, {old.get('commit', 'unknown commit')}: at most {threshold:g}"
        table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
        for name in ("H", "B", "layout", "state", "provider"):
            table.add_column(name, no_wrap=True)
        for name in ("old µs", "new µs", "new / old"):
            table.add_column(name, justify="right", no_wrap=True)
        for one in found:
            cell = dict(zip(comparison.KEY, one.key, strict=True))
            new = ("-", "not timed") if one.new is None else (f"{one.new:.2f}", f"{one.ratio:.3f}")
            style = "bold red" if one in worse else None if one.gated else "dim"
            table.add_row(*_cell(cell), f"{one.old:.2f}", *new, style=style)
        Console(width=max(console.width, MIN_COLUMNS), highlight=False).print(table)
    if worse:
        stop(f"{len(worse)} of {sum(one.gated for one in found)} steps are slower than {threshold:g} x before", FAILED)
