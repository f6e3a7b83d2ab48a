"""Timing: every sample is kept, providers take turns, launches are counted and not assumed."""

from __future__ import annotations

import pytest
import torch

from fused_kda import gates
from fused_kda.bench import timing
from fused_kda.bench.cells import Cell, make_layers
from fused_kda.bench.host import host_times
from fused_kda.bench.limit import copy_steps, limit_steps
from fused_kda.bench.timing import Timing, profiled_launches, time_providers
from fused_kda.testing.battery import Subject

CPU = torch.device("cpu")


def test_figures_come_from_the_samples() -> None:
    found = Timing((5.0, 1.0, 2.0, 3.0, 4.0, 60.0), 3)
    assert found.median == 3.5
    assert found.mean == 12.5
    assert [found.percentile(share) for share in (0.0, 0.2, 0.8, 0.99)] == [1.0, 2.0, 5.0, 60.0]
    assert found.record()["samples"] == [5.0, 1.0, 2.0, 3.0, 4.0, 60.0]


def test_providers_take_turns_and_samples_are_per_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(1000))
    monkeypatch.setattr(timing.time, "perf_counter", lambda: float(next(clock)))
    order: list[str] = []
    providers = {name: [lambda name=name: order.append(name)] * 2 for name in ("a", "b")}
    found = time_providers(providers, CPU, replays=3, warmup=1)
    assert order == ["a", "a", "b", "b"] * 4
    assert found["a"] == Timing((5e5,) * 3, None)  # a second for two layers; a CPU launches nothing


def test_the_limit_and_the_copy_touch_the_named_slots_alone() -> None:
    layers = make_layers(Cell(1, 3), CPU, 4)
    for number, layer in enumerate(layers):
        layer.arguments["state"].fill_(number)
    before = [layer.arguments["state"].clone() for layer in layers]
    for steps in limit_steps(layers).values():
        for step in steps:
            step()
    assert all(torch.equal(layer.arguments["state"], kept) for layer, kept in zip(layers, before, strict=True))
    copy_steps(layers)[0]()
    state = layers[0].arguments["state"]
    assert state[0].eq(0).all()
    assert state[1:].eq(2).all()  # from half of the layers away


@pytest.mark.gpu
@pytest.mark.parametrize("prefetch", [False, True])
def test_launches_of_a_step_are_those_that_the_gates_table_says(subject: Subject, prefetch: bool) -> None:
    row = gates.rows(subject.backend, gates.architecture(subject.device))[0]
    if subject.device.type != "cuda" or row.launches == 0:
        pytest.skip("no kernels")
    layers = make_layers(Cell(12, 4), subject.device, 3)
    steps = [lambda layer=layer: layer.run(subject.backend, prefetch=prefetch) for layer in layers]
    found = time_providers({"step": steps}, subject.device, replays=2)["step"]
    assert found.launches == row.launches
    assert len(found.samples) == 2
    assert profiled_launches(steps[0]) == row.launches
    eager = time_providers({"step": steps}, subject.device, replays=2, graph=False)["step"]
    assert eager.launches == row.launches


@pytest.mark.gpu
def test_a_graph_that_cannot_be_read_is_counted_by_the_profiler(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    monkeypatch.setattr(timing, "can_use_driver", lambda device: False)
    buffer = torch.ones(1000, device=device)
    _, launches = timing.capture([lambda: buffer.mul_(2.0), lambda: buffer.zero_()], device)
    assert launches == 2


@pytest.mark.gpu
def test_host_times() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    times = host_times("cuda", Cell(12, 1), device)
    assert 0 < times["bare launch"] < times["call"] < times["call that allocates out"]
