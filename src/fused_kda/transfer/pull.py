"""Reading offered slots: data in chunks, then generations, then checksums; only then are the slots the caller's."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from .checksum import checksums
from .layout import PoolLayout
from .offer import Offer
from .plan import Ranges, chunks, plan, source_ranks

if TYPE_CHECKING:
    from .agent import TransferAgent

_log = logging.getLogger(__name__)

#: Bytes of one NIXL request: small enough to show progress and to stop early, large enough to cost nothing.
CHUNK_BYTES = 32 * 2**20
#: Requests in flight at a time.
WINDOW = 4
ATTEMPTS = 2


class TransferError(RuntimeError):
    """Slots did not arrive. None of them is in use: they were zeroed and freed, or are held back until they can be."""


@dataclass(frozen=True, slots=True)
class Peer:
    """A connected agent.

    Attributes:
        name: of the agent.
        layout: its pool's.
        memory: NIXL's memory kind ("DRAM" or "VRAM") and device number of its pool.
        generations: address of its generation counters, int64 in host memory, one per slot.
        metadata: NIXL's connection data.
    """

    name: str
    layout: PoolLayout
    memory: tuple[str, int]
    generations: int
    metadata: bytes


@dataclass(frozen=True, slots=True)
class _Request:
    """One READ: ``ranges`` of source address, target address, bytes."""

    peer: Peer
    ranges: Ranges
    remote: tuple[str, int]
    local: tuple[str, int]

    @property
    def nbytes(self) -> int:
        return int(self.ranges[:, 2].sum())


class _PeerFailed(Exception):
    """A read from this peer did not go through."""

    def __init__(self, peer: Peer, reason: str) -> None:
        super().__init__(f"{peer.name}: {reason}")
        self.peer = peer


class Pull:
    """Slots on their way. Made by :meth:`TransferAgent.start_pull`; advance it with :meth:`poll` or :meth:`wait`.

    Attributes:
        offers: what is read.
        slots: where it goes, in the offers' order. Nobody may use them before :meth:`poll` has returned True; empty
            after a failure.
        ranges: byte ranges that are read.
        bytes_total, bytes_done: of the data.
    """

    def __init__(self, agent: TransferAgent, offers: Sequence[Offer]) -> None:
        self.offers = tuple(offers)
        self._agent = agent
        self._peers = [agent.peer(offer.agent) for offer in self.offers]
        self._check()
        count = len(self.offers[0].slots)
        self.slots = agent.pool.allocate(count)
        self._seen: NDArray[np.int64] = np.zeros((len(self.offers), count), np.int64)
        self._seen_handle = agent.register([(self._seen.ctypes.data, self._seen.nbytes)], ("DRAM", 0))
        plans = [
            plan(peer.layout, agent.layout, list(zip(offer.slots, self.slots, strict=True)))
            for peer, offer in zip(self._peers, self.offers, strict=True)
        ]
        self.ranges = sum(map(len, plans))
        self._data = [
            _Request(peer, piece, peer.memory, agent.memory)
            for peer, ranges in zip(self._peers, plans, strict=True)
            for piece in chunks(ranges, CHUNK_BYTES)
        ]
        self.bytes_total = sum(request.nbytes for request in self._data)
        self._running: list[tuple[_Request, Any]] = []
        self._attempt = 0
        self._finished = False
        self._begin()

    def poll(self) -> bool:
        """Advance as far as possible without waiting. Within one host NIXL itself copies here, some chunks a call.

        Returns:
            True when the slots have arrived, are what the owners offered, and are the caller's.

        Raises:
            TransferError: as :meth:`TransferAgent.pull`.
        """
        if self._finished:
            return True
        if not self.slots:
            raise TransferError("pull: it has failed before")
        try:
            if not self._advance():
                return False
            self._verify()
        except _PeerFailed as failure:
            if self._attempt == ATTEMPTS or not self._cancel():
                self._abandon(str(failure))
            _log.warning("%s: pull from %s; trying once more", self._agent.name, failure)
            try:
                self._agent.reconnect(failure.peer)
            except TransferError as error:
                self._abandon(f"{failure}, then {error}")
            self._begin()
            return False
        self._agent.nixl.deregister_memory(self._seen_handle)
        self._finished = True
        self._confirm()
        return True

    def wait(self, progress: Callable[[int, int], None] | None = None) -> list[int]:
        """Poll until the slots are there.

        Args:
            progress: called with (bytes done, bytes in all) whenever more has come.

        Returns:
            The slots.

        Raises:
            TransferError: as :meth:`TransferAgent.pull`.
        """
        shown = 0
        while True:
            arrived = self.poll()
            if progress is not None and self.bytes_done != shown:
                shown = self.bytes_done
                progress(shown, self.bytes_total)
            if arrived:
                return self.slots
            time.sleep(0.0002)

    def release(self) -> bool:
        """After a failure: cancel what NIXL would not cancel before, then zero and free the slots. True once done."""
        if not self._cancel():
            return False
        pool = self._agent.pool
        for slot in self.slots:
            pool.reset(slot)
        if self._agent.memory[0] == "VRAM":  # a later pull into these slots does not follow this stream
            torch.cuda.current_stream(self._agent.memory[1]).synchronize()
        for slot in self.slots:
            pool.free(slot)
        self.slots = []
        self._agent.nixl.deregister_memory(self._seen_handle)
        return True

    def _check(self) -> None:
        """The offers are of the same number of slots that exist, and cover this rank's heads once.

        Raises:
            TransferError: they do not.
        """
        if len({len(offer.slots) for offer in self.offers}) != 1:
            raise TransferError(
                f"offers: expected the same number of slots in each, got {[len(offer.slots) for offer in self.offers]}"
            )
        shards = [peer.layout.shard for peer in self._peers]
        ranks = sorted((shard.size, shard.rank) for shard in shards)
        wanted = [(shards[0].size, rank) for rank in source_ranks(shards[0].size, self._agent.layout.shard)]
        if ranks != wanted:
            raise TransferError(
                f"offers: expected one from each (tp size, rank) of {wanted}, which have this rank's heads, got {ranks}"
            )
        for peer, offer in zip(self._peers, self.offers, strict=True):
            first, last = peer.layout.null_slot + 1, peer.layout.slots - 1
            if not all(first <= slot <= last for slot in offer.slots):
                raise TransferError(
                    f"offer {offer.number} of {peer.name}: expected slots {first} to {last}, got {list(offer.slots)}"
                )
            shape = (len(offer.slots), peer.layout.layers, peer.layout.shard.local_heads)
            if offer.checksums.shape != shape:
                raise TransferError(
                    f"offer {offer.number} of {peer.name}: expected checksums {list(shape)}, got "
                    f"{list(offer.checksums.shape)}"
                )

    def _begin(self) -> None:
        self._attempt += 1
        self._waiting = deque(self._data)
        self._generations_asked = False
        self.bytes_done = 0
        self._last_progress = time.monotonic()

    def _advance(self) -> bool:
        """Post and poll requests; True when data and generations are there."""
        for request, handle in list(self._running):
            if self._state(request, handle) == "DONE":
                self._running.remove((request, handle))
                handle.release()
                self.bytes_done += 0 if self._generations_asked else request.nbytes
                self._last_progress = time.monotonic()
        while self._waiting and len(self._running) < WINDOW:
            self._post(self._waiting.popleft())
        if self._running:
            if time.monotonic() - self._last_progress > self._agent.timeout:
                raise _PeerFailed(self._running[0][0].peer, f"no progress for {self._agent.timeout:g} s")
            return False
        if not self._generations_asked:
            self._generations_asked = True
            self._waiting.extend(map(self._generation_request, range(len(self.offers))))
            return False
        return True

    def _post(self, request: _Request) -> None:
        nixl = self._agent.nixl
        try:
            handle = nixl.initialize_xfer(
                "READ",
                nixl.get_xfer_descs(_descriptors(request.ranges, 1, request.local[1]), request.local[0]),
                nixl.get_xfer_descs(_descriptors(request.ranges, 0, request.remote[1]), request.remote[0]),
                request.peer.name,
            )
            self._running.append((request, handle))
            state = nixl.transfer(handle)
        except self._agent.errors as error:
            raise _PeerFailed(request.peer, str(error)) from error
        if state == "ERR":
            raise _PeerFailed(request.peer, "NIXL could not start the read")

    def _state(self, request: _Request, handle: Any) -> str:
        try:
            state = str(self._agent.nixl.check_xfer_state(handle))
        except self._agent.errors as error:
            raise _PeerFailed(request.peer, str(error)) from error
        if state == "ERR":
            raise _PeerFailed(request.peer, "NIXL reports a failed read")
        return state

    def _generation_request(self, number: int) -> _Request:
        """Read the owner's generation counters of one offer's slots into this offer's row of ``_seen``."""
        peer, slots = self._peers[number], np.array(self.offers[number].slots, np.int64)
        rows = np.empty((len(slots), 3), np.int64)
        rows[:, 0] = peer.generations + 8 * slots
        rows[:, 1] = self._seen[number].ctypes.data + 8 * np.arange(len(slots))
        rows[:, 2] = 8
        return _Request(peer, rows, ("DRAM", 0), ("DRAM", 0))

    def _verify(self) -> None:
        """Abandon unless every slot is still offered and every checksum agrees."""
        for offer, seen in zip(self.offers, self._seen.tolist(), strict=True):
            for slot, expected, got in zip(offer.slots, offer.generations, seen, strict=True):
                if got != expected:
                    self._abandon(
                        f"slot {slot} of {offer.agent} was withdrawn (generation {expected} was offered, now {got})"
                    )
        sums = checksums(self._agent.pool, self.slots)
        own = self._agent.layout.shard.head_slice
        for peer, offer in zip(self._peers, self.offers, strict=True):
            theirs = peer.layout.shard.head_slice
            first, last = max(own.start, theirs.start), min(own.stop, theirs.stop)
            arrived = sums[..., first - own.start : last - own.start]
            wrong = (arrived != offer.checksums[..., first - theirs.start : last - theirs.start]).nonzero().tolist()
            if wrong:
                sequence, layer, head = wrong[0]
                self._abandon(
                    f"slot {offer.slots[sequence]} of {offer.agent}, layer {layer}, head {first + head}: the checksum "
                    f"differs ({len(wrong)} of {arrived.numel()} differ)"
                )

    def _confirm(self) -> None:
        """Tell the owners. A confirmation that is lost costs an owner its lease, and this reader nothing."""
        for peer, offer in zip(self._peers, self.offers, strict=True):
            try:
                self._agent.nixl.send_notif(peer.name, b"pulled %d" % offer.number)
            except self._agent.errors as error:
                _log.warning("%s: %s did not hear that it may free its slots: %s", self._agent.name, peer.name, error)

    def _cancel(self) -> bool:
        """Cancel running requests; True when none is left that could still write."""
        for request, handle in list(self._running):
            try:
                handle.release()
            except self._agent.errors as error:
                _log.info("%s: a read from %s runs on: %s", self._agent.name, request.peer.name, error)
                continue
            self._running.remove((request, handle))
        return not self._running

    def _abandon(self, reason: str) -> None:
        """Give the slots up and say why."""
        held = "" if self.release() else "; its slots are held back until NIXL has cancelled the read"
        if held:
            self._agent.hold(self)
        raise TransferError(f"pull: {reason}{held}")


def _descriptors(ranges: Ranges, column: int, device: int) -> NDArray[np.uint64]:
    """NIXL's ``[n, 3]`` of address, bytes, device."""
    table = np.empty((len(ranges), 3), np.uint64)
    table[:, 0] = ranges[:, column]
    table[:, 1] = ranges[:, 2]
    table[:, 2] = device
    return table
