"""Steps in a process of their own: from a prebuilt directory with no compiler and no disk, or compiled here.

    python prebuilt_process.py DIRECTORY    without NVRTC, Triton's compiler, processes and files written
    python prebuilt_process.py              compiled here

Prints one JSON document: hashes of every result by case, the battery's outcomes, where the kernels came from,
and what was done that there was no right to.
"""

from __future__ import annotations

import hashlib
import importlib.abc
import itertools
import json
import os
import sys
from typing import Any

import torch

HEADS = 12
#: Batches on both sides of the launch shapes' thresholds.
BATCHES = (1, 5, 24, 150)
BACKENDS = ("cuda", "triton", "chain")


class NoCompiler(importlib.abc.MetaPathFinder):
    """NVRTC's bindings, and whatever imports them, are not there."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name in ("cuda.core", "cuda.bindings.nvrtc", "cuda.bindings.nvjitlink"):
            raise ModuleNotFoundError(f"{name} is hidden", name=name)


def forbid() -> list[str]:
    """From now on nothing here can compile; processes started and files made or written are listed in the result."""
    sys.dont_write_bytecode = True
    sys.meta_path.insert(0, NoCompiler())
    import triton
    import triton.compiler.compiler

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("Triton was asked to compile")

    triton.compile = triton.compiler.compile = triton.compiler.compiler.compile = refuse
    found: list[str] = []
    events = ("subprocess.Popen", "os.posix_spawn", "os.exec", "os.mkdir", "tempfile.mkstemp", "tempfile.mkdtemp")
    writing = os.O_WRONLY | os.O_RDWR | os.O_CREAT

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & writing
        if event in events or (writes and not str(arguments[0]).startswith(("/dev/", "/proc/"))):
            found.append(f"{event} {arguments}")

    sys.addaudithook(watch)
    return found


def steps(backend: str, device: torch.device) -> dict[str, str]:
    """Two steps of each case, the first one replayed from a graph that captured it; the results' hashes."""
    from fused_kda.testing.problems import Draw, draw

    found = {}
    cases = itertools.product(("SD", "DS"), (torch.float32, torch.bfloat16), BATCHES, (False, True))
    for layout, state_dtype, batch, prefetch in cases:
        call = draw(Draw(batch=batch, heads=HEADS, layout=layout, state_dtype=state_dtype, seed=batch), device)  # type: ignore[arg-type]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):  # the very first call of each specialisation among them
            call.run(backend, prefetch=prefetch)
        graph.replay()
        call.run(backend, prefetch=prefetch)
        digest = hashlib.sha256()
        for name in ("out", "conv_state", "state"):
            digest.update(call.arguments[name].contiguous().view(torch.uint8).cpu().numpy().tobytes())
        found[f"{backend} {layout} {state_dtype} B={batch} prefetch={prefetch}"] = digest.hexdigest()
    return found


def main() -> None:
    directory = sys.argv[1] if len(sys.argv) > 1 else None
    forbidden: list[str] = []
    device = torch.device("cuda", 0)
    torch.zeros(1, device=device)
    if directory is not None:
        os.environ.update(FUSED_KDA_PREBUILT=directory, FUSED_KDA_COMPILE="never")
        forbidden = forbid()
    import fused_kda
    from fused_kda import gates
    from fused_kda.testing.battery import Size, Subject, run_battery

    hashes: dict[str, str] = {}
    for backend in BACKENDS:
        hashes |= steps(backend, device)
    outcomes = []
    if directory is not None:
        size = Size(heads=HEADS, rows=9, batches=(1, 2, 5, 16, 40, 130), repeats=20, steps=4)
        for backend in BACKENDS:
            outcomes += [[o.backend, o.check, o.status, o.reason] for o in run_battery(Subject(backend, device, size))]
    print(
        json.dumps(
            {
                "hashes": hashes,
                "outcomes": outcomes,
                "forbidden": forbidden,
                "counts": fused_kda.kernel_counts(),
                "directories": [str(one.directory) for one in gates.prebuilt_sets()],
            }
        )
    )


if __name__ == "__main__":
    main()
