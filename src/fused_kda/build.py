"""Compiling ahead: what the gates' table has for an architecture, into a directory that needs no compiler later.

:func:`requests` asks the table what there is to build, :func:`write` compiles it and writes the directory. Neither
needs a GPU. :mod:`fused_kda.binaries` reads what is written.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.metadata
import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from . import gates
from .binaries import FORMAT, MANIFEST, Made, describe, source_hash
from .contract import Specialization
from .layouts import LayoutKind
from .shapes import WeightForm, shape_problem

#: Distributions whose versions a manifest holds, by the name it gives them.
TOOLS = {"nvrtc": "nvidia-cuda-nvrtc", "triton": "triton", "torch": "torch"}


@dataclass(frozen=True, slots=True)
class Request:
    """One problem to build: a backend's kernels for a specialisation on an architecture.

    ``target`` is what is compiled for: "sm_90a" for the table's "sm_90" where it was asked for so, else ``arch``.
    """

    backend: str
    arch: str
    target: str
    spec: Specialization
    prefetch: bool


def specialization(
    heads: int,
    layout: LayoutKind = "SD",
    state_dtype: torch.dtype = torch.float32,
    bounded: bool = True,
    weight: WeightForm = "planes",
) -> Specialization:
    """That of a call of a shipped model's layer: see :func:`fused_kda.shapes.shape_problem`.

    Args:
        heads, layout, state_dtype, weight: as there.
        bounded: the gate with a lower bound (Kimi-K3), or the softplus gate (Kimi-Linear).
    """
    bound = -5.0 if bounded else None
    problem = shape_problem(heads=heads, layout=layout, state_dtype=state_dtype, lower_bound=bound, weight=weight)
    return problem.spec


def specializations(
    heads: Iterable[int],
    layouts: Iterable[LayoutKind],
    state_dtypes: Iterable[torch.dtype],
    bounded: Iterable[bool],
    weights: Iterable[WeightForm],
) -> list[Specialization]:
    """Every combination of :func:`specialization`'s arguments."""
    return list(itertools.starmap(specialization, itertools.product(heads, layouts, state_dtypes, bounded, weights)))


def architectures() -> tuple[str, ...]:
    """What the table has kernels to compile for."""
    return tuple(dict.fromkeys(arch for row in gates.TABLE if row.compiler is not None for arch in row.archs))


def requests(
    archs: Iterable[str], specs: Sequence[Specialization], backends: Iterable[str] | None = None
) -> list[Request]:
    """What the table has of the specialisations on the architectures, with and without prefetch; nothing else.

    Args:
        archs: such as "sm_90", "sm_90a" or "gfx942".
        specs: specialisations.
        backends: of the table; None for all.

    Raises:
        ValueError: an architecture or backend that the table does not have, or none of the specialisations on one; the
            text lists what it has.
    """
    known = architectures()
    named = tuple(gates.BACKENDS if backends is None else backends)
    if not set(named) <= set(gates.BACKENDS):
        raise ValueError(f"backends: expected some of {', '.join(gates.BACKENDS)}, got {', '.join(named)}")
    found = []
    for target in archs:
        arch = target.rstrip("af") if target.startswith("sm_") else target
        if arch not in known:
            raise ValueError(f"arch: expected some of {', '.join(known)}, got {target!r}")
        here = [
            Request(backend, arch, target if backend == "cuda" else arch, spec, prefetch)
            for backend in named
            for spec in specs
            if any(row.compiler is not None and not row.spec_reasons(spec) for row in gates.rows(backend, arch))
            for prefetch in (False, True)
        ]
        if not here:
            reasons = {
                r for b in named for row in gates.rows(b, arch) for spec in specs for r in row.spec_reasons(spec)
            }
            text = "; ".join(sorted(reasons)) or f"no backend of {', '.join(named)} has a row for it"
            raise ValueError(f"arch: expected one for which the table has what is asked, got {target}: {text}")
        found += here
    return found


def write(
    directory: Path, wanted: Sequence[Request], jobs: int = 1, progress: Callable[[Request], None] | None = None
) -> dict[str, Any]:
    """Compile the requests and write the directory: files first, the manifest last. Returns the manifest.

    Args:
        directory: new, empty, or one that this function wrote before, which is then replaced.
        wanted: from :func:`requests`.
        jobs: compiling processes.
        progress: called with each request when it is done.

    Raises:
        ValueError: the directory holds something else.
    """
    if directory.exists() and any(directory.iterdir()) and not (directory / MANIFEST).exists():
        raise ValueError(f"out: expected a new or empty directory, or an earlier build, got {directory}")
    if (directory / MANIFEST).exists():
        (directory / MANIFEST).unlink()
        for backend in gates.BACKENDS:
            shutil.rmtree(directory / backend, ignore_errors=True)
    directory.mkdir(parents=True, exist_ok=True)
    sources = {backend: source_hash(backend) for backend in dict.fromkeys(one.backend for one in wanted)}
    kernels: dict[str, dict[str, Any]] = {}
    problems = []
    for request, made in _compile_all(wanted, jobs):
        for one in made:
            if one.key not in kernels:
                kernels[one.key] = _write_kernel(directory, request, one)
        problems.append(
            {
                "backend": request.backend,
                "arch": request.arch,
                "specialization": describe(request.spec),
                "prefetch": request.prefetch,
                "kernels": [one.key for one in made],
            }
        )
        if progress is not None:
            progress(request)
    manifest = {
        "format": FORMAT,
        "fused_kda": importlib.import_module(__package__ or "").__version__,
        "tools": _tools(),
        "sources": sources,
        "kernels": kernels,
        "problems": problems,
    }
    partial = directory / f"{MANIFEST}.partial"
    partial.write_text(json.dumps(manifest, indent=1) + "\n")
    os.replace(partial, directory / MANIFEST)
    return manifest


def _compile_all(wanted: Sequence[Request], jobs: int) -> Iterator[tuple[Request, list[Made]]]:
    if jobs == 1:
        yield from zip(wanted, map(_compile, wanted), strict=True)
        return
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        yield from zip(wanted, pool.map(_compile, wanted), strict=True)


def _compile(request: Request) -> list[Made]:
    backend = importlib.import_module(f".kernels.{request.backend}", __package__)
    made: list[Made] = backend.prebuild(request.spec, request.arch, request.target, request.prefetch)
    return made


def _write_kernel(directory: Path, request: Request, made: Made) -> dict[str, Any]:
    files = {}
    for suffix, content in made.files.items():
        name = f"{request.backend}/{request.arch}/{made.key}.{suffix}"
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(content)
        files[suffix] = (name, hashlib.sha256(content).hexdigest())
    return {
        "backend": request.backend,
        "arch": request.arch,
        "target": request.target,
        "name": made.name,
        "files": files,
        "registers": made.registers,
        "spills": made.spills,
        "shared": made.shared,
    }


def _tools() -> dict[str, str]:
    found = {}
    for name, distribution in TOOLS.items():
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(distribution)
    return found
