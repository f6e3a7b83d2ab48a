"""A long run of continuous batching, repeated to the bit and followed in float64.

    python -m fused_kda.testing.soak [--steps 100000] [--json FILE]          (make soak; needs a GPU)

Sequences join and leave at random (:mod:`.traffic`); a slot that is freed goes to the next sequence without being
cleared. Each step runs in the smallest bucket that holds its rows, padded with null rows; on a GPU every bucket is one
CUDA graph, captured before the first step and replayed with the indices rewritten. What is checked:

* every few steps some rows are sampled; each is followed in float64 from the step at which it joined, and its state and
  output must lie within the budget that the reference's own rounding over the same tokens gives
  (:func:`.compare.budget`), its window equal to the bit;
* device memory is the same at every check;
* the runs, on DS and on SD, leave one digest over all outputs of all steps and both pools at the end.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from ..api import fused_kda_decode
from ..layouts import LAYOUTS, LayoutKind
from ..pool import StatePool
from .compare import Mismatch, budget, check_equal
from .traffic import History, Inputs, Sample, Traffic, draw_history, draw_inputs

FP32, BF16 = torch.float32, torch.bfloat16


@dataclass(frozen=True, slots=True)
class Run:
    """What one run left behind.

    Attributes:
        digest: over every output of every step and the pools' last content.
        states, windows, outs: of the history's samples, in its order.
        memory: bytes of the device in use at each check: allocated, reserved, and taken from the device by anyone.
        seconds: of the steps, checks included.
    """

    digest: str
    states: torch.Tensor
    windows: torch.Tensor
    outs: torch.Tensor
    memory: tuple[tuple[int, int, int], ...]
    seconds: float


def run(
    traffic: Traffic,
    history: History,
    inputs: Inputs,
    backend: str,
    *,
    layout: LayoutKind = "DS",
    state_dtype: torch.dtype = FP32,
    disturb: Callable[[int, StatePool], None] | None = None,
) -> Run:
    """Run the history once on fresh pools.

    Args:
        soak, history, inputs: what, drawn from the same traffic.
        backend: that runs it, on the inputs' device.
        layout, state_dtype: of the pools.
        disturb: called after each step with its number and the pool: a test's way to spoil something.
    """
    device = inputs.ring.device
    pool = StatePool(
        1, traffic.slots, traffic.heads, traffic.head_dim, layout=layout, state_dtype=state_dtype, device=device
    )
    conv_state, state, null_slot = pool.layer(0)
    table = torch.zeros(traffic.batch, 3, dtype=torch.int32, device=device)
    wide = torch.zeros(traffic.batch, inputs.ring.shape[1], dtype=BF16, device=device)
    started = torch.zeros(traffic.batch, dtype=torch.bool, device=device)
    out = torch.zeros(traffic.batch, traffic.heads, traffic.head_dim, dtype=BF16, device=device)
    odd = torch.arange(out.numel(), device=device).view(out.shape) * 2 + 1
    outputs = torch.zeros((), dtype=torch.int64, device=device)
    states = state.new_zeros(len(history.samples), *state.shape[1:])
    windows = conv_state.new_zeros(len(history.samples), *conv_state.shape[1:])
    outs = out.new_zeros(len(history.samples), *out.shape[1:])

    def step(size: int) -> None:
        torch.index_select(inputs.ring, 0, table[:size, 1], out=wide[:size])
        torch.ne(table[:size, 2], 0, out=started[:size])
        fused_kda_decode(
            **inputs.rows(wide[:size], traffic.heads), **inputs.parameters, conv_state=conv_state, state=state,
            state_indices=table[:size, 0], has_initial_state=started[:size], null_slot=null_slot, out=out[:size],
            backend=backend,
        )  # fmt: skip
        # Integers: their sum has no order, and each step's moves all later ones. A null row adds zero.
        outputs.mul_(1_000_003).add_((out[:size].view(torch.int16) * odd[:size]).sum())

    steps = {size: _replayable(step, size, device) for size in traffic.buckets}
    outputs.zero_()
    memory: list[tuple[int, int, int]] = []
    number = 0
    start = time.perf_counter()
    for first in range(0, traffic.steps, traffic.check_every):
        chunk = history.tables[first : first + traffic.check_every].to(device)
        for at, count in enumerate(history.rows[first : first + traffic.check_every].tolist()):
            table.copy_(chunk[at])
            steps[1 << (count - 1).bit_length()]()
            if disturb is not None:
                disturb(first + at, pool)
        while number < len(history.samples) and history.samples[number].step < first + traffic.check_every:
            sample = history.samples[number]
            states[number].copy_(state[sample.slot])
            windows[number].copy_(conv_state[sample.slot])
            outs[number].copy_(out[sample.row])
            number += 1
        del chunk
        memory.append(_memory(device))
    seconds = time.perf_counter() - start
    digest = hashlib.sha256(int(outputs).to_bytes(8, "little", signed=True))
    for left in (conv_state, state):
        digest.update(left.contiguous().cpu().view(torch.uint8).numpy().tobytes())
    return Run(digest.hexdigest(), states, windows, outs, tuple(memory), seconds)


def _replayable(step: Callable[[int], None], size: int, device: torch.device) -> Callable[[], None]:
    """The step of one bucket: a captured graph's replay, or on a CPU the step itself. Runs it once on null rows."""
    step(size)
    if device.type != "cuda":
        return lambda: step(size)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(size)
    return graph.replay


