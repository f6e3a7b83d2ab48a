"""Plans move every byte to where its (section, head, channel, tap) belongs; handshakes refuse by name."""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import json
import time
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fused_kda.layouts import LayoutKind, Shard
from fused_kda.pool import StatePool
from fused_kda.transfer import LayoutMismatch, Placement, PoolLayout, explain_plan, plan, source_ranks

HEADS, DIM = 8, 2
FILL = 0x5A
CODES = {2: torch.int16, 4: torch.int32}


@dataclass(frozen=True)
class Side:
    """How one side keeps its pools."""

    size: int
    kind: LayoutKind
    spare_taps: int
    page_shared: bool
    null_slot: int
    slots: int


@dataclass(frozen=True)
class Model:
    layers: int
    width: int
    conv_dtype: torch.dtype
    state_dtype: torch.dtype


def sides() -> st.SearchStrategy[Side]:
    return st.builds(
        Side,
        st.sampled_from((1, 2, 4, 8)),
        st.sampled_from(("SD", "DS")),
        st.integers(0, 2),
        st.booleans(),
        st.sampled_from((-1, 0)),
        st.integers(5, 6),
    )


models = st.builds(
    Model,
    st.integers(1, 3),
    st.integers(2, 4),
    st.sampled_from((torch.bfloat16, torch.float32)),
    st.sampled_from((torch.float32, torch.bfloat16)),
)
slot_pairs = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), max_size=3, unique_by=lambda pair: pair[1])


def make_pool(model: Model, side: Side, rank: int) -> tuple[StatePool, PoolLayout]:
    shard = Shard(HEADS, DIM, side.size, rank)
    pool = StatePool(
        model.layers,
        side.slots,
        shard.local_heads,
        DIM,
        model.width,
        layout=side.kind,
        spare_taps=side.spare_taps,
        page_shared=side.page_shared,
        conv_dtype=model.conv_dtype,
        state_dtype=model.state_dtype,
        null_slot=side.null_slot,
    )
    for storage in storages(pool):
        storage.fill_(FILL)
    return pool, PoolLayout.of(pool, shard)


def storages(pool: StatePool) -> list[torch.Tensor]:
    """All bytes behind a pool: one uint8 tensor per allocation."""
    found = {}
    for index in range(pool.layers):
        for view in pool.layer(index)[:2]:
            storage = view.untyped_storage()
            found[storage.data_ptr()] = torch.empty(0, dtype=torch.uint8).set_(storage)
    return list(found.values())


def windows(pool: StatePool, layout: PoolLayout, layer: int) -> torch.Tensor:
    """``[slots, channels, taps]`` with the spare taps of DS, as integers of the element's size."""
    view = pool.layer(layer).conv_state
    if layout.kind == "DS":
        view = view.as_strided((*view.shape[:2], layout.taps), view.stride())
    return view.view(CODES[view.element_size()])


def states(pool: StatePool, layer: int) -> torch.Tensor:
    state = pool.layer(layer).state
    return state.view(CODES[state.element_size()])


def copy(source: StatePool, target: StatePool, ranges: list[list[int]]) -> None:
    """Carry the ranges out, after checking that they stay inside the pools."""
    for column, pool in ((0, source), (1, target)):
        spans = [(s.data_ptr(), s.data_ptr() + s.numel()) for s in storages(pool)]
        for row in ranges:
            assert any(first <= row[column] and row[column] + row[2] <= last for first, last in spans)
    for src, dst, size in ranges:
        ctypes.memmove(dst, src, size)


@pytest.mark.case(23)
@settings(max_examples=150)
@given(models, sides(), sides(), slot_pairs)
def test_every_byte_lands_where_it_belongs(
    model: Model, source_side: Side, target_side: Side, slots: list[tuple[int, int]]
) -> None:
    taps = model.width + 1
    conv_codes = torch.arange(model.layers * 5 * 3 * HEADS * DIM * taps).view(model.layers, 5, 3 * HEADS * DIM, taps)
    state_codes = torch.arange(model.layers * 5 * HEADS * DIM * DIM).view(model.layers, 5, HEADS, DIM, DIM)

    def write(pool: StatePool, layout: PoolLayout, slot: int, tenant: int, carried: int) -> None:
        for layer in range(model.layers):
            channels = torch.cat([conv_codes[layer, tenant, rows] for rows in layout.shard.channel_slices])
            windows(pool, layout, layer)[slot, :, :carried] = channels[:, :carried]
            states(pool, layer)[slot] = state_codes[layer, tenant, layout.shard.head_slice]

    sources = [make_pool(model, source_side, rank) for rank in range(source_side.size)]
    for pool, layout in sources:
        for slot in range(1, 5):
            write(pool, layout, slot, slot, layout.taps)
    for rank in range(target_side.size):
        target, layout = make_pool(model, target_side, rank)
        expected, expected_layout = make_pool(model, target_side, rank)
        for source_rank in source_ranks(source_side.size, layout.shard):
            source, source_layout = sources[source_rank]
            ranges = plan(source_layout, layout, slots).tolist()
            for one, next_one in itertools.pairwise(ranges):
                assert one[1] + one[2] <= next_one[1]
                assert one[0] + one[2] != next_one[0] or one[1] + one[2] != next_one[1]  # else they were one range
            copy(source, target, ranges)
        source_taps = sources[0][1].taps
        carried = layout.taps if layout.taps == source_taps else model.width - 1
        for source_slot, target_slot in slots:
            write(expected, expected_layout, target_slot, source_slot, carried)
        for got, wanted in zip(storages(target), storages(expected), strict=True):
            assert torch.equal(got, wanted)


