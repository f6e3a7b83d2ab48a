# Triton's language, not Python's: no annotations.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""One launch that marks the slots whose row of an output holds a NaN or an infinity."""

import triton
import triton.language as tl


@triton.jit
def mark(
    flags, out, state_indices, slots, null_slot, out_row, index_stride,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Set ``flags[slot]`` (int32) where a bf16 row ``[COLUMNS]`` of a live slot is not finite. Grid ``[B]``."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(state_indices + row * index_stride).to(tl.int64)
    if (slot <= null_slot) | (slot >= slots):
        return
    found = tl.zeros((BLOCK,), tl.int32)
    for first in tl.static_range(0, COLUMNS, BLOCK):
        column = first + tl.arange(0, BLOCK)
        value = tl.load(out + row * out_row + column, mask=column < COLUMNS, other=0.0)
        found |= (value.to(tl.int16, bitcast=True) & 0x7F80) == 0x7F80  # all bits of the exponent
    if tl.max(found, axis=0) != 0:
        tl.store(flags + slot, 1)
