"""A slot that an unfinished step lists is not handed out, so nothing can be received into it.

The scene: a step that lists a sequence is queued; the sequence turns out to be over and its slot is freed; another
sequence is received; only then does the queued step run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch

from fused_kda import fused_kda_decode
from fused_kda.pool import PoolFullError, StatePool
from fused_kda.transfer.checksum import checksums

HEADS, DIM = 2, 16


def make_pool(device: str = "cpu", dim: int = DIM, slots: int = 4) -> StatePool:
    return StatePool(1, slots, HEADS, dim, layout="DS", device=device)


def decode(pool: StatePool, slot: int, device: str = "cpu") -> Callable[[], None]:
    """One step of the op that lists ``slot``, to be launched later."""
    dim = pool.layer(0).state.shape[-1]
    inner = HEADS * dim
    generator = torch.Generator().manual_seed(slot)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    x, raw_g, raw_beta = (draw(1, width).bfloat16() for width in (3 * inner, inner, HEADS))
    weight, a_log, dt_bias = draw(3 * inner, 4), draw(HEADS), draw(inner)
    indices = torch.tensor([slot], dtype=torch.int32, device=device)
    layer = pool.layer(0)

    def launch() -> None:
        fused_kda_decode(
            x, weight, None, layer.conv_state, raw_g, raw_beta, a_log, dt_bias, indices, layer.state, lower_bound=-5.0
        )

    return launch


def receive(pool: StatePool) -> tuple[int, torch.Tensor]:
    """What a transfer does to a fresh slot: a slot full of someone's state, and its checksum."""
    slot = pool.allocate()
    pool.layer(0).conv_state[slot] = 0.25
    pool.layer(0).state[slot] = 0.5
    return slot, checksums(pool, [slot])


@contextmanager
def no_rule(slots: object) -> Iterator[None]:
    """In the place of ``StatePool.step``: nobody keeps track."""
    yield


@pytest.mark.case(22)
@pytest.mark.parametrize("kept", [False, True], ids=["without the rule", "with the rule"])
def test_a_queued_step_corrupts_a_received_slot_unless_the_rule_is_kept(kept: bool) -> None:
    pool = make_pool()
    ended = pool.allocate()
    queue: list[Callable[[], None]] = []
    with (pool.step if kept else no_rule)([ended]):
        queue.append(decode(pool, ended))
        pool.free(ended)
        slot, before = receive(pool)
        for launch in queue:
            launch()
    assert (slot == ended) == (not kept)
    assert torch.equal(checksums(pool, [slot]), before) == kept


@pytest.mark.gpu
@pytest.mark.case(22)
@pytest.mark.parametrize("kept", [False, True], ids=["without the rule", "with the rule"])
def test_a_running_step_corrupts_a_received_slot_unless_the_rule_is_kept(kept: bool) -> None:
    pool = make_pool("cuda", 128)
    ended = pool.allocate()
    launch = decode(pool, ended, "cuda")
    launch()  # compiles
    aside = torch.cuda.Stream()  # a transfer does not follow the op's stream
    with torch.cuda.stream(aside):
        receive(make_pool("cuda", 128))  # CUDA loads kernels at their first use, and may wait for the whole device then
    torch.cuda.synchronize()
    with pool.step([ended]) if kept else nullcontext():
        torch.cuda._sleep(2_000_000_000)  # about a second of cycles: the step stays behind it
        launch()
    pool.free(ended)
    with torch.cuda.stream(aside):
        slot, before = receive(pool)
    torch.cuda.synchronize()
    assert (slot == ended) == (not kept)
    assert torch.equal(checksums(pool, [slot]), before) == kept
    if kept:
        pool.allocate(pool.capacity - 1)  # the step has finished: its slot is back


def test_a_slot_comes_back_when_the_last_step_that_lists_it_has_finished() -> None:
    pool = make_pool()
    first, second, third = pool.allocate(3)
    with pool.step([first, second]):
        with pool.step([first]):
            pool.free(first)
            pool.free(third)
            assert pool.free_slots == 1
            assert first not in pool.allocated
        assert pool.free_slots == 1
        with pytest.raises(PoolFullError, match="1 of 3 are free; 1 wait for a step to finish"):
            pool.allocate(2)
        with pytest.raises(ValueError, match="which is free"):
            pool.free(first)
    assert pool.free_slots == 2
    assert pool.allocate(2) == [first, third]


def test_a_step_that_fails_is_over() -> None:
    pool = make_pool()
    slot = pool.allocate()

    def failing_step() -> None:
        with pool.step([slot]):
            pool.free(slot)
            raise RuntimeError("launch")

    with pytest.raises(RuntimeError, match="launch"):
        failing_step()
    assert pool.free_slots == 3


def test_steps_do_not_pile_up() -> None:
    pool = make_pool()
    slot = pool.allocate()
    for _ in range(100):
        with pool.step([slot]):
            pass
    assert len(pool._steps) <= 1
