"""Machine code that is there already: directories that ``fused-kda build`` wrote, read without a compiler or a device.

Such a directory holds files of machine code and ``manifest.json``, which names for each *problem* (backend,
architecture, specialisation, prefetch) the kernels that any batch of it needs, and for each kernel its files with their
SHA-256. A file is compared with it before it is loaded. A directory that was built from other sources of a backend than
the installed ones holds nothing for that backend.

This module also counts where kernels came from (:data:`counts`).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .contract import Specialization

logger = logging.getLogger("fused_kda")

MANIFEST = "manifest.json"
#: Of the manifest's form; a directory of another one is refused.
FORMAT = 1
#: Where a wheel carries prebuilt kernels.
INSIDE = Path(__file__).with_name("prebuilt")

#: Kernels that this process got, by where from: "prebuilt", "cache" (compiled earlier) or "compiled" (now).
counts: Counter[str] = Counter()


class Refused(RuntimeError):
    """A file of a prebuilt directory is absent, truncated or altered; the text names it. It has not been loaded."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel of a manifest.

    Attributes:
        backend, arch: of the gates' table.
        target: what it was compiled for: "sm_90a" for "sm_90", or the same.
        name: of the function.
        files: by suffix ("cubin", "hsaco", "json"): ``(path inside the directory, SHA-256)``.
        registers, spills, shared: per thread, registers spilt or bytes of stack and local memory, bytes of shared
            memory per program; None where no tool could tell.
    """

    backend: str
    arch: str
    target: str
    name: str
    files: Mapping[str, tuple[str, str]]
    registers: int | None
    spills: int | None
    shared: int | None


@dataclass(frozen=True, slots=True)
class Made:
    """A kernel just compiled for a directory: its key, and as in :class:`Kernel` its name, files and figures."""

    key: str
    name: str
    files: Mapping[str, bytes]
    registers: int | None
    spills: int | None
    shared: int | None


@dataclass(frozen=True, slots=True)
class Prebuilt:
    """A kernel found in a directory: its key, and by suffix its files' contents and where they lie."""

    key: str
    files: Mapping[str, bytes]
    paths: Mapping[str, Path]


def describe(spec: Specialization) -> dict[str, Any]:
    """A specialisation as a manifest holds it: plain JSON."""
    plain = dataclasses.asdict(spec)
    return {name: str(v).removeprefix("torch.") if isinstance(v, torch.dtype) else v for name, v in plain.items()}


def identity(recipe: Mapping[str, Any]) -> str:
    """The name under which a kernel is filed: a hash of all that its compilation depends on but the sources."""
    return hashlib.sha256(_canonical(recipe).encode()).hexdigest()[:32]


#: What kernels and their launches are made of, beside their own package.
_SHARED = ("contract.py", "kernels/device.py", "kernels/driver.py", "kernels/jit.py")


