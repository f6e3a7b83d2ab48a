"""``fused-kda build``: compile kernels ahead of time into a directory that a machine without a compiler can use."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, get_args

import torch
import typer
from rich.progress import Progress
from rich.table import Table

from .. import gates
from ..build import architectures, requests, specializations, write
from ..layouts import LAYOUTS
from ..shapes import WeightForm
from .terminal import FAILED, console, errors, print_json, stop

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_GATES = {"bounded": True, "softplus": False}


def command(
    arch: Annotated[str, typer.Option(help="such as sm_90a,sm_100a,gfx942; separated by commas")],
    heads: Annotated[str, typer.Option(help="heads on a rank, such as 12,24,48,96")],
    out: Annotated[Path, typer.Option(help="directory to write: new, empty, or an earlier build")],
    layouts: Annotated[str, typer.Option(help="conv layouts")] = "SD,DS",
    state_dtypes: Annotated[str, typer.Option(help="of the recurrent pool")] = "fp32,bf16",
    gate: Annotated[str, typer.Option(help="decay gates: bounded is Kimi-K3's, softplus Kimi-Linear's")] = (
        "bounded,softplus"
    ),
    weights: Annotated[str, typer.Option(help="forms of the conv weight: planes [3, W, P], checkpoint [3P, W]")] = (
        "planes,checkpoint"
    ),
    backends: Annotated[str, typer.Option(help="all, or names separated by commas")] = "all",
    jobs: Annotated[int | None, typer.Option(min=1, help="compilers at once; default: one per core")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print the manifest")] = False,
) -> None:
    """Compile what the gates' table has for the architectures, with and without prefetch, and write a manifest.

    Needs no GPU. D = 128, W = 4, bf16 activations, fp32 weights, int32 indices, the gated norm, aligned pools.
    """
    wanted_heads = [int(one) for one in _parts("--heads", heads, None)]
    specs = specializations(
        wanted_heads,
        [one for one in LAYOUTS if one in _parts("--layouts", layouts.upper(), LAYOUTS)],
        [_DTYPES[one] for one in _parts("--state-dtypes", state_dtypes, _DTYPES)],
        [_GATES[one] for one in _parts("--gate", gate, _GATES)],
        _parts("--weights", weights, get_args(WeightForm)),  # type: ignore[arg-type]
    )
    chosen = None if backends == "all" else _parts("--backends", backends, gates.BACKENDS)
    try:
        wanted = requests(_parts("--arch", arch, None), specs, chosen)
        with Progress(console=errors, transient=True) as progress:
            bar = progress.add_task("build", total=len(wanted))

            def advance(done: object) -> None:
                progress.update(bar, advance=1, description=f"build: {getattr(done, 'backend', '')}")

            manifest = write(out, wanted, jobs or os.cpu_count() or 1, advance)
    except ValueError as error:
        stop(f"--{error}")
    except ModuleNotFoundError as missing:
        stop(f"the compiler needs the module {missing.name}: pip install 'fused-kda[cuda,triton]'")
    kernels = list(manifest["kernels"].values())
    if as_json:
        print_json(manifest)
    else:
        table = Table(title=f"{out}: {len(wanted)} problems, {len(kernels)} kernels", title_justify="left")
        for heading in ("backend", "arch", "problems", "kernels", "most registers", "spills"):
            table.add_column(heading, justify="left" if heading in ("backend", "arch") else "right")
        for backend, name in dict.fromkeys((one["backend"], one["arch"]) for one in kernels):
            here = [one for one in kernels if (one["backend"], one["arch"]) == (backend, name)]
            problems = sum((one["backend"], one["arch"]) == (backend, name) for one in manifest["problems"])
            registers = [one["registers"] for one in here]
            spills = [one["spills"] for one in here]
            figures = ["?" if None in values else str(max(values)) for values in (registers, spills)]
            table.add_row(backend, name, str(problems), str(len(here)), *figures)
        console.print(table)
    if any(one["spills"] for one in kernels):
        stop("a kernel spills registers; the manifest tells which", FAILED)


def _parts(option: str, text: str, known: Iterable[str] | None) -> list[str]:
    """What an option lists by comma; each a number where nothing else is known for ``--heads``."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        stop(f"{option}: expected at least one, got {text!r}")
    if option == "--heads" and not all(part.isdecimal() and int(part) > 0 for part in parts):
        stop(f"--heads: expected numbers above 0, got {text!r}")
    if option == "--arch":
        unknown = [p for p in parts if (p.rstrip("af") if p.startswith("sm_") else p) not in architectures()]
        if unknown:
            stop(f"--arch: expected some of {', '.join(architectures())}, got {', '.join(unknown)}")
    if known is not None and not set(parts) <= set(known):
        stop(f"{option}: expected some of {', '.join(known)}, got {text!r}")
    return parts
