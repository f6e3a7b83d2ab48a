"""``fused-kda inspect``: what the compilers made of the kernels, for any architecture, on a machine without a GPU."""

from __future__ import annotations

import importlib
import os
from dataclasses import asdict
from enum import Enum
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .. import gates
from .terminal import FAILED, console, errors, print_json, stop

#: A row per kernel is only read as one if it stays on one line: narrower terminals wrap it, files keep it.
MIN_COLUMNS = 190


class Compiled(str, Enum):
    """Backends whose kernels can be compiled and read without a GPU."""

    cuda = "cuda"
    triton = "triton"


def command(
    backend: Annotated[Compiled, typer.Option(help="whose kernel")],
    arch: Annotated[str, typer.Option(help="such as sm_90 or gfx942; several separated by commas")],
    layout: Annotated[str, typer.Option(help="conv layouts, separated by commas")] = "SD,DS",
    jobs: Annotated[int | None, typer.Option(min=1, help="compilers at once; default: one per core")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON document")] = False,
) -> None:
    """Compile a backend's listed specialisations and print registers, spills, memory and instruction counts.

    Ends with code 1 where one of them spills or breaks another rule that the backend's kernels keep.
    """
    layouts = [name.strip().upper() for name in layout.split(",")]
    if not set(layouts) <= {"SD", "DS"}:
        stop(f"--layout: expected SD, DS or both, got {layout!r}")
    known = tuple(dict.fromkeys(a for row in gates.rows(backend.value) for a in row.archs if a != "cpu"))
    archs = [name.strip() for name in arch.split(",")]
    for name in archs:
        if _family(name) not in known:
            stop(f"--arch: expected one of {', '.join(known)}, got {name!r}")
    read = _read_cuda if backend is Compiled.cuda else _read_triton
    found = {}
    for name in archs:
        with errors.status(f"compiling for {name}"):
            found[name] = read(name, layouts, jobs or os.cpu_count() or 1)
    if as_json:
        print_json({"backend": backend.value, "architectures": found})
    else:
        for name, kernels in found.items():
            table = _table(f"{backend.value} for {name}, {len(kernels)} kernels", kernels)
            Console(width=max(console.width, MIN_COLUMNS), highlight=False).print(table)
    faults = [f"{name} {k['kernel']}: {k['faults']}" for name, kernels in found.items() for k in kernels if k["faults"]]
    if faults:
        stop("\n".join(faults), FAILED)


def _family(arch: str) -> str:
    """The table's name of an architecture: "sm_90a" is "sm_90" with the instructions that no later one has."""
    return arch.removesuffix("a") if arch.startswith("sm_") else arch


def _read_cuda(arch: str, layouts: list[str], jobs: int) -> list[dict[str, Any]]:
    inspect = _module("cuda")
    try:
        reports = inspect.report(arch, layouts, jobs=jobs)
    except RuntimeError as error:
        stop(str(error), FAILED)
    kernels = []
    for report in reports:
        row = asdict(report)
        name, counts = row.pop("name"), row.pop("counts")
        row.pop("arch")
        kernels.append({"kernel": name, **row, "counts": counts})
    return kernels


def _read_triton(arch: str, layouts: list[str], jobs: int) -> list[dict[str, Any]]:
    inspect = _module("triton")
    cases = [case for case in inspect.cases(_family(arch)) if case.layout in layouts]
    figures = inspect.table(cases, jobs)
    return [
        {"kernel": case.name, **asdict(figures[case.name]), "faults": "; ".join(figures[case.name].faults(case))}
        for case in cases
    ]


def _module(backend: str) -> Any:
    """The backend's own ``inspect`` module, which needs its compiler installed."""
    try:
        return importlib.import_module(f"fused_kda.kernels.{backend}.inspect")
    except ModuleNotFoundError as missing:
        stop(f"--backend: {backend} needs the module {missing.name}: pip install 'fused-kda[{backend}]'")


def _table(title: str, kernels: list[dict[str, Any]]) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    columns = [name for name in kernels[0] if name not in ("counts", "faults")]
    for name in columns:
        left = name in ("kernel", "digest")
        table.add_column(name.replace("_", " "), justify="left" if left else "right", no_wrap=left)
    if "counts" in kernels[0]:
        table.add_column("instructions by class")
    for kernel in kernels:
        cells = [escape(str(kernel[name])) for name in columns]
        if "counts" in kernel:
            cells.append(" ".join(f"{name} {count}" for name, count in kernel["counts"].items() if count))
        table.add_row(*cells, style="red" if kernel["faults"] else None)
    return table
