"""``fused-kda check``: the correctness battery of every backend that this machine has, as one table."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import torch
import typer
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from .. import gates
from ..testing.battery import CHECKS, Outcome, Subject, default_size, run_check
from .terminal import FAILED, console, errors, parse_backends, parse_device, print_json, small_work, stop

_STYLES = {"pass": "green", "fail": "bold red", "not run": "yellow"}


def command(
    backend: Annotated[str, typer.Option(help="all, or names separated by commas")] = "all",
    device: Annotated[
        str | None, typer.Option(help="cpu or cuda[:number]; default: the first GPU, else the CPU")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON document")] = False,
) -> None:
    """Run the correctness battery of the op's backends and print backend by check: pass, fail or not run."""
    names = parse_backends(backend)
    where = parse_device(device)
    small_work(where)
    outcomes: list[Outcome] = []
    with Progress(console=errors, transient=True) as progress:
        bar = progress.add_task("check", total=len(names) * len(CHECKS))
        for name in names:
            subject = Subject(name, where, default_size(where, name))
            for item in CHECKS:
                progress.update(bar, description=f"{name}: {item.name}")
                outcomes.append(run_check(item, subject))
                progress.advance(bar)
    if as_json:
        print_json(
            {
                "device": str(where),
                "architecture": gates.architecture(where),
                "outcomes": [asdict(outcome) for outcome in outcomes],
            }
        )
    else:
        _print(names, where, outcomes)
    failed = sum(outcome.status == "fail" for outcome in outcomes)
    if failed:
        stop(f"{failed} of {len(outcomes)} checks failed", FAILED)
    idle = [name for name in names if not any(o.backend == name and o.status == "pass" for o in outcomes)]
    if idle and (backend != "all" or len(idle) == len(names)):
        stop(f"no check could be run on {', '.join(idle)}", FAILED)


def _print(names: tuple[str, ...], device: torch.device, outcomes: list[Outcome]) -> None:
    table = Table(title=f"correctness on {device} ({gates.architecture(device)})", title_justify="left")
    table.add_column("check", no_wrap=True)
    table.add_column("what it asserts")
    for name in names:
        table.add_column(name, no_wrap=True)
    found = {(outcome.check, outcome.backend): outcome for outcome in outcomes}
    for item in CHECKS:
        cells = [found[item.name, name].status for name in names]
        table.add_row(item.name, escape(item.asserts), *(f"[{_STYLES[cell]}]{cell}[/]" for cell in cells))
    console.print(table)
    reasons: dict[tuple[str, str, str], list[str]] = {}
    for outcome in outcomes:
        if outcome.reason:
            reasons.setdefault((outcome.backend, outcome.status, outcome.reason), []).append(outcome.check)
    for (name, status, reason), checks in reasons.items():
        which = "every check" if len(checks) == len(CHECKS) else ", ".join(checks)
        console.print(f"{name}: {status}: {which}: {reason}", style=_STYLES[status], markup=False, soft_wrap=True)
    counts = {status: sum(o.status == status for o in outcomes) for status in _STYLES}
    console.print(", ".join(f"{count} {status}" for status, count in counts.items()))
