"""Checksums see every bit of a head and nothing else."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fused_kda.layouts import LayoutKind
from fused_kda.pool import StatePool
from fused_kda.transfer.checksum import checksums


def filled(layout: LayoutKind = "SD", *, heads: int = 4, spare_taps: int = 0, page_shared: bool = False) -> StatePool:
    pool = StatePool(2, 3, heads, 4, layout=layout, spare_taps=spare_taps, page_shared=page_shared)
    generator = torch.Generator().manual_seed(0)
    for index in range(pool.layers):
        for view in pool.layer(index)[:2]:
            view.copy_(torch.randn(view.shape, generator=generator))
    return pool


@pytest.mark.parametrize("page_shared", [False, True])
@pytest.mark.parametrize(("layout", "spare_taps"), [("SD", 0), ("DS", 0), ("DS", 2)])
def test_layout_pitch_and_spare_taps_play_no_part(layout: LayoutKind, spare_taps: int, page_shared: bool) -> None:
    other = filled(layout, spare_taps=spare_taps, page_shared=page_shared)
    assert torch.equal(checksums(filled(), [1, 2]), checksums(other, [1, 2]))


def test_a_rank_has_the_checksums_of_its_heads() -> None:
    whole, half = filled(), StatePool(2, 3, 2, 4, layout="DS")
    for index in range(2):
        full, own = whole.layer(index), half.layer(index)
        own.state.copy_(full.state[:, 2:])
        own.conv_state.copy_(full.conv_state.unflatten(1, (3, 4, 4))[:, :, 2:].flatten(1, 3))
    assert torch.equal(checksums(half, [2]), checksums(whole, [2])[:, :, 2:])


@given(st.data())
def test_one_flipped_bit_shows_in_its_slot_layer_and_head_alone(data: st.DataObject) -> None:
    pool = filled("DS")
    before = checksums(pool, [1, 2])
    slot, layer, head = (data.draw(st.integers(0, n - 1)) for n in (2, 2, 4))
    row = 4 * head + data.draw(st.integers(0, 3))
    column = data.draw(st.integers(0, 2))
    if data.draw(st.booleans()):
        section = data.draw(st.integers(0, 2))
        view = pool.layer(layer).conv_state.view(torch.int16)
        view[1 + slot, 16 * section + row, column] ^= 1 << data.draw(st.integers(0, 14))
    else:
        view = pool.layer(layer).state.view(torch.int32)
        view[1 + slot, head, row % 4, column] ^= 1 << data.draw(st.integers(0, 30))
    changed = (checksums(pool, [1, 2]) != before).nonzero().tolist()
    assert changed == [[slot, layer, head]]


def test_swapped_values_show() -> None:
    pool = filled()
    before = checksums(pool, [1])
    state = pool.layer(0).state
    state[1, 0, 0, [0, 1]] = state[1, 0, 0, [1, 0]]
    assert not torch.equal(checksums(pool, [1]), before)
