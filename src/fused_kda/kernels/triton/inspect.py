"""Static figures of the decode kernel: compiled for a named architecture, on any machine, read off the binary.

    python -m fused_kda.kernels.triton.inspect --arch gfx942     print the table
    python -m fused_kda.kernels.triton.inspect --check | --write compare with, or renew, the lock files

A lock file per architecture holds the figures, so a kernel that starts to spill, to use scratch memory or to lose its
16-byte accesses is seen without the hardware. Locks hold for one version of Triton.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import triton
from triton.compiler import CompiledKernel

from ...contract import Specialization
from ...layouts import ConvLayout, LayoutKind
from ..jit import Build, compiled
from .compile import decode_build
from .shape import Shape, choose, has_pdl

#: LDS of one gfx9 compute unit that one program may use, bytes.
LDS_BYTES = 64 * 1024
LOCKS = Path("locks/triton")
#: Architectures with a lock file. sm_86 and sm_103 run what sm_80 and sm_100 were proved for.
ARCHS = ("gfx942", "gfx950", "sm_80", "sm_89", "sm_90", "sm_100", "sm_120")
#: Heads of the static matrix: Kimi-K3 at TP32, TP8, TP4 and TP1.
HEADS = (3, 12, 24, 96)
#: Rows for which every H takes the launch shape of large grids.
MANY_ROWS = 1024


@dataclass(frozen=True, slots=True)
class Case:
    """One specialisation to compile. Defaults are Kimi-K3's layer; the rest is what a caller may change.

    Attributes:
        arch: "gfx942", "sm_90" ...
        heads, head_dim, layout, state_dtype, bounded, norm: of the problem.
        batch: rows, for the launch shape alone; the default takes the shape for large grids.
        extra: further changes, by name: "mask", "bias", "w2", "checkpoint" (bf16 weights [3P, W]), "unaligned",
            "spare" (DS with a spare tap) and "prefetch".
    """

    arch: str
    heads: int = 12
    head_dim: int = 128
    layout: LayoutKind = "SD"
    state_dtype: torch.dtype = torch.float32
    bounded: bool = True
    norm: bool = True
    batch: int = MANY_ROWS
    extra: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The case's key in a lock file."""
        state = "fp32" if self.state_dtype == torch.float32 else "bf16"
        words = [f"H{self.heads}", f"D{self.head_dim}", self.layout, state]
        words += ["bounded" if self.bounded else "softplus", "norm" if self.norm else "plain", *self.extra]
        words += [f"B{self.batch}"] if self.batch != MANY_ROWS else []
        return " ".join(words)

    def specialization(self) -> Specialization:
        """The problem's compile-time part, as the contract would derive it from tensors."""
        width = 2 if "w2" in self.extra else 4
        channels = 3 * self.heads * self.head_dim
        inner = self.heads * self.head_dim
        checkpoint = "checkpoint" in self.extra
        unaligned = "unaligned" in self.extra
        return Specialization(
            heads=self.heads,
            head_dim=self.head_dim,
            conv_width=width,
            conv_layout=ConvLayout(self.layout, channels, width - 1 + ("spare" in self.extra)),
            weight_strides=(inner * width, 1, width) if checkpoint else (width * inner, inner, 1),
            dtype=torch.bfloat16,
            weight_dtype=torch.bfloat16 if checkpoint else torch.float32,
            bias_dtype=torch.float32 if "bias" in self.extra else None,
            norm_dtype=torch.float32 if self.norm else None,
            param_dtype=torch.float32,
            state_dtype=self.state_dtype,
            index_dtype=torch.int32,
            bounded=self.bounded,
            has_initial_state="mask" in self.extra,
            state_alignment=self.state_dtype.itemsize if unaligned else 16,
            conv_alignment=2 if unaligned else 16,
        )

    def shape(self) -> Shape:
        """The launch shape of the case."""
        return choose(self.specialization(), self.arch, self.batch, "prefetch" in self.extra)

    def build(self) -> Build:
        """What a launch of the case compiles."""
        return decode_build(self.specialization(), self.arch, self.shape(), "prefetch" in self.extra)