@given(sides(), sides())
def test_ranks_without_a_common_head_exchange_nothing(source_side: Side, target_side: Side) -> None:
    model = Model(1, 4, torch.bfloat16, torch.float32)
    for rank in range(target_side.size):
        _, target = make_pool(model, target_side, rank)
        useful = source_ranks(source_side.size, target.shard)
        for source_rank in range(source_side.size):
            _, source = make_pool(model, source_side, source_rank)
            assert bool(len(plan(source, target, [(1, 1)]))) == (source_rank in useful)


def kimi_k3(kind: LayoutKind, size: int, rank: int = 0, *, layers: int = 69, slots: int = 65) -> PoolLayout:
    """Page-shared pools of Kimi-K3: 96 heads of 128, 69 KDA layers."""
    shard = Shard(96, 128, size, rank)
    window, state = 3 * shard.local_heads * 128 * 3 * 2, shard.local_heads * 128 * 128 * 4
    pitch = window + state
    bases = [layer * slots * pitch for layer in range(layers)]
    conv = tuple(Placement(base, pitch) for base in bases)
    return PoolLayout(
        shard=shard,
        kind=kind,
        conv_width=4,
        taps=3,
        conv_dtype="bfloat16",
        state_dtype="float32",
        slots=slots,
        null_slot=0,
        conv=conv,
        state=tuple(Placement(base + window, pitch) for base in bases),
    )


@pytest.mark.parametrize(
    ("kind", "source", "target", "ranges"),
    [
        ("DS", 8, 4, 3 + 1),
        ("DS", 4, 8, 3 + 1),
        ("DS", 1, 8, 3 + 1),
        ("SD", 8, 4, 3 * 3 + 1),
        ("SD", 4, 8, 3 * 3 + 1),
        ("DS", 8, 8, 1),  # the whole page
        ("SD", 8, 8, 1),
    ],
)
def test_ranges_of_kimi_k3(kind: LayoutKind, source: int, target: int, ranges: int) -> None:
    rows = plan(kimi_k3(kind, source), kimi_k3(kind, target), [(3, 9)])
    assert len(rows) == 69 * ranges
    heads = 96 // max(source, target)
    assert rows[:, 2].sum() == 69 * heads * (3 * 128 * 3 * 2 + 128 * 128 * 4)


def test_neighbouring_slots_of_equal_pools_are_one_range() -> None:
    rows = plan(kimi_k3("DS", 8), kimi_k3("DS", 8), [(1 + i, 1 + i) for i in range(64)])
    assert len(rows) == 69
    assert len(plan(kimi_k3("DS", 8, slots=6), kimi_k3("DS", 8), [(1, 5), (2, 4)])) == 2 * 69


def test_explanation_gives_the_counts() -> None:
    text = explain_plan(kimi_k3("DS", 8), kimi_k3("DS", 4))
    assert "3 + 1 ranges per slot and layer; one slot in 69 layers: 276 ranges" in text
    assert "heads 0 to 11 of 96" in text
    assert "9 + 1 ranges per slot and layer" in explain_plan(kimi_k3("SD", 8), kimi_k3("SD", 4))
    assert "nothing to carry" in explain_plan(kimi_k3("SD", 8, 7), kimi_k3("SD", 4, 0))


@pytest.mark.parametrize(("source", "target"), [("DS", "DS"), ("SD", "SD")])
def test_planning_a_full_pool_is_quick(source: LayoutKind, target: LayoutKind) -> None:
    before, after = kimi_k3(source, 8), kimi_k3(target, 4)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        plan(before, after, [(slot, 65 - slot) for slot in range(1, 65)])
        times.append(time.perf_counter() - start)
    assert min(times) <= 0.050


def test_offsets_pass_32_bits() -> None:
    large = kimi_k3("DS", 1, layers=1, slots=2000)
    (row,) = plan(large, large, [(1999, 1998)]).tolist()
    assert row[0] == 1999 * (221_184 + 6_291_456) > 2**33
    assert row[0] - row[1] == 221_184 + 6_291_456


