"""Checksums of slots by layer and head, so that ranks with different shares of the heads can compare."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..pool import StatePool

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
    sums = []
    for number in range(pool.layers):
        layer = pool.layer(number)
        index = torch.tensor(slots, dtype=torch.int64, device=layer.state.device)
        state = layer.state[index].flatten(2)
        window = torch.unflatten(layer.conv_state[index], 1, (3, state.shape[1], -1)).transpose(1, 2).flatten(2)
        total, first = torch.zeros(state.shape[:2], dtype=torch.int64, device=state.device), 1
        for words in (_words(window), _words(state)):
            last = first + 2 * words.shape[-1]
            total += (words * (torch.arange(first, last, 2, device=words.device) * _SPREAD)).sum(-1)
            first = last
        sums.append(total)
    return torch.stack(sums, 1).cpu()


def _words(values: torch.Tensor) -> torch.Tensor:
    """``[slots, heads, n]`` of any dtype as int64, the bytes of each row unchanged in order."""
    size = next(size for size in _WORDS if values.shape[-1] * values.element_size() % size == 0)
    return values.contiguous().view(_WORDS[size]).to(torch.int64)