@dataclass(frozen=True, slots=True)
class Figures:
    """What a compiled kernel needs.

    Attributes:
        registers: vector registers per thread (VGPRs with AGPRs on AMD).
        scalar_registers: SGPRs per wave; 0 on NVIDIA.
        spills: registers spilt to memory (AMD: vector and scalar).
        scratch_bytes: private memory per thread: stack and local on NVIDIA, private segment on AMD.
        shared_bytes: shared memory or LDS per program.
        occupancy: programs' waves per SIMD that the registers allow (AMD), or warps per SM sub-partition (NVIDIA).
        wide_loads, wide_stores: 16-byte global loads and stores in the code.
        lane_ops: exchanges between lanes without shared memory (DPP on AMD, SHFL on NVIDIA).
    """

    registers: int
    scalar_registers: int
    spills: int
    scratch_bytes: int
    shared_bytes: int
    occupancy: int
    wide_loads: int
    wide_stores: int
    lane_ops: int

    def faults(self, case: Case) -> list[str]:
        """What a kernel of this case must not do and does; empty for a sound one."""
        found = []
        if self.spills or self.scratch_bytes:
            found.append(f"{self.spills} registers spilt, {self.scratch_bytes} bytes of scratch per thread")
        if self.shared_bytes > LDS_BYTES:
            found.append(f"{self.shared_bytes} bytes of shared memory")
        if self.occupancy < 2:
            found.append(f"{self.occupancy} resident waves per SIMD")
        if "unaligned" not in case.extra:
            threads = case.shape().warps * (64 if case.arch.startswith("gfx") else 32)
            least = case.head_dim**2 * case.state_dtype.itemsize // (16 * threads)
            if min(self.wide_loads, self.wide_stores) < least:
                found.append(f"{self.wide_loads} loads and {self.wide_stores} stores of 16 bytes, state needs {least}")
        if not self.lane_ops:
            found.append("no exchange between lanes without shared memory")
        return found


def cases(arch: str) -> list[Case]:
    """The static matrix of one architecture.

    AMD, where nothing else can be proved without hardware: both layouts, both gates, norm on and off, all of
    :data:`HEADS`, both state dtypes, then one case for every other thing that changes the code. NVIDIA: both layouts
    and dtypes with either half of the features, what costs most registers, and each launch shape.
    """
    layouts: tuple[LayoutKind, ...] = ("SD", "DS")
    dtypes = (torch.float32, torch.bfloat16)
    flags = (True, False)
    amd = arch.startswith("gfx")
    gates_and_norms = list(itertools.product(flags, flags)) if amd else [(True, True), (False, False)]
    matrix = [
        Case(arch, heads, 128, layout, dtype, bounded, norm)
        for heads, layout, dtype in itertools.product(HEADS if amd else (12,), layouts, dtypes)
        for bounded, norm in gates_and_norms
    ]
    matrix += [Case(arch, 12, dim, "DS", dtype) for dim in (64, 256) for dtype in dtypes]
    matrix += [Case(arch, extra=extra) for extra in (("mask", "bias"), ("unaligned",))]
    if amd:
        matrix += [Case(arch, extra=(extra,)) for extra in ("w2", "checkpoint")]
        matrix.append(Case(arch, layout="DS", extra=("spare",)))
        return matrix
    matrix += [Case(arch, state_dtype=dtype, batch=1) for dtype in dtypes]
    if has_pdl(arch):
        for dtype, batches in zip(dtypes, ((1, 16, MANY_ROWS), (1, 32, MANY_ROWS)), strict=True):
            matrix += [Case(arch, state_dtype=dtype, batch=batch, extra=("prefetch",)) for batch in batches]
    return matrix


def figures(case: Case) -> Figures:
    """Compile one case and read its figures."""
    kernel = compiled(case.build(), case.arch)
    return _amd(kernel) if case.arch.startswith("gfx") else _nvidia(kernel)


def table(wanted: Sequence[Case], processes: int = 1) -> dict[str, Figures]:
    """The figures of many cases by name, compiled by ``processes`` processes."""
    if processes == 1:
        results: Iterable[Figures] = map(figures, wanted)
        return {case.name: result for case, result in zip(wanted, results, strict=True)}
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        results = pool.map(figures, wanted, chunksize=4)
        return {case.name: result for case, result in zip(wanted, results, strict=True)}


