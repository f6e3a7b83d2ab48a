"""SD and DS: told apart, converted, cut for tensor parallelism, put in pages."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fused_kda.layouts import (
    ByteRange,
    ConvLayout,
    LayoutKind,
    PageLayout,
    Shard,
    conv_view,
    convert_conv_state,
    detect_conv_layout,
    merge_ranges,
)

BF16 = torch.bfloat16
KINDS = st.sampled_from(("SD", "DS"))


def storage(kind: LayoutKind, slots: int, channels: int, taps: int) -> torch.Tensor:
    """Pool storage in its own order whose every element is its position code."""
    inner = (taps, channels) if kind == "SD" else (channels, taps)
    return torch.arange(slots * channels * taps, dtype=torch.int32).view(slots, *inner)


@given(KINDS, st.integers(1, 4), st.integers(1, 6), st.integers(1, 3), st.integers(0, 3), st.integers(0, 5))
def test_views_say_what_lies_behind_them(
    kind: LayoutKind, slots: int, heads: int, window: int, spare: int, guard: int
) -> None:
    channels, taps = 3 * heads, window + spare
    layout = ConvLayout(kind, channels, taps)
    wide = torch.zeros(slots, layout.elements + guard)
    inner = (taps, channels) if kind == "SD" else (channels, taps)
    view = conv_view(wide[:, : layout.elements].view(slots, *inner), layout, window)
    assert view.shape == (slots, channels, window)
    assert view.data_ptr() == wide.data_ptr()
    found = detect_conv_layout(view.shape, view.stride())
    assert found is not None
    # A pool of one tap without spare ones is the same memory in either layout: SD is the answer.
    same_memory = window == 1 and taps == 1
    assert found.kind == ("SD" if same_memory else kind)
    assert (found.channel_stride, found.tap_stride if window > 1 else 0) == (
        view.stride(1),
        view.stride(2) if window > 1 else 0,
    )
    assert found.span(window) == 1 + sum((n - 1) * s for n, s in zip(view.shape[1:], view.stride()[1:], strict=True))


@pytest.mark.parametrize(
    ("shape", "strides", "expected"),
    [
        ((9, 48, 3), (144, 1, 48), ConvLayout("SD", 48, 3)),
        ((9, 48, 3), (10**10, 1, 48), ConvLayout("SD", 48, 3)),
        ((9, 48, 3), (144, 3, 1), ConvLayout("DS", 48, 3)),
        ((9, 48, 3), (240, 5, 1), ConvLayout("DS", 48, 5)),
        ((1, 48, 3), (7, 3, 1), ConvLayout("DS", 48, 3)),
        ((1, 48, 3), (0, 1, 48), ConvLayout("SD", 48, 3)),
        ((9, 48, 1), (48, 1, 1), ConvLayout("SD", 48, 1)),
        ((9, 48, 1), (48, 1, 999), ConvLayout("SD", 48, 1)),
        ((9, 48, 1), (192, 4, 999), ConvLayout("DS", 48, 4)),
        ((9, 3, 3), (9, 3, 1), ConvLayout("DS", 3, 3)),
        ((9, 3, 3), (9, 1, 3), ConvLayout("SD", 3, 3)),
        ((9, 48, 3), (144, 1, 47), None),
        ((9, 48, 3), (144, 1, 1), None),
        ((9, 48, 3), (144, 2, 1), None),
        ((9, 48, 3), (300, 2, 96), None),
        ((9, 48, 3), (300, 3, 2), None),
        ((9, 48, 3), (300, 0, 1), None),
        ((9, 48, 1), (300, 0, 1), None),
    ],
)
def test_strides_alone_tell_the_layout(
    shape: tuple[int, ...], strides: tuple[int, ...], expected: ConvLayout | None
) -> None:
    assert detect_conv_layout(shape, strides) == expected


@given(KINDS, KINDS, st.integers(1, 3), st.integers(1, 4), st.integers(1, 3), st.integers(0, 2), st.integers(0, 2))
def test_conversion_keeps_values_and_leaves_the_source(
    source: LayoutKind, target: LayoutKind, slots: int, heads: int, window: int, spare: int, new_spare: int
) -> None:
    layout = ConvLayout(source, 3 * heads, window + spare)
    raw = storage(source, slots, layout.channels, layout.taps)
    before = raw.clone()
    view = conv_view(raw, layout, window)
    converted = convert_conv_state(view, target, spare_taps=new_spare)
    assert torch.equal(converted, view)
    assert torch.equal(raw, before)
    found = detect_conv_layout(converted.shape, converted.stride())
    assert found is not None
    if window > 1:
        assert found == ConvLayout(target, layout.channels, window + new_spare if target == "DS" else window)
    assert torch.equal(convert_conv_state(converted, source), view)


def test_conversion_zeroes_spare_taps() -> None:
    view = conv_view(storage("SD", 2, 6, 3) + 1, ConvLayout("SD", 6, 3), 3)
    converted = convert_conv_state(view, "DS", spare_taps=2)
    whole = converted.as_strided((2, 6, 5), (30, 5, 1))
    assert torch.count_nonzero(whole[..., 3:]) == 0


def test_bad_requests_are_named() -> None:
    view = conv_view(storage("SD", 2, 6, 3), ConvLayout("SD", 6, 3), 3)
    with pytest.raises(ValueError, match=r"^kind: expected one of \('SD', 'DS'\), got 'NHWC'$"):
        convert_conv_state(view, "NHWC")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^spare_taps: expected >= 0, got -1$"):
        convert_conv_state(view, "DS", spare_taps=-1)
    with pytest.raises(ValueError, match=r"^storage: expected \[slots, 3, 6\] for SD, got \[2, 6, 3\]$"):
        conv_view(storage("DS", 2, 6, 3), ConvLayout("SD", 6, 3), 3)
    with pytest.raises(ValueError, match=r"^window: expected at most the pool's 3 taps, got 4$"):
        conv_view(storage("DS", 2, 6, 3), ConvLayout("DS", 6, 3), 4)
    with pytest.raises(ValueError, match=r"^size: expected a divisor of the 12 heads, got 5$"):
        Shard(12, 128, 5, 0)
    with pytest.raises(ValueError, match=r"^size: expected a divisor of the 12 heads, got 0$"):
        Shard(12, 128, 0, 0)
    with pytest.raises(ValueError, match=r"^rank: expected 0 <= rank < 4, got 4$"):
        Shard(12, 128, 4, 4)
    with pytest.raises(ValueError, match=r"^channels: expected 3 \* 2 \* 4, got 6$"):
        Shard(2, 4, 2, 0).conv_views(view)
    with pytest.raises(ValueError, match=r"^state: expected 2 heads, got 3$"):
        Shard(2, 4, 2, 0).state_view(torch.zeros(1, 3, 4, 4))


def all_shards() -> list[Shard]:
    return [
        Shard(heads, 2, size, rank)
        for heads in (1, 2, 3, 4, 6, 12, 96)
        for size in range(1, heads + 1)
        if heads % size == 0
        for rank in range(size)
    ]


@pytest.mark.parametrize("kind", ["SD", "DS"])
@pytest.mark.parametrize("spare", [0, 2])
def test_a_ranks_bytes_are_its_own_pool(kind: LayoutKind, spare: int) -> None:
    """For every split: the views hold q | k | v of the rank's heads, the byte ranges cover exactly those bytes."""
    for shard in all_shards():
        channels, dim = 3 * shard.heads * shard.head_dim, shard.head_dim
        layout = ConvLayout(kind, channels, 3 + spare)
        raw = storage(kind, 2, channels, layout.taps)
        view = conv_view(raw, layout, layout.taps)
        # An independent account of a channel's owner: section, head, position within the head.
        by_head = view.reshape(2, 3, shard.heads, dim, layout.taps)
        mine = by_head[:, :, shard.head_slice]
        parts = shard.conv_views(view)
        assert torch.equal(torch.stack([part.reshape(2, -1, dim, layout.taps) for part in parts], 1), mine)
        assert all(part.untyped_storage().data_ptr() == raw.untyped_storage().data_ptr() for part in parts)

        ranges = shard.conv_ranges(layout, raw.itemsize)
        assert all(a.offset + a.nbytes < b.offset for a, b in itertools.pairwise(ranges))
        first_slot = raw[0].reshape(-1).view(torch.uint8)
        covered = torch.cat([first_slot[r.offset : r.offset + r.nbytes] for r in ranges]).view(torch.int32)
        assert torch.equal(covered.sort().values, mine[0].reshape(-1).sort().values)
        if kind == "DS":
            assert len(ranges) <= 3
        if shard.size == 1:
            assert ranges == (ByteRange(0, layout.elements * raw.itemsize),)


