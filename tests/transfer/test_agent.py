"""Agents in one process: slots arrive whole, or the pull fails, says why, and leaves nothing half-used behind."""

from __future__ import annotations

import itertools
import json
import logging
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from fused_kda.layouts import LayoutKind, Shard
from fused_kda.pool import PoolFullError, StatePool
from fused_kda.transfer import LayoutMismatch, Offer, TransferAgent, TransferError, source_ranks
from fused_kda.transfer import pull as pull_module
from fused_kda.transfer.checksum import checksums

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="NIXL exists for Linux alone")

HEADS, DIM, LAYERS = 4, 16, 3

MakeAgent = Callable[..., TransferAgent]


@pytest.fixture
def make_agent() -> Iterator[MakeAgent]:
    """Agents with pools of ``HEADS / size`` heads; closed at the end."""
    agents = []
    numbers = itertools.count()

    def make(
        kind: LayoutKind = "DS",
        size: int = 1,
        rank: int = 0,
        *,
        slots: int = 5,
        heads: int = HEADS,
        conv_dtype: torch.dtype = torch.bfloat16,
        state_dtype: torch.dtype = torch.float32,
        page_shared: bool = True,
        name: str | None = None,
        device: str = "cpu",
        **times: float,
    ) -> TransferAgent:
        pool = StatePool(
            LAYERS,
            slots,
            heads // size,
            DIM,
            layout=kind,
            page_shared=page_shared,
            conv_dtype=conv_dtype,
            state_dtype=state_dtype,
            device=device,
        )
        agent = TransferAgent(name or f"agent{next(numbers)}", pool, Shard(heads, DIM, size, rank), **times)
        agents.append(agent)
        return agent

    yield make
    for agent in agents:
        agent.close()


def fill(pool: StatePool, shard: Shard, slots: list[int]) -> None:
    """What prefill leaves: the same content on every rank of a model, each its heads."""
    for index in range(LAYERS):
        layer = pool.layer(index)
        for order, slot in enumerate(slots):
            generator = torch.Generator().manual_seed(100 * index + order)
            window = torch.randn(3 * shard.heads * DIM, 3, generator=generator)
            state = torch.randn(shard.heads, DIM, DIM, generator=generator)
            layer.conv_state[slot] = torch.cat([window[rows] for rows in shard.channel_slices])
            layer.state[slot] = state[shard.head_slice]


def offer(agent: TransferAgent, reader: TransferAgent, count: int = 1, **options: int) -> Offer:
    """Filled slots, offered to a reader that knows the agent; the offer goes through its JSON form."""
    slots = agent.pool.allocate(count)
    fill(agent.pool, agent.layout.shard, slots)
    reader.connect(agent.handshake())
    return Offer.from_json(agent.offer(slots, **options).to_json())


def nothing_is_left(agent: TransferAgent) -> bool:
    """All slots are free and zero."""
    pool = agent.pool
    empty = all(not view.any() for index in range(LAYERS) for view in pool.layer(index)[:2])
    return pool.free_slots == pool.capacity and empty


