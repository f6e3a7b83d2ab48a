"""Values at the ends of what the op may be given, put into a drawn call in place: :data:`EXTREMES`, :func:`poison`.

All of them are finite (A_log's minus infinity aside: a head that never decays). Most are put into some of the live rows
or heads only, so that ordinary ones stand beside them. What fp32 arithmetic cannot hold may come out of such a head as
anything, but of no other: :func:`.compare.limits` says which heads that are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

#: As large as bf16 takes, and so small that its square is no longer a normal number.
HUGE, TINY = 3e38, 1e-20

Change = Callable[[Mapping[str, Any], list[int], list[int], torch.Generator], None]


POOLS = ("conv_state", "state")


def _some(count: int, generator: torch.Generator) -> list[bool]:
    """For each of ``count`` things whether it is chosen: about two in three."""
    return (torch.rand(count, generator=generator) < 0.67).tolist()


def _rows(given: Mapping[str, Any], name: str) -> torch.Tensor:
    """A row input or a pool, its first dimension over rows or slots."""
    tensor: torch.Tensor = given[name]
    return tensor[0] if tensor.ndim == 4 and name not in POOLS else tensor


def _zero(*sections: int) -> Change:
    """q (0), k (1), v (2) exactly zero where there is no bias: token and history of all live rows, there."""

    def change(given: Mapping[str, Any], live: list[int], slots: list[int], generator: torch.Generator) -> None:
        inner = given["x"].shape[1] // 3
        for section in sections:
            own = slice(section * inner, (section + 1) * inner)
            given["x"][live, own] = 0.0
            given["conv_state"][slots, own] = 0.0

    return change


def _scattered(value: float, share: float, *names: str) -> Change:
    """``+-value`` in about ``share`` of the elements of some live rows of inputs, or live slots of a pool."""

    def change(given: Mapping[str, Any], live: list[int], slots: list[int], generator: torch.Generator) -> None:
        for name in names:
            if given[name] is None:
                continue
            rows, places = _rows(given, name), slots if name in POOLS else live
            chosen = [place for place, taken in zip(places, _some(len(places), generator), strict=True) if taken]
            values = rows[chosen]
            hit = torch.rand(values.shape, generator=generator) < share
            most = torch.finfo(values.dtype).max
            signed = torch.where(torch.rand(values.shape, generator=generator) < 0.5, -1.0, 1.0) * min(value, most)
            rows[chosen] = torch.where(hit, signed.to(values.dtype), values)

    return change


def _decay_rates(given: Mapping[str, Any], live: list[int], slots: list[int], generator: torch.Generator) -> None:
    """A_log minus infinity (no decay at all) and +10 (decay at once), in turn over the heads from a random one on."""
    a_log = given["A_log"].view(-1)
    ends = torch.tensor([-torch.inf, 10.0], dtype=a_log.dtype)
    first = int(torch.randint(3, (1,), generator=generator))
    for head in range(a_log.shape[0]):
        if (head + first) % 3 < 2:
            a_log[head] = ends[(head + first) % 3]


EXTREMES: dict[str, Change] = {
    "q zero": _zero(0),
    "k zero": _zero(1),
    "q, k, v zero": _zero(0, 1, 2),
    "tiny inputs": _scattered(TINY, 0.5, "x", "conv_state"),
    "all inputs tiny": _scattered(TINY, 1.0, "x", "conv_state"),
    "tiny state": _scattered(TINY, 0.9, "state"),
    "one huge input": _scattered(HUGE, 0.002, "x", "conv_state"),
    "large inputs": _scattered(1e15, 0.02, "x", "conv_state"),
    "huge state": _scattered(HUGE, 0.0001, "state"),
    "large state": _scattered(1e15, 0.01, "state"),
    "gates at 80": _scattered(80.0, 0.5, "raw_g"),
    "output gates at 80": _scattered(80.0, 0.5, "output_gate"),
    "output gates all at 80": _scattered(80.0, 1.0, "output_gate"),
    "beta at 80": _scattered(80.0, 0.7, "raw_beta"),
    "A_log at its ends": _decay_rates,
}

#: What :func:`poison` spoils.
POISON = ("x", "raw_g", "raw_beta", "output_gate", "conv_state", "state")


def poison(given: Mapping[str, Any], name: str, row: int, slot: int) -> None:
    """NaN and both infinities in one row of an input, or in one slot of a pool."""
    if given[name] is None:
        return
    target = _rows(given, name)[slot if name in POOLS else row]
    spoilt = torch.tensor([torch.nan, torch.inf, -torch.inf]).repeat(target.numel() // 3 + 1)
    target.copy_(spoilt[: target.numel()].view(target.shape))
