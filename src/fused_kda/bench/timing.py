"""Timing whole models' worth of one op: every provider's layers in one CUDA graph, replays interleaved."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Timing:
    """Microseconds per layer over the replays: median, 20th and 80th percentile."""

    median: float
    p20: float
    p80: float


def time_graphs(
    providers: Mapping[str, Sequence[Callable[[], object]]], *, replays: int = 30, warmup: int = 3
) -> dict[str, Timing]:
    """Capture each provider's steps (one callable per layer) into a graph and time its replays.

    The providers take turns within each round, so that a drift of the clocks touches all of them alike. All rounds are
    queued before the first result is awaited, so that no replay waits for the host.
    """
    graphs: dict[str, torch.cuda.CUDAGraph] = {}
    for name, steps in providers.items():
        steps[0]()  # compiles, loads, allocates
        torch.cuda.synchronize()
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name]):
            for step in steps:
                step()
    marks: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in graphs}
    for turn in range(warmup + replays):
        for name, graph in graphs.items():
            start, end = _event(), _event()
            start.record()
            graph.replay()
            end.record()
            if turn >= warmup:
                marks[name].append((start, end))
    torch.cuda.synchronize()
    times = {
        name: sorted(start.elapsed_time(end) * 1e3 / len(providers[name]) for start, end in pairs)
        for name, pairs in marks.items()
    }
    return {name: _summary(values) for name, values in times.items()}


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _summary(times: Sequence[float]) -> Timing:
    def percentile(share: float) -> float:
        return times[round(share * (len(times) - 1))]

    return Timing(statistics.median(times), percentile(0.2), percentile(0.8))
