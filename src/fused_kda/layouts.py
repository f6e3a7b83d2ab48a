"""Conv-state layouts SD and DS: told apart by strides, converted, cut by tensor-parallel rank, paged with the state.

The op always sees the conv pool as a view ``[slots, 3P, W-1]`` (P = heads * head_dim; channels in the order q | k | v).
What lies behind the view is one of

* **SD** ``[slots, taps, channels]``: strides ``(pitch, 1, 3P)``; one tap of all channels is contiguous;
* **DS** ``[slots, channels, taps]``: strides ``(pitch, taps, 1)``; one channel's history is contiguous, so the channels
  of one tensor-parallel rank are one contiguous range each for q, k and v. ``taps`` may exceed ``W - 1``: engines keep
  spare history rows for speculation.

All strides and pitches here are in elements, all ranges in bytes. Nothing in this module reads tensor data, except
:func:`convert_conv_state`, which copies it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch.utils.dlpack import from_dlpack

LayoutKind = Literal["SD", "DS"]
LAYOUTS: tuple[LayoutKind, ...] = ("SD", "DS")
SECTIONS = ("q", "k", "v")


@dataclass(frozen=True, slots=True)
class ConvLayout:
    """How one slot of a conv pool lies in memory.

    Attributes:
        kind: "SD" or "DS".
        channels: 3P, all channels of q, k and v on this rank.
        taps: history rows that the pool keeps per channel (>= W - 1). For SD it does not show in the strides, so a
            detected layout says W - 1.
    """

    kind: LayoutKind
    channels: int
    taps: int

    @property
    def channel_stride(self) -> int:
        """Elements between neighbouring channels of one tap."""
        return 1 if self.kind == "SD" else self.taps

    @property
    def tap_stride(self) -> int:
        """Elements between neighbouring taps of one channel."""
        return self.channels if self.kind == "SD" else 1

    @property
    def elements(self) -> int:
        """Elements of one dense slot, spare taps included."""
        return self.channels * self.taps

    @property
    def storage_shape(self) -> tuple[int, int]:
        """Shape of one dense slot in the order in which it is stored."""
        return (self.taps, self.channels) if self.kind == "SD" else (self.channels, self.taps)

    def span(self, window: int) -> int:
        """Elements from a slot's first to its last touched element, inclusive, when ``window`` taps are in use."""
        return (self.channels - 1) * self.channel_stride + (window - 1) * self.tap_stride + 1


def detect_conv_layout(shape: Sequence[int], strides: Sequence[int]) -> ConvLayout | None:
    """Tell the layout of a ``[slots, 3P, W-1]`` view from its strides.

    Args:
        shape: ``(slots, 3P, W-1)``.
        strides: the view's strides in elements. The slot stride is not looked at (its size may be 1).

    Returns:
        The layout, or None where the strides are neither SD nor DS. With one tap (W = 2) the tap stride means nothing:
        channel stride 1 is then SD, which is the same memory as DS without spare taps.
    """
    _, channels, window = shape
    _, channel_stride, tap_stride = strides
    if channel_stride == 1 and (window == 1 or tap_stride == channels):
        return ConvLayout("SD", channels, window)
    if (window == 1 or tap_stride == 1) and channel_stride >= window:
        return ConvLayout("DS", channels, channel_stride)
    return None


def conv_view(storage: torch.Tensor, layout: ConvLayout, window: int) -> torch.Tensor:
    """View pool storage in its own order as the op's ``[slots, 3P, window]``.

    Args:
        storage: ``[slots, taps, channels]`` (SD) or ``[slots, channels, taps]`` (DS), each slot dense, any slot pitch.
        layout: the storage's layout.
        window: W - 1, the taps that the op uses.

    Returns:
        A view; no copy.
    """
    inner = layout.storage_shape
    if tuple(storage.shape[1:]) != inner:
        raise ValueError(
            f"storage: expected [slots, {inner[0]}, {inner[1]}] for {layout.kind}, got {list(storage.shape)}"
        )
    if window > layout.taps:
        raise ValueError(f"window: expected at most the pool's {layout.taps} taps, got {window}")
    view = storage.transpose(1, 2) if layout.kind == "SD" else storage
    return view[:, :, :window]


