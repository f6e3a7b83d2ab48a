"""The soak itself, small: what its traffic is, that it passes on the reference, and that it notices what it is for."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from fused_kda.pool import StatePool
from fused_kda.testing.soak import Drift, follow, run, soak
from fused_kda.testing.traffic import TINY, History, Traffic, draw_history, draw_inputs

FP32, BF16 = torch.float32, torch.bfloat16
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def history() -> History:
    return draw_history(TINY)


def test_slots_come_and_go_and_every_row_reads_its_inputs_in_turn(history: History) -> None:
    expected: dict[int, int] = {}  # slot: the input that its sequence reads next
    joined = 0
    for table, count in zip(history.tables.tolist(), history.rows.tolist(), strict=True):
        rows, padding = table[:count], table[count:]
        assert all(row == [0, 0, 1] for row in padding)
        slots = [slot for slot, _, _ in rows]
        assert len(set(slots)) == count > 0
        assert min(slots) > 0
        for slot, position, started in rows:
            assert not started or position == expected[slot]
            joined += not started
        expected = {slot: (position + 1) % TINY.inputs for slot, position, _ in rows}
    assert joined == history.sequences > TINY.slots, "slots were used again"
    assert len(set(history.rows.tolist())) > 4
    assert {sample.step % TINY.check_every for sample in history.samples} == {TINY.check_every - 1}


def test_the_same_seed_draws_the_same_traffic(history: History) -> None:
    again, other = draw_history(TINY), draw_history(dataclasses.replace(TINY, seed=1))
    assert torch.equal(again.tables, history.tables)
    assert again.samples == history.samples
    assert not torch.equal(other.tables, history.tables)


def test_the_reference_passes() -> None:
    for outcome in soak(TINY, ["reference"], CPU):
        assert outcome.faults == ()
        assert len(outcome.digests) == 2
        assert outcome.samples >= TINY.steps // TINY.check_every
        assert outcome.longest_followed > 100
        assert 0.0 < outcome.state_share <= 1.0
        assert 0.0 < outcome.out_share <= 1.0


def test_one_bit_of_one_slot_is_noticed(history: History) -> None:
    """The lowest bit but eight of one number, in the middle of a sampled row's life, in fp32."""
    inputs = draw_inputs(TINY, CPU)
    sample = max(history.samples, key=lambda sample: sample.tokens)

    def spoil(step: int, pool: StatePool) -> None:
        if step == sample.step - 3:
            pool.layer(0).state[sample.slot].view(torch.int32)[0, 3, 5] ^= 1 << 20

    sound = run(TINY, history, inputs, "reference")
    spoilt = run(TINY, history, inputs, "reference", disturb=spoil)
    assert spoilt.digest != sound.digest
    drifts = follow(TINY, history, inputs, {("sound", FP32): sound, ("spoilt", FP32): spoilt})
    assert drifts[("sound", FP32)].faults == []
    assert any(
        f"step {sample.step}, row {sample.row}, slot {sample.slot}" in f for f in drifts[("spoilt", FP32)].faults
    )


def test_a_digest_covers_every_step(history: History) -> None:
    """A number that is wrong in one step's output alone, and right again in all that is left at the end."""
    inputs = draw_inputs(TINY, CPU)
    short = dataclasses.replace(TINY, steps=200)

    def blink(step: int, pool: StatePool) -> None:
        kept = pool.layer(0).state
        if step == 50:
            blink.before = kept.clone()  # type: ignore[attr-defined]
            kept.mul_(1.5)
        elif step == 51:
            kept.zero_()

    def zero(step: int, pool: StatePool) -> None:
        if step == 51:
            pool.layer(0).state.zero_()

    one = run(short, history, inputs, "reference", disturb=blink)
    other = run(short, history, inputs, "reference", disturb=zero)
    assert torch.equal(one.states, other.states)
    assert one.digest != other.digest


def test_drift_beyond_the_budget_is_a_fault() -> None:
    from fused_kda.testing.soak import _share

    drift = Drift()
    budget = torch.tensor([1.0, 2.0])
    assert _share(torch.tensor([0.5, 1.0]), torch.zeros(2), budget, "a", drift) == 0.5
    assert drift.faults == []
    assert _share(torch.tensor([0.0, float("nan")]), torch.zeros(2), budget, "b", drift) == float("inf")
    assert drift.faults == ["b: inf of the budget"]


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_a_short_soak_on_a_gpu(backend: str) -> None:
    """Graphs, buckets and memory as in the long one, but for what other processes take of the device meanwhile."""
    device = torch.device("cuda", torch.cuda.current_device())
    traffic = Traffic(steps=2000, longest=600, check_every=200)
    history, inputs = draw_history(traffic), draw_inputs(traffic, device)
    made = [run(traffic, history, inputs, backend, layout=layout, state_dtype=BF16) for layout in ("SD", "DS")]
    assert len({one.digest for one in made}) == 1
    for one in made:
        assert len({memory[:2] for memory in one.memory[1:]}) == 1
    drift = follow(traffic, history, inputs, {(backend, BF16): made[0]})[(backend, BF16)]
    assert drift.faults == []
