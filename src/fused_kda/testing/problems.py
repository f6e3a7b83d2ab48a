"""Whole calls of the op, drawn from a seed, in memory that bites.

:class:`Draw` says what is wanted; :func:`draw` makes it. Pools carry guard elements between slots, unnamed slots and
padding hold NaN, ``out`` is poisoned with NaN: whatever reads or writes beyond its own is seen. Values are ordinary
unless :mod:`.extremes` are asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from ..api import fused_kda_decode
from ..contract import DecodeProblem, decode_problem
from ..layouts import ConvLayout, LayoutKind, PageLayout, conv_view
from .extremes import EXTREMES, poison

WeightForm = Literal["planes", "checkpoint", "checkpoint_3d"]
RowForm = Literal["[1,B,H,D]", "[B,H,D]", "[B,P]"]
ROW_FORMS: tuple[RowForm, ...] = ("[1,B,H,D]", "[B,H,D]", "[B,P]")


@dataclass(frozen=True, slots=True)
class Draw:
    """What call to draw.

    Attributes:
        batch, heads, head_dim, conv_width: B, H, D, W.
        slots: pool size; 0 means enough for the live rows, one reserved and two unnamed.
        layout, spare_taps: of the conv pool; spare taps are for DS.
        page_shared: conv and state in one page.
        guard: elements between slots beyond the dense size (pages: units of ``page_unit`` bytes).
        page_unit: pages are a multiple of so many bytes; at least the larger element size.
        pool_offset: elements of its dtype by which each pool begins late in its buffer (not for pages).
        dtype, state_dtype, weight_dtype, bias_dtype, norm_dtype: element types; None leaves bias or norm out.
        weight_form: "planes" ``[3, W, P]``, "checkpoint" ``[3P, W]`` or "checkpoint_3d" ``[3P, 1, W]``.
        index_dtype, index_stride: of state_indices.
        lower_bound: None for the softplus gate.
        null_slot: policy, 0 or -1.
        null_rows: rows that get an index which is null under the policy (in turn null_slot, a large negative one, and
            two beyond the pool), with NaN in all their inputs.
        reserved: all of them get null_slot instead.
        mask: give has_initial_state, False for every other live row, whose slots then hold NaN.
        sliced: x, output_gate and raw_beta are column slices of one wide buffer, beta at an odd element.
        row_form: shape of raw_g; out and output_gate have the next one of the three.
        row_offset, row_gap: elements before the first row and between the rows of raw_g and out (and of x, output_gate
            and raw_beta, if not sliced).
        norm_eps, scale, prefetch: as in the call, and left out of it where they are the op's defaults.
        extremes: names in :data:`.extremes.EXTREMES`; they are applied in turn.
        poison: a name in :data:`.extremes.POISON`: what of the last live row holds NaN and infinities.
        seed: of everything random.
    """

    batch: int = 3
    heads: int = 2
    head_dim: int = 128
    conv_width: int = 4
    slots: int = 0
    layout: LayoutKind = "SD"
    spare_taps: int = 0
    page_shared: bool = False
    guard: int = 16
    page_unit: int = 16
    pool_offset: int = 0
    dtype: torch.dtype = torch.bfloat16
    state_dtype: torch.dtype = torch.float32
    weight_dtype: torch.dtype = torch.float32
    bias_dtype: torch.dtype | None = None
    norm_dtype: torch.dtype | None = torch.float32
    weight_form: WeightForm = "planes"
    index_dtype: torch.dtype = torch.int32
    index_stride: int = 1
    lower_bound: float | None = -5.0
    null_slot: int = 0
    null_rows: tuple[int, ...] = ()
    reserved: bool = False
    mask: bool = False
    sliced: bool = False
    row_form: RowForm = "[1,B,H,D]"
    row_offset: int = 0
    row_gap: int = 0
    norm_eps: float = 1e-5
    scale: float | None = None
    prefetch: bool = False
    extremes: tuple[str, ...] = ()
    poison: str | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Call:
    """One drawn call.

    Attributes:
        arguments: what :func:`fused_kda.fused_kda_decode` takes, by name, without ``backend``.
        live: rows that are live, ascending.
        slots: their slots.
    """

    arguments: dict[str, Any]
    live: tuple[int, ...]
    slots: tuple[int, ...]

    @property
    def problem(self) -> DecodeProblem:
        return decode_problem(**self.arguments)

    def run(self, backend: str, **changes: Any) -> torch.Tensor:
        """Run the op on this call's own tensors (the pools advance) and return ``out``."""
        return fused_kda_decode(**{**self.arguments, **changes}, backend=backend)

    def clone(self) -> Call:
        """The same call on copies of every underlying buffer; views that share a buffer still do."""
        copies: dict[int, torch.Tensor] = {}

        def copy(tensor: Any) -> Any:
            if not isinstance(tensor, torch.Tensor):
                return tensor
            base = _bytes(tensor)
            if base.data_ptr() not in copies:
                copies[base.data_ptr()] = base.clone()
            fresh = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            fresh.set_(
                copies[base.data_ptr()].untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()
            )
            return fresh

        return replace(self, arguments={name: copy(value) for name, value in self.arguments.items()})

    def touched_elsewhere(self, before: Call) -> list[str]:
        """Which arguments' buffers changed, against ``before`` (a clone), where the op must not write.

        Allowed are the live rows' slots of the two pools, and ``out``'s elements. Compared byte by byte, padding and
        guards included.
        """
        faults = []
        for name, now in self.arguments.items():
            then = before.arguments[name]
            if not isinstance(now, torch.Tensor):
                continue
            changed = _bytes(now) != _bytes(then)
            for written in ("conv_state", "state", "out"):
                target = self.arguments[written]
                if target is not None and _bytes(target).data_ptr() == _bytes(now).data_ptr():
                    changed &= ~_covered(target, None if written == "out" else self.slots)
            if bool(changed.any()):
                faults.append(f"{name}: {int(changed.sum())} bytes, first at {int(changed.nonzero()[0])}")
        return faults


