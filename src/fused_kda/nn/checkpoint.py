"""Loading and saving by the Hugging Face names of Kimi-Linear and Kimi-K3.

A checkpoint keeps q, k, v, gates and beta apart; the layer keeps them as rows of one merged weight. Name by name,
:func:`layer_entries` says where each tensor goes and which of the published shapes it may have:

* ``{q,k,v}_proj.weight [P, C]``, ``b_proj.weight [H, C]``, ``f_a_proj.weight [D, C]``, ``f_b_proj.weight [P, D]``,
  ``o_proj.weight [C, P]``;
* the output gate: ``g_proj.weight [P, C]`` (Kimi-K3), or ``g_a_proj.weight [D, C]`` and ``g_b_proj.weight [P, D]``
  (Kimi-Linear);
* ``{q,k,v}_conv1d.weight [P, 1, W]`` or ``[P, W]``;
* ``A_log``: ``[1, 1, H, 1]`` (Kimi-Linear), ``[H]``, or 1-D with zeros up to a multiple of 128 (Kimi-K3);
* ``dt_bias [P]``, ``o_norm.weight [D]``.

P = H * D, H counts all heads (also where a layer has one rank's share alone and loads that) and C is the hidden size.
Prefixes are e.g. ``model.layers.0.self_attn.`` (Kimi-Linear) and ``language_model.model.layers.0.self_attn.``
(Kimi-K3).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open

from .kda import KimiDeltaAttention

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
#: Kimi-K3 pads A_log with zeros to a multiple of this.
A_LOG_MULTIPLE = 128


class CheckpointError(ValueError):
    """A checkpoint does not fit: the text names every missing, unexpected and misshapen tensor. Nothing was loaded."""


@dataclass(frozen=True, slots=True)
class Entry:
    """Where one tensor of a checkpoint goes.

    Attributes:
        target: the parameter, or a view of some of its rows. Loading writes it (in its own dtype).
        shapes: shapes that the checkpoint's tensor may have; the first is the one that is saved. A 1-D shape longer
            than the target is the target with zeros after it.
        parts, part, axis: the target is one of ``parts`` equal parts of the checkpoint's tensor along the target's
            ``axis``: the share of one tensor-parallel rank.
    """

    target: torch.Tensor
    shapes: tuple[tuple[int, ...], ...]
    parts: int = 1
    part: int = 0
    axis: int = 0

    @property
    def elements(self) -> int:
        """Of the checkpoint's tensor, without zeros after it."""
        return self.target.numel() * self.parts

    def own_part(self, tensor: torch.Tensor) -> torch.Tensor:
        """The target's values in a checkpoint's tensor."""
        shape, length = list(self.target.shape), self.target.shape[self.axis]
        shape[self.axis] *= self.parts
        return tensor.flatten()[: self.elements].view(shape).narrow(self.axis, self.part * length, length)


