"""CUDA graphs: what a replay reads again, and what a capture may be the first to do. Public faults 5, 6 and 7."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fused_kda import gates
from fused_kda.testing.battery import Subject, default_size
from fused_kda.testing.compare import check_call, check_equal, expected
from fused_kda.testing.problems import Call

pytestmark = pytest.mark.gpu
POOLS = ("conv_state", "state")


@pytest.fixture(params=["cuda", "triton", "chain"])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def on_gpu(backend: str) -> Subject:
    device = torch.device("cuda", torch.cuda.current_device())
    rows = gates.rows(backend, gates.architecture(device))
    if not rows or rows[0].machine_reasons():
        pytest.skip(f"{backend} has no open gate here")
    return Subject(backend, device, default_size(device, backend))


def finite(call: Call) -> Call:
    """The call with finite values in every slot: a replay may name any."""
    for name in POOLS:
        call.arguments[name].nan_to_num_(nan=0.25)
    return call


def capture(call: Call, backend: str, **changes: Any) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """One step as a graph that has not run yet, and its output."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out = call.run(backend, **changes)
    return graph, out


KINDS = {
    "SD": {},
    "DS, spare taps": {"layout": "DS", "spare_taps": 2},
    "pages": {"layout": "DS", "page_shared": True, "state_dtype": torch.bfloat16},
    "int64 table": {"index_dtype": torch.int64, "index_stride": 16, "mask": True},
    "prefetch": {"prefetch": True, "lower_bound": None},
    "slot 0 live": {"null_slot": -1, "norm_dtype": None},
}


@pytest.mark.case(6)
@pytest.mark.parametrize("kind", KINDS)
def test_fifty_replays_each_with_another_permutation_of_twenty_slots(on_gpu: Subject, kind: str) -> None:
    """Indices, inputs and the mask change in their buffers; every replay has the bits of an eager call, and every tenth
    the values of a float64 one."""
    captured = finite(on_gpu.draw(batch=20, slots=21, **KINDS[kind]))
    eager = captured.clone()
    captured.clone().run(on_gpu.backend)
    graph, out = capture(captured, on_gpu.backend)
    generator = torch.Generator().manual_seed(1)
    first = captured.arguments["null_slot"] + 1
    for step in range(50):
        order = torch.randperm(20, generator=generator) + first
        mask = torch.rand(20, generator=generator) < 0.8
        for call in (captured, eager):
            call.arguments["state_indices"].copy_(order)
            call.arguments["x"].copy_(call.arguments["x"].roll(1, 0))
            if call.arguments["has_initial_state"] is not None:
                call.arguments["has_initial_state"].copy_(mask)
        now = Call(eager.arguments, tuple(range(20)), tuple(order.tolist()))
        want = expected(now, chain=on_gpu.backend == "chain") if step % 10 == 9 else None
        graph.replay()
        got = now.run(on_gpu.backend)
        if want is not None:
            check_call(now, got, want)
        check_equal(f"out of replay {step}", out, got)
        for name in POOLS:
            check_equal(f"{name} after replay {step}", captured.arguments[name], eager.arguments[name])


@pytest.mark.case(7)
@pytest.mark.parametrize("heads", [11, 17])
@pytest.mark.parametrize("out", ["given", "allocated"])
def test_the_first_call_may_be_captured(
    on_gpu: Subject, heads: int, out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing compiled, no warm-up, ``out`` perhaps left to the op; then a larger eager batch; then the graph again."""
    monkeypatch.setenv("FUSED_KDA_CACHE_DIR", str(tmp_path))  # nothing on disk from an earlier run
    captured = finite(on_gpu.draw(batch=3, heads=heads, slots=20, index_stride=2))
    eager = captured.clone()
    changes = {} if out == "given" else {"out": None}
    graph, result = capture(captured, on_gpu.backend, **changes)
    generator = torch.Generator().manual_seed(0)
    for number in range(6):
        order = torch.randperm(19, generator=generator)[:3] + 1
        for call in (captured, eager):
            call.arguments["state_indices"].copy_(order)
        if number == 3:
            on_gpu.agree(on_gpu.draw(batch=300, heads=heads))
        graph.replay()
        want = eager.run(on_gpu.backend, **changes)
        check_equal(f"out of replay {number}", result, want)
        for name in POOLS:
            check_equal(f"{name} after replay {number}", captured.arguments[name], eager.arguments[name])


@pytest.mark.case(5)
def test_a_stale_tail_is_believed_and_a_rewritten_one_touches_nothing(on_gpu: Subject) -> None:
    """Captured at B = 4, replayed for two requests. The op believes the buffer: with the tail of an earlier step the
    other two slots advance, which is why an adapter rewrites the whole buffer; with null indices they do not."""
    call = finite(on_gpu.draw(batch=4, slots=9))
    call.clone().run(on_gpu.backend)
    graph, out = capture(call, on_gpu.backend)
    others = list(call.slots[2:])
    before = call.clone()
    graph.replay()
    for slot in others:
        assert not torch.equal(call.arguments["state"][slot], before.arguments["state"][slot])
    call.arguments["state_indices"][2:] = torch.tensor([0, -1])
    before = call.clone()
    shorter = Call(call.arguments, call.live[:2], call.slots[:2])
    want = expected(shorter, chain=on_gpu.backend == "chain")
    graph.replay()
    check_call(shorter, out, want)
    assert shorter.touched_elsewhere(before) == []