def source_hash(backend: str) -> str:
    """Hash of the installed sources that a backend's kernels, and what launches them, are made of."""
    package = Path(__file__).parent
    files = [package / name for name in _SHARED]
    files += [path for path in (package / "kernels" / backend).iterdir() if path.suffix in (".py", ".cu")]
    digest = hashlib.sha256()
    for path in sorted(files):
        if path.name != "inspect.py":
            digest.update(path.relative_to(package).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


class PrebuiltSet:
    """One prebuilt directory.

    Attributes:
        directory: where.
        tools: versions of what compiled it, by name.
        problems: ``(backend, arch, specialisation, prefetch)`` to the identities of their kernels.
        kernels: by identity.
    """

    def __init__(self, directory: Path) -> None:
        """Read the manifest.

        Raises:
            ValueError: there is none, or it is not one of this form.
        """
        self.directory = directory
        try:
            manifest = json.loads((directory / MANIFEST).read_text())
            if manifest["format"] != FORMAT:
                raise ValueError(f"format {manifest['format']}, not {FORMAT}")
            self.version: str = manifest["fused_kda"]
            self.tools: dict[str, str] = manifest["tools"]
            self.sources: dict[str, str] = manifest["sources"]
            self.kernels = {
                key: Kernel(**{**one, "files": {suffix: tuple(pair) for suffix, pair in one["files"].items()}})
                for key, one in manifest["kernels"].items()
            }
            self.problems: dict[tuple[str, str, str, bool], tuple[str, ...]] = {}
            for one in manifest["problems"]:
                key = one["backend"], one["arch"], _canonical(one["specialization"]), one["prefetch"]
                self.problems[key] = tuple(one["kernels"])
            self._listed: list[dict[str, Any]] = manifest["problems"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            text = f"{type(error).__name__}: {error}"
            raise ValueError(
                f"prebuilt: expected a directory that `fused-kda build` wrote, got {directory} ({text})"
            ) from error
        self._refused: dict[str, str] = {}
        self._current: dict[str, bool] = {}

    def stale(self, backend: str) -> str | None:
        """Why nothing of a backend can be used although it may be there, or None."""
        if backend not in self.sources:
            return None
        if backend not in self._current:
            self._current[backend] = self.sources[backend] == source_hash(backend)
        if self._current[backend]:
            return None
        return f"{self.directory} was built from other sources of {backend} (fused-kda {self.version})"

    def lacks(self, backend: str, arch: str, spec: Specialization, prefetch: bool) -> str | None:
        """Why a problem cannot run from this directory; None where all its kernels are there, and whole."""
        stale = self.stale(backend)
        if stale is not None:
            return stale
        found = self.problems.get((backend, arch, _canonical(describe(spec)), prefetch))
        if found is None:
            return f"{self.directory} holds no kernel for this specialisation on {arch}"
        for key in found:
            try:
                self.read(key)
            except Refused as error:
                return str(error)
        return None

    def read(self, key: str) -> dict[str, bytes]:
        """A kernel's files by suffix, compared with the manifest.

        Raises:
            KeyError: the directory has no such kernel.
            Refused: a file is not what the manifest says, or the device refused it before.
        """
        kernel = self.kernels[key]
        if key in self._refused:
            raise Refused(self._refused[key])
        contents = {}
        for suffix, (name, digest) in kernel.files.items():
            path = self.directory / name
            try:
                if self.directory.resolve() not in path.resolve().parents:
                    raise OSError("outside the directory")
                contents[suffix] = path.read_bytes()
            except OSError as error:
                raise Refused(f"{path} cannot be read ({error.strerror or error})") from error
            got = hashlib.sha256(contents[suffix]).hexdigest()
            if got != digest:
                raise Refused(f"{path} is not what was built: expected SHA-256 {digest[:16]}..., got {got[:16]}...")
        return contents

    def refuse(self, key: str, reason: str) -> None:
        """Do not offer a kernel again in this process: the device would not load it."""
        self._refused[key] = f"{self.directory} holds {key}, but {reason}"

    def held(self, backend: str, arch: str) -> list[dict[str, Any]]:
        """The problems that the manifest lists for a backend on an architecture; none if the directory is stale."""
        if self.stale(backend) is not None:
            return []
        return [one for one in self._listed if one["backend"] == backend and one["arch"] == arch]


def find(sets: Iterable[PrebuiltSet], backend: str, key: str) -> tuple[PrebuiltSet, Prebuilt] | None:
    """The first of the directories that holds a kernel whole, and the kernel."""
    for one in sets:
        if key in one.kernels and one.stale(backend) is None:
            try:
                files = one.read(key)
            except Refused as error:
                logger.warning("a prebuilt kernel is refused: %s", error)
            else:
                paths = {suffix: one.directory / name for suffix, (name, _) in one.kernels[key].files.items()}
                return one, Prebuilt(key, files, paths)
    return None


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=_plain)


def _plain(value: object) -> str:
    return str(value).removeprefix("torch.")
