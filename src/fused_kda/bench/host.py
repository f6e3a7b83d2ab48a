"""Host time of one eager step on a GPU: from the Python call until it returns, the launch queued."""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Callable

import torch

from ..api import fused_kda_decode
from ..contract import Tensors, decode_problem
from .cells import Cell, make_layers

_CALLS, _ROUNDS = 200, 21


def host_times(backend: str, cell: Cell, device: torch.device) -> dict[str, float]:
    """Median microseconds per call: "bare launch", "call" (``out`` given), "call that allocates out".

    The queue is drained before it fills, so no call waits for the GPU.
    """
    arguments = make_layers(cell, device, 1)[0].arguments
    tensors = Tensors(*(arguments[name] for name in Tensors._fields))
    problem = decode_problem(**arguments)
    launch = importlib.import_module(f"fused_kda.kernels.{backend}").prepare(problem)
    without = {**arguments, "out": None}
    return {
        "bare launch": microseconds_per_call(lambda: launch(tensors), device),
        "call": microseconds_per_call(lambda: fused_kda_decode(**arguments, backend=backend), device),
        "call that allocates out": microseconds_per_call(lambda: fused_kda_decode(**without, backend=backend), device),
    }


def microseconds_per_call(call: Callable[[], object], device: torch.device) -> float:
    """Median over rounds of calls, after one that compiles."""
    call()
    times = []
    for _ in range(_ROUNDS):
        torch.cuda.synchronize(device)
        start = time.perf_counter()
        for _ in range(_CALLS):
            call()
        times.append((time.perf_counter() - start) / _CALLS * 1e6)
    return statistics.median(times)