def collect(agent: TransferAgent, seconds: float = 5.0) -> list[bool]:
    """Wait until an offer has ended."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        settled = agent.collect()
        if settled:
            return [one.pulled for one in settled]
        time.sleep(0.002)
    return []


@pytest.mark.case(23)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    ("kind", "source_size", "target_size", "page_shared"),
    [
        ("DS", 1, 1, True),
        ("SD", 1, 1, False),
        ("DS", 2, 1, False),
        ("SD", 2, 1, True),
        ("DS", 1, 2, True),
        ("SD", 4, 2, True),
    ],
)
def test_slots_arrive_whole(
    make_agent: MakeAgent, kind: LayoutKind, source_size: int, target_size: int, page_shared: bool, device: str
) -> None:
    sources = [
        make_agent(kind, source_size, rank, page_shared=page_shared, device=device) for rank in range(source_size)
    ]
    offers = {}
    for source in sources:
        slots = source.pool.allocate(2)
        fill(source.pool, source.layout.shard, slots)
        offers[source.name] = source.offer(slots, readers=max(1, target_size // source_size))
    for rank in range(target_size):
        target = make_agent(kind, target_size, rank, page_shared=not page_shared, device=device)
        target.pool.allocate()  # so that slots differ on the two sides
        shard = target.layout.shard
        mine = [sources[number] for number in source_ranks(source_size, shard)]
        for source in mine:
            target.connect(source.handshake())
        seen: list[tuple[int, int]] = []
        arrived = target.pull([offers[s.name] for s in mine], progress=lambda *done: seen.append(done))  # noqa: B023
        expected = StatePool(LAYERS, 3, shard.local_heads, DIM)
        fill(expected, shard, expected.allocate(2))
        assert torch.equal(checksums(target.pool, arrived), checksums(expected, [1, 2]))
        for index in range(LAYERS):
            for got, wanted in zip(target.pool.layer(index)[:2], expected.layer(index)[:2], strict=True):
                assert torch.equal(got[arrived].cpu(), wanted[1:])
        total = 2 * LAYERS * shard.local_heads * (3 * DIM * 3 * 2 + DIM * DIM * 4)
        assert seen[-1] == (total, total)
    for source in sources:
        assert source.pool.free_slots == source.pool.capacity - 2  # held until it hears
        assert collect(source) == [True]
        assert source.pool.free_slots == source.pool.capacity
        assert source.collect() == []


@pytest.mark.case(23)
@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"kind": "SD"}, "kind: expected DS, got SD"),
        ({"state_dtype": torch.bfloat16}, "state_dtype: expected float32, got bfloat16"),
        ({"conv_dtype": torch.float32}, "conv_dtype: expected bfloat16, got float32"),
        ({"heads": 8}, "heads: expected 4, got 8"),
    ],
)
def test_a_peer_that_does_not_fit_is_refused_before_a_byte_moves(
    make_agent: MakeAgent, other: dict[str, Any], message: str
) -> None:
    source, target = make_agent(**other), make_agent()
    offered = source.offer(source.pool.allocate(1))
    with pytest.raises(LayoutMismatch, match=message):
        target.connect(source.handshake())
    with pytest.raises(TransferError, match=f"{source.name} is not connected"):
        target.pull([offered])
    assert nothing_is_left(target)


def test_what_is_no_handshake_or_offer_is_refused(make_agent: MakeAgent) -> None:
    agent, other = make_agent(), make_agent()
    for text in ("", "[]", "{}", "x" * 100, json.dumps({**json.loads(other.handshake()), "nixl": "%"})):
        with pytest.raises(LayoutMismatch):
            agent.connect(text)
        with pytest.raises(LayoutMismatch, match=r"offer: expected what Offer.to_json gives"):
            Offer.from_json(text)
    with pytest.raises(LayoutMismatch, match="own"):
        agent.connect(agent.handshake())
    with pytest.raises(TransferError, match="cannot be reached"):
        agent.connect(json.dumps({**json.loads(other.handshake()), "nixl": "AAAA"}))
    fields = json.loads(other.offer(other.pool.allocate(2)).to_json())
    with pytest.raises(LayoutMismatch, match="1 slots, 2 generations"):
        Offer.from_json(json.dumps({**fields, "slots": [1]}))


def test_a_slot_withdrawn_before_the_pull(make_agent: MakeAgent) -> None:
    source, target = make_agent(), make_agent()
    offered = offer(source, target)
    source.withdraw(offered)
    with pytest.raises(TransferError, match=r"slot 1 of agent0 was withdrawn \(generation 1 was offered, now 2\)"):
        target.pull([offered])
    assert nothing_is_left(target)
    assert source.pool.free_slots == source.pool.capacity


def test_a_slot_withdrawn_and_reused_in_mid_transfer(make_agent: MakeAgent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pull_module, "CHUNK_BYTES", 4096)
    monkeypatch.setattr(pull_module, "WINDOW", 1)
    source, target = make_agent(), make_agent()
    offered = offer(source, target, 2)
    seen: list[int] = []

    def free_meanwhile(done: int, total: int) -> None:
        seen.append(done)
        if len(seen) == 1:
            assert 0 < done < total
            source.withdraw(offered)
            again = source.pool.allocate(2)
            source.pool.layer(0).state[again] = 7.0
            source.offer(again)

    with pytest.raises(TransferError, match="was withdrawn"):
        target.pull([offered], progress=free_meanwhile)
    assert len(seen) > 2
    assert nothing_is_left(target)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_slot_that_its_owner_changed_while_it_was_offered(make_agent: MakeAgent, device: str) -> None:
    source, target = make_agent(device=device), make_agent(device=device)
    offered = offer(source, target, 2)
    source.pool.layer(1).state[offered.slots[1], 2, 5, 6] += 1.0
    with pytest.raises(TransferError, match=r"slot 2 of agent0, layer 1, head 2: the checksum differs \(1 of 24"):
        target.pull([offered])
    assert nothing_is_left(target)


def test_a_lost_confirmation_costs_the_owner_its_lease_alone(
    make_agent: MakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = make_agent(lease=0.3), make_agent()
    offered = offer(source, target)
    with monkeypatch.context() as patch:
        patch.setattr(target.nixl, "send_notif", lambda *_: None)
        (slot,) = target.pull([offered])
    assert source.collect() == []
    assert collect(source) == [False]
    assert source.pool.free_slots == source.pool.capacity
    assert slot in target.pool.allocated
    with pytest.raises(TransferError, match="withdrawn"):  # the offer is over
        target.pull([offered])


def test_a_confirmation_that_cannot_be_sent_is_logged(
    make_agent: MakeAgent, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    source, target = make_agent(), make_agent()
    offered = offer(source, target)
    error = target.errors[0]("gone")

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(target.nixl, "send_notif", fail)
    assert target.pull([offered])
    assert "agent0 did not hear that it may free its slots" in caplog.text


def test_a_strange_confirmation_ends_nothing(make_agent: MakeAgent, caplog: pytest.LogCaptureFixture) -> None:
    source, target = make_agent(), make_agent()
    offered = offer(source, target)
    for message in (b"pulled 99", b"pulled", b"\xff\x00", b"pulled -1"):
        target.nixl.send_notif(source.name, message)
    deadline = time.monotonic() + 5
    while caplog.text.count("names no standing offer") < 4 and time.monotonic() < deadline:
        assert source.collect() == []
    assert caplog.text.count("names no standing offer") == 4
    assert target.pull([offered])
    assert collect(source) == [True]


def test_one_failed_read_is_repeated(
    make_agent: MakeAgent, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    source, target = make_agent(), make_agent()
    offered = offer(source, target)
    answers = iter(["ERR"])
    real = target.nixl.check_xfer_state
    monkeypatch.setattr(target.nixl, "check_xfer_state", lambda handle: next(answers, None) or real(handle))
    (slot,) = target.pull([offered])
    assert torch.equal(checksums(target.pool, [slot]), offered.checksums)
    assert "NIXL reports a failed read; trying once more" in caplog.text
    assert collect(source) == [True]


@pytest.mark.parametrize("state", ["ERR", "PROC"])
def test_a_read_that_fails_twice_gives_up(make_agent: MakeAgent, monkeypatch: pytest.MonkeyPatch, state: str) -> None:
    source, target = make_agent(), make_agent(timeout=0.1)
    offered = offer(source, target)
    monkeypatch.setattr(target.nixl, "check_xfer_state", lambda _: state)
    pull = target.start_pull([offered])
    reason = {"ERR": "agent0: NIXL reports a failed read", "PROC": "agent0: no progress for 0.1 s"}[state]
    start = time.monotonic()
    with pytest.raises(TransferError, match=reason):
        pull.wait()
    assert time.monotonic() - start < 5
    assert nothing_is_left(target)
    with pytest.raises(TransferError, match="failed before"):
        pull.poll()
    monkeypatch.undo()
    target.timeout = 30.0
    assert target.pull([offered])  # the offer stands: another try, later, may do


def test_slots_of_a_read_that_cannot_be_cancelled_are_held_back(
    make_agent: MakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = make_agent(), make_agent(timeout=0.1)
    offered = offer(source, target)
    error = target.errors[0]("still running")
    real = target.nixl.initialize_xfer
    running = True

    class Handle:
        """NIXL's handle, which refuses to go as long as the read runs."""

        def __init__(self, handle: Any) -> None:
            self.handle = handle

        def release(self) -> None:
            if running:
                raise error
            self.handle.release()

    monkeypatch.setattr(target.nixl, "initialize_xfer", lambda *arguments: Handle(real(*arguments)))
    monkeypatch.setattr(target.nixl, "transfer", lambda _: "PROC")
    monkeypatch.setattr(target.nixl, "check_xfer_state", lambda _: "PROC")
    with pytest.raises(TransferError, match="held back until NIXL has cancelled the read"):
        target.pull([offered])
    assert target.pool.free_slots == target.pool.capacity - 1
    monkeypatch.undo()
    target.timeout = 30.0
    running = False
    assert target.pull([offered]) == [1]  # the held slot came back first
    assert target.pool.free_slots == target.pool.capacity - 1