def _memory(device: torch.device) -> tuple[int, int, int]:
    if device.type != "cuda":
        return 0, 0, 0
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info(device)
    return torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device), total - free


@dataclass(slots=True)
class Drift:
    """How far the sampled rows of one run were from float64: the largest share of the budget that was used.

    Attributes:
        state, out: shares, at most 1.
        tokens: of the longest row that was followed.
        faults: what was beyond the budget, or not equal, in words.
    """

    state: float = 0.0
    out: float = 0.0
    tokens: int = 0
    faults: list[str] = field(default_factory=list)


#: A backend and a state dtype.
Kind = tuple[str, torch.dtype]


def follow(traffic: Traffic, history: History, inputs: Inputs, runs: Mapping[Kind, Run]) -> dict[Kind, Drift]:
    """Follow every sampled row from its first token, in float64 and by the reference in each run's state dtype.

    All rows take their tokens side by side, the longest first, so that a row that is at its sample leaves at the end.
    """
    device = inputs.ring.device
    order = sorted(range(len(history.samples)), key=lambda number: -history.samples[number].tokens)
    tokens = [history.samples[number].tokens for number in order]
    first = torch.tensor([history.samples[number].first_input for number in order], device=device)
    exact = _Follower(traffic, inputs, len(order), torch.float64, torch.float64)
    low = {dtype: _Follower(traffic, inputs, len(order), BF16, dtype) for dtype in {dtype for _, dtype in runs}}
    drifts = {kind: Drift(tokens=tokens[0]) for kind in runs}
    left = len(order)
    for token in range(tokens[0]):
        wide = inputs.ring.index_select(0, (first[:left] + token) % traffic.inputs)
        for follower in (exact, *low.values()):
            follower.step(wide, token > 0)
        while left and tokens[left - 1] == token + 1:
            left -= 1
            for kind, run in runs.items():
                sample = history.samples[order[left]]
                _compare(drifts[kind], exact, low[kind[1]], left, sample, run, order[left])
    return drifts


class _Follower:
    """Rows that take their tokens side by side, each in a slot of its own, on the reference."""

    def __init__(
        self, traffic: Traffic, inputs: Inputs, count: int, dtype: torch.dtype, state_dtype: torch.dtype
    ) -> None:
        device = inputs.ring.device
        self.inputs, self.heads, self.dtype = inputs, traffic.heads, dtype
        pool = StatePool(
            1,
            count,
            traffic.heads,
            traffic.head_dim,
            conv_dtype=dtype,
            state_dtype=state_dtype,
            null_slot=-1,
            device=device,
        )
        self.windows, self.states, self.null_slot = pool.layer(0)
        self.outs = torch.zeros(count, traffic.heads, traffic.head_dim, dtype=dtype, device=device)
        wide = dtype if dtype == torch.float64 else FP32
        self.parameters: dict[str, Any] = {
            name: value.to(wide) if isinstance(value, torch.Tensor) else value
            for name, value in inputs.parameters.items()
        }
        self.indices = torch.arange(count, device=device)

    def step(self, wide: torch.Tensor, started: bool) -> None:
        count = wide.shape[0]
        fused_kda_decode(
            **self.inputs.rows(wide.to(self.dtype), self.heads), **self.parameters, conv_state=self.windows,
            state=self.states, state_indices=self.indices[:count], null_slot=self.null_slot, out=self.outs[:count],
            has_initial_state=torch.full((count,), started, device=wide.device), backend="reference",
        )  # fmt: skip


def _compare(drift: Drift, exact: _Follower, low: _Follower, row: int, sample: Sample, run: Run, number: int) -> None:
    """Add one sample's distance to a drift."""
    name = f"step {sample.step}, row {sample.row}, slot {sample.slot}, token {sample.tokens}"
    allowed = budget(exact.states[row], low.states[row].double(), (-2, -1), low.states.dtype)
    drift.state = max(drift.state, _share(run.states[number], exact.states[row], allowed, f"{name}: state", drift))
    allowed = budget(exact.outs[row], low.outs[row].double(), (-1,), BF16)
    drift.out = max(drift.out, _share(run.outs[number], exact.outs[row], allowed, f"{name}: out", drift))
    try:
        check_equal(f"{name}: window", run.windows[number], low.windows[row])
    except Mismatch as mismatch:
        drift.faults.append(str(mismatch))


