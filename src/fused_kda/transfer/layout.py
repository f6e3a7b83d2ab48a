"""What one rank's pool looks like in memory, as it is told to a peer before any byte moves.

A :class:`PoolLayout` says where every (section, head, channel, tap) and every state row of each slot and layer lies.
Two ranks exchange theirs as JSON (:meth:`PoolLayout.to_json`); from the pair, :func:`fused_kda.transfer.plan` derives
the byte ranges to copy. Nothing here touches a device or moves data.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..layouts import LAYOUTS, ConvLayout, LayoutKind, Shard, detect_conv_layout
from ..pool import LayerPool, StatePool

#: Of the handshake. Raised when the meaning of a field changes; a peer of another version is refused.
VERSION = 1
DTYPES = {str(t).removeprefix("torch."): t for t in (torch.bfloat16, torch.float16, torch.float32, torch.float64)}


class LayoutMismatch(ValueError):
    """Two pools that cannot exchange slots: the text names every field that differs. No byte has moved."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where one layer's conv windows, or its states, lie.

    Attributes:
        offset: bytes from the layout's origin to slot 0. For a live pool the origin is address 0: it is an address.
        pitch: bytes from one slot to the next.
    """

    offset: int
    pitch: int


@dataclass(frozen=True, slots=True)
class PoolLayout:
    """One tensor-parallel rank's pool.

    Attributes:
        shard: all heads of the model's layer, head dim, and which rank of how many this pool belongs to.
        kind: "SD" or "DS".
        conv_width: W; W - 1 taps are in use.
        taps: history rows per channel that the pool keeps, spare ones included.
        conv_dtype, state_dtype: names as in torch, e.g. "bfloat16".
        slots: pool size, reserved slots included.
        null_slot: slots up to this one hold no sequence.
        conv, state: one placement per layer.
        version: of this description.

    Raises:
        ValueError: a field is out of range, or slots would overlap.
    """

    shard: Shard
    kind: LayoutKind
    conv_width: int
    taps: int
    conv_dtype: str
    state_dtype: str
    slots: int
    null_slot: int
    conv: tuple[Placement, ...]
    state: tuple[Placement, ...]
    version: int = VERSION

    def __post_init__(self) -> None:
        if self.kind not in LAYOUTS:
            raise ValueError(f"kind: expected one of {', '.join(LAYOUTS)}, got {self.kind!r}")
        for name, dtype in (("conv_dtype", self.conv_dtype), ("state_dtype", self.state_dtype)):
            if dtype not in DTYPES:
                raise ValueError(f"{name}: expected one of {', '.join(DTYPES)}, got {dtype!r}")
        if self.conv_width < 2 or self.taps < self.conv_width - 1:
            raise ValueError(f"taps: expected >= conv_width - 1 >= 1, got {self.taps} taps, width {self.conv_width}")
        if self.slots < self.null_slot + 2:
            raise ValueError(f"slots: expected > {self.null_slot + 1}, got {self.slots}")
        if not self.conv or len(self.conv) != len(self.state):
            raise ValueError(
                f"layers: expected one conv and one state each, got {len(self.conv)} and {len(self.state)}"
            )
        for name, placements, least in (("conv", self.conv, self.conv_bytes), ("state", self.state, self.state_bytes)):
            for layer, place in enumerate(placements):
                if place.offset < 0 or place.pitch < least or place.offset + self.slots * place.pitch >= 2**63:
                    raise ValueError(
                        f"{name}[{layer}]: expected offset >= 0 and pitch >= {least} bytes, within 63 bits, got {place}"
                    )

    @classmethod
    def of(cls, pool: StatePool | Sequence[LayerPool], shard: Shard | None = None) -> PoolLayout:
        """Describe a live pool. Reads shapes, strides and addresses; no data.

        Args:
            pool: a pool, or each layer's views as an engine has them. A view's strides do not show the spare taps of SD
                storage, so they are not counted (and not transferred).
            shard: which heads of how many these are; None: all of them.

        Raises:
            ValueError: layers differ from each other, are neither SD nor DS, or do not fit the shard.
        """
        layers = [pool.layer(i) for i in range(pool.layers)] if isinstance(pool, StatePool) else list(pool)
        if not layers:
            raise ValueError("pool: expected at least one layer, got none")
        first = layers[0]
        slots, heads, head_dim, _ = first.state.shape
        shard = Shard(heads, head_dim, 1, 0) if shard is None else shard
        if (shard.local_heads, shard.head_dim) != (heads, head_dim):
            raise ValueError(
                f"shard: expected {heads} heads of {head_dim} on this rank, got {shard.local_heads} of {shard.head_dim}"
            )
        conv = detect_conv_layout(first.conv_state.shape, first.conv_state.stride())
        if conv is None or conv.channels != 3 * heads * head_dim:
            raise ValueError(
                f"conv_state: expected an SD or DS view [slots, {3 * heads * head_dim}, W-1], got shape "
                f"{list(first.conv_state.shape)} with strides {list(first.conv_state.stride())}"
            )
        for index, layer in enumerate(layers):
            if _signature(layer) != _signature(first):
                raise ValueError(f"pool: expected layers of one kind, but layer {index} differs from layer 0")
            if layer.state.stride()[1:] != (head_dim * head_dim, head_dim, 1):
                raise ValueError(f"state: expected each slot dense, got strides {list(layer.state.stride())}")
        return cls(
            shard=shard,
            kind=conv.kind,
            conv_width=first.conv_state.shape[2] + 1,
            taps=conv.taps,
            conv_dtype=str(first.conv_state.dtype).removeprefix("torch."),
            state_dtype=str(first.state.dtype).removeprefix("torch."),
            slots=slots,
            null_slot=first.null_slot,
            conv=tuple(_placement(layer.conv_state) for layer in layers),
            state=tuple(_placement(layer.state) for layer in layers),
        )

    @property
    def layers(self) -> int:
        return len(self.conv)

    @property
    def conv_layout(self) -> ConvLayout:
        """Of this rank's channels."""
        return ConvLayout(self.kind, 3 * self.shard.local_heads * self.shard.head_dim, self.taps)

    @property
    def conv_itemsize(self) -> int:
        return DTYPES[self.conv_dtype].itemsize

    @property
    def state_itemsize(self) -> int:
        return DTYPES[self.state_dtype].itemsize

    @property
    def conv_bytes(self) -> int:
        """Bytes of one slot's window in one layer, spare taps included."""
        return self.conv_layout.elements * self.conv_itemsize

    @property
    def state_bytes(self) -> int:
        """Bytes of one slot's state in one layer."""
        return self.shard.local_heads * self.shard.head_dim**2 * self.state_itemsize

    @property
    def page_shared(self) -> bool:
        """Window and state of a slot lie in one page, in every layer."""
        return all(
            c.pitch == s.pitch and 0 < s.offset - c.offset < c.pitch for c, s in zip(self.conv, self.state, strict=True)
        )

    def __str__(self) -> str:
        rank = f"tp {self.shard.size} rank {self.shard.rank}"
        return f"{self.kind}, {self.taps} taps, {self.conv_dtype} / {self.state_dtype}, {rank}"

    def require_peer(self, peer: PoolLayout) -> None:
        """Check that slots of ``peer`` mean the same as slots of this pool: same model, same element types.

        Tensor-parallel sizes, SD or DS, spare taps, pool sizes and page sharing may differ: :func:`plan` maps between
        them.

        Raises:
            LayoutMismatch: some do not; the text names them all.
        """
        problems = [
            f"{name}: expected {mine}, got {theirs}"
            for name, mine, theirs in (
                ("version", self.version, peer.version),
                ("layers", self.layers, peer.layers),
                ("heads", self.shard.heads, peer.shard.heads),
                ("head_dim", self.shard.head_dim, peer.shard.head_dim),
                ("conv_width", self.conv_width, peer.conv_width),
                ("conv_dtype", self.conv_dtype, peer.conv_dtype),
                ("state_dtype", self.state_dtype, peer.state_dtype),
            )
            if mine != theirs
        ]
        if problems:
            raise LayoutMismatch("the peer's pool does not fit: " + "; ".join(problems))

    def to_json(self) -> str:
        """The handshake form. :meth:`from_json` gives an equal layout."""
        return json.dumps(
            {
                "version": self.version,
                "heads": self.shard.heads,
                "head_dim": self.shard.head_dim,
                "tp_size": self.shard.size,
                "tp_rank": self.shard.rank,
                "kind": self.kind,
                "conv_width": self.conv_width,
                "taps": self.taps,
                "conv_dtype": self.conv_dtype,
                "state_dtype": self.state_dtype,
                "slots": self.slots,
                "null_slot": self.null_slot,
                "conv": [[place.offset, place.pitch] for place in self.conv],
                "state": [[place.offset, place.pitch] for place in self.state],
            }
        )

    @classmethod
    def from_json(cls, text: str) -> PoolLayout:
        """Read a peer's layout. The text comes from another machine and is trusted in nothing.

        Raises:
            LayoutMismatch: another version, a missing or unknown field, a wrong type, or values that contradict.
        """
        try:
            fields = json.loads(text)
        except (json.JSONDecodeError, RecursionError) as error:
            raise LayoutMismatch(f"handshake: expected JSON, got {text[:40]!r}") from error
        if not isinstance(fields, dict) or fields.get("version") != VERSION:
            version = fields.get("version") if isinstance(fields, dict) else None
            raise LayoutMismatch(f"version: expected {VERSION}, got {version!r}")
        integers = ("heads", "head_dim", "tp_size", "tp_rank", "conv_width", "taps", "slots", "null_slot")
        texts = ("kind", "conv_dtype", "state_dtype")
        expected = {"version", *integers, *texts, "conv", "state"}
        if fields.keys() != expected:
            raise LayoutMismatch(f"handshake: missing or unknown fields {sorted(fields.keys() ^ expected)}")
        for name in integers:
            if type(fields[name]) is not int:
                raise LayoutMismatch(f"{name}: expected an integer, got {fields[name]!r}")
        for name in texts:
            if type(fields[name]) is not str:
                raise LayoutMismatch(f"{name}: expected a text, got {fields[name]!r}")
        try:
            return cls(
                shard=Shard(fields["heads"], fields["head_dim"], fields["tp_size"], fields["tp_rank"]),
                kind=fields["kind"],
                conv_width=fields["conv_width"],
                taps=fields["taps"],
                conv_dtype=fields["conv_dtype"],
                state_dtype=fields["state_dtype"],
                slots=fields["slots"],
                null_slot=fields["null_slot"],
                conv=_placements("conv", fields["conv"]),
                state=_placements("state", fields["state"]),
            )
        except LayoutMismatch:
            raise
        except ValueError as error:
            raise LayoutMismatch(f"handshake: {error}") from error


def _signature(layer: LayerPool) -> tuple[Any, ...]:
    """What all layers of one pool have in common. Slot strides may differ."""
    conv, state = layer.conv_state, layer.state
    return conv.shape, conv.stride()[1:], conv.dtype, state.shape, state.dtype, layer.null_slot


def _placement(view: torch.Tensor) -> Placement:
    return Placement(view.data_ptr(), view.stride(0) * view.element_size())


def _placements(name: str, rows: object) -> tuple[Placement, ...]:
    if not isinstance(rows, list):
        raise LayoutMismatch(f"{name}: expected a list of [offset, pitch], got {rows!r}")
    for row in rows:
        if not (isinstance(row, list) and len(row) == 2 and all(type(value) is int for value in row)):
            raise LayoutMismatch(f"{name}: expected [offset, pitch] in bytes, got {row!r}")
    return tuple(Placement(*row) for row in rows)