@given(models, sides(), st.data())
def test_handshake_round_trip(model: Model, side: Side, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, side.size - 1))
    _, layout = make_pool(model, side, rank)
    assert PoolLayout.from_json(layout.to_json()) == layout
    assert layout.page_shared == side.page_shared
    if side.kind == "DS":
        assert layout.taps == model.width - 1 + side.spare_taps


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("version", 2, "version: expected 1, got 2"),
        ("heads", "96", "heads: expected an integer, got '96'"),
        ("heads", True, "heads: expected an integer, got True"),
        ("tp_size", 7, "size: expected a divisor of the 96 heads, got 7"),
        ("tp_rank", 8, "rank: expected 0 <= rank < 8, got 8"),
        ("kind", "DD", "kind: expected one of SD, DS, got 'DD'"),
        ("kind", None, "kind: expected a text, got None"),
        ("conv_dtype", "int8", "conv_dtype: expected one of"),
        ("taps", 2, "taps: expected >= conv_width - 1"),
        ("slots", 1, "slots: expected > 1, got 1"),
        ("conv", [], "layers: expected one conv and one state each"),
        ("conv", [[0, 1]] * 69, r"conv\[0\]: expected offset >= 0 and pitch >= 27648 bytes"),
        ("state", [[-1, 10**9]] * 69, r"state\[0\]: expected offset >= 0"),
        ("state", [[2**63, 10**9]] * 69, "within 63 bits"),
        ("state", [[0.5, 10**9]] * 69, r"state: expected \[offset, pitch\]"),
        ("state", "x", "state: expected a list"),
        ("strange", 1, "missing or unknown fields"),
    ],
)
def test_a_bad_handshake_is_refused_by_name(field: str, value: object, message: str) -> None:
    fields = json.loads(kimi_k3("DS", 8).to_json())
    fields[field] = value
    with pytest.raises(LayoutMismatch, match=message):
        PoolLayout.from_json(json.dumps(fields))


@pytest.mark.parametrize("text", ["", "[]", "null", "{}", "not json", "[" * 100_000])
def test_what_is_no_handshake_is_refused(text: str) -> None:
    with pytest.raises(LayoutMismatch, match="expected"):
        PoolLayout.from_json(text)


def test_a_missing_field_is_refused() -> None:
    fields = json.loads(kimi_k3("DS", 8).to_json())
    del fields["taps"]
    with pytest.raises(LayoutMismatch, match=r"\['taps'\]"):
        PoolLayout.from_json(json.dumps(fields))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"conv_dtype": "float16"}, "conv_dtype: expected bfloat16, got float16"),
        ({"state_dtype": "bfloat16"}, "state_dtype: expected float32, got bfloat16"),
        ({"conv_width": 3}, "conv_width: expected 4, got 3"),
        ({"version": 0}, "version: expected 1, got 0"),
        ({"shard": Shard(48, 128, 4, 0)}, "heads: expected 96, got 48"),
        ({"shard": Shard(96, 64, 4, 0)}, "head_dim: expected 128, got 64"),
    ],
)
def test_pools_of_different_models_are_refused_by_name(changes: dict[str, object], message: str) -> None:
    target = kimi_k3("DS", 8)
    source = dataclasses.replace(target, **changes, **_roomy(69))
    with pytest.raises(LayoutMismatch, match=message):
        plan(source, target, [(1, 1)])
    with pytest.raises(LayoutMismatch, match=message):
        explain_plan(source, target)


def test_all_differences_are_named_at_once() -> None:
    target = kimi_k3("DS", 8)
    source = dataclasses.replace(target, conv_dtype="float32", state_dtype="bfloat16", **_roomy(68))
    with pytest.raises(LayoutMismatch, match=r"layers: expected 69, got 68; conv_dtype: .*; state_dtype: "):
        plan(source, target, [])


def _roomy(layers: int) -> dict[str, object]:
    """Placements that hold any of the layouts above."""
    places = tuple(Placement(0, 1 << 30) for _ in range(layers))
    return {"conv": places, "state": places}


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        ([(0, 1)], "source slots > 0 and < 65, got 0"),
        ([(65, 1)], "source slots > 0 and < 65, got 65"),
        ([(1, -1)], "target slots > 0 and < 65, got -1"),
        ([(1, 2), (2, 2)], r"different target slots, got \[2, 2\]"),
    ],
)
def test_slots_that_hold_no_sequence_are_refused(slots: list[tuple[int, int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan(kimi_k3("DS", 8), kimi_k3("DS", 8), slots)


def test_pools_that_are_not_what_they_seem_are_refused() -> None:
    pool = StatePool(2, 3, 2, 4)
    with pytest.raises(ValueError, match="shard: expected 2 heads of 4 on this rank, got 1 of 4"):
        PoolLayout.of(pool, Shard(2, 4, 2, 0))
    first, second = pool.layer(0), StatePool(1, 3, 2, 4, layout="DS").layer(0)
    with pytest.raises(ValueError, match="layer 1 differs from layer 0"):
        PoolLayout.of([first, second])
    with pytest.raises(ValueError, match="dense"):
        PoolLayout.of([first._replace(state=first.state.transpose(2, 3))])
    with pytest.raises(ValueError, match="SD or DS view"):
        PoolLayout.of([first._replace(conv_state=first.conv_state[:, ::2])])
    with pytest.raises(ValueError, match="at least one layer"):
        PoolLayout.of([])
