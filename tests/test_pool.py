"""StatePool: slots that come and go, and storage of every kind in the op's form."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fused_kda.layouts import detect_conv_layout
from fused_kda.pool import PoolFullError, StatePool


def small(**options):
    return StatePool(2, 4, 2, 8, **options)


@pytest.mark.parametrize("layout", ["SD", "DS"])
@pytest.mark.parametrize("page_shared", [False, True])
@pytest.mark.parametrize("spare_taps", [0, 2])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_views_have_the_ops_form(layout, page_shared, spare_taps, state_dtype):
    pool = StatePool(3, 5, 2, 8, layout=layout, page_shared=page_shared, spare_taps=spare_taps, state_dtype=state_dtype)
    assert pool.layers == 3
    channels, taps = 3 * 2 * 8, 3 + spare_taps
    for index in range(3):
        conv_state, state, null_slot = pool.layer(index)
        assert null_slot == 0
        assert conv_state.shape == (5, channels, 3)
        assert state.shape == (5, 2, 8, 8)
        assert (conv_state.dtype, state.dtype) == (torch.bfloat16, state_dtype)
        found = detect_conv_layout(conv_state.shape, conv_state.stride())
        assert found is not None
        assert found.kind == layout
        if layout == "DS":
            assert found.taps == taps
        assert state.stride()[1:] == (64, 8, 1)
        conv_pitch, state_pitch = conv_state.stride(0) * 2, state.stride(0) * state_dtype.itemsize
        if page_shared:
            assert conv_pitch == state_pitch == channels * taps * 2 + 128 * state_dtype.itemsize
            assert conv_state.untyped_storage().data_ptr() == state.untyped_storage().data_ptr()
        else:
            assert (conv_pitch, state_pitch) == (channels * taps * 2, 128 * state_dtype.itemsize)
        assert not conv_state.any()
        assert not state.any()


@pytest.mark.parametrize("page_shared", [False, True])
def test_slots_and_layers_do_not_overlap(page_shared):
    pool = small(page_shared=page_shared, layout="DS", spare_taps=1, null_slot=-1)
    places = [(layer, slot) for layer in range(2) for slot in range(4)]
    for code, (layer, slot) in enumerate(places):
        pool.layer(layer).conv_state[slot] = code
        pool.layer(layer).state[slot] = code + 0.5
    for code, (layer, slot) in enumerate(places):
        assert (pool.layer(layer).conv_state[slot] == code).all()
        assert (pool.layer(layer).state[slot] == code + 0.5).all()


@pytest.mark.parametrize("page_shared", [False, True])
def test_reset_zeroes_one_slot_of_every_layer(page_shared):
    pool = small(page_shared=page_shared)
    taken = pool.allocate(3)
    for index in range(2):
        for tensor in pool.layer(index)[:2]:
            tensor.fill_(float("nan"))
    pool.reset(taken[1])
    for index in range(2):
        for tensor in pool.layer(index)[:2]:
            assert not tensor[taken[1]].any()
            assert tensor[[0, taken[0], taken[2]]].isnan().all()


def test_a_freed_slot_keeps_its_bytes():
    pool = small()
    slot = pool.allocate()
    pool.layer(1).state[slot] = 7
    pool.free(slot)
    assert pool.allocate() == slot
    assert (pool.layer(1).state[slot] == 7).all()


@given(
    null_slot=st.sampled_from((-1, 0)),
    slots=st.integers(2, 9),
    moves=st.lists(st.tuples(st.booleans(), st.integers(0, 8)), max_size=40),
)
def test_no_slot_is_ever_given_twice(null_slot, slots, moves):
    pool = StatePool(1, slots, 1, 1, null_slot=null_slot)
    usable = set(range(null_slot + 1, slots))
    assert pool.capacity == len(usable)
    used = set()
    for take, number in moves:
        if take and len(used) < len(usable):
            slot = pool.allocate()
            assert slot == min(usable - used)
            used.add(slot)
        elif take:
            with pytest.raises(PoolFullError):
                pool.allocate()
        elif number in used:
            pool.free(number)
            used.remove(number)
        else:
            with pytest.raises(ValueError, match="slot: expected"):
                pool.free(number)
        assert pool.allocated == used
        assert pool.free_slots == len(usable) - len(used)


def test_a_request_for_too_many_takes_none():
    pool = small()
    assert pool.allocate(2) == [1, 2]
    with pytest.raises(PoolFullError, match=r"^pool: 2 slots asked for, 1 of 3 are free$"):
        pool.allocate(2)
    assert pool.allocate(0) == []
    assert pool.allocate() == 3
    with pytest.raises(PoolFullError, match=r"^pool: 1 slots asked for, 0 of 3 are free$"):
        pool.allocate()
    with pytest.raises(ValueError, match=r"^count: expected >= 0, got -1$"):
        pool.allocate(-1)


@pytest.mark.parametrize("action", ["free", "reset"])
def test_wrong_slots_are_named(action):
    pool = small()
    act = getattr(pool, action)
    slot = pool.allocate()
    pool.free(slot)
    with pytest.raises(ValueError, match=r"^slot: expected an allocated slot, got 1, which is free \(freed twice\?\)$"):
        act(slot)
    with pytest.raises(ValueError, match=r"^slot: expected 1 <= slot < 4, got 4$"):
        act(4)
    with pytest.raises(ValueError, match=r"^slot: expected 1 <= slot < 4, got 0 \(0 is reserved\)$"):
        act(0)
    with pytest.raises(ValueError, match=r"^slot: expected 0 <= slot < 4, got -1$"):
        getattr(small(null_slot=-1), action)(-1)


@pytest.mark.parametrize("allocated", [True, False])
def test_a_quarantined_slot_is_not_handed_out_until_it_is_released(allocated):
    pool = small()
    taken = pool.allocate(2)
    if not allocated:
        pool.free(taken[0])
    pool.layer(1).state[taken[0]] = float("nan")
    pool.quarantine(taken[0], "not finite")
    assert pool.quarantined == {1: "not finite"}
    assert pool.allocated == {2}
    assert pool.free_slots == 1
    assert pool.allocate() == 3
    with pytest.raises(PoolFullError, match=r"^pool: 1 slots asked for, 0 of 3 are free; 1 are quarantined$"):
        pool.allocate()
    assert pool.layer(1).state[1].isnan().all()
    pool.release(1)
    assert pool.quarantined == {}
    assert not any(tensor[1].any() for layer in range(2) for tensor in pool.layer(layer)[:2])
    assert pool.allocate() == 1


def test_layers_that_are_not_finite_are_found():
    pool = StatePool(4, 3, 2, 8)
    assert pool.not_finite(1) == []
    pool.layer(3).state[1, 1, 2, 3] = float("inf")
    pool.layer(1).conv_state[1, 5, 1] = float("nan")
    pool.layer(0).state[2] = float("nan")
    assert pool.not_finite(1) == [1, 3]
    assert pool.not_finite(2) == [0]
    with pytest.raises(ValueError, match=r"^slot: expected 1 <= slot < 3, got 3$"):
        pool.not_finite(3)


def test_a_released_slot_waits_for_the_steps_that_list_it():
    pool = small()
    with pool.step([1]):
        pool.quarantine(1, "under suspicion")
        pool.release(1)
        assert pool.allocate(2) == [2, 3]
        with pytest.raises(PoolFullError, match=r"1 wait for a step to finish$"):
            pool.allocate()
    assert pool.allocate() == 1


def test_a_slot_freed_in_a_step_may_be_quarantined():
    pool = small()
    slot = pool.allocate()
    with pool.step([slot]):
        pool.free(slot)
        pool.quarantine(slot, "wrong")
    assert pool.free_slots == 2
    assert pool.quarantined == {slot: "wrong"}


def test_what_a_quarantine_refuses():
    pool = small()
    slot = pool.allocate()
    pool.quarantine(slot, "wrong sums")
    for act in (pool.free, pool.reset):
        with pytest.raises(
            ValueError, match=r"^slot: expected an allocated slot, got 1, .* quarantined \(wrong sums\)$"
        ):
            act(slot)
    with pytest.raises(ValueError, match=r"^slot: expected one in circulation, got 1, .* quarantined \(wrong sums\)$"):
        pool.quarantine(slot, "again")
    with pytest.raises(ValueError, match=r"^slot: expected 1 <= slot < 4, got 0 \(0 is reserved\)$"):
        pool.quarantine(0, "why not")
    with pytest.raises(ValueError, match=r"^reason: expected some words, got none$"):
        pool.quarantine(2, "")
    with pytest.raises(ValueError, match=r"^slot: expected a quarantined slot, got 2$"):
        pool.release(2)


def test_wrong_layers_are_named():
    for index in (-1, 2):
        with pytest.raises(ValueError, match=rf"^index: expected 0 <= layer < 2, got {index}$"):
            small().layer(index)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"layers": 0}, ValueError, "layers: expected >= 1, got 0"),
        ({"slots": 1}, ValueError, "slots: expected >= 2, got 1"),
        ({"slots": 0, "null_slot": -1}, ValueError, "slots: expected >= 1, got 0"),
        ({"heads": 0}, ValueError, "heads: expected >= 1, got 0"),
        ({"head_dim": 0}, ValueError, "head_dim: expected >= 1, got 0"),
        ({"conv_width": 1}, ValueError, "conv_width: expected >= 2, got 1"),
        ({"spare_taps": -1}, ValueError, "spare_taps: expected >= 0, got -1"),
        ({"layout": "XY"}, ValueError, "layout: expected one of SD, DS, got 'XY'"),
        ({"null_slot": 3}, ValueError, "null_slot: expected 0 .* or -1 .*, got 3"),
        ({"conv_dtype": torch.int8}, TypeError, "conv_dtype: expected torch.bfloat16 or .*, got torch.int8"),
        ({"state_dtype": torch.float16}, TypeError, "state_dtype: expected torch.float32 or .*, got torch.float16"),
    ],
)
def test_wrong_arguments_are_named(arguments, error, text):
    with pytest.raises(error, match=text):
        StatePool(**({"layers": 1, "slots": 2, "heads": 1, "head_dim": 8} | arguments))
