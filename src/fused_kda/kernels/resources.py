"""What a compiled NVIDIA kernel needs, read off its machine code with ``cuobjdump``."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

_RESOURCES = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")


def cuobjdump() -> Path | None:
    """The disassembler: Triton's own, which is pinned with it, else the one on PATH."""
    triton = importlib.util.find_spec("triton")
    if triton is not None and triton.origin is not None:
        bundled = Path(triton.origin).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        if bundled.exists():
            return bundled
    found = shutil.which("cuobjdump")
    return Path(found) if found else None


def read(report: str) -> tuple[int, int, int, int] | None:
    """Registers, bytes of stack, of static shared and of local memory, as ``cuobjdump -res-usage`` prints them."""
    found = _RESOURCES.search(report)
    if found is None:
        return None
    registers, stack, shared, local = map(int, found.groups())
    return registers, stack, shared, local


def resources(cubin: bytes) -> tuple[int, int, int] | None:
    """Registers per thread, bytes of stack and local memory per thread, bytes of static shared memory.

    None where there is no ``cuobjdump``, or one that does not know the architecture.
    """
    tool = cuobjdump()
    if tool is None:
        return None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=False)
    found = read(done.stdout)
    if found is None:
        return None
    registers, stack, shared, local = found
    return registers, stack + local, shared
