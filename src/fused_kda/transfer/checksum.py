"""Checksums of slots by layer and head, so that ranks with different shares of the heads can compare."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ..pool import LayerPool, StatePool

#: An odd constant whose multiples spread over 64 bits (2^64 divided by the golden ratio), as a signed number.
_SPREAD = 0x9E3779B97F4A7C15 - 2**64
#: Integers by size; a head is summed in the largest that divides it.
_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16}


def checksums(pool: StatePool, slots: Sequence[int]) -> torch.Tensor:
    """Checksum of every (slot, layer, head): its q, k and v windows and its state, bit by bit.

    A head's bytes, in the order (section, channel, tap), then (row, column) of the state, are taken as integers, each
    times an odd weight of its own, and summed modulo 2^64: one changed integer always shows, swapped ones do too. The
    conv layout, pitches and spare taps play no part.

    Args:
        pool: read only.
        slots: which.

    Returns:
        int64 ``[slots, layers, heads]`` on the CPU. Waits for the device.
    """
    first = pool.layer(0)
    device, heads = first.state.device, first.state.shape[1]
    # One odd weight per word of a head; no element is more than four words.
    count = 4 * (first.state[0, 0].numel() + first.conv_state[0].numel() // heads)
    weights = torch.arange(1, 2 * count, 2, device=device) * _SPREAD
    # A slice is a view of its slot; on a GPU all slots at once take fewer launches.
    parts: list[slice | torch.Tensor] = [slice(slot, slot + 1) for slot in slots]
    if device.type != "cpu":
        parts = [torch.tensor(slots, device=device)]
    layers = [torch.cat([_sums(pool.layer(n), part, weights) for part in parts]) for n in range(pool.layers)]
    return torch.stack(layers, 1).cpu()


def _sums(layer: LayerPool, part: slice | torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """int64 ``[slots, heads]`` of one layer, on its device."""
    state = layer.state[part].flatten(2)
    window = torch.unflatten(layer.conv_state[part], 1, (3, state.shape[1], -1)).transpose(1, 2).flatten(2)
    window, state = _words(window), _words(state)
    count = window.shape[-1]
    return _dot(window, weights[:count]) + _dot(state, weights[count : count + state.shape[-1]])


def _dot(words: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """``[..., n]`` times ``[n]``, modulo 2^64. For integers on a CPU numpy needs one pass over memory, torch three."""
    if words.device.type == "cpu":
        return torch.from_numpy(np.einsum("...n,n->...", words.numpy(), weights.numpy()))
    return (words * weights).sum(-1)


def _words(values: torch.Tensor) -> torch.Tensor:
    """``[slots, heads, n]`` of any dtype as int64, the bytes of each row unchanged in order."""
    size = next(size for size in _WORDS if values.shape[-1] * values.element_size() % size == 0)
    return values.contiguous().view(_WORDS[size]).to(torch.int64)
