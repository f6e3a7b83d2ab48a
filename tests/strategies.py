"""Whole problems for hypothesis, as :class:`fused_kda.testing.problems.Draw`: everything the contract allows.

A problem has two parts. The *specialisation* is what a kernel is compiled for; on a GPU a test fixes a few dozen of
them, so that compilers do not take the time. The rest (batch, slots, pitches, offsets, null rows, values) is run time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from hypothesis import strategies as st

from fused_kda.testing.extremes import EXTREMES, POISON
from fused_kda.testing.problems import ROW_FORMS, Draw

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
T = TypeVar("T")
#: Takes one of several values: hypothesis' draw, or a seeded generator's choice.
Choice = Callable[[Sequence[Any]], Any]

#: Both sides of what a launch shape, a warp, a grid or an engine's bucket may turn on.
BATCHES = (0, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 131, 132, 133)
BATCHES += (255, 256, 257, 511, 512, 513, 1023, 1024, 1025, 2047, 2048)
HEADS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 13, 16, 24, 31, 32, 33, 48, 64, 95, 96)


@dataclass(frozen=True, slots=True)
class Space:
    """Where problems are drawn from.

    Attributes:
        heads, dims, widths, dtypes: values of H, D, W and the activation dtype.
        elements: most elements of state in the live rows of ordinary problems, B * H * D * D.
        most: the same for one problem in eight.
    """

    heads: tuple[int, ...]
    dims: tuple[int, ...] = (128,)
    widths: tuple[int, ...] = (4,)
    dtypes: tuple[torch.dtype, ...] = (BF16,)
    elements: int = 1 << 21
    most: int = 1 << 25


WIDTHS = (2, 3, 4, 4)
DTYPES = (BF16, BF16, FP16, FP32, FP64)
#: For the scalar oracle, which takes a microsecond for a product.
SCALAR = Space(heads=(1, 2, 3, 4), dims=(1, 2, 3, 5, 8, 12, 16), widths=WIDTHS, dtypes=DTYPES, elements=600, most=600)


def specialisation(choose: Choice, space: Space) -> Draw:
    """The compile-time part of a problem; all else is Draw's default."""
    dtype = choose(space.dtypes)
    states = (FP32, BF16, FP64) if dtype == FP64 else (FP32, BF16)
    parameters = tuple(dict.fromkeys((FP32, BF16, dtype)))
    layout = choose(("SD", "DS"))
    spec = Draw(
        heads=choose(space.heads),
        head_dim=choose(space.dims),
        conv_width=choose(space.widths),
        layout=layout,
        spare_taps=choose((0, 0, 1, 2, 3)) if layout == "DS" else 0,
        dtype=dtype,
        state_dtype=choose(states),
        weight_dtype=choose(parameters),
        weight_form=choose(("planes", "checkpoint", "checkpoint_3d")),
        bias_dtype=choose((None, *parameters)),
        norm_dtype=choose((None, *parameters)),
        index_dtype=choose((torch.int32, torch.int64)),
        lower_bound=choose((None, -5.0)),
        mask=choose((False, True)),
        prefetch=choose((False, True)),
    )
    window = spec.conv_width - 1 + spec.spare_taps
    conv_bytes = 3 * spec.heads * spec.head_dim * window * dtype.itemsize
    shared = conv_bytes % spec.state_dtype.itemsize == 0 and choose((False, False, True))
    # Whether every slot starts at a multiple of 16 bytes; with an odd guard none but the first does.
    aligned = choose((False, True, True))
    unit = 16 if aligned else max(dtype.itemsize, spec.state_dtype.itemsize)
    return replace(spec, page_shared=shared, page_unit=unit, guard=0 if aligned else 1)


def null_rows(choose: Choice, batch: int) -> tuple[int, ...]:
    """Patterns of padding: none, a tail, a head, one in the middle, every other row, all, any third."""
    kind = choose(("none", "none", "none", "tail", "head", "middle", "alternate", "all", "scattered"))
    if kind == "none" or batch == 0:
        return ()
    if kind == "scattered":
        salt = choose(range(1, 1000))
        return tuple(row for row in range(batch) if (row * 7919 + salt) * salt % 31 < 10)
    return {
        "tail": tuple(range(batch - choose(range(1, batch + 1)), batch)),
        "head": tuple(range(choose(range(1, batch + 1)))),
        "middle": (batch // 2,),
        "alternate": tuple(range(0, batch, 2)),
        "all": tuple(range(batch)),
    }[kind]


def complete(choose: Choice, spec: Draw, space: Space, seed: int) -> Draw:
    """Give a specialisation the run-time part of a problem."""
    room = choose((space.elements,) * 7 + (space.most,)) // (spec.heads * spec.head_dim**2)
    most = max(1, min(2048, room))
    edges = [batch for batch in BATCHES if batch <= most]
    batch = choose((*edges, choose(range(most + 1)))) if choose((True, True, False)) else choose(edges[-4:])
    nulls = null_rows(choose, batch)
    null_slot = choose((0, -1))
    aligned = spec.guard % 2 == 0
    live, named = batch - len(nulls), spec.norm_dtype is not None
    extremes = [name for name in EXTREMES if named or not name.startswith("output gates")]
    return replace(
        spec,
        batch=batch,
        slots=max(1, null_slot + 1 + live + choose((0, 0, 1, 2, 5))),
        guard=choose((0, 0, 8, 16, 64)) if aligned else choose((1, 3, 5)),
        pool_offset=0 if spec.page_shared else choose((0, 8) if aligned else (0, 1, 2, 3)),
        index_stride=choose((1, 1, 1, 2, 5, 16)),
        lower_bound=choose((-5.0, -5.0, -0.25, -1e-3, -60.0)) if spec.lower_bound is not None else None,
        null_slot=null_slot,
        null_rows=nulls,
        reserved=choose((False, True)),
        sliced=choose((False, False, True)),
        row_form=choose(ROW_FORMS),
        row_offset=choose((0, 0, 1, 3)),
        row_gap=choose((0, 0, 1, 8)),
        norm_eps=choose((1e-5, 1e-5, 1e-6, 1e-2)),
        scale=choose((None, None, 1.0, -0.5)),
        extremes=tuple(dict.fromkeys(choose(extremes) for _ in range(choose((0, 0, 1, 1, 2, 3))))),
        poison=choose((None, None, None, *(name for name in POISON if named or name != "output_gate"))),
        seed=seed,
    )


@st.composite
def problems(draw: st.DrawFn, space: Space, spec: Draw | None = None) -> Draw:
    """Whole problems of a space; of one specialisation if ``spec`` is given."""

    def choose(values: Sequence[T]) -> T:
        return draw(st.sampled_from(values))

    return complete(choose, spec or specialisation(choose, space), space, draw(st.integers(0, 2**20)))


def snippet(wanted: Draw, backend: str, device: str) -> str:
    """A program that repeats one problem."""
    changed = ", ".join(
        f"{name}={_literal(getattr(wanted, name))}"
        for name in wanted.__dataclass_fields__
        if getattr(wanted, name) != getattr(Draw(), name)
    )
    return "\n".join(
        (
            "import torch",
            "from fused_kda.testing.battery import Subject, default_size",
            "from fused_kda.testing.problems import Draw, draw",
            f"device = torch.device({device!r})",
            f"subject = Subject({backend!r}, device, default_size(device, {backend!r}))",
            f"subject.agree(draw(Draw({changed}), device), extreme=True)",
        )
    )


def _literal(value: Any) -> str:
    return f"float({str(value)!r})" if isinstance(value, float) and not math.isfinite(value) else repr(value)
