"""Checksums of slots by layer and head, so that ranks with different shares of the heads can compare."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..pool import StatePool

#: An odd constant whose multiples spread over 64 bits (2^64 divided by the golden ratio), as a signed number.
_SPREAD = 0x9E3779B97F4A7C15 - 2**64
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksums(pool: StatePool, slots: Sequence[int]) -> torch.Tensor:
    """Checksum of every (slot, layer, head): its q, k and v windows and its state, bit by bit.

    A head's elements, in the order (section, channel, tap), then (row, column) of the state, are taken as integers,
    each times an odd weight of its own, and summed modulo 2^64: one changed element always shows, swapped ones do too.
    The conv layout, pitches and spare taps play no part.

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
        state = layer.state[index].contiguous()
        count, heads = state.shape[:2]
        window = layer.conv_state[index].contiguous()
        window = window.view(count, 3, heads, -1).transpose(1, 2).reshape(count, heads, -1)
        elements = torch.cat((_integers(window), _integers(state.view(count, heads, -1))), -1)
        weights = torch.arange(1, 2 * elements.shape[-1], 2, device=elements.device) * _SPREAD
        sums.append((elements * weights).sum(-1))
    return torch.stack(sums, 1).cpu()


def _integers(values: torch.Tensor) -> torch.Tensor:
    return values.view(_INTEGERS[values.element_size()]).to(torch.int64)