def test_offers_that_do_not_make_up_this_rank_are_refused(make_agent: MakeAgent) -> None:
    halves, target = [make_agent(size=2, rank=rank) for rank in range(2)], make_agent()
    offers = [offer(half, target) for half in halves]
    longer = offer(halves[0], target, 2)
    for given, message in (
        (offers[:1], r"expected one from each \(tp size, rank\) of \[\(2, 0\), \(2, 1\)\]"),
        ([offers[0], offers[0]], "expected one from each"),
        ([longer, offers[1]], r"the same number of slots in each, got \[2, 1\]"),
        ([], "the same number"),
        ([_altered(offers[0], slots=(9,)), offers[1]], r"expected slots 1 to 4, got \[9\]"),
        ([_altered(offers[0], checksums=offers[0].checksums[:, :2]), offers[1]], "expected checksums"),
    ):
        with pytest.raises(TransferError, match=message):
            target.pull(given)
    assert nothing_is_left(target)
    assert target.pull(offers)


def _altered(offered: Offer, **changes: Any) -> Offer:
    fields = {name: getattr(offered, name) for name in ("agent", "number", "slots", "generations", "checksums")}
    return Offer(**{**fields, **changes})


def test_slots_that_cannot_be_offered(make_agent: MakeAgent) -> None:
    agent = make_agent()
    slot = agent.pool.allocate()
    for slots, message in (([], "at least one"), ([slot, slot], "each once"), ([2], "not offered yet, got 2")):
        with pytest.raises(ValueError, match=message):
            agent.offer(slots)
    agent.offer([slot])
    with pytest.raises(ValueError, match="not offered yet, got 1"):
        agent.offer([slot])