def convert_conv_state(conv_state: torch.Tensor, kind: LayoutKind, *, spare_taps: int = 0) -> torch.Tensor:
    """Copy a conv pool into the other (or the same) layout.

    Args:
        conv_state: ``[slots, 3P, W-1]`` view of SD or DS storage.
        kind: the layout wanted.
        spare_taps: history rows beyond W - 1 to leave room for in DS storage; they are zero.

    Returns:
        A new ``[slots, 3P, W-1]`` view with equal values over densely pitched storage of the wanted layout.
    """
    if kind not in LAYOUTS:
        raise ValueError(f"kind: expected one of {LAYOUTS}, got {kind!r}")
    if spare_taps < 0:
        raise ValueError(f"spare_taps: expected >= 0, got {spare_taps}")
    slots, channels, window = conv_state.shape
    layout = ConvLayout(kind, channels, window + spare_taps)
    view = conv_view(conv_state.new_zeros((slots, *layout.storage_shape)), layout, window)
    view.copy_(conv_state)
    return view


@dataclass(frozen=True, slots=True)
class ByteRange:
    """``nbytes`` bytes starting ``offset`` bytes into a slot (or page)."""

    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Shard:
    """The share of one tensor-parallel rank, ``rank`` of ``size``, in ``heads`` heads of ``head_dim``."""

    heads: int
    head_dim: int
    size: int
    rank: int

    def __post_init__(self) -> None:
        if self.size < 1 or self.heads % self.size:
            raise ValueError(f"size: expected a divisor of the {self.heads} heads, got {self.size}")
        if not 0 <= self.rank < self.size:
            raise ValueError(f"rank: expected 0 <= rank < {self.size}, got {self.rank}")

    @property
    def local_heads(self) -> int:
        return self.heads // self.size

    @property
    def head_slice(self) -> slice:
        """The rank's heads among all heads."""
        return slice(self.rank * self.local_heads, (self.rank + 1) * self.local_heads)

    @property
    def channel_slices(self) -> tuple[slice, slice, slice]:
        """The rank's channels among all 3P: one range in each of q, k, v. A flat cut of 3P would be wrong."""
        full, local = self.heads * self.head_dim, self.local_heads * self.head_dim
        first = self.rank * local
        starts = (first, full + first, 2 * full + first)
        return tuple(slice(s, s + local) for s in starts)  # type: ignore[return-value]

    def conv_views(self, conv_state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Views ``[slots, P_local, W-1]`` of the rank's q, k and v channels in a full conv pool. No copy."""
        self._check_channels(conv_state.shape[1])
        return tuple(conv_state[:, s] for s in self.channel_slices)  # type: ignore[return-value]

    def state_view(self, state: torch.Tensor) -> torch.Tensor:
        """View ``[slots, H_local, D, D]`` of the rank's heads in a full recurrent pool. No copy."""
        if state.shape[1] != self.heads:
            raise ValueError(f"state: expected {self.heads} heads, got {state.shape[1]}")
        return state[:, self.head_slice]

    def conv_ranges(self, layout: ConvLayout, itemsize: int) -> tuple[ByteRange, ...]:
        """The rank's bytes within one slot of the full conv pool, ascending.

        DS: three ranges (q, k, v). SD: ``taps`` times as many, since every tap row holds all channels.
        Ranges that touch (one rank owns everything) are merged.
        """
        self._check_channels(layout.channels)
        pieces: list[ByteRange] = []
        if layout.kind == "DS":
            for s in self.channel_slices:
                pieces.append(ByteRange(s.start * layout.taps * itemsize, (s.stop - s.start) * layout.taps * itemsize))
        else:
            for tap in range(layout.taps):
                row = tap * layout.channels
                for s in self.channel_slices:
                    pieces.append(ByteRange((row + s.start) * itemsize, (s.stop - s.start) * itemsize))
        return merge_ranges(pieces)

    def state_range(self, itemsize: int) -> ByteRange:
        """The rank's bytes within one dense slot ``[H, D, D]`` of the full recurrent pool."""
        per_head = self.head_dim * self.head_dim * itemsize
        return ByteRange(self.rank * self.local_heads * per_head, self.local_heads * per_head)

    def _check_channels(self, channels: int) -> None:
        if channels != 3 * self.heads * self.head_dim:
            raise ValueError(f"channels: expected 3 * {self.heads} * {self.head_dim}, got {channels}")


def merge_ranges(ranges: Sequence[ByteRange]) -> tuple[ByteRange, ...]:
    """Join ranges that touch; ``ranges`` must ascend and not overlap."""
    merged: list[ByteRange] = []
    for piece in ranges:
        if merged and merged[-1].offset + merged[-1].nbytes == piece.offset:
            merged[-1] = ByteRange(merged[-1].offset, merged[-1].nbytes + piece.nbytes)
        else:
            merged.append(piece)
    return tuple(merged)


@dataclass(frozen=True, slots=True)
class PageLayout:
    """Conv and recurrent state of a slot in one page: bytes ``[0, conv)``, then ``[conv, conv + state)``, then padding.

    Attributes:
        conv: the conv layout.
        conv_dtype / state_dtype: element types of the two parts.
        heads, head_dim: shape of the recurrent part, ``[heads, head_dim, head_dim]``.
        page_bytes: distance between pages; 0 means as small as the state's alignment allows.
    """

    conv: ConvLayout
    conv_dtype: torch.dtype
    state_dtype: torch.dtype
    heads: int
    head_dim: int
    page_bytes: int = 0

    def __post_init__(self) -> None:
        if self.conv_bytes % self.state_dtype.itemsize:
            raise ValueError(
                f"conv: expected a byte size that divides by {self.state_dtype.itemsize}, got {self.conv_bytes}"
            )
        step = max(self.conv_dtype.itemsize, self.state_dtype.itemsize)
        least = -(-(self.conv_bytes + self.state_bytes) // step) * step
        if self.page_bytes == 0:
            object.__setattr__(self, "page_bytes", least)
        elif self.page_bytes < least or self.page_bytes % step:
            raise ValueError(f"page_bytes: expected a multiple of {step} that is >= {least}, got {self.page_bytes}")

    @property
    def conv_bytes(self) -> int:
        return self.conv.elements * self.conv_dtype.itemsize

    @property
    def state_bytes(self) -> int:
        return self.heads * self.head_dim * self.head_dim * self.state_dtype.itemsize

    def views(self, storage: torch.Tensor, window: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Cut page storage into the op's two pools.

        Args:
            storage: uint8 ``[slots, page_bytes]``, contiguous, its base aligned to the larger element size.
            window: W - 1.

        Returns:
            ``(conv_state [slots, 3P, window], state [slots, H, D, D])``, both over the pages, pitch ``page_bytes``.
            They share no bytes, so each gets a storage object of its own: ``torch.compile`` refuses a graph that
            mutates two views of one storage in different dtypes. The memory lives as long as any of them.
        """
        if storage.dtype != torch.uint8 or storage.ndim != 2 or storage.shape[1] != self.page_bytes:
            raise ValueError(
                f"storage: expected uint8 [slots, {self.page_bytes}], got {storage.dtype} {list(storage.shape)}"
            )
        slots = storage.shape[0]
        conv = from_dlpack(storage).view(self.conv_dtype)[:, : self.conv.elements].view(slots, *self.conv.storage_shape)
        first = self.conv_bytes // self.state_dtype.itemsize
        count = self.heads * self.head_dim * self.head_dim
        state = from_dlpack(storage).view(self.state_dtype)[:, first : first + count]
        return conv_view(conv, self.conv, window), state.view(slots, self.heads, self.head_dim, self.head_dim)
