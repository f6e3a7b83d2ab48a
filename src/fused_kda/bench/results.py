"""Results files: what was measured, on what, by which code and which command. One JSON document each."""

from __future__ import annotations

import datetime
import hashlib
import importlib.metadata
import json
import platform
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from .. import __version__, gates

#: Distributions whose versions a figure depends on.
DISTRIBUTIONS = (
    "triton",
    "cuda-core",
    "cuda-bindings",
    "nvidia-cuda-nvrtc",
    "fla-core",
    "vllm",
    "sglang",
    "flashinfer-python",
)
PACKAGE = Path(__file__).resolve().parents[1]


def machine(device: torch.device) -> dict[str, Any]:
    """What the figures are measured on, and the day."""
    found: dict[str, Any] = {
        "device": _cpu(),
        "architecture": gates.architecture(device),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
    }
    if device.type == "cpu":
        return {**found, "threads": torch.get_num_threads()}
    properties = torch.cuda.get_device_properties(device)
    return {
        **found,
        "device": properties.name,
        "sms": properties.multi_processor_count,
        "l2_bytes": properties.L2_cache_size,
        "driver": _driver(),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
    }


def _cpu() -> str:
    """The processor's model where the system tells it, else its architecture."""
    return _in_file("/proc/cpuinfo", r"model name\s*: (.+)") or platform.processor() or platform.machine()


def _driver() -> str:
    """Version of NVIDIA's kernel module, as it says it itself."""
    return _in_file("/proc/driver/nvidia/version", r"\b(\d+\.\d+(?:\.\d+)?)\b") or "unknown"


def _in_file(path: str, pattern: str) -> str | None:
    """What a pattern's group finds first in a file; None where there is no such file or text."""
    try:
        found = re.search(pattern, Path(path).read_text())
    except OSError:
        return None
    return found[1] if found else None


def versions(names: Sequence[str] = DISTRIBUTIONS) -> dict[str, str | None]:
    """This package's version, torch's with its build, and those of distributions; None where one is not installed."""
    found: dict[str, str | None] = {"fused-kda": __version__, "torch": str(torch.__version__)}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def commit(package: Path = PACKAGE) -> str:
    """The checkout's commit, "-dirty" after it where tracked files differ; "unknown" outside a checkout."""
    git = ["git", "-C", str(package)]
    try:  # a package that another repository's folder merely surrounds is not in its commit
        subprocess.run([*git, "ls-files", "--error-unmatch", "__init__.py"], check=True, capture_output=True)
        described = [*git, "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
        return subprocess.run(described, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def source_digest(package: Path = PACKAGE) -> str:
    """SHA-256, shortened, over the package's Python and CUDA files: names the code where no commit can."""
    digest = hashlib.sha256()
    for path in sorted(path for path in package.rglob("*") if path.suffix in (".py", ".cu")):
        digest.update(path.relative_to(package).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def document(kind: str, command: str, device: torch.device, **content: Any) -> dict[str, Any]:
    """A results document: its kind, the command line, the machine and the code, then what was measured."""
    return {
        "kind": kind,
        "command": command,
        "machine": machine(device),
        "versions": versions(),
        "commit": commit(),
        "source": source_digest(),
        **content,
    }


def write(result: dict[str, Any], path: Path) -> Path:
    """Write a document and return where: ``path``, or, if that is a directory, ``<machine>-<date>.json`` in it.

    Documents of another kind than "bench" have their kind before the ending.
    """
    if path.is_dir():
        path = path / f"{default_name(result)}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text(result))
    return path


def default_name(result: dict[str, Any]) -> str:
    """``nvidia-h200-2026-11-29``, and ``-model`` or the like after it where the kind is not "bench"."""
    device = re.sub(r"[^a-z0-9]+", "-", result["machine"]["device"].lower()).strip("-")
    kind = "" if result["kind"] == "bench" else f"-{result['kind']}"
    return f"{device}-{result['machine']['date']}{kind}"


def text(result: dict[str, Any]) -> str:
    """The document as JSON, one line for each member, and for each element of a list of objects."""
    members = []
    for key, value in result.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            lines = ",\n".join(f"  {json.dumps(element)}" for element in value)
            members.append(f" {json.dumps(key)}: [\n{lines}\n ]")
        else:
            members.append(f" {json.dumps(key)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(members) + "\n}\n"


def read(path: Path) -> dict[str, Any]:
    """Read a document.

    Raises:
        ValueError: it is not one; the text names the file.
    """
    try:
        result = json.loads(path.read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: expected a results file, got {error}") from error
    if not isinstance(result, dict) or not isinstance(result.get("machine"), dict):
        raise ValueError(f"{path}: expected a results file with the machine that it is from, got something else")
    return result