def layer_entries(layer: KimiDeltaAttention, prefix: str = "") -> dict[str, Entry]:
    """Every tensor of one layer by its Hugging Face name."""
    hidden, shard, dim, width = layer.hidden_size, layer.shard, layer.head_dim, layer.conv_width
    heads, inner = shard.heads, shard.heads * dim

    def own(target: torch.Tensor, *shapes: tuple[int, ...], axis: int = 0) -> Entry:
        return Entry(target.detach(), shapes, shard.size, shard.rank, axis)

    entries: dict[str, Entry] = {}
    for name, rows in layer.columns.items():
        section = layer.in_proj.weight.detach()[rows]
        if name in ("f_a", "g_a"):
            entries[f"{name}_proj.weight"] = Entry(section, ((dim, hidden),))
        else:
            entries[f"{name}_proj.weight"] = own(section, (heads if name == "b" else inner, hidden))
    for name, taps in zip("qkv", layer.conv_weight.chunk(3), strict=True):
        entries[f"{name}_conv1d.weight"] = own(taps, (inner, 1, width), (inner, width))
    entries["f_b_proj.weight"] = own(layer.f_b_proj.weight, (inner, dim))
    if layer.g_b_proj is not None:
        entries["g_b_proj.weight"] = own(layer.g_b_proj.weight, (inner, dim))
    entries["o_proj.weight"] = own(layer.o_proj.weight, (hidden, inner), axis=1)
    published = ((heads,), (1, 1, heads, 1)) if layer.full_rank_gate else ((1, 1, heads, 1), (heads,))
    padded = -(-heads // A_LOG_MULTIPLE) * A_LOG_MULTIPLE
    entries["A_log"] = own(layer.A_log, *published, (padded,))
    entries["dt_bias"] = own(layer.dt_bias, (inner,))
    entries["o_norm.weight"] = Entry(layer.norm_weight.detach(), ((dim,),))
    return {prefix + name: entry for name, entry in entries.items()}


def load_layer(layer: KimiDeltaAttention, tensors: Mapping[str, torch.Tensor], prefix: str = "") -> None:
    """Load one layer from the tensors whose names start with ``prefix``; other names are not looked at.

    Raises:
        CheckpointError: as :func:`load_entries`.
    """
    own = {name: tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    load_entries(layer_entries(layer, prefix), own)


def load_entries(entries: Mapping[str, Entry], tensors: Mapping[str, torch.Tensor]) -> None:
    """Copy a checkpoint's tensors to their targets, converted to the targets' dtype and device.

    Raises:
        CheckpointError: tensors are missing, unexpected, of a wrong shape, or of a dtype that is no plain floating
            point (quantised weights). One text names them all, and nothing has been written.
    """
    problems = [f"missing: {name} {_shapes(entries[name])}" for name in entries if name not in tensors]
    problems += [f"unexpected: {name} {list(tensors[name].shape)}" for name in tensors if name not in entries]
    for name, entry in entries.items():
        tensor = tensors.get(name)
        if tensor is None:
            continue
        if tuple(tensor.shape) not in entry.shapes:
            problems.append(f"shape: {name}: expected {_shapes(entry)}, got {list(tensor.shape)}")
        elif tensor.dtype not in DTYPES:
            problems.append(f"dtype: {name}: expected {' or '.join(map(str, DTYPES))}, got {tensor.dtype}")
        elif tensor.flatten()[entry.elements :].any():
            problems.append(f"padding: {name}: expected zeros after the first {entry.elements} elements")
    if problems:
        raise CheckpointError("checkpoint does not fit:\n  " + "\n  ".join(problems))
    for name, entry in entries.items():
        entry.target.copy_(entry.own_part(tensors[name]))


def entry_tensors(entries: Mapping[str, Entry]) -> dict[str, torch.Tensor]:
    """Copies of all targets by name, in the shape that is saved: what ``safetensors.torch.save_file`` takes.

    Raises:
        ValueError: the entries are one rank's parts.
    """
    parts = [name for name, entry in entries.items() if entry.parts > 1]
    if parts:
        raise ValueError(f"entries: expected whole tensors, got one tensor-parallel rank's part of {', '.join(parts)}")
    return {name: entry.target.reshape(entry.shapes[0]).clone() for name, entry in entries.items()}


def read_tensors(files: Iterable[Path], prefix: str = "") -> dict[str, torch.Tensor]:
    """Read the tensors whose names start with ``prefix`` from safetensors files, to the CPU.

    Args:
        files: one file, or the shards of one checkpoint.
        prefix: the others are not read.

    Raises:
        CheckpointError: two files hold a tensor of the same name.
    """
    tensors: dict[str, torch.Tensor] = {}
    origin: dict[str, Path] = {}
    for path in files:
        with safe_open(path, framework="pt") as shard:
            for name in shard.keys():  # noqa: SIM118 (not a dict)
                if not name.startswith(prefix):
                    continue
                if name in tensors:
                    raise CheckpointError(f"{name}: in {origin[name].name} and again in {path.name}")
                tensors[name], origin[name] = shard.get_tensor(name), path
    return tensors


def _shapes(entry: Entry) -> str:
    return " or ".join(str(list(shape)) for shape in dict.fromkeys(entry.shapes))