def _amd(kernel: CompiledKernel) -> Figures:
    text: str = kernel.asm["amdgcn"]

    def metadata(name: str) -> int:
        return int(_only(re.findall(rf"^\s+\.{name}:\s+(\d+)", text, re.M), name))

    return Figures(
        registers=metadata("vgpr_count"),
        scalar_registers=metadata("sgpr_count"),
        spills=metadata("vgpr_spill_count") + metadata("sgpr_spill_count"),
        scratch_bytes=metadata("private_segment_fixed_size"),
        shared_bytes=int(kernel.metadata.shared),
        occupancy=int(_only(re.findall(r"; Occupancy: (\d+)", text), "Occupancy")),
        wide_loads=len(re.findall(r"^\s+(?:buffer|global)_load_dwordx4 ", text, re.M)),
        wide_stores=len(re.findall(r"^\s+(?:buffer|global)_store_dwordx4 ", text, re.M)),
        lane_ops=len(re.findall(r"^\s+v_\w+_dpp ", text, re.M)),
    )


def disassembled(kernel: CompiledKernel) -> str:
    """What cuobjdump, which comes with Triton, says of an NVIDIA kernel: its resources and its instructions."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [str(tool), "-sass", "-res-usage", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _nvidia(kernel: CompiledKernel) -> Figures:
    text = disassembled(kernel)

    def resource(name: str) -> int:
        return int(_only(re.findall(rf"\b{name}:(\d+)", text), name))

    registers = resource("REG")
    return Figures(
        registers=registers,
        scalar_registers=0,
        spills=len(re.findall(r"\b(?:LDL|STL)\b", text)),
        scratch_bytes=resource("STACK") + resource("LOCAL"),
        shared_bytes=int(kernel.metadata.shared),
        # 16,384 registers per sub-partition, handed out to a warp in units of 256.
        occupancy=16384 // (-(-registers * 32 // 256) * 256),
        wide_loads=len(re.findall(r"\bLDG\S*\.128\b", text)),
        wide_stores=len(re.findall(r"\bSTG\S*\.128\b", text)),
        lane_ops=len(re.findall(r"\bSHFL\b", text)),
    )


def _only(found: Sequence[str], name: str) -> str:
    if len(found) != 1:
        raise ValueError(f"{name}: expected once in the compiled kernel, found {len(found)} times")
    return found[0]


def write_lock(arch: str, rows: Mapping[str, Figures], directory: Path) -> Path:
    """Write one architecture's lock file, a case a line, and return its path."""
    path = directory / f"{arch}.json"
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(asdict(row))}" for name, row in rows.items())
    directory.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{{"triton": "{triton.__version__}", "cases": {{\n{lines}\n}}}}\n')
    return path


def read_lock(arch: str, directory: Path) -> tuple[str, dict[str, Figures]]:
    """An architecture's lock: the Triton version that it holds for, and its figures by case."""
    content: dict[str, Any] = json.loads((directory / f"{arch}.json").read_text())
    return content["triton"], {name: Figures(**row) for name, row in content["cases"].items()}


def differences(locked: Mapping[str, Figures], now: Mapping[str, Figures]) -> list[str]:
    """What differs between a lock and the present, one line each; empty where all is as locked."""
    lines = [f"{name}: new" for name in now if name not in locked]
    lines += [f"{name}: gone" for name in locked if name not in now]
    for name in now.keys() & locked.keys():
        before, after = asdict(locked[name]), asdict(now[name])
        changed = [f"{key} {before[key]} -> {after[key]}" for key in before if before[key] != after[key]]
        if changed:
            lines.append(f"{name}: {', '.join(changed)}")
    return sorted(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", default=",".join(ARCHS), help="comma-separated")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--locks", type=Path, default=LOCKS, help="directory of the lock files")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--write", action="store_true", help="renew the lock files")
    what.add_argument("--check", action="store_true", help="exit with 1 if a lock file differs or a kernel has a fault")
    options = parser.parse_args(arguments)
    failed = False
    for arch in options.arch.split(","):
        listed = cases(arch)
        rows = table(listed, options.jobs)
        faults = [f"{case.name}: {fault}" for case in listed for fault in rows[case.name].faults(case)]
        if options.write:
            print(write_lock(arch, rows, options.locks))
        elif options.check:
            faults += differences(read_lock(arch, options.locks)[1], rows)
            print("\n".join(faults) or f"{arch}: as locked")
        else:
            print(f"{arch}, Triton {triton.__version__}\n{'case':<40} {' '.join(Figures.__slots__)}")
            for name, row in rows.items():
                print(f"{name:<40} {' '.join(f'{value:>{len(key)}}' for key, value in asdict(row).items())}")
        failed |= bool(faults)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
