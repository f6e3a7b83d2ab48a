"""What the compiler made of the kernel, for any architecture, without a GPU.

    python -m fused_kda.kernels.cuda.inspect --arch sm_90 --layout SD,DS     print the table
    python -m fused_kda.kernels.cuda.inspect --check | --write               compare with, or renew, the lock files

A *listed* set of specialisations is compiled by NVRTC: registers, shared memory, stack and local memory as
``cuobjdump`` tells them (Triton's, or the one on PATH), the length and a hash of the instruction stream, instruction
counts. A lock file per architecture holds all but the counts. So a change that costs an existing specialisation one
instruction shows in review, and one that adds a specialisation shows that it left all others as they were: this is how
DS is proved to cost SD nothing. Locks hold for one NVRTC; with another there is nothing to compare.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import re
import struct
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from ... import gates
from ...contract import Specialization
from ...layouts import ConvLayout
from ..resources import cuobjdump, read
from .compile import ENTRY, compile_cubin, nvrtc_version
from .shape import REGISTERS, WHOLE, Shape, has_copy_engine, shapes

DIM, WIDTH = 128, 4
LOCKS = Path("locks/cuda")
#: Classes of instructions that the report counts: memory by kind, arithmetic, exchange, synchronisation.
COUNTED = ("LDG", "STG", "LDS", "STS", "LDL", "STL", "UBLKCP", "FFMA", "FMUL", "FADD", "MUFU", "SHFL", "BAR", "SYNCS")


@dataclass(frozen=True, slots=True)
class Listed:
    """One entry of the listed set: a name and what is compiled."""

    name: str
    spec: Specialization
    shape: Shape
    prefetch: bool


@dataclass(frozen=True, slots=True)
class Report:
    """What the compiler made of one specialisation.

    Attributes:
        name, arch: which.
        registers: per thread.
        shared: static shared memory of a CTA in bytes.
        dynamic: dynamic shared memory of a CTA in bytes (the bulk tile).
        stack, local: bytes per thread; more than 0 means a spill.
        instructions: length of the instruction stream.
        counts: instructions by class (:data:`COUNTED`); all 0 where the disassembler does not know the architecture.
        digest: hash of the encoded instruction stream, scheduling included.
        faults: what breaks a rule that every specialisation keeps; "" if nothing does.
    """

    name: str
    arch: str
    registers: int
    shared: int
    dynamic: int
    stack: int
    local: int
    instructions: int
    counts: dict[str, int]
    digest: str
    faults: str


def listed(arch: str, layouts: Sequence[str] = ("SD", "DS", "DS+2")) -> list[Listed]:
    """The listed set of an architecture: every launch shape it can be given, then every feature in one shape.

    Args:
        arch: such as "sm_90".
        layouts: names of conv layouts, as :attr:`ConvLayout.name`.
    """
    large = WHOLE if has_copy_engine(arch) else REGISTERS
    found = []
    for layout in layouts:
        for state_dtype in (torch.float32, torch.bfloat16):
            spec = _spec(layout, state_dtype=state_dtype)
            for shape, prefetch in ((shape, early) for early in (True, False) for shape in shapes(spec, arch, early)):
                found.append(Listed(_name(layout, state_dtype, shape, prefetch), spec, shape, prefetch))
    for layout, feature, changes in _FEATURES:
        if layout in layouts:
            spec = _spec(layout, **changes)  # type: ignore[arg-type]
            shape = REGISTERS if spec.state_alignment < 16 else large
            found.append(Listed(f"{layout} {feature}", spec, shape, True))
    return found


def report(arch: str, layouts: Sequence[str] = ("SD", "DS", "DS+2"), *, jobs: int = 2) -> list[Report]:
    """Compile the listed set for an architecture and read it. Needs NVRTC and cuobjdump, no GPU.

    Raises:
        RuntimeError: no cuobjdump.
    """
    tool = cuobjdump()
    if tool is None:
        raise RuntimeError("cuobjdump: expected it on PATH or in an installed triton, found neither")
    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(lambda entry: _read(entry, arch, tool), listed(arch, layouts)))


def compiler() -> str:
    """NVRTC's full version ("13.0.88") if its package is installed, else its major and minor."""
    try:
        return importlib.metadata.version("nvidia-cuda-nvrtc")
    except importlib.metadata.PackageNotFoundError:
        return nvrtc_version()


