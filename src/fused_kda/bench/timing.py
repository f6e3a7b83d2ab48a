"""Timing whole models' worth of steps: all providers take turns, every sample is kept, launches are counted.

On a GPU a provider's layers are captured into one CUDA graph (or, eager, queued one by one) and timed by events; on a
CPU they are called one by one and timed by the clock.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .. import gates

#: One layer's (or one model's) step.
Step = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Timing:
    """What the rounds of one provider took.

    Attributes:
        samples: microseconds per step, one per round, in the order in which they were taken.
        launches: kernels, copies and fills on the device per step, counted; None where nothing is launched.
    """

    samples: tuple[float, ...]
    launches: float | None

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def mean(self) -> float:
        return statistics.fmean(self.samples)

    def percentile(self, share: float) -> float:
        """The sample below which the given share of them lies, 0 to 1."""
        ranked = sorted(self.samples)
        return ranked[round(share * (len(ranked) - 1))]

    def record(self) -> dict[str, Any]:
        """The timing for a results file; samples to the nanosecond."""
        return {
            "median": self.median,
            "p20": self.percentile(0.2),
            "p80": self.percentile(0.8),
            "p99": self.percentile(0.99),
            "samples": [round(sample, 3) for sample in self.samples],
        }


def time_providers(
    providers: Mapping[str, Sequence[Step]],
    device: torch.device,
    *,
    replays: int = 30,
    warmup: int = 3,
    graph: bool = True,
) -> dict[str, Timing]:
    """Time every provider's steps, one callable per layer, in rounds in which the providers take turns.

    So a drift of the clocks touches all of them alike. On a GPU all rounds are queued before the first result is
    awaited, so that no replay waits for the host.

    Args:
        providers: steps by name.
        device: where they run.
        replays: rounds that are kept.
        warmup: rounds before them; a CPU takes one at most.
        graph: replay CUDA graphs; False queues every launch anew. A CPU has no graphs and takes no notice.

    Returns:
        Microseconds per step of every kept round, and the launches of one step.
    """
    if device.type == "cpu":
        return _time_by_clock(providers, replays, min(warmup, 1))
    runs: dict[str, Callable[[], None]] = {}
    launches: dict[str, float | None] = {}
    for name, steps in providers.items():
        steps[0]()  # compiles, loads, allocates
        torch.cuda.synchronize(device)
        if graph:
            captured, count = capture(steps, device)
            runs[name] = captured.replay
            launches[name] = count / len(steps)
        else:
            runs[name] = _queue(steps)
            launches[name] = profiled_launches(steps[0])
    marks: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in runs}
    for turn in range(warmup + replays):
        for name, run in runs.items():
            start, end = _event(), _event()
            start.record()
            run()
            end.record()
            if turn >= warmup:
                marks[name].append((start, end))
    torch.cuda.synchronize(device)
    return {
        name: Timing(
            tuple(start.elapsed_time(end) * 1e3 / len(providers[name]) for start, end in pairs), launches[name]
        )
        for name, pairs in marks.items()
    }


def _time_by_clock(providers: Mapping[str, Sequence[Step]], replays: int, warmup: int) -> dict[str, Timing]:
    samples: dict[str, list[float]] = {name: [] for name in providers}
    for turn in range(warmup + replays):
        for name, steps in providers.items():
            start = time.perf_counter()
            for step in steps:
                step()
            if turn >= warmup:
                samples[name].append((time.perf_counter() - start) * 1e6 / len(steps))
    return {name: Timing(tuple(values), None) for name, values in samples.items()}


def _queue(steps: Sequence[Step]) -> Callable[[], None]:
    def run() -> None:
        for step in steps:
            step()

    return run


def capture(steps: Sequence[Step], device: torch.device) -> tuple[torch.cuda.CUDAGraph, int]:
    """The steps in one CUDA graph, and the kernels, copies and fills in it: its nodes, or what the profiler counts."""
    readable = can_use_driver(device)
    captured = torch.cuda.CUDAGraph(keep_graph=readable)
    with torch.cuda.graph(captured):
        for step in steps:
            step()
    if not readable:
        return captured, profiled_launches(captured.replay)
    captured.instantiate()
    return captured, _graph_launches(captured.raw_cuda_graph())


def _graph_launches(graph: int) -> int:
    from cuda.bindings import driver

    kinds = driver.CUgraphNodeType
    work = (kinds.CU_GRAPH_NODE_TYPE_KERNEL, kinds.CU_GRAPH_NODE_TYPE_MEMCPY, kinds.CU_GRAPH_NODE_TYPE_MEMSET)
    handle = driver.CUgraph(graph)
    _, count = _checked(driver.cuGraphGetNodes(handle))
    nodes, _ = _checked(driver.cuGraphGetNodes(handle, count))
    return sum(_checked(driver.cuGraphNodeGetType(node))[0] in work for node in nodes)


def profiled_launches(step: Step) -> int:
    """Kernels, copies and fills on the device while a step runs once, as torch's profiler sees them."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    return sum(event.device_type.name == "CUDA" for event in profile.events() or ())


def can_use_driver(device: torch.device) -> bool:
    """Whether what the CUDA backend needs (cuda.core, cuda.bindings, NVRTC) is here and made for the device."""
    return any(not row.machine_reasons() for row in gates.rows("cuda", gates.architecture(device)))


def _checked(result: Sequence[Any]) -> Sequence[Any]:
    code, *values = result
    if int(code) != 0:
        raise RuntimeError(f"CUDA driver: expected the graph's nodes, got {code.name}")
    return values


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
