"""What the sanitizer lane launches: a covering set of calls for each GPU backend, and one deliberate fault a tool.

Every two values of any two axes (layout, dtypes, gates, masks, alignments, launch shape ...) meet in some launch;
``tests/kernels/test_sanitize.py`` holds that every part of a specialisation takes each of its values. Pure: no GPU.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fused_kda.testing.problems import Draw

FP32, BF16 = torch.float32, torch.bfloat16

#: The tools of compute-sanitizer, each with a statement that makes ``fused_decode.cu`` commit what the tool looks for.
#: It runs after the convolution, in every thread of a live (row, head).
FAULTS: dict[str, tuple[str, str]] = {
    # The element behind the last slot's guard, which is the first byte behind the allocation.
    "memcheck": ("oob", "if (thread == 0) p.state[p.slots * p.state_pitch] = STATE{}"),
    # Read and written by threads of different warps, with no barrier between.
    "racecheck": ("race", "shared_k[(thread + 32) % DIM] += 1.0f"),
    "synccheck": ("sync", "if (thread % 2) __syncthreads()"),
    # out is write-only and its memory is fresh.
    "initcheck": (
        "uninit",
        "if (p.out[row * p.out_row + head * DIM + thread % DIM].bits == 0x7ff1) shared_k[thread % DIM] = 0.0f",
    ),
}

_COMMON: dict[str, tuple[Any, ...]] = {
    # layout, spare taps, page shared
    "pool": (("SD", 0, False), ("SD", 0, True), ("DS", 0, False), ("DS", 1, False), ("DS", 2, True)),
    "guard": (16, 4, 1),  # both pools aligned to 16 bytes; of fp32 state, the state alone; neither
    "state_dtype": (FP32, BF16),
    "weight_form": ("planes", "checkpoint", "checkpoint_3d"),
    "weight_dtype": (FP32, BF16),
    "bias_dtype": (None, FP32, BF16),
    "norm_dtype": (None, FP32, BF16),
    "index": ((torch.int32, 1), (torch.int64, 1), (torch.int32, 5)),  # dtype, stride
    "lower_bound": (None, -5.0),
    "mask": (False, True),
    "sliced": (False, True),
    "null_slot": (0, -1),
}
#: Names of the launch shapes of ``kernels/cuda/shape.py``.
CUDA_SHAPES = ("REGISTERS", "EIGHTHS", "QUARTERS", "HALVES", "WHOLE")
#: Of the Triton kernel: head dim, place in ``kernels/triton/shape.py``'s list for it, and when pools may be read.
_TRITON_LAUNCHES = tuple(itertools.product(((64, 0), (128, 0), (128, 1), (128, 2), (256, 0)), ("wait", "prefetch")))
_AXES: dict[str, dict[str, tuple[Any, ...]]] = {
    "cuda": {**_COMMON, "launch": tuple(itertools.product(CUDA_SHAPES, ("wait", "hint", "prefetch")))},
    "triton": {**_COMMON, "launch": _TRITON_LAUNCHES, "conv_width": (2, 3, 4)},
    "chain": {**_COMMON, "head_dim": (64, 128, 256), "conv_width": (2, 3, 4)},
}
BACKENDS = tuple(_AXES)


@dataclass(frozen=True, slots=True)
class Case:
    """One launch: what is drawn, the launch shape (None: the backend's only one), and when pools may be read."""

    backend: str
    draw: Draw
    shape: str | int | None = None
    hint: bool = False
    prefetch: bool = False


#: The call that the faults are built into; without a fault it is one of the clean ones.
FAULTY = Case("cuda", Draw(batch=2, heads=2), "REGISTERS")


@functools.cache
def cases(backend: str) -> tuple[Case, ...]:
    """The covering set of one backend."""
    rows = covering(_AXES[backend], functools.partial(_reachable, backend))
    return tuple(_case(backend, number, row) for number, row in enumerate(rows)) + (
        (FAULTY,) if backend == FAULTY.backend else ()
    )


def covering(axes: Mapping[str, tuple[Any, ...]], valid: Callable[[dict[str, Any]], bool]) -> list[dict[str, Any]]:
    """Few rows in which every pair of values of two axes occurs that any valid row can have. Always the same rows."""
    source = random.Random(0)
    names = list(axes)

    def pairs(row: Mapping[str, Any]) -> set[tuple[str, int, str, int]]:
        place = {name: axes[name].index(row[name]) for name in names}
        return {(a, place[a], b, place[b]) for a, b in itertools.combinations(names, 2)}

    missing = {
        (a, i, b, j)
        for a, b in itertools.combinations(names, 2)
        for i, j in itertools.product(range(len(axes[a])), range(len(axes[b])))
    }
    rows: list[dict[str, Any]] = []
    while missing:
        a, i, b, j = min(missing)
        wanted = {a: axes[a][i], b: axes[b][j]}
        drawn = ({**{name: source.choice(axes[name]) for name in names}, **wanted} for _ in range(60))
        candidates = [row for row in drawn if valid(row)]
        if not candidates:
            missing.remove((a, i, b, j))
            continue
        best = max(candidates, key=lambda row: len(missing & pairs(row)))
        missing -= pairs(best)
        rows.append(best)
    return rows


def _reachable(backend: str, row: dict[str, Any]) -> bool:
    """Pools whose state is not aligned to 16 bytes take one launch shape alone."""
    aligned = row["pool"][2] or row["guard"] == 16 or (row["guard"] == 4 and row["state_dtype"] == FP32)
    if backend == "cuda":
        return aligned or row["launch"][0] == "REGISTERS"
    return aligned or backend == "chain" or row["launch"][0][1] == 0


def _case(backend: str, number: int, row: Mapping[str, Any]) -> Case:
    rest = dict(row)
    layout, spare_taps, page_shared = rest.pop("pool")
    index_dtype, index_stride = rest.pop("index")
    shape, timing = rest.pop("launch", (None, "wait"))
    if backend == "triton":
        rest["head_dim"], shape = shape
    drawn = Draw(
        batch=4,
        heads=2 + number % 2,
        layout=layout,
        spare_taps=spare_taps,
        page_shared=page_shared,
        index_dtype=index_dtype,
        index_stride=index_stride,
        null_rows=(number % 4,),
        seed=number,
        **rest,
    )
    return Case(backend, drawn, shape, timing == "hint", timing == "prefetch")
