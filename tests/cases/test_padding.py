"""Padded rows, sentinels and index buffers, as serving engines use them. Public faults 1 to 5."""

from __future__ import annotations

from typing import Any

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


ROWS = {"tail": (5, 6, 7), "all": tuple(range(8)), "middle": (3,), "first": (0,)}
KINDS = {
    "SD": {},
    "pages": {"layout": "DS", "page_shared": True, "state_dtype": torch.bfloat16},
    "DS, int64": {"layout": "DS", "spare_taps": 1, "index_dtype": torch.int64, "lower_bound": None},
    "masked, no norm": {"mask": True, "norm_dtype": None, "index_stride": 3},
}


PADDED = [("tail", "SD"), ("all", "SD"), ("middle", "SD"), ("tail", "pages"), ("first", "DS, int64")]
PADDED += [("middle", "masked, no norm")]


@pytest.mark.case(1)
@pytest.mark.parametrize("sentinel", [0, -1])
@pytest.mark.parametrize(("rows", "kind"), PADDED)
def test_padded_rows_are_zero_and_write_nothing(subject: Subject, rows: str, kind: str, sentinel: int) -> None:
    """Padded rows name the reserved slot, their inputs are NaN and Inf, ``out`` is full of NaN. On a GPU also in
    batches that take other launch shapes, the padding repeated all over them."""
    for batch in (8, 40, 304) if subject.device.type == "cuda" else (8,):
        nulls = tuple(row for row in range(batch) if row % 8 in ROWS[rows])
        call = subject.draw(batch=batch, null_rows=nulls, **KINDS[kind])
        call.arguments["state_indices"][list(nulls)] = sentinel
        for name, value in (("x", float("inf")), ("raw_beta", float("-inf")), ("output_gate", float("inf"))):
            if call.arguments[name] is not None:
                call.arguments[name][list(nulls)] = value
        before = call.clone()
        out = call.run(subject.backend)
        assert torch.count_nonzero(out[list(nulls)]) == 0
        assert call.touched_elsewhere(before) == []
        if call.live:
            alone = take(before, call.live)
            check_equal("live rows", out[list(call.live)], alone.run(subject.backend))
            pools_equal(call, alone, list(call.slots))


@pytest.mark.case(2)
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


@pytest.mark.case(2)
@pytest.mark.parametrize("beyond", [2**31 - 1, 2**31, 2**40, -(2**63)])
def test_no_index_wraps_into_the_pool(subject: Subject, beyond: int) -> None:
    """A wrapped 2**40 would be slot 0, a wrapped 2**32 + 1 slot 1."""
    call = subject.draw(batch=3, index_dtype=torch.int64, null_slot=-1, null_rows=(1,))
    name_rows(call, {1: beyond})
    subject.agree(call)
    name_rows(call, {1: 2**32 + 1})
    subject.agree(call)


@pytest.mark.case(3)
@pytest.mark.parametrize("wanted", [{}, {"row_gap": 24, "row_offset": 1, "row_form": "[B,P]", "mask": True}], ids=str)
def test_a_bucket_of_64_with_five_live_rows_is_written_whole(subject: Subject, wanted: dict[str, Any]) -> None:
    """Poisoned before the call with bytes 0xFF, in each form of ``out``; one that the op allocates is whole as well."""
    call = subject.draw(batch=64, null_rows=tuple(range(5, 64)), reserved=True, **wanted)
    call.arguments["out"].view(torch.int16).fill_(-1)
    own = call.clone()
    subject.agree(call)
    assert call.arguments["out"].isfinite().all()
    torch.full((1 << 20,), float("nan"), device=subject.device)  # what an allocator may hand out next
    allocated = own.run(subject.backend, out=None)
    check_equal("allocated", allocated.reshape(64, -1), call.arguments["out"].reshape(64, -1))


@pytest.mark.case(4)
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("kind", ["SD", "pages"])
def test_a_poisoned_null_slot_reaches_no_live_row(subject: Subject, kind: str, poison: float) -> None:
    clean = subject.draw(batch=5, null_rows=(1, 3), **KINDS[kind])
    name_rows(clean, {1: 0, 3: 0})
    for name in ("conv_state", "state"):
        clean.arguments[name][0] = 0.0
    poisoned = clean.clone()
    for name in ("conv_state", "state"):
        poisoned.arguments[name][0] = poison
    check_equal("out", poisoned.run(subject.backend), clean.run(subject.backend))
    pools_equal(poisoned, clean, list(clean.slots))
    assert not poisoned.arguments["state"][0].isfinite().any()


@pytest.mark.case(5)
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
