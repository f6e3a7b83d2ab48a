"""Pools of conv windows and recurrent states: many layers, one set of slots.

A slot is one sequence's place in every layer. The pool hands slots out and takes them back; only the op and prefill
write what lies in them.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, overload

import torch

from . import debug
from .contract import ACTIVATION_DTYPES
from .layouts import LAYOUTS, ConvLayout, LayoutKind, PageLayout, conv_view

STATE_DTYPES = (torch.float32, torch.bfloat16, torch.float64)


class PoolFullError(RuntimeError):
    """More slots were asked for than are free. Nothing was allocated."""


class LayerPool(NamedTuple):
    """One layer's pools in the op's form.

    Attributes:
        conv_state: ``[slots, 3P, W-1]`` view, SD or DS.
        state: ``[slots, H, D(V), D(K)]`` view, K contiguous.
        null_slot: indices up to this one name no slot (0: slot 0 is reserved; -1: all slots are usable).
    """

    conv_state: torch.Tensor
    state: torch.Tensor
    null_slot: int


@dataclass(slots=True)
class _Step:
    """A step whose launches may not have run yet."""

    slots: frozenset[int]
    launched: bool = False
    event: torch.cuda.Event | None = None

    @property
    def finished(self) -> bool:
        return self.launched and (self.event is None or bool(self.event.query()))  # type: ignore[no-untyped-call]


class StatePool:
    """Conv windows and recurrent states of ``layers`` KDA layers for ``slots`` sequences.

    Args:
        layers: number of KDA layers. Each has storage of its own.
        slots: pool size, the reserved slot included.
        heads: H, heads on this rank.
        head_dim: D.
        conv_width: W; the pool keeps W - 1 taps.
        layout: "SD" or "DS", see :mod:`fused_kda.layouts`.
        spare_taps: history rows per channel beyond W - 1, as engines keep for speculation. The op does not use them.
        page_shared: conv and state of a slot lie in one page (equal byte pitch), as in vLLM's pools.
        conv_dtype: dtype of the layer's activations.
        state_dtype: float32 or bfloat16 (float64 for float64 activations).
        null_slot: 0 reserves slot 0 (vLLM, FlashInfer), -1 keeps it usable (SGLang, fla).
        device: where the storage lives.

    A new pool is zero. A slot that is freed keeps its bytes: the request that gets it next must start with
    ``has_initial_state`` False, or call :meth:`reset`. Not thread-safe.

    A slot that somebody distrusts is kept out of circulation by :meth:`quarantine`, with its bytes, until
    :meth:`release`.

    Lifetime of a slot: what lists a slot for later (a step that is queued or running) says so with :meth:`step`, and a
    freed slot is handed out again only when no unfinished step lists it. Whoever writes a slot from outside the op's
    stream, as a transfer does, is safe by writing to freshly allocated slots alone.

    Raises:
        ValueError, TypeError: an argument out of its range; the text names it.
    """

    def __init__(
        self,
        layers: int,
        slots: int,
        heads: int,
        head_dim: int = 128,
        conv_width: int = 4,
        *,
        layout: LayoutKind = "SD",
        spare_taps: int = 0,
        page_shared: bool = False,
        conv_dtype: torch.dtype = torch.bfloat16,
        state_dtype: torch.dtype = torch.float32,
        null_slot: int = 0,
        device: torch.device | str | None = None,
    ) -> None:
        if null_slot not in (-1, 0):
            raise ValueError(
                f"null_slot: expected 0 (slot 0 is reserved) or -1 (all slots are usable), got {null_slot}"
            )
        least = {"layers": (layers, 1), "slots": (slots, null_slot + 2), "heads": (heads, 1), "head_dim": (head_dim, 1)}
        least |= {"conv_width": (conv_width, 2), "spare_taps": (spare_taps, 0)}
        for name, (value, bound) in least.items():
            if value < bound:
                raise ValueError(f"{name}: expected >= {bound}, got {value}")
        if layout not in LAYOUTS:
            raise ValueError(f"layout: expected one of {', '.join(LAYOUTS)}, got {layout!r}")
        for name, dtype, allowed in (
            ("conv_dtype", conv_dtype, ACTIVATION_DTYPES),
            ("state_dtype", state_dtype, STATE_DTYPES),
        ):
            if dtype not in allowed:
                raise TypeError(f"{name}: expected {' or '.join(map(str, allowed))}, got {dtype}")
        self.slots = slots
        self.null_slot = null_slot
        conv_layout = ConvLayout(layout, 3 * heads * head_dim, conv_width - 1 + spare_taps)
        self._layers: list[LayerPool] = []
        for index in range(layers):
            if page_shared:
                pages = PageLayout(conv_layout, conv_dtype, state_dtype, heads, head_dim)
                storage = torch.zeros(slots, pages.page_bytes, dtype=torch.uint8, device=device)
                conv_state, state = pages.views(storage, conv_width - 1)
            else:
                conv = torch.zeros(slots, *conv_layout.storage_shape, dtype=conv_dtype, device=device)
                conv_state = conv_view(conv, conv_layout, conv_width - 1)
                state = torch.zeros(slots, heads, head_dim, head_dim, dtype=state_dtype, device=device)
            debug.label(state, f"layer {index}")
            self._layers.append(LayerPool(conv_state, state, null_slot))
        self._free = list(range(self.first_slot, slots))  # ascending, hence already a heap
        self._allocated: set[int] = set()
        self._retired: set[int] = set()  # freed while a step still listed them
        self._quarantined: dict[int, str] = {}  # with the reason
        self._steps: list[_Step] = []

    @property
    def layers(self) -> int:
        """Number of layers."""
        return len(self._layers)

    @property
    def first_slot(self) -> int:
        """The lowest usable slot."""
        return self.null_slot + 1

    @property
    def capacity(self) -> int:
        """Sequences that fit: all slots but the reserved one."""
        return self.slots - self.first_slot

    @property
    def free_slots(self) -> int:
        """Slots that :meth:`allocate` can still give."""
        self._collect()
        return len(self._free)

    @property
    def allocated(self) -> frozenset[int]:
        """Slots in use."""
        return frozenset(self._allocated)

    @property
    def quarantined(self) -> dict[int, str]:
        """Slots out of circulation, each with the reason that was given."""
        return dict(self._quarantined)

    def layer(self, index: int) -> LayerPool:
        """The pools of layer ``index`` in the op's form: views, no copy."""
        if not 0 <= index < len(self._layers):
            raise ValueError(f"index: expected 0 <= layer < {len(self._layers)}, got {index}")
        return self._layers[index]

    @overload
    def allocate(self) -> int: ...
    @overload
    def allocate(self, count: int) -> list[int]: ...
    def allocate(self, count: int | None = None) -> int | list[int]:
        """Take the lowest free slot, or the ``count`` lowest.

        Returns:
            The slot, or (with ``count``) a list of slots, ascending.

        Raises:
            PoolFullError: fewer are free; none is taken.
        """
        wanted = 1 if count is None else count
        if wanted < 0:
            raise ValueError(f"count: expected >= 0, got {wanted}")
        self._collect()
        if wanted > len(self._free):
            waiting = f"; {len(self._retired)} wait for a step to finish" if self._retired else ""
            waiting += f"; {len(self._quarantined)} are quarantined" if self._quarantined else ""
            raise PoolFullError(
                f"pool: {wanted} slots asked for, {len(self._free)} of {self.capacity} are free{waiting}"
            )
        taken = [heapq.heappop(self._free) for _ in range(wanted)]
        self._allocated.update(taken)
        return taken[0] if count is None else taken

    def free(self, slot: int) -> None:
        """Give a slot back. Its bytes stay, and so does the slot itself while an unfinished :meth:`step` lists it.

        Raises:
            ValueError: the slot does not exist, is the reserved one, or is free already.
        """
        self._check_allocated(slot)
        self._allocated.remove(slot)
        self._retired.add(slot)
        self._collect()

    def quarantine(self, slot: int, reason: str) -> None:
        """Keep a slot, free or allocated, out of circulation: it is handed out no more until :meth:`release`.

        For a slot that is suspected, by :class:`fused_kda.finite.FiniteCheck` or in debug mode. Its bytes stay as they
        are, to be looked at. Its sequence, if it has one, is over: the slot counts as allocated no longer.

        Args:
            slot: which.
            reason: why, for :attr:`quarantined` and for errors about the slot.

        Raises:
            ValueError: the slot does not exist, is the reserved one, or is quarantined already; there is no reason.
        """
        self._check_exists(slot)
        if slot in self._quarantined:
            raise ValueError(f"slot: expected one in circulation, got {slot}, which is {self._quarantine_of(slot)}")
        if not reason:
            raise ValueError("reason: expected some words, got none")
        self._allocated.discard(slot)
        self._retired.discard(slot)
        if slot in self._free:
            self._free.remove(slot)
            heapq.heapify(self._free)
        self._quarantined[slot] = reason

    def release(self, slot: int) -> None:
        """Return a quarantined slot to circulation, zeroed in every layer, as soon as no unfinished step lists it.

        Raises:
            ValueError: the slot is not quarantined.
        """
        if slot not in self._quarantined:
            raise ValueError(f"slot: expected a quarantined slot, got {slot}")
        self._zero(slot)
        del self._quarantined[slot]
        self._retired.add(slot)
        self._collect()

    @contextmanager
    def step(self, slots: Iterable[int]) -> Iterator[None]:
        """Around the launches of a step: its slots, even if freed meanwhile, are not handed out until it has finished.

        On a GPU a step has finished when the current stream has passed the end of the block (an event is recorded
        there, nothing waits); on the CPU, at the end of the block. An engine that queues a step to run it later enters
        the block when it queues.

        Args:
            slots: every slot that the step lists.
        """
        step = _Step(frozenset(slots))
        self._steps = [*self._unfinished(), step]
        try:
            yield
        finally:
            device = self._layers[0].state.device
            if device.type == "cuda":
                step.event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                step.event.record(torch.cuda.current_stream(device))
            step.launched = True

    def _unfinished(self) -> list[_Step]:
        return [step for step in self._steps if not step.finished]

    def _collect(self) -> None:
        """Hand back the retired slots that no unfinished step lists."""
        if not self._retired:
            return
        self._steps = self._unfinished()
        listed = frozenset[int]().union(*(step.slots for step in self._steps))
        for slot in self._retired - listed:
            self._retired.remove(slot)
            heapq.heappush(self._free, slot)

    def reset(self, slot: int) -> None:
        """Zero an allocated slot's window and state in every layer.

        Raises:
            ValueError: as for :meth:`free`.
        """
        self._check_allocated(slot)
        self._zero(slot)

    def not_finite(self, slot: int) -> list[int]:
        """The layers in which a slot's window or state holds a NaN or an infinity, ascending. Waits for the device.

        Raises:
            ValueError: the slot does not exist or is the reserved one.
        """
        self._check_exists(slot)
        sound = [torch.stack([t[slot].isfinite().all() for t in layer[:2]]).all() for layer in self._layers]
        return [index for index, one in enumerate(torch.stack(sound).tolist()) if not one]

    def _zero(self, slot: int) -> None:
        for layer in self._layers:
            layer.conv_state[slot].zero_()
            layer.state[slot].zero_()

    def _check_exists(self, slot: int) -> None:
        if not self.first_slot <= slot < self.slots:
            reserved = " (0 is reserved)" if slot == self.null_slot == 0 else ""
            raise ValueError(f"slot: expected {self.first_slot} <= slot < {self.slots}, got {slot}{reserved}")

    def _check_allocated(self, slot: int) -> None:
        self._check_exists(slot)
        if slot in self._quarantined:
            raise ValueError(f"slot: expected an allocated slot, got {slot}, which is {self._quarantine_of(slot)}")
        if slot not in self._allocated:
            raise ValueError(f"slot: expected an allocated slot, got {slot}, which is free (freed twice?)")

    def _quarantine_of(self, slot: int) -> str:
        return f"quarantined ({self._quarantined[slot]})"
