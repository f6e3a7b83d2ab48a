"""What this machine and its devices have: the questions that gates put to them, each answered by a reason or None."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import shutil

import torch

#: Optional dependencies of the package that bring what backends need, named like the module they bring.
EXTRAS: tuple[str, ...] = ("cuda", "triton")


@functools.cache
def architecture(device: torch.device) -> str:
    """The device's architecture as the table names it: "cpu", "sm_90", "gfx942", or the device type."""
    if device.type != "cuda":
        return device.type
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        return str(properties.gcnArchName).split(":")[0]
    return f"sm_{properties.major}{properties.minor}"


def shared_memory_limit(device: torch.device) -> int | None:
    """Bytes of shared memory that one program may have on the device; None where there is no such limit."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(device)
    limit = getattr(properties, "shared_memory_per_block_optin", 0) or properties.shared_memory_per_block
    return int(limit)


def missing(module: str) -> str:
    """The reason that a module which is not there gives, with the extra that brings it."""
    extra = module.split(".")[0]
    remedy = f" (pip install 'fused-kda[{extra}]')" if extra in EXTRAS else ""
    return f"module {module} is not installed{remedy}"


@functools.cache
def importable(module: str) -> bool:
    """Whether a module is installed; does not import it."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def nvrtc_problem() -> str | None:
    """Why NVRTC cannot compile here for this driver, or None."""
    try:
        importlib.import_module("cuda.core")
        nvrtc = importlib.import_module("cuda.bindings.nvrtc")
        result, major, minor = nvrtc.nvrtcVersion()
    except Exception as error:  # whatever a missing or broken library raises closes the gate, and the reason names it
        return f"NVRTC cannot be loaded ({type(error).__name__}: {error})"
    if int(result) != 0 or (major, minor) < (12, 9):
        return f"NVRTC {major}.{minor} is older than 12.9"
    driver = _driver_version()
    if driver is not None and driver // 1000 < major:
        return f"the driver supports CUDA {driver // 1000}.{driver % 1000 // 10}, NVRTC makes code for CUDA {major}"
    return None


@functools.cache
def _driver_version() -> int | None:
    """The CUDA version that the driver supports, as 13000; None without a driver."""
    try:
        result, version = importlib.import_module("cuda.bindings.driver").cuDriverGetVersion()
    except Exception:  # no driver: the bindings' own error type differs from version to version
        return None
    return int(version) if int(result) == 0 else None


def triton_problem() -> str | None:
    """Why Triton cannot compile here, or None: what it needs comes with it."""
    return None if importable("triton") else missing("triton")


def no_launcher() -> str | None:
    """Triton builds its launcher with a C compiler; on NVIDIA the driver's own launch does without."""
    if importable("cuda.bindings"):
        return None
    reason = no_c_compiler()
    return reason and f"{reason}, or cuda-bindings (pip install 'fused-kda[cuda]')"


def no_c_compiler() -> str | None:
    """Why Triton cannot build its launcher here, or None."""
    if os.environ.get("CC") or any(map(shutil.which, ("gcc", "clang", "cc"))):
        return None
    return "Triton builds its launcher at first use and needs a C compiler on PATH"


def interpreter_off() -> str | None:
    """Why Triton's interpreter is not at work in this process, or None."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        return None
    return "Triton runs on a CPU only in its interpreter (TRITON_INTERPRET=1, set before the first import)"
