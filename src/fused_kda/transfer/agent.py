"""One rank's end of the transfer: it offers slots of its pool to readers, and pulls slots that others offer.

The owner (a prefill rank) never writes to a reader, and a reader (a decode rank) reads with one-sided NIXL READs. What
makes that safe is a generation counter per slot, in memory that readers can read too: the owner raises it when it
offers a slot and again before it gives the slot up, so a reader that still finds the offered generation after its last
byte has read the offered content.
"""

from __future__ import annotations

import base64
import binascii
import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..layouts import Shard
from ..pool import StatePool
from .checksum import checksums
from .layout import LayoutMismatch, PoolLayout
from .nixl import load_nixl, new_agent, nixl_errors
from .offer import Offer
from .pull import Peer, Pull, TransferError

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Settled:
    """An offer that has ended; its slots are back in the pool.

    Attributes:
        offer: which.
        pulled: True if every reader confirmed; False if the lease ran out first (a reader failed, or a notification was
            lost).
    """

    offer: Offer
    pulled: bool


@dataclass(slots=True)
class _Standing:
    """An offer that readers may still pull."""

    offer: Offer
    readers: int
    deadline: float
    confirmed: set[str] = field(default_factory=set)


class TransferAgent:
    """A pool made readable to others, and the means to read theirs.

    Args:
        name: unique among the agents that meet.
        pool: the rank's pool. All its memory is registered with NIXL until :meth:`close`.
        shard: which heads of how many the pool holds; None: all.
        lease: seconds for which an offer stands without all readers' confirmation.
        timeout: seconds without progress after which a read counts as failed.

    Not thread-safe; the pool is touched only inside calls.

    Raises:
        ImportError: NIXL is not installed.
        ValueError: the pool has no describable layout.
    """

    def __init__(
        self,
        name: str,
        pool: StatePool,
        shard: Shard | None = None,
        *,
        lease: float = 60.0,
        timeout: float = 30.0,
    ) -> None:
        nixl = load_nixl()
        self.name = name
        self.pool = pool
        self.layout = PoolLayout.of(pool, shard)
        self.lease = lease
        self.timeout = timeout
        self.errors = nixl_errors(nixl)
        self.nixl: Any = new_agent(nixl, name)
        device = pool.layer(0).state.device
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # a new pool's zeros must not come after what is read into it
        self.memory = ("VRAM", device.index or 0) if device.type == "cuda" else ("DRAM", 0)
        self._generations: NDArray[np.int64] = np.zeros(pool.slots, np.int64)
        self._registered = [
            self.register(_allocations(pool), self.memory),
            self.register([(self._generations.ctypes.data, self._generations.nbytes)], ("DRAM", 0)),
        ]
        self._peers: dict[str, Peer] = {}
        self._standing: dict[int, _Standing] = {}
        self._offers = 0
        self._stuck: list[Pull] = []

    def register(self, regions: Sequence[tuple[int, int]], memory: tuple[str, int]) -> Any:
        """Register ``(address, bytes)`` regions with NIXL; returns its handle."""
        kind, device = memory
        return self.nixl.register_memory([(address, size, device, "") for address, size in regions], kind)

    def handshake(self) -> str:
        """What a peer needs in order to read from this agent: the pool's layout and NIXL's connection data, as JSON."""
        return json.dumps(
            {
                "agent": self.name,
                "layout": json.loads(self.layout.to_json()),
                "memory": self.memory,
                "generations": self._generations.ctypes.data,
                "nixl": base64.b64encode(self.nixl.get_agent_metadata()).decode(),
            }
        )

    def connect(self, handshake: str) -> str:
        """Meet a peer, in order to pull from it.

        Args:
            handshake: what the peer's :meth:`handshake` gave. A peer of a known name takes that one's place.

        Returns:
            The peer's name.

        Raises:
            LayoutMismatch: its pool does not fit this one; the text names each difference. Nothing was connected.
            TransferError: NIXL cannot reach it.
        """
        try:
            fields = json.loads(handshake)
            name = str(fields["agent"])
            layout = PoolLayout.from_json(json.dumps(fields["layout"]))
            kind, device = fields["memory"]
            generations = int(fields["generations"])
            metadata = base64.b64decode(fields["nixl"], validate=True)
        except LayoutMismatch:
            raise
        except (ValueError, TypeError, KeyError, RecursionError, binascii.Error) as error:
            raise LayoutMismatch(f"handshake: expected what a TransferAgent gives, got {handshake[:40]!r}") from error
        self.layout.require_peer(layout)
        if layout.kind != self.layout.kind:
            raise LayoutMismatch(
                f"the peer's pool does not fit: kind: expected {self.layout.kind}, got {layout.kind}; between the two "
                "every element of a window is a range of its own, so give both pools one layout"
            )
        if name == self.name:
            raise LayoutMismatch(f"handshake: expected another agent's, got {name}'s own")
        try:
            if name in self._peers:
                self.nixl.remove_remote_agent(name)
                del self._peers[name]
            self.nixl.add_remote_agent(metadata)
        except self.errors as error:
            raise TransferError(f"{name} cannot be reached: {error}") from error
        self._peers[name] = Peer(name, layout, (str(kind), int(device)), generations, metadata)
        return name

    def peer(self, name: str) -> Peer:
        """A connected peer.

        Raises:
            TransferError: there is none of this name.
        """
        if name not in self._peers:
            raise TransferError(f"offer: {name} is not connected (connected: {', '.join(self._peers) or 'none'})")
        return self._peers[name]

    def offer(self, slots: Sequence[int], *, readers: int = 1) -> Offer:
        """Let readers pull slots. The agent owns them from here on and frees them when the offer has ended.

        Args:
            slots: allocated slots, each once, whose last step has been launched. Waits for the current stream.
            readers: how many agents will pull: decode ranks that share this rank's heads.

        Returns:
            The offer, to be sent to the readers by whatever carries the request.

        Raises:
            ValueError: there is no slot, or one is not allocated, or is offered already or named twice.
        """
        if not slots or len(set(slots)) != len(slots):
            raise ValueError(f"slots: expected at least one, each once, got {list(slots)}")
        offered = {slot for standing in self._standing.values() for slot in standing.offer.slots}
        for slot in slots:
            if slot not in self.pool.allocated or slot in offered:
                raise ValueError(f"slots: expected allocated slots that are not offered yet, got {slot}")
        sums = checksums(self.pool, slots)
        self._generations[list(slots)] += 1
        generations = tuple(self._generations[list(slots)].tolist())
        self._offers += 1
        offer = Offer(self.name, self._offers, tuple(slots), generations, sums)
        self._standing[offer.number] = _Standing(offer, readers, time.monotonic() + self.lease)
        return offer

    def collect(self) -> list[Settled]:
        """Take readers' confirmations, and end the offers that all readers have pulled or whose lease is over.

        To be called now and then; between calls, offers stay as they are.
        """
        for reader, messages in self.nixl.get_new_notifs().items():
            for message in messages:
                number = message.removeprefix(b"pulled ")
                standing = self._standing.get(int(number)) if number.isdigit() else None
                if standing is None:
                    _log.warning("%s: %r from %s names no standing offer", self.name, message, reader)
                else:
                    standing.confirmed.add(reader)
        settled = []
        for standing in list(self._standing.values()):
            pulled = len(standing.confirmed) >= standing.readers
            if pulled or time.monotonic() >= standing.deadline:
                self.withdraw(standing.offer)
                settled.append(Settled(standing.offer, pulled))
        return settled

    def withdraw(self, offer: Offer) -> None:
        """End an offer and free its slots. A reader that is still at it finds out and discards what it has read."""
        del self._standing[offer.number]
        self._generations[list(offer.slots)] += 1  # before the slots can be written again
        for slot in offer.slots:
            self.pool.free(slot)

    def start_pull(self, offers: Sequence[Offer]) -> Pull:
        """Begin to read slots into fresh slots of this pool; see :class:`Pull` for the rest.

        Args:
            offers: of the same sequences in the same order, one from each peer that has some of this rank's heads.

        Raises:
            TransferError: a peer is not connected, or the offers do not cover this rank's heads exactly once.
            PoolFullError: this pool has too few free slots.
        """
        self._stuck = [pull for pull in self._stuck if not pull.release()]
        return Pull(self, offers)

    def pull(self, offers: Sequence[Offer], *, progress: Callable[[int, int], None] | None = None) -> list[int]:
        """Read slots and wait for them: :meth:`start_pull` and :meth:`Pull.wait`.

        Args:
            offers: as for :meth:`start_pull`.
            progress: called with (bytes done, bytes in all) as they come.

        Returns:
            The slots of this pool, in the order of the offers'; checked against the owners' checksums.

        Raises:
            TransferError: it failed, and once more after a retry, or what was read is not what was offered. The slots
                have been zeroed and freed.
        """
        return self.start_pull(offers).wait(progress)

    def hold(self, pull: Pull) -> None:
        """Keep a failed pull whose reads NIXL could not cancel yet; its slots stay taken until it can."""
        self._stuck.append(pull)

    def reconnect(self, peer: Peer) -> None:
        """Drop the connection to a peer and make it anew.

        Raises:
            TransferError: NIXL cannot reach it.
        """
        try:
            self.nixl.remove_remote_agent(peer.name)
            self.nixl.add_remote_agent(peer.metadata)
        except self.errors as error:
            raise TransferError(f"{peer.name} cannot be reached again: {error}") from error

    def close(self) -> None:
        """Withdraw all offers and let go of the pool's memory. The agent is of no use afterwards."""
        for standing in list(self._standing.values()):
            self.withdraw(standing.offer)
        self._stuck = [pull for pull in self._stuck if not pull.release()]
        for name in self._peers:
            try:
                self.nixl.remove_remote_agent(name)
            except self.errors as error:  # the peer may be gone already
                _log.info("%s: %s was disconnected before: %s", self.name, name, error)
        self._peers.clear()
        for handle in self._registered:
            self.nixl.deregister_memory(handle)
        self._registered.clear()


def _allocations(pool: StatePool) -> list[tuple[int, int]]:
    """Every allocation behind a pool, once: ``(address, bytes)``. Two views of one page are one allocation."""
    found = {}
    for index in range(pool.layers):
        for view in pool.layer(index)[:2]:
            storage = view.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return list(found.items())
