"""What the commands share: where text goes, how a command stops, and how options name devices and backends."""

from __future__ import annotations

import json
import shlex
from collections.abc import Collection
from typing import Any, NoReturn

import torch
import typer
from rich.console import Console

from .. import gates
from ..layouts import LAYOUTS, LayoutKind

console = Console(highlight=False)
errors = Console(stderr=True, highlight=False)

#: State dtypes, as options name them.
STATE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

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


def parse_layouts(text: str) -> tuple[LayoutKind, ...]:
    """The conv layouts that ``--layout`` lists by comma."""
    names = tuple(name.strip().upper() for name in text.split(","))
    if not set(names) <= set(LAYOUTS):
        stop(f"--layout: expected {' or '.join(LAYOUTS)}, or both by comma, got {text!r}")
    return names  # type: ignore[return-value]


def parse_dtypes(text: str) -> tuple[torch.dtype, ...]:
    """The state dtypes that ``--state-dtype`` lists by comma."""
    names = tuple(name.strip() for name in text.split(","))
    if not set(names) <= set(STATE_DTYPES):
        stop(f"--state-dtype: expected {' or '.join(STATE_DTYPES)}, or both by comma, got {text!r}")
    return tuple(STATE_DTYPES[name] for name in names)


def parse_numbers(option: str, text: str) -> tuple[int, ...]:
    """The positive whole numbers that an option lists by comma."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        stop(f"{option}: expected positive whole numbers separated by commas, got {text!r}")
    return tuple(map(int, words))


def command_line(ctx: typer.Context, leave_out: Collection[str] = ()) -> str:
    """The command as it was given, without the named parameters: those of where its results go."""
    words = ["fused-kda", ctx.info_name or ""]
    for parameter in ctx.command.params:
        name = parameter.name or ""
        source = ctx.get_parameter_source(name)
        if name in leave_out or source is None or source.name != "COMMANDLINE":
            continue
        value = ctx.params[name]
        if isinstance(value, bool):
            words.append((parameter.opts if value else parameter.secondary_opts)[0])
        else:
            words += [parameter.opts[0], str(value)]
    return shlex.join(words)
