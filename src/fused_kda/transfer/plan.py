"""Which bytes to copy so that a slot of one rank's pool arrives in another's, for any pair of layouts. Pure arithmetic.

The plan is built from small pieces, between SD and DS single elements of the conv window, and joined: whatever the two
layouts are, what remains is the fewest ranges that do the job.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..layouts import SECTIONS, Shard
from .layout import PoolLayout

#: ``[n, 3]``: source offset, target offset, bytes; ascending by target.
Ranges = NDArray[np.int64]


def plan(source: PoolLayout, target: PoolLayout, slots: Sequence[tuple[int, int]]) -> Ranges:
    """Byte ranges that carry slots from ``source`` to ``target``, in every layer.

    Only the heads that both ranks have are carried; :func:`source_ranks` says which source ranks fill a target. Spare
    taps are carried if both pools keep the same number.

    Args:
        source: the pool that is read.
        target: the pool that is written. Tensor-parallel size and rank, SD or DS, spare taps, pitches and offsets may
            differ from the source's.
        slots: ``(source slot, target slot)`` pairs; no target slot twice, a source slot as often as you like.

    Returns:
        int64 ``[n, 3]``: source offset, target offset, bytes; offsets count from each layout's origin. No two ranges
        could be joined.

    Raises:
        LayoutMismatch: the pools do not belong to the same model, or differ in a dtype.
        ValueError: a slot that is no sequence's, or a target slot named twice.
    """
    target.require_peer(source)
    pairs = np.array(slots, dtype=np.int64).reshape(-1, 2)
    for name, layout, named in (("source", source, pairs[:, 0]), ("target", target, pairs[:, 1])):
        strange = named[(named <= layout.null_slot) | (named >= layout.slots)]
        if strange.size:
            raise ValueError(
                f"slots: expected {name} slots > {layout.null_slot} and < {layout.slots}, got {strange[0]}"
            )
    if np.unique(pairs[:, 1]).size != len(pairs):
        raise ValueError(f"slots: expected different target slots, got {pairs[:, 1].tolist()}")

    parts = []
    for pieces, src, dst in (
        (window_ranges(source, target), source.conv, target.conv),
        (state_ranges(source, target), source.state, target.state),
    ):
        # [layers, slots, ranges of one slot and layer]
        shape = (source.layers, len(pairs), len(pieces))
        table = np.empty((*shape, 3), dtype=np.int64)
        for column, layers in ((0, src), (1, dst)):
            offsets = np.array([place.offset for place in layers], dtype=np.int64)
            pitches = np.array([place.pitch for place in layers], dtype=np.int64)
            slot_offsets = offsets[:, None] + pitches[:, None] * pairs[None, :, column]
            table[..., column] = slot_offsets[..., None] + pieces[:, column]
        table[..., 2] = pieces[:, 2]
        parts.append(table.reshape(-1, 3))
    return join(np.concatenate(parts))


def window_ranges(source: PoolLayout, target: PoolLayout) -> Ranges:
    """Ranges of one slot's conv window in one layer; offsets count from the slot's window in each pool."""
    heads, dim = _common_heads(source.shard, target.shard), source.shard.head_dim
    taps = source.taps if source.taps == target.taps else source.conv_width - 1
    # What lies side by side in both pools moves as one piece of ``run`` channels and ``rows`` taps.
    run, rows, kinds = 1, 1, {source.kind, target.kind}
    if kinds == {"SD"} or (kinds == {"DS"} and source.taps == target.taps):
        run = max(len(heads) * dim, 1)
    if kinds == {"DS"}:
        rows = taps
    section, channel, tap = np.meshgrid(
        np.arange(len(SECTIONS)),
        np.arange(heads.start * dim, heads.stop * dim, run),
        np.arange(0, taps, rows),
        indexing="ij",
    )
    pieces = np.empty((section.size, 3), dtype=np.int64)
    for column, layout in enumerate((source, target)):
        conv, local = layout.conv_layout, layout.shard.local_heads * dim
        own = section * local + channel - layout.shard.rank * local
        elements = own * conv.channel_stride + tap * conv.tap_stride
        pieces[:, column] = elements.ravel() * layout.conv_itemsize
    pieces[:, 2] = run * rows * source.conv_itemsize
    return join(pieces)


def state_ranges(source: PoolLayout, target: PoolLayout) -> Ranges:
    """The range of one slot's state in one layer (none without a common head); offsets count from the slot's state."""
    heads = _common_heads(source.shard, target.shard)
    per_head = source.shard.head_dim**2 * source.state_itemsize
    firsts = [heads.start - layout.shard.head_slice.start for layout in (source, target)]
    rows = [[firsts[0] * per_head, firsts[1] * per_head, len(heads) * per_head]] if heads else []
    return np.array(rows, dtype=np.int64).reshape(-1, 3)


def source_ranks(size: int, target: Shard) -> range:
    """Ranks, of ``size`` that share the model's heads, that have some of the target's heads."""
    local = Shard(target.heads, target.head_dim, size, 0).local_heads
    return range(target.head_slice.start // local, (target.head_slice.stop - 1) // local + 1)


def join(pieces: Ranges) -> Ranges:
    """Sort pieces by target and join neighbours that touch on both sides. Pieces must not overlap in the target."""
    if not len(pieces):
        return pieces
    pieces = pieces[np.argsort(pieces[:, 1], kind="stable")]
    touch = pieces[1:, :2] == pieces[:-1, :2] + pieces[:-1, 2:]
    starts = np.concatenate(([0], np.flatnonzero(~touch.all(1)) + 1))
    joined: Ranges = pieces[starts]
    joined[:, 2] = np.add.reduceat(pieces[:, 2], starts)
    return joined


def chunks(ranges: Ranges, limit: int) -> list[Ranges]:
    """Cut a plan, in order, into pieces of at most ``limit`` bytes each; a range may be cut too. No copy of data."""
    ends = np.cumsum(ranges[:, 2])
    pieces = []
    for first in range(0, int(ends[-1]) if len(ends) else 0, limit):
        last = min(first + limit, int(ends[-1]))
        begin, end = np.searchsorted(ends, first, side="right"), np.searchsorted(ends, last, side="left") + 1
        piece = ranges[begin:end].copy()
        skipped = first - (ends[begin] - ranges[begin, 2])
        piece[0] += (skipped, skipped, -skipped)
        piece[-1, 2] -= ends[end - 1] - last
        pieces.append(piece)
    return pieces


def explain_plan(source: PoolLayout, target: PoolLayout) -> str:
    """The ranges of one slot as a small table: per layer by part, and over all layers after joining.

    Raises:
        LayoutMismatch: as :func:`plan`.
    """
    target.require_peer(source)
    heads = _common_heads(source.shard, target.shard)
    lines = [f"{source}  ->  {target}"]
    if not heads:
        return "\n".join([*lines, "no head in common: nothing to carry"])
    lines.append(f"heads {heads.start} to {heads.stop - 1} of {source.shard.heads}")
    lines.append(f"{'one slot and layer':<20}{'ranges':>10}{'bytes':>14}{'smallest range':>16}")
    counts = []
    for name, pieces in (("conv window", window_ranges(source, target)), ("state", state_ranges(source, target))):
        sizes = pieces[:, 2]
        counts.append(len(pieces))
        lines.append(f"{name:<20}{len(pieces):>10,}{sizes.sum():>14,}{sizes.min():>16,}")
    whole = plan(source, target, [(source.null_slot + 1, target.null_slot + 1)])
    lines.append(
        f"{counts[0]:,} + {counts[1]:,} ranges per slot and layer; one slot in {source.layers} layers: "
        f"{len(whole):,} ranges, {whole[:, 2].sum() / 2**20:,.2f} MiB"
    )
    return "\n".join(lines)


def _common_heads(source: Shard, target: Shard) -> range:
    """Heads, by their number in the model, that both ranks have."""
    ours, theirs = source.head_slice, target.head_slice
    first = max(ours.start, theirs.start)
    return range(first, max(first, min(ours.stop, theirs.stop)))
