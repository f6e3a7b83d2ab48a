"""``fused-kda doctor --engine NAME``: what the adapter of one engine does here, and for which models it would."""

from __future__ import annotations

import importlib
import importlib.metadata
from dataclasses import asdict
from typing import Any

import torch
from rich.markup import escape
from rich.table import Table

from .. import gates
from ..engines import one_launch, sglang, surfaces, vllm
from ..engines.table import TABLE
from ..shapes import shape_problem
from .terminal import console

#: Engine: the distribution that is it, and the adapter's plug-in if it has one.
ENGINES: dict[str, tuple[str, Any]] = {
    "vllm": ("vllm", vllm),
    "sglang": ("sglang", sglang),
    "fla": ("flash-linear-attention", None),
}


def examine(name: str) -> dict[str, Any]:
    """Register the plug-in as the engine would, import what it changes, and ask the gates for each model and device."""
    distribution, plugin = ENGINES[name]
    try:
        version = importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        version = None
    failures: dict[str, str] = {}
    if plugin is not None:
        plugin.register()
        for module in plugin.MODULES.values() if version else ():
            try:
                importlib.import_module(module)
            except Exception as error:  # whatever an engine raises where its own requirements are not met
                failures[module] = f"{type(error).__name__}: {error}"
    devices = [torch.device("cuda", number) for number in range(torch.cuda.device_count())] or [torch.device("cpu")]
    return {
        "engine": name,
        "version": version,
        "surfaces": [asdict(surface) for surface in surfaces.values() if surface.engine == name],
        "imports_that_failed": failures,
        "models": [answer for device in devices for answer in _models(name, device)],
    }


def _models(name: str, device: torch.device) -> list[dict[str, Any]]:
    """One answer per model, layout and state dtype: the backend, or why none, for all head counts of the model."""
    found = []
    for entry in TABLE:
        if entry.engine != name:
            continue
        refusal = entry.refusal
        if not refusal and device.type == "cuda" and not gates.architecture(device).startswith(entry.archs):
            refusal = f"the adapter does not go to {gates.architecture(device)}"
        for layout in entry.layouts:
            for dtype in entry.state_dtypes:
                backend, reason = None, refusal
                for heads in entry.heads if not reason else ():
                    problem = shape_problem(
                        heads=heads, layout=layout, state_dtype=dtype, lower_bound=entry.lower_bound
                    )
                    backend, reason = one_launch(problem, device)
                    if backend is None:
                        break
                found.append(
                    {
                        "device": str(device),
                        "model": entry.model,
                        "versions": entry.versions,
                        "layout": layout,
                        "state": str(dtype).removeprefix("torch."),
                        "backend": backend,
                        "reason": reason,
                    }
                )
    return found


def show(report: dict[str, Any]) -> None:
    """Print the report for a person."""
    version = report["version"] or "not installed"
    console.print(f"{report['engine']}: {version}", markup=False)
    for one in report["surfaces"]:
        console.print(f"{one['name']}: {one['state']}: {one['detail']}", markup=False, soft_wrap=True)
    if not report["surfaces"]:
        console.print(f"Nothing is changed until fused_kda.engines.{report['engine']}.patch(model) is called.")
    for module, text in report["imports_that_failed"].items():
        console.print(f"import of {module} failed here: {text}", markup=False, soft_wrap=True)
    table = Table(title="what its models would run on", title_justify="left")
    for heading in ("device", "model", "conv layout", "state", "backend, or why the engine's own code"):
        table.add_column(heading)
    for one in report["models"]:
        answer = f"[green]{one['backend']}[/]" if one["backend"] else escape(one["reason"])
        table.add_row(one["device"], f"{one['model']} ({one['versions']})", one["layout"], one["state"], answer)
    console.print(table)
