"""Continuous batching drawn from a seed: who joins when, in which slot, for how long, and with what inputs.

All of it is drawn ahead, so that a run can be repeated and any row followed from its first token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..pool import StatePool

FP32, BF16 = torch.float32, torch.bfloat16
_WIDTH = 4


@dataclass(frozen=True, slots=True)
class Traffic:
    """What is drawn.

    Attributes:
        steps: decode steps.
        heads, head_dim: H and D.
        batch: most sequences at once, a power of two; the buckets are all powers of two up to it.
        longest: most tokens of one sequence. Lengths are drawn so that each order of magnitude is as likely.
        inputs: rows of the ring from which a sequence reads its tokens' inputs one after the other, from a place of its
            own.
        check_every: steps between two checks.
        samples: rows that a check samples: the one with most tokens, and others at random.
        seed: of everything random.
    """

    steps: int = 100_000
    heads: int = 12
    head_dim: int = 128
    batch: int = 64
    longest: int = 6000
    inputs: int = 2039
    check_every: int = 1000
    samples: int = 2
    seed: int = 0

    @property
    def slots(self) -> int:
        """Of the pool: few more than sequences, so that slots are soon used again."""
        return self.batch + 3

    @property
    def buckets(self) -> tuple[int, ...]:
        """Batch sizes that are run."""
        return tuple(2**power for power in range(self.batch.bit_length()))


#: Small enough for the reference on a CPU.
TINY = Traffic(steps=600, heads=1, head_dim=16, batch=8, longest=400, inputs=127, check_every=100)


@dataclass(frozen=True, slots=True)
class Sample:
    """One row at one check: its step, its row and slot there, its first input, and how many tokens it has had."""

    step: int
    row: int
    slot: int
    first_input: int
    tokens: int


@dataclass(frozen=True, slots=True)
class History:
    """All that happens.

    Attributes:
        tables: ``[steps, batch, 3]`` int32: slot, input row and "has a usable state" of each row; padding names slot 0.
        rows: ``[steps]`` live rows of each step.
        samples: by step.
        sequences: that ran.
    """

    tables: torch.Tensor
    rows: np.ndarray[Any, np.dtype[np.int64]]
    samples: tuple[Sample, ...]
    sequences: int


def draw_history(traffic: Traffic) -> History:
    """Draw who joins when, where, and for how long."""
    source = np.random.default_rng(traffic.seed)
    pool = StatePool(1, traffic.slots, 1, 1)  # for its book-keeping alone
    tables = np.zeros((traffic.steps, traffic.batch, 3), np.int32)
    tables[..., 2] = 1
    counts = np.zeros(traffic.steps, np.int64)
    # Of each live row, in batch order: slot, first input, tokens so far, tokens in all.
    live: np.ndarray[Any, np.dtype[np.int64]] = np.zeros((0, 4), np.int64)
    samples: list[Sample] = []
    sequences, target = 0, traffic.batch
    for step in range(traffic.steps):
        if step % (2 * traffic.check_every) == 0:
            target = round(traffic.batch ** source.random())
        if len(live) > target and source.random() < 0.05:  # its user has gone away
            live[source.integers(len(live)), 3] = 0
        over = live[:, 2] >= live[:, 3]
        if over.any():
            for slot in live[over, 0]:
                pool.free(int(slot))
            live = live[~over]
        if not len(live) or (len(live) < target and source.random() < 0.3):
            length = int(math.exp(source.uniform(0.0, math.log(traffic.longest)))) + 1
            joined = np.array([pool.allocate(), source.integers(traffic.inputs), 0, length])
            live = np.insert(live, source.integers(len(live) + 1), joined, axis=0)
            sequences += 1
        count = counts[step] = len(live)
        tables[step, :count, 0] = live[:, 0]
        tables[step, :count, 1] = (live[:, 1] + live[:, 2]) % traffic.inputs
        tables[step, :count, 2] = live[:, 2] > 0
        live[:, 2] += 1
        if (step + 1) % traffic.check_every == 0:
            others = source.permutation(count)[: traffic.samples - 1]
            for row in dict.fromkeys([int(live[:, 2].argmax()), *others.tolist()]):
                slot, first, tokens, _ = map(int, live[row])
                samples.append(Sample(step, int(row), slot, first, tokens))
    return History(torch.from_numpy(tables), counts, tuple(samples), sequences)


@dataclass(frozen=True, slots=True)
class Inputs:
    """The ring of inputs and the layer's parameters on one device, as :func:`fused_kda.fused_kda_decode` takes them."""

    ring: torch.Tensor
    parameters: Mapping[str, Any]

    def rows(self, wide: torch.Tensor, heads: int) -> dict[str, Any]:
        """A step's inputs out of rows of the ring: columns of one buffer, as of one projection."""
        inner = (wide.shape[1] - heads) // 5
        shape = (wide.shape[0], heads, inner // heads)
        return {
            "x": wide[:, : 3 * inner],
            "output_gate": wide[:, 3 * inner : 4 * inner].view(shape),
            "raw_g": wide[:, 4 * inner : 5 * inner].view(shape),
            "raw_beta": wide[:, 5 * inner :],
        }


def draw_inputs(traffic: Traffic, device: torch.device) -> Inputs:
    """Draw inputs under which a state remembers: most decays are near one, from some ten to some thousand tokens."""
    generator = torch.Generator().manual_seed(traffic.seed)
    heads, inner = traffic.heads, traffic.heads * traffic.head_dim

    def normal(*shape: int, mean: float = 0.0, std: float = 1.0) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * std + mean

    count = traffic.inputs
    ring = torch.cat((normal(count, 4 * inner), normal(count, inner, mean=-6.0), normal(count, heads, mean=-2.0)), 1)
    parameters: dict[str, Any] = {
        "weight": normal(3, _WIDTH, inner, std=0.5),
        "bias": None,
        "A_log": normal(heads, std=0.3),
        "dt_bias": normal(inner, std=2.0),
        "norm_weight": normal(traffic.head_dim),
    }
    moved = {name: value if value is None else value.to(device) for name, value in parameters.items()}
    return Inputs(ring.to(BF16).to(device), {**moved, "lower_bound": -5.0})
