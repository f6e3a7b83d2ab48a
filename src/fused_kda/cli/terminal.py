"""What the commands share: where text goes, how a command stops, and how options name devices and backends."""

from __future__ import annotations

import json
from typing import Any, NoReturn

import torch
import typer
from rich.console import Console

from .. import gates

console = Console(highlight=False)
errors = Console(stderr=True, highlight=False)

USAGE = 2
FAILED = 1


def stop(message: str, code: int = USAGE) -> NoReturn:
    """End the command with one line on stderr."""
    errors.print(f"fused-kda: {message}", style="red", markup=False, soft_wrap=True)
    raise typer.Exit(code)


def print_json(document: Any) -> None:
    typer.echo(json.dumps(document, indent=2))


def parse_device(text: str | None) -> torch.device:
    """The device that ``--device`` names; without it the first GPU, or the CPU where there is none."""
    if text is None:
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    try:
        device = torch.device(text)
    except RuntimeError:
        stop(f"--device: expected cpu or cuda[:number], got {text!r}")
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type != "cuda":
        stop(f"--device: expected cpu or cuda[:number], got {text!r}")
    count = torch.cuda.device_count()
    number = device.index or 0
    if number >= count:
        stop(f"--device: expected one of this machine's {count} CUDA devices, got {text!r}")
    return torch.device("cuda", number)


def small_work(device: torch.device) -> None:
    """Settle for one CPU thread: tensors this small are not worth sharing, and on busy cores threads only wait."""
    if device.type == "cpu":
        torch.set_num_threads(1)


def parse_backends(text: str) -> tuple[str, ...]:
    """The backends that ``--backend`` lists by comma, or every one of them for ``all``."""
    if text == "all":
        return gates.BACKENDS
    names = tuple(name.strip() for name in text.split(","))
    unknown = [name for name in names if name not in gates.BACKENDS]
    if unknown:
        stop(f"--backend: expected all or some of {', '.join(gates.BACKENDS)}, got {', '.join(map(repr, unknown))}")
    return names