def architectures() -> tuple[str, ...]:
    """The architectures that the gates' table names for this backend."""
    return tuple(arch for row in gates.rows("cuda") for arch in row.archs)


def write_lock(reports: Sequence[Report], directory: Path) -> Path:
    """Write one architecture's lock file, an entry a line, and return its path."""
    path = directory / f"{reports[0].arch}.json"
    entries = ",\n".join(f"  {json.dumps(entry.name)}: {json.dumps(_locked(entry))}" for entry in reports)
    directory.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{{"nvrtc": {json.dumps(compiler())}, "entries": {{\n{entries}\n}}}}\n')
    return path


def read_lock(arch: str, directory: Path) -> tuple[str, dict[str, dict[str, object]]]:
    """An architecture's lock: the NVRTC that it holds for, and its entries by name."""
    lock = json.loads((directory / f"{arch}.json").read_text())
    return lock["nvrtc"], lock["entries"]


def differences(reports: Sequence[Report], entries: Mapping[str, Mapping[str, object]]) -> list[str]:
    """What changed against a lock, a line per specialisation; empty where nothing did."""
    found = []
    for entry in reports:
        now, then = _locked(entry), entries.get(entry.name)
        if then is None:
            found.append(f"{entry.arch} {entry.name}: new")
        elif then != now:
            changed = [f"{key} {then.get(key)} -> {value}" for key, value in now.items() if then.get(key) != value]
            found.append(f"{entry.arch} {entry.name}: {', '.join(changed)}")
    names = {entry.name for entry in reports}
    return found + [f"{reports[0].arch} {name}: gone" for name in entries if name not in names]


def table(reports: Iterable[Report]) -> str:
    """The reports as text, a line per specialisation."""
    lines = [f"{'specialisation':<38} {'regs':>4} {'shared':>7} {'local':>5} {'instr':>5}  hash      counts"]
    for entry in reports:
        counts = " ".join(f"{name} {count}" for name, count in entry.counts.items() if count)
        lines.append(
            f"{entry.name:<38} {entry.registers:>4} {entry.shared + entry.dynamic:>7} {entry.stack + entry.local:>5} "
            f"{entry.instructions:>5}  {entry.digest[:8]}  {counts}"
        )
    return "\n".join(lines)


def _locked(entry: Report) -> dict[str, object]:
    return {key: value for key, value in asdict(entry).items() if key not in ("name", "arch", "counts", "faults")}


def _name(layout: str, state_dtype: torch.dtype, shape: Shape, prefetch: bool) -> str:
    kind = "bulk" if shape.bulk else "registers"
    early = "prefetch" if prefetch else "hint" if shape.hint else "wait"
    return f"{layout} {str(state_dtype).removeprefix('torch.')} {shape.threads}/{shape.split} {kind} {early}"


_BF16 = torch.bfloat16
_FEATURES: tuple[tuple[str, str, dict[str, object]], ...] = (
    ("SD", "softplus", {"bounded": False}),
    ("SD", "no norm", {"norm_dtype": None}),
    ("SD", "bf16 norm", {"norm_dtype": _BF16}),
    ("SD", "bias", {"bias_dtype": torch.float32}),
    ("SD", "bf16 bias", {"bias_dtype": _BF16}),
    ("SD", "checkpoint weight", {"checkpoint": True}),
    ("SD", "bf16 checkpoint weight", {"checkpoint": True, "weight_dtype": _BF16}),
    ("SD", "int64 index", {"index_dtype": torch.int64}),
    ("SD", "initial state", {"has_initial_state": True}),
    ("SD", "one head", {"heads": 1}),
    ("SD", "32 heads, softplus", {"heads": 32, "bounded": False}),
    ("SD", "96 heads", {"heads": 96}),
    ("SD", "unaligned", {"state_alignment": 4, "conv_alignment": 2}),
    ("DS", "unaligned", {"state_alignment": 4, "conv_alignment": 2}),
    ("DS", "unaligned bf16 state", {"state_alignment": 2, "conv_alignment": 2, "state_dtype": _BF16}),
)