def test_ranks_together_are_the_whole() -> None:
    for heads, size in ((12, 4), (6, 3), (96, 8)):
        shards = [Shard(heads, 2, size, rank) for rank in range(size)]
        state = torch.arange(2 * heads * 4).view(2, heads, 2, 2)
        assert torch.equal(torch.cat([shard.state_view(state) for shard in shards], 1), state)
        flat = state[0].reshape(-1).view(torch.uint8)
        pieces = [shard.state_range(state.itemsize) for shard in shards]
        joined = torch.cat([flat[piece.offset : piece.offset + piece.nbytes] for piece in pieces])
        assert torch.equal(joined, flat)
        layout = ConvLayout("SD", 3 * heads * 2, 3)
        everything = sorted((r for s in shards for r in s.conv_ranges(layout, 2)), key=lambda r: r.offset)
        assert merge_ranges(everything) == (ByteRange(0, layout.elements * 2),)


def test_a_flat_cut_would_be_wrong() -> None:
    """Rank 0 of 2 owns the first half of each of q, k and v, not the first half of all channels."""
    assert Shard(4, 8, 2, 0).channel_slices == (slice(0, 16), slice(32, 48), slice(64, 80))
    assert Shard(4, 8, 2, 1).channel_slices == (slice(16, 32), slice(48, 64), slice(80, 96))
    assert Shard(4, 8, 2, 1).conv_ranges(ConvLayout("DS", 96, 3), 2) == (
        ByteRange(96, 96),
        ByteRange(288, 96),
        ByteRange(480, 96),
    )


