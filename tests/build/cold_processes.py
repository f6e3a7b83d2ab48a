"""Sixteen processes that want one kernel at once, from one empty cache: ``cold_processes.py KIND DIRECTORY``.

Each of them prints where its kernel came from, and a hash of it. The kernel is a small one: the cache is what is tried.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from multiprocessing import get_context
from pathlib import Path
from typing import Any

PROCESSES = 16
SOURCE = 'extern "C" __global__ void fused_kda_decode(float* x) { x[threadIdx.x] *= 2.0f; }\n'

kind, directory = sys.argv[1], Path(sys.argv[2])
os.environ["FUSED_KDA_CACHE_DIR"] = str(directory / "cache")

from fused_kda import build, kernel_counts  # noqa: E402 (the environment first)

SPEC = build.specialization(1)
if kind == "cuda":
    import cuda.core

    from fused_kda.kernels.cuda import compile as compiling
    from fused_kda.kernels.cuda.shape import REGISTERS

    assert cuda.core.Program  # loaded before the processes part; NVRTC is not
    compiling.SOURCE = directory / "small.cu"
else:
    from triton.runtime.cache import triton_key

    from fused_kda.kernels import jit
    from fused_kda.kernels.chain import launch

    triton_key()  # reads all of Triton's library; sixteen times that is most of the test


def code() -> bytes:
    if kind == "cuda":
        return compiling.compile_cubin(SPEC, REGISTERS, False, "sm_80")
    return bytes(jit.compiled(launch._norm(SPEC, launch.SHAPE), "gfx942").kernel)


def work(barrier: Any, answers: Any) -> None:
    barrier.wait()
    digest = hashlib.sha256(code()).hexdigest()
    answers.put([digest, kernel_counts()])


if __name__ == "__main__":
    (directory / "small.cu").write_text(SOURCE)
    context = get_context("fork")  # cold: nothing is loaded but modules
    barrier, answers = context.Barrier(PROCESSES), context.Queue()
    processes = [context.Process(target=work, args=(barrier, answers)) for _ in range(PROCESSES)]
    for process in processes:
        process.start()
    found = [answers.get(timeout=200) for _ in processes]
    for process in processes:
        process.join()
    print(json.dumps({"answers": found, "codes": [process.exitcode for process in processes]}))
