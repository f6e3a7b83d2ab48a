"""``fused-kda eval --backend all``: what the shipped model says on every backend, layout and state dtype."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from .. import gates
from ..bench import results
from ..bench.agreement import STATE_DTYPES, agreement, drift
from ..bench.plot import drift_panels
from ..layouts import LAYOUTS
from ..nn.language_model import read_model
from .bench import MIN_COLUMNS, draw_or_stop, keep
from .terminal import FAILED, console, errors, print_json, stop


def run(
    command: str,
    device: torch.device,
    limit: int,
    steps: int,
    least: float,
    save: Path | None,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Everything that the command does. Ends with code 1 where an fp32 state changes a text, or a share is below least.

    Args:
        command: for the results file.
        device: where.
        limit: problems.
        steps: of the measurement of drift.
        least: exact match that every combination must reach.
        save, plot, as_json: as the options say.
    """
    start = time.perf_counter()
    model = read_model(device=device)
    with Progress(console=errors, transient=True) as progress:
        bar = progress.add_task("eval", total=len(gates.BACKENDS) * len(LAYOUTS) * len(STATE_DTYPES))

        def before(text: str) -> None:
            progress.update(bar, description=text)
            progress.advance(bar)

        found = agreement(model, gates.BACKENDS, limit=limit, by_name=False, progress=before)
        steps_bar = progress.add_task("drift", total=steps)
        moved = drift(model, steps, progress=lambda step: progress.update(steps_bar, completed=step))
    result = results.document(
        "eval", command, device, seconds=round(time.perf_counter() - start, 1), drift=moved, agreement=found
    )
    if as_json:
        print_json(result)
    else:
        show(result)
    keep(result, save)
    if plot is not None:
        draw_or_stop(drift_panels(moved), plot)
    changed = [one for one in found if one["state_dtype"] == "float32" and one.get("different")]
    if changed:
        names = ", ".join(f"{one['backend']} {one['layout']}" for one in changed)
        stop(f"texts differ from the reference's with an fp32 state: {names}", FAILED)
    low = [one for one in found if one.get("exact_match", 1.0) < least]
    if low:
        stop(f"exact match is below {least} in {len(low)} of {len(found)} combinations", FAILED)


def show(result: dict[str, Any]) -> None:
    """Print a results document: one table, then the drift."""
    machine = result["machine"]
    title = f"{machine['device']} ({machine['architecture']}), against reference SD float32"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("backend", "layout", "state"):
        table.add_column(name, no_wrap=True)
    for name in ("exact match", "answers that differ"):
        table.add_column(name, justify="right", no_wrap=True)
    reasons: dict[str, None] = {}
    for one in result["agreement"]:
        cells = ("not run", "") if "not_run" in one else (f"{one['exact_match']:.1%}", f"{one['different']}")
        if "not_run" in one:
            reasons[f"{one['backend']}: not run: {one['not_run']}"] = None
        elif one["different"]:
            cells = (cells[0], f"{cells[1]} of {one['problems']}")
        table.add_row(one["backend"], one["layout"], one["state_dtype"], *cells)
    Console(width=max(console.width, MIN_COLUMNS), highlight=False).print(table)
    for reason in reasons:
        console.print(reason, markup=False, soft_wrap=True)
    moved = result["drift"]
    console.print(
        f"a bf16 state after {moved['steps'][-1]} decode steps of {moved['rows']} rows: "
        f"off by {moved['state'][-1]:.2e} of its norm (worst layer; at most {max(moved['state']):.2e} on the way), "
        f"logits by {moved['logits'][-1]:.2e}; "
        f"another most likely token in {moved['other_tokens'][-1]:.3%} of the steps",
        markup=False,
        soft_wrap=True,
    )
