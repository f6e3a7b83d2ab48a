"""Padded rows, sentinels and index buffers, as serving engines use them."""

from __future__ import annotations

import pytest
import torch

from fused_kda.testing.battery import Subject, take
from fused_kda.testing.compare import check_equal
from fused_kda.testing.problems import Call


def pools_equal(call: Call, other: Call, slots: list[int]) -> None:
    for name in ("conv_state", "state"):
        check_equal(name, call.arguments[name][slots], other.arguments[name][slots])


def name_rows(call: Call, indices: dict[int, int]) -> None:
    """Write indices in place, as an engine does between steps."""
    for row, slot in indices.items():
        call.arguments["state_indices"][row] = slot


@pytest.mark.parametrize("sentinel", [0, -1])
@pytest.mark.parametrize("rows", [(5, 6, 7), (0, 1, 2, 3, 4, 5, 6, 7), (3,)], ids=["tail", "all", "middle"])
def test_padded_rows_are_zero_and_write_nothing(subject: Subject, rows: tuple[int, ...], sentinel: int) -> None:
    """Padded rows name the reserved slot, their inputs are NaN and Inf, ``out`` is full of NaN."""
    call = subject.draw(batch=8, null_rows=rows)
    name_rows(call, dict.fromkeys(rows, sentinel))
    for name, value in (("x", float("inf")), ("raw_beta", float("-inf")), ("output_gate", float("inf"))):
        call.arguments[name][list(rows)] = value
    before = call.clone()
    out = call.run(subject.backend)
    assert torch.count_nonzero(out[list(rows)]) == 0
    assert call.touched_elsewhere(before) == []
    if call.live:
        alone = take(before, call.live)
        check_equal("live rows", out[list(call.live)], alone.run(subject.backend))
        pools_equal(call, alone, list(call.slots))


@pytest.mark.parametrize("null_slot", [0, -1])
def test_slot_zero_is_live_under_one_policy_alone(subject: Subject, null_slot: int) -> None:
    call = subject.draw(batch=5, slots=6)
    for name in ("conv_state", "state"):
        call.arguments[name].nan_to_num_(nan=0.25)
    indices = [0, 3, -(2**31), call.problem.slots, call.problem.slots + 7]
    call.arguments["state_indices"].copy_(torch.tensor(indices))
    call.arguments["null_slot"] = null_slot
    live = (0, 1) if null_slot == -1 else (1,)
    subject.agree(Call(call.arguments, live, tuple(indices[row] for row in live)))
    null = [row for row in range(5) if row not in live]
    assert torch.count_nonzero(call.arguments["out"][null]) == 0
    assert call.arguments["out"][list(live)].abs().sum() > 0


@pytest.mark.parametrize("beyond", [2**31 - 1, 2**31, 2**40, -(2**63)])
def test_no_index_wraps_into_the_pool(subject: Subject, beyond: int) -> None:
    """A wrapped 2**40 would be slot 0, a wrapped 2**32 + 1 slot 1."""
    call = subject.draw(batch=3, index_dtype=torch.int64, null_slot=-1, null_rows=(1,))
    name_rows(call, {1: beyond})
    subject.agree(call)
    name_rows(call, {1: 2**32 + 1})
    subject.agree(call)


def test_a_bucket_of_64_with_five_live_rows_is_written_whole(subject: Subject) -> None:
    call = subject.draw(batch=64, null_rows=tuple(range(5, 64)))
    name_rows(call, dict.fromkeys(range(5, 64), 0))
    call.arguments["out"].view(torch.int16).fill_(-1)
    subject.agree(call)
    assert call.arguments["out"].isfinite().all()


def test_a_poisoned_null_slot_reaches_no_live_row(subject: Subject) -> None:
    clean = subject.draw(batch=5, null_rows=(1, 3))
    name_rows(clean, {1: 0, 3: 0})
    for name in ("conv_state", "state"):
        clean.arguments[name][0] = 0.0
    poisoned = clean.clone()
    for name in ("conv_state", "state"):
        poisoned.arguments[name][0] = float("nan")
    check_equal("out", poisoned.run(subject.backend), clean.run(subject.backend))
    pools_equal(poisoned, clean, list(clean.slots))
    assert poisoned.arguments["state"][0].isnan().all()


def test_a_rewritten_tail_leaves_the_slots_of_others_alone(subject: Subject) -> None:
    """The op believes the index buffer: an engine that replays with fewer rows must rewrite its tail."""
    call = subject.draw(batch=4)
    call.run(subject.backend)
    name_rows(call, {2: 0, 3: 0})
    before = call.clone()
    shorter = Call(call.arguments, (0, 1), call.slots[:2])
    shorter.run(subject.backend)
    assert shorter.touched_elsewhere(before) == []
    stale = before.clone()
    name_rows(stale, {2: call.slots[2], 3: call.slots[3]})
    stale.run(subject.backend)
    for slot in call.slots[2:]:
        assert not torch.equal(stale.arguments["state"][slot], before.arguments["state"][slot])