def draw(wanted: Draw, device: torch.device | str = "cpu") -> Call:
    """Draw a call. Values are drawn on the CPU, so they are the same on every device."""
    generator = torch.Generator().manual_seed(wanted.seed)
    batch, heads, dim, width = wanted.batch, wanted.heads, wanted.head_dim, wanted.conv_width
    inner = heads * dim
    null_rows = set(wanted.null_rows)
    live = tuple(row for row in range(batch) if row not in null_rows)
    first = wanted.null_slot + 1
    slots = wanted.slots or first + len(live) + 2
    if slots < first + len(live):
        raise ValueError(f"slots: expected at least {first + len(live)} for the live rows, got {slots}")

    def normal(*shape: int, dtype: torch.dtype, std: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * std).to(dtype)

    def rows(columns: int, std: float = 1.0) -> torch.Tensor:
        """``[batch, columns]`` in a buffer with the wanted gaps, which hold NaN."""
        values = normal(batch, columns, dtype=wanted.dtype, std=std)
        return _spaced(values, wanted.row_offset, wanted.row_gap)

    order = torch.randperm(slots - first, generator=generator)[: len(live)] + first
    named = tuple(order.tolist())
    indices = torch.full((batch, wanted.index_stride), first, dtype=wanted.index_dtype)
    nulls = (wanted.null_slot,) if wanted.reserved else (wanted.null_slot, -(2**31), slots, slots + 7)
    for number, row in enumerate(wanted.null_rows):
        indices[row, 0] = nulls[number % len(nulls)]
    indices[list(live), 0] = order.to(wanted.index_dtype)

    conv, state = _pools(wanted, slots)
    started = [not wanted.mask or number % 2 == 0 for number in range(len(live))]
    for slot, usable in zip(named, started, strict=True):
        if usable:
            conv[slot] = normal(3 * inner, width - 1, dtype=wanted.dtype)
            state[slot] = normal(heads, dim, dim, dtype=wanted.state_dtype, std=0.3)

    beta_first = 4 * inner + 1
    columns = beta_first + heads + 3 if wanted.sliced else 0
    wide = normal(batch, columns, dtype=wanted.dtype)
    x = wide[:, : 3 * inner] if wanted.sliced else rows(3 * inner)
    gate = wide[:, 3 * inner : 4 * inner] if wanted.sliced else rows(inner)
    beta = wide[:, beta_first : beta_first + heads] if wanted.sliced else rows(heads)
    raw_g = rows(inner, std=2.0)
    for tensor in (x, gate, beta, raw_g):
        tensor[list(wanted.null_rows)] = float("nan")

    planes = normal(3, width, inner, dtype=wanted.weight_dtype, std=0.5)
    flat = planes.transpose(1, 2).reshape(3 * inner, width).contiguous()
    weight = {"planes": planes, "checkpoint": flat, "checkpoint_3d": flat.unsqueeze(1)}[wanted.weight_form]
    mask = torch.ones(batch, dtype=torch.bool)
    for row, usable in zip(live, started, strict=True):
        mask[row] = usable
    param = torch.float64 if wanted.dtype == torch.float64 else torch.float32
    out = _spaced(torch.full((batch, inner), float("nan"), dtype=wanted.dtype), wanted.row_offset, wanted.row_gap)
    other = ROW_FORMS[(ROW_FORMS.index(wanted.row_form) + 1) % len(ROW_FORMS)]
    arguments: dict[str, Any] = {
        "x": x,
        "weight": weight,
        "bias": normal(3 * inner, dtype=wanted.bias_dtype, std=0.2) if wanted.bias_dtype else None,
        "conv_state": conv,
        "raw_g": _formed(raw_g, wanted.row_form, heads),
        "raw_beta": beta,
        "A_log": normal(heads, dtype=param, std=0.5),
        "dt_bias": normal(inner, dtype=param),
        "state_indices": indices[:, 0],
        "state": state,
        "out": _formed(out, other, heads),
        "output_gate": _formed(gate, other, heads) if wanted.norm_dtype else None,
        "norm_weight": normal(dim, dtype=wanted.norm_dtype) if wanted.norm_dtype else None,
        "has_initial_state": mask if wanted.mask else None,
        "lower_bound": wanted.lower_bound,
        "null_slot": wanted.null_slot,
    }
    scalars = {"norm_eps": wanted.norm_eps, "scale": wanted.scale, "prefetch": wanted.prefetch}
    arguments.update({name: value for name, value in scalars.items() if value != getattr(Draw(), name)})
    usable_slots = [slot for slot, usable in zip(named, started, strict=True) if usable]
    for name in wanted.extremes:
        EXTREMES[name](arguments, list(live), usable_slots, generator)
    if wanted.poison is not None and live:
        poison(arguments, wanted.poison, live[-1], named[-1])
    return Call(_moved(arguments, torch.device(device)), live, named)


