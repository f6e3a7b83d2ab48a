# Triton's language, not Python's: no annotations.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""One launch that marks the slots whose row of an output holds a NaN or an infinity."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .. import gates
from .jit import Build, bind

#: Elements that one program looks at together.
BLOCK = 2048


@triton.jit
def mark(
    flags, out, state_indices, slots, null_slot, columns, out_row, index_stride, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """Set ``flags[slot]`` (int32) where a bf16 row ``[columns]`` of a live slot is not finite. Grid ``[B]``.

    With PDL it is launched while the step ahead still runs, and lets the kernel behind it start only after that step
    has ended: what that kernel reads early is as safe as if this one were not there.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(state_indices + row * index_stride).to(tl.int64)
    if (slot <= null_slot) | (slot >= slots):
        return
    found = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, columns, BLOCK):
        column = first + tl.arange(0, BLOCK)
        value = tl.load(out + row * out_row + column, mask=column < columns, other=0.0)
        found |= (value.to(tl.int16, bitcast=True) & 0x7F80) == 0x7F80  # all bits of the exponent
    if tl.max(found, axis=0) != 0:
        tl.store(flags + slot, 1)


def marking(arch: str, index_dtype: torch.dtype) -> Build:
    """What to compile of :func:`mark` for an architecture."""
    pdl = arch.startswith("sm_") and int(arch.removeprefix("sm_")) >= 90
    options: dict[str, int | bool] = {"num_warps": 8, **({"launch_pdl": True} if pdl else {})}
    return Build(
        kernel=mark,
        pointers=(("flags", torch.int32), ("out", torch.bfloat16), ("state_indices", index_dtype)),
        constants=(("BLOCK", BLOCK), ("PDL", pdl)),
        aligned=(),
        options=tuple(options.items()),
    )


@functools.lru_cache(maxsize=4096)
def marker(
    device: torch.device,
    batch: int,
    index_dtype: torch.dtype,
    slots: int,
    null_slot: int,
    columns: int,
    out_row: int,
    index_stride: int,
) -> Callable[[Mapping[str, Any]], None]:
    """A launch of :func:`mark` on the current stream; takes "flags", "out" (bf16) and "state_indices" by name."""
    arch = gates.architecture(device)
    numbers = {
        "slots": slots, "null_slot": null_slot, "columns": columns, "out_row": out_row, "index_stride": index_stride,
    }  # fmt: skip
    return bind(marking(arch, index_dtype), arch, device, batch, numbers)