def _spec(
    layout: str,
    *,
    heads: int = 12,
    state_dtype: torch.dtype = torch.float32,
    weight_dtype: torch.dtype = torch.float32,
    bias_dtype: torch.dtype | None = None,
    norm_dtype: torch.dtype | None = torch.float32,
    index_dtype: torch.dtype = torch.int32,
    checkpoint: bool = False,
    bounded: bool = True,
    has_initial_state: bool = False,
    state_alignment: int = 16,
    conv_alignment: int = 16,
) -> Specialization:
    kind, _, spare = layout.partition("+")
    inner = heads * DIM
    return Specialization(
        heads=heads,
        head_dim=DIM,
        conv_width=WIDTH,
        conv_layout=ConvLayout("SD" if kind == "SD" else "DS", 3 * inner, WIDTH - 1 + int(spare or 0)),
        weight_strides=(inner * WIDTH, 1, WIDTH) if checkpoint else (inner * WIDTH, inner, 1),
        dtype=_BF16,
        weight_dtype=weight_dtype,
        bias_dtype=bias_dtype,
        norm_dtype=norm_dtype,
        param_dtype=torch.float32,
        state_dtype=state_dtype,
        index_dtype=index_dtype,
        bounded=bounded,
        has_initial_state=has_initial_state,
        state_alignment=state_alignment,
        conv_alignment=conv_alignment,
    )


_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:\{\s*)?(?:@!?U?P\w+\s+)?(\w+)", re.MULTILINE)
#: Bytes of one encoded instruction, on every architecture of the table.
_ENCODED = 16
_WIDE = re.compile(r"\b(LDG|STG)\.E(?:\.\w+)*?\.(128|256)\b")


def _read(entry: Listed, arch: str, tool: Path) -> Report:
    code = compile_cubin(entry.spec, entry.shape, entry.prefetch, arch, cached=False)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        done = subprocess.run([tool, "-sass", "-res-usage", file.name], capture_output=True, text=True, check=False)
    resources = read(done.stdout)
    if resources is None:
        got = f"code {done.returncode}: {done.stderr[:500]}{done.stdout[:500]}"
        raise RuntimeError(f"cuobjdump: expected the resources of {entry.name} for {arch}, got {got}")
    stream = _section(code, f".text.{ENTRY}")
    registers, stack, shared, local = resources
    classes = Counter(_INSTRUCTION.findall(done.stdout))
    faults = []
    if stack or local or classes["LDL"] or classes["STL"]:
        faults.append("spills")
    wide = Counter[str]()
    for kind, bits in _WIDE.findall(done.stdout):
        wide[kind] += int(bits) // 128
    if classes and entry.spec.state_alignment >= 16:
        spec, shape = entry.spec, entry.shape
        of_state = spec.head_dim**2 * spec.state_dtype.itemsize // (shape.split * shape.threads * 16)
        kinds = ("STG",) if shape.bulk else ("LDG", "STG")
        faults += [f"state not {kind} by 16 bytes" for kind in kinds if wide[kind] < of_state]
    return Report(
        name=entry.name,
        arch=arch,
        registers=registers,
        shared=shared,
        dynamic=entry.shape.shared_bytes(entry.spec),
        stack=stack,
        local=local,
        instructions=len(stream) // _ENCODED,
        counts={name: classes[name] for name in COUNTED},
        digest=hashlib.sha256(stream).hexdigest()[:16],
        faults="; ".join(faults),
    )


def _section(elf: bytes, name: str) -> bytes:
    """A section of a 64-bit ELF file."""
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    size, count, names = struct.unpack_from("<3H", elf, 0x3A)
    headers = [struct.unpack_from("<II4Q", elf, table + number * size) for number in range(count)]
    strings = headers[names][4]
    for at, _, _, _, offset, length in headers:
        if elf[strings + at : elf.index(b"\0", strings + at)] == name.encode():
            return elf[offset : offset + length]
    raise RuntimeError(f"cubin: expected a section {name}, found none")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", help="comma-separated, such as sm_90a; default: those of the gates' table")
    parser.add_argument("--layout", default="SD,DS,DS+2", help="comma-separated, for the table alone")
    parser.add_argument("--locks", type=Path, default=LOCKS, help="directory of the lock files")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--write", action="store_true", help="renew the lock files")
    what.add_argument("--check", action="store_true", help="exit with 1 if a lock file differs")
    options = parser.parse_args(arguments)
    failed = False
    for arch in options.arch.split(",") if options.arch else architectures():
        if options.write:
            print(write_lock(report(arch), options.locks))
        elif options.check:
            changed = differences(report(arch), read_lock(arch, options.locks)[1])
            print("\n".join(changed) or f"{arch}: as locked")
            failed |= bool(changed)
        else:
            print(f"{arch}, NVRTC {compiler()}\n{table(report(arch, options.layout.split(',')))}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