def test_a_full_pool_takes_nothing(make_agent: MakeAgent) -> None:
    source, target = make_agent(), make_agent(slots=2)
    offered = offer(source, target, 2)
    with pytest.raises(PoolFullError):
        target.pull([offered])
    assert nothing_is_left(target)


@pytest.mark.case(22)
def test_slots_listed_by_an_unfinished_step_are_not_received_into(make_agent: MakeAgent) -> None:
    source, target = make_agent(), make_agent()
    offered = offer(source, target)
    listed = target.pool.allocate()
    with target.pool.step([listed]):
        target.pool.free(listed)
        assert target.pull([offered]) != [listed]


def test_a_peer_that_came_back_under_its_name_is_taken(make_agent: MakeAgent) -> None:
    source, target = make_agent(name="prefill"), make_agent()
    lost = offer(source, target)
    source.close()
    again = make_agent(name="prefill")
    offered = offer(again, target, 2)
    assert len(target.pull([offered])) == 2
    assert lost.agent == offered.agent


def test_an_idle_agent_takes_no_core(make_agent: MakeAgent) -> None:
    make_agent()
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.2  # NIXL's own default takes all of the 0.5


def test_without_nixl_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fused_kda.transfer.nixl.find_spec", lambda _: None)
    with pytest.raises(ImportError, match=r"pip install 'fused-kda\[transfer\]'"):
        TransferAgent("alone", StatePool(1, 2, 1, 4))


@pytest.fixture(autouse=True)
def _warnings_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "fused_kda")
