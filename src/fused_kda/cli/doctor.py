"""``fused-kda doctor``: what this machine can do with the op, what it cannot, and what would change that."""

from __future__ import annotations

import os
import platform
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import torch
import typer
from rich.markup import escape
from rich.table import Table

from .. import gates
from ..bench.results import versions
from . import cache
from . import engine as engines
from .terminal import console, print_json, stop

#: Distributions whose versions matter to a report of a fault.
DISTRIBUTIONS = (
    "triton",
    "cuda-core",
    "cuda-bindings",
    "nvidia-cuda-nvrtc",
    "fla-core",
    "numpy",
    "safetensors",
)


@dataclass(frozen=True, slots=True)
class Gate:
    """One backend's gate on one device, whatever the problem.

    Attributes:
        device, backend: which gate.
        open: whether some row of the table can be used here.
        launches: kernel launches per decode step of that row (0: not a kernel; None where there is no row).
        auto: whether ``backend="auto"`` may choose it here.
        covers: the ranges of the open rows, in words.
        reasons: why it is closed.
        opens_with: what would open it.
    """

    device: str
    backend: str
    open: bool
    launches: int | None
    auto: bool
    covers: str
    reasons: tuple[str, ...]
    opens_with: str


def command(
    engine: Annotated[
        str | None, typer.Option("--engine", help="vllm, sglang or fla: what its adapter does here")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON document")] = False,
) -> None:
    """Show this machine's devices and versions, and for each backend whether its gate is open, and if not why."""
    if engine is not None and engine not in engines.ENGINES:
        stop(f"--engine: expected one of {', '.join(engines.ENGINES)}, got {engine!r}")
    report = examine() if engine is None else engines.examine(engine)
    if as_json:
        print_json(report)
    elif engine is None:
        _print(report)
    else:
        engines.show(report)


def examine() -> dict[str, Any]:
    """Everything that the command shows, as plain data."""
    devices = [torch.device("cpu")] + [torch.device("cuda", number) for number in range(torch.cuda.device_count())]
    found = [gate(backend, device) for device in devices for backend in gates.BACKENDS]
    chosen = {
        str(d): next((g.backend for g in found if g.device == str(d) and g.open and g.auto), None) for d in devices
    }
    return {
        "devices": [_device(device) for device in devices],
        "versions": _versions(),
        "backends": [asdict(one) for one in found],
        "auto": chosen,
        "prebuilt": _prebuilt(devices),
        "compiling": gates.settings().compile,
        "caches": cache.examine(),
        "switches": [{**asdict(s), "value": os.environ.get(s.variable)} for s in gates.SWITCHES],
    }


def gate(backend: str, device: torch.device) -> Gate:
    """The backend's gate on a device, before any problem is known."""
    arch = gates.architecture(device)
    rows = gates.rows(backend, arch)
    if not rows:
        known = ", ".join(dict.fromkeys(name for row in gates.rows(backend) for name in row.archs))
        return Gate(
            str(device), backend, False, None, False, "", (f"no row for architecture {arch}",), f"one of {known}"
        )
    usable = [row for row in rows if not row.machine_reasons(device)]
    if usable:
        covers = "; or ".join(dict.fromkeys(_covers(row, arch) for row in usable))
        launches = usable[0].launches
        return Gate(str(device), backend, True, launches, any(row.auto for row in usable), covers, (), "")
    reasons = tuple(dict.fromkeys(reason for row in rows for reason in row.machine_reasons(device)))
    missing = {module.split(".")[0] for row in rows for module in row.modules if f"module {module} is" in str(reasons)}
    extras = ",".join(sorted(missing.intersection(gates.EXTRAS)))
    opens = f"pip install 'fused-kda[{extras}]'" if extras else ""
    return Gate(str(device), backend, False, rows[0].launches, False, "", reasons, opens)


def _covers(row: gates.Row, arch: str) -> str:
    """What a usable row covers here: its ranges, or what is prebuilt where nothing can be compiled."""
    reason = row.compile_reason()
    if reason is None:
        return _ranges(row)
    held = [one["specialization"] for each in gates.prebuilt_sets() for one in each.held(row.backend, arch)]
    heads = ", ".join(map(str, sorted({spec["heads"] for spec in held})))
    layouts = "/".join(sorted({spec["conv_layout"]["kind"] for spec in held}, reverse=True))
    states = "/".join(sorted({_short(spec["state_dtype"]) for spec in held}, reverse=True))
    return f"prebuilt alone ({reason}): H {heads}, {layouts}, state {states}"


def _prebuilt(devices: list[torch.device]) -> list[dict[str, Any]]:
    """The prebuilt directories that are asked, and how much each holds for the devices here."""
    archs = dict.fromkeys(gates.architecture(device) for device in devices if device.type == "cuda")
    return [
        {
            "directory": str(one.directory),
            "version": one.version,
            "tools": one.tools,
            "stale": [reason for backend in gates.BACKENDS if (reason := one.stale(backend))],
            "architectures": sorted({kernel.arch for kernel in one.kernels.values()}),
            "here": {f"{b} {a}": len(one.held(b, a)) for a in archs for b in gates.BACKENDS if one.held(b, a)},
        }
        for one in gates.prebuilt_sets()
    ]


def _ranges(row: gates.Row) -> str:
    def words(values: tuple[Any, ...] | None) -> str:
        return "any" if values is None else "/".join(_short(value) for value in values)

    return (
        f"D {words(row.head_dims)}, W {words(row.conv_widths)}, {words(row.layouts)}, "
        f"{words(row.dtypes)} in, state {words(row.state_dtypes)}"
    )


def _short(value: object) -> str:
    return str(value).removeprefix("torch.").replace("bfloat", "bf").replace("float", "fp")


def _device(device: torch.device) -> dict[str, Any]:
    if device.type == "cpu":
        name = platform.processor() or platform.machine()
        return {
            "device": "cpu",
            "name": name,
            "architecture": "cpu",
            "cores": os.cpu_count(),
            "memory_gib": None,
            "shared_memory_bytes": None,
        }
    properties = torch.cuda.get_device_properties(device)
    return {
        "device": str(device),
        "name": properties.name,
        "architecture": gates.architecture(device),
        "cores": properties.multi_processor_count,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "shared_memory_bytes": gates.shared_memory_limit(device),
    }


def _versions() -> dict[str, str | None]:
    of_torch = {"CUDA of torch": torch.version.cuda, "HIP of torch": torch.version.hip}
    return {**versions(DISTRIBUTIONS), "python": platform.python_version(), **of_torch}


def _print(report: dict[str, Any]) -> None:
    for one in report["devices"]:
        memory = f", {one['memory_gib']} GiB" if one["memory_gib"] else ""
        if one["shared_memory_bytes"]:
            memory += f", {one['shared_memory_bytes'] / 1024:g} KiB of shared memory for a program"
        console.print(
            f"{one['device']}: {one['name']} ({one['architecture']}), {one['cores']} cores{memory}", markup=False
        )
    console.print(", ".join(f"{name} {version or '-'}" for name, version in report["versions"].items()), soft_wrap=True)
    for one in report["devices"]:
        console.print(_gate_table(one, [g for g in report["backends"] if g["device"] == one["device"]]))
        chosen = report["auto"][one["device"]]
        console.print(f'On {one["device"]}, backend="auto" takes {chosen or "nothing: no gate is open"}.', markup=False)
    if len(report["devices"]) == 1:
        console.print(
            "This machine has no GPU: the op runs at a CPU's speed, for tests and small models. "
            "`fused-kda inspect` compiles the kernels for a GPU that is not here.",
            soft_wrap=True,
        )
    for one in report["prebuilt"]:
        here = ", ".join(f"{count} problems for {where}" for where, count in one["here"].items()) or "nothing for here"
        text = f"prebuilt kernels: {one['directory']} ({', '.join(one['architectures'])}; {here})"
        console.print("; ".join([text, *one["stale"]]), markup=False, soft_wrap=True)
    cache.show(report["caches"])
    switches = Table(title="environment switches", title_justify="left", show_header=False)
    switches.add_column(no_wrap=True)
    switches.add_column()
    for switch in report["switches"]:
        now = switch["value"] if switch["value"] is not None else switch["default"] or "unset"
        meaning = f"{switch['meaning']} (takes {switch['values']})"
        switches.add_row(f"{switch['variable']}={now}", escape(meaning))
    console.print(switches)


def _gate_table(device: dict[str, Any], found: list[dict[str, Any]]) -> Table:
    table = Table(title=f"backends on {device['device']}, fastest first", title_justify="left")
    for heading in ("backend", "gate", "launches"):
        table.add_column(heading, no_wrap=True)
    table.add_column("what it covers, or what keeps it closed")
    for one in found:
        state = "[green]open[/]" if one["open"] else "[yellow]closed[/]"
        text = one["covers"] if one["open"] else "; ".join(one["reasons"])
        if one["opens_with"]:
            text += f". Opens with: {one['opens_with']}"
        launches = "-" if one["launches"] is None else str(one["launches"])
        table.add_row(one["backend"], state, launches, escape(text))
    return table