def _spaced(values: torch.Tensor, offset: int, gap: int) -> torch.Tensor:
    """The same ``[rows, columns]``, ``offset`` elements into a NaN-filled buffer, ``gap`` between the rows."""
    if offset == 0 and gap == 0:
        return values
    count, columns = values.shape
    buffer = torch.full((offset + count * (columns + gap),), float("nan"), dtype=values.dtype)
    view = buffer[offset:].view(count, columns + gap)[:, :columns]
    view.copy_(values)
    return view


def _formed(rows: torch.Tensor, form: RowForm, heads: int) -> torch.Tensor:
    """A view of ``[B, P]`` in one of the forms that the contract allows."""
    if form == "[B,P]":
        return rows
    shaped: torch.Tensor = rows.unflatten(1, (heads, rows.shape[1] // heads))  # type: ignore[no-untyped-call]
    return shaped.unsqueeze(0) if form == "[1,B,H,D]" else shaped


def _pools(wanted: Draw, slots: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Both pools, every byte of every slot and guard a NaN."""
    heads, dim, window = wanted.heads, wanted.head_dim, wanted.conv_width - 1
    layout = ConvLayout(wanted.layout, 3 * heads * dim, window + wanted.spare_taps)
    if wanted.page_shared:
        page = PageLayout(layout, wanted.dtype, wanted.state_dtype, heads, dim)
        least = -(-page.page_bytes // wanted.page_unit) * wanted.page_unit
        page = replace(page, page_bytes=least + wanted.page_unit * wanted.guard)
        return page.views(torch.full((slots, page.page_bytes), 0xFF, dtype=torch.uint8), window)
    dense = heads * dim * dim

    def pool(elements: int, dtype: torch.dtype) -> torch.Tensor:
        pitch = elements + wanted.guard
        storage = torch.full((wanted.pool_offset + slots * pitch,), float("nan"), dtype=dtype)
        return storage[wanted.pool_offset :].view(slots, pitch)[:, :elements]

    conv = pool(layout.elements, wanted.dtype).unflatten(1, layout.storage_shape)  # type: ignore[no-untyped-call]
    return conv_view(conv, layout, window), pool(dense, wanted.state_dtype).view(slots, heads, dim, dim)


def _moved(arguments: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Arguments on another device: buffers move whole, so strides and sharing stay."""
    moved: dict[int, torch.Tensor] = {}

    def move(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.device == device:
            return value
        base = _bytes(value)
        if base.data_ptr() not in moved:
            moved[base.data_ptr()] = base.to(device)
        fresh = torch.empty(0, dtype=value.dtype, device=device)
        fresh.set_(moved[base.data_ptr()].untyped_storage(), value.storage_offset(), value.shape, value.stride())
        return fresh

    return {name: move(value) for name, value in arguments.items()}


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The whole buffer under a tensor, as bytes."""
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return flat.set_(tensor.untyped_storage())


def _covered(tensor: torch.Tensor, slots: tuple[int, ...] | None) -> torch.Tensor:
    """Bool per byte of the tensor's buffer: whether it belongs to the tensor (in the given slots only, if given)."""
    marks = torch.zeros_like(_bytes(tensor))
    whole = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize]
    view = torch.empty(0, dtype=whole, device=tensor.device)
    view.set_(marks.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
    if slots is None:
        view.fill_(-1)
    else:
        view[list(slots)] = -1
    return marks != 0