@pytest.mark.parametrize(
    ("heads", "page_bytes"), [(12, 814_080), (96, 6_512_640), (32, 2_170_880)], ids=["K3-TP8", "K3", "Kimi-Linear"]
)
def test_page_sizes_of_the_published_models(heads: int, page_bytes: int) -> None:
    page = PageLayout(ConvLayout("DS", 3 * heads * 128, 3), BF16, torch.float32, heads, 128)
    assert page.page_bytes == page_bytes


@pytest.mark.parametrize("kind", ["SD", "DS"])
@pytest.mark.parametrize("state_dtype", [torch.float32, BF16])
@pytest.mark.parametrize("extra", [0, 64])
def test_page_views_share_a_pitch_and_nothing_else(kind: LayoutKind, state_dtype: torch.dtype, extra: int) -> None:
    layout = ConvLayout(kind, 3 * 2 * 8, 4)
    page = PageLayout(layout, BF16, state_dtype, 2, 8)
    page = PageLayout(layout, BF16, state_dtype, 2, 8, page.page_bytes + extra)
    raw = torch.zeros(3, page.page_bytes, dtype=torch.uint8)
    conv, state = page.views(raw, 3)
    assert conv.shape == (3, 48, 3)
    assert state.shape == (3, 2, 8, 8)
    assert conv.stride(0) * conv.itemsize == state.stride(0) * state.itemsize == page.page_bytes
    assert conv.data_ptr() == raw.data_ptr()
    assert state.data_ptr() == raw.data_ptr() + page.conv_bytes
    conv[1].fill_(float("nan"))
    assert torch.count_nonzero(state) == 0
    assert torch.count_nonzero(raw[[0, 2]]) == 0
    conv[1].zero_()
    state[1].fill_(1.0)
    assert torch.count_nonzero(conv) == 0
    assert torch.count_nonzero(raw[1, page.conv_bytes + page.state_bytes :]) == 0
    assert torch.count_nonzero(raw[1, : page.conv_bytes]) == 0
    assert detect_conv_layout(conv.shape, conv.stride()) == ConvLayout(kind, 48, 4 if kind == "DS" else 3)


def test_bad_pages_are_named() -> None:
    layout = ConvLayout("SD", 48, 3)
    with pytest.raises(ValueError, match=r"^page_bytes: expected a multiple of 4 that is >= 800, got 796$"):
        PageLayout(layout, BF16, torch.float32, 2, 8, 796)
    with pytest.raises(ValueError, match=r"^page_bytes: expected a multiple of 4 that is >= 800, got 802$"):
        PageLayout(layout, BF16, torch.float32, 2, 8, 802)
    with pytest.raises(ValueError, match=r"^conv: expected a byte size that divides by 4, got 6$"):
        PageLayout(ConvLayout("SD", 3, 1), BF16, torch.float32, 1, 1)
    page = PageLayout(layout, BF16, torch.float32, 2, 8)
    with pytest.raises(ValueError, match=r"^storage: expected uint8 \[slots, 800\], got torch.uint8 \[2, 801\]$"):
        page.views(torch.zeros(2, 801, dtype=torch.uint8), 3)
    with pytest.raises(ValueError, match=r"^storage: expected uint8 \[slots, 800\], got torch.int8 \[2, 800\]$"):
        page.views(torch.zeros(2, 800, dtype=torch.int8), 3)