def _share(got: torch.Tensor, want: torch.Tensor, allowed: torch.Tensor, name: str, drift: Drift) -> float:
    share = float(((got.double() - want).abs() / allowed).nan_to_num(nan=math.inf).max())
    if share > 1.0:
        drift.faults.append(f"{name}: {share:.3g} of the budget")
    return share


@dataclass(frozen=True, slots=True)
class Outcome:
    """One backend and state dtype: figures for a results file, and what is wrong (nothing, where it passed)."""

    backend: str
    state_dtype: str
    steps: int
    sequences: int
    row_steps: int
    buckets: tuple[int, ...]
    layouts: tuple[str, ...]
    digests: tuple[str, ...]
    samples: int
    longest_followed: int
    state_share: float
    out_share: float
    memory_bytes: tuple[int, ...]
    microseconds_per_step: float
    faults: tuple[str, ...]


def soak(
    traffic: Traffic,
    backends: Iterable[str],
    device: torch.device,
    dtypes: Sequence[torch.dtype] = (FP32, BF16),
    layouts: Sequence[LayoutKind] = LAYOUTS,
) -> list[Outcome]:
    """Run the traffic once for each layout, follow the first run's samples, and say what came of it."""
    history, inputs = draw_history(traffic), draw_inputs(traffic, device)
    runs = {
        (backend, dtype): [
            run(traffic, history, inputs, backend, layout=layout, state_dtype=dtype) for layout in layouts
        ]
        for backend in backends
        for dtype in dtypes
    }
    drifts = follow(traffic, history, inputs, {kind: made[0] for kind, made in runs.items()})
    return [_outcome(traffic, history, kind, tuple(layouts), runs[kind], drifts[kind]) for kind in runs]


def _outcome(
    traffic: Traffic, history: History, kind: Kind, layouts: tuple[str, ...], made: Sequence[Run], drift: Drift
) -> Outcome:
    digests = tuple(one.digest for one in made)
    faults = list(drift.faults)
    if len(set(digests)) > 1:
        faults.append(f"digests differ: {', '.join(digests)}")
    for layout, one in zip(layouts, made, strict=True):
        seen = set(one.memory[1:])  # the first check still loads what it needs
        if len(seen) > 1:
            faults.append(f"{layout}: device memory (allocated, reserved, taken) is not constant: {sorted(seen)}")
    return Outcome(
        backend=kind[0],
        state_dtype=str(kind[1]).removeprefix("torch."),
        steps=traffic.steps,
        sequences=history.sequences,
        row_steps=int(history.rows.sum()),
        buckets=traffic.buckets,
        layouts=layouts,
        digests=digests,
        samples=len(history.samples),
        longest_followed=drift.tokens,
        state_share=round(drift.state, 4),
        out_share=round(drift.out, 4),
        memory_bytes=made[0].memory[-1],
        microseconds_per_step=round(min(one.seconds for one in made) / traffic.steps * 1e6, 1),
        faults=tuple(faults),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; exit status 1 where something drifted, grew or did not repeat."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="cuda,triton", help="comma-separated backends")
    parser.add_argument("--steps", type=int, default=Traffic().steps)
    parser.add_argument("--json", type=Path, help="write the results here")
    options = parser.parse_args(arguments)
    device = torch.device("cuda", torch.cuda.current_device())
    outcomes = soak(replace(Traffic(), steps=options.steps), options.backend.split(","), device)
    for outcome in outcomes:
        print(
            f"{outcome.backend}, {outcome.state_dtype} state: {outcome.steps} steps of {outcome.sequences} sequences "
            f"({outcome.row_steps} rows), {outcome.microseconds_per_step} us a step, "
            f"on {' and '.join(outcome.layouts)}: {len(set(outcome.digests))} digest ({outcome.digests[0][:16]}); "
            f"{outcome.samples} rows followed for up to {outcome.longest_followed} tokens, "
            f"at most {outcome.state_share} of the state's and {outcome.out_share} of the output's budget; "
            f"device memory (allocated, reserved, taken) {outcome.memory_bytes}"
        )
        for fault in outcome.faults:
            print(f"  FAULT {fault}")
    if options.json:
        from ..bench import results

        results.write(
            results.document("soak", "make soak", device, soak=[asdict(outcome) for outcome in outcomes]), options.json
        )
    return 1 if any(outcome.faults for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
