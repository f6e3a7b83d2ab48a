"""The Triton backends on a GPU, beyond the battery of every backend: launches, compilations, shapes, order, capture."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton

from fused_kda import gates
from fused_kda.contract import Tensors
from fused_kda.kernels.jit import interpreted
from fused_kda.kernels.triton import kernel, prepare
from fused_kda.kernels.triton.compile import decode_build
from fused_kda.kernels.triton.shape import Shape, choose, shapes
from fused_kda.testing.compare import check_equal
from fused_kda.testing.problems import Call, Draw, draw

if interpreted(kernel.decode):
    pytest.skip("needs compiled kernels", allow_module_level=True)

BF16 = torch.bfloat16


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def tensors(call: Call) -> Tensors:
    return Tensors(*(call.arguments[name] for name in Tensors._fields))


def same(what: str, one: Call, other: Call) -> None:
    for name in ("out", "conv_state", "state"):
        check_equal(f"{name}: {what}", one.arguments[name], other.arguments[name])


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_120", "gfx942"])
@pytest.mark.parametrize("prefetch", [False, True])
@pytest.mark.parametrize("state_dtype", [torch.float32, BF16])
def test_batch_slots_and_pitches_do_not_change_what_is_compiled(
    arch: str, prefetch: bool, state_dtype: torch.dtype
) -> None:
    known: set[Any] = set()
    builds = set()
    for slots, guard in ((0, 16), (20, 16), (9, 64), (33, 8)):
        problem = draw(Draw(batch=2, heads=3, head_dim=64, slots=slots, guard=guard, state_dtype=state_dtype)).problem
        spec = dataclasses.replace(problem.spec, head_dim=128)
        known |= {decode_build(spec, arch, shape, prefetch) for _, shape in shapes(spec, arch, prefetch)}
        for batch in range(1, 1100):
            builds.add(decode_build(spec, arch, choose(spec, arch, batch, prefetch), prefetch))
    assert builds == known, "what the first call compiles is all that any batch needs"
    early = prefetch and arch in ("sm_90", "sm_120")
    assert len(known) == (1 if arch == "gfx942" else 3 if early else 2)
    warps = {dict(build.options)["num_warps"] for build in builds}
    assert len(warps) == 1, "the order of the sums follows the warps"


@pytest.fixture
def compilations() -> Iterator[list[str]]:
    """Names of the kernels that Triton was asked to compile, found in its cache or not."""
    names: list[str] = []
    knob = triton.knobs.compilation
    before = knob.listener
    knob.listener = lambda **event: names.append(event["src"].name)
    yield names
    knob.listener = before


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "chain"])
def test_only_the_first_call_compiles(device: torch.device, compilations: list[str], backend: str) -> None:
    first = draw(Draw(batch=2, heads=11), device)  # H that nothing else compiles for
    first.run(backend)
    launch_shapes = {shape for _, shape in shapes(first.problem.spec, gates.architecture(device), False)}
    assert len(compilations) == (3 if backend == "chain" else len(launch_shapes))
    compilations.clear()
    for batch in (1, 3, 16, 17, 64, 65):
        for slots, guard in ((0, 16), (80, 48)):
            draw(Draw(batch=batch, heads=11, slots=slots, guard=guard), device).run(backend)
    assert compilations == []


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("backend", "norm", "launches"), [("triton", True, 1), ("chain", True, 3), ("chain", False, 2)]
)
@pytest.mark.parametrize("layout", ["SD", "DS"])
def test_launches_and_allocations(device: torch.device, backend: str, norm: bool, launches: int, layout: Any) -> None:
    """As many kernels as the gates' table says, nothing else on the device; the one-launch kernel allocates nothing."""
    call = draw(Draw(batch=5, heads=3, layout=layout, norm_dtype=torch.float32 if norm else None), device)
    call.run(backend)
    torch.cuda.synchronize()
    allocations = torch.cuda.memory_stats(device)["allocation.all.allocated"]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call.run(backend)
        torch.cuda.synchronize()
    ran = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert len(ran) == launches, ran
    made = torch.cuda.memory_stats(device)["allocation.all.allocated"] - allocations
    assert made == (0 if backend == "triton" else launches - 1)
    (row,) = (row for row in gates.rows(backend, gates.architecture(device)))
    assert row.launches == (launches if norm else launches + 1)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("layout", "state_dtype", "mask"),
    [("SD", torch.float32, False), ("DS", torch.float32, True), ("SD", BF16, True), ("DS", BF16, False)],
)
def test_every_launch_shape_leaves_the_same_bits(
    device: torch.device, layout: Any, state_dtype: torch.dtype, mask: bool
) -> None:
    wanted = Draw(batch=9, heads=3, layout=layout, state_dtype=state_dtype, mask=mask, null_rows=(2, 8))
    snapshot = draw(wanted, device)
    arch = gates.architecture(device)
    chosen = choose(snapshot.problem.spec, arch, 1024, False)
    lane = chosen.lane_k
    candidates = [Shape(chosen.warps, lane, ahead) for ahead in (1, 4, 8)]
    candidates += [Shape(chosen.warps, lane, 2, block_v=32), Shape(chosen.warps, lane // 2, 8)]
    candidates += [Shape(chosen.warps, lane, 4, registers=128, fenced=True)]
    first = snapshot.clone()
    prepare(snapshot.problem, chosen)(tensors(first))
    for shape in candidates:
        for prefetch in (False, True):
            call = snapshot.clone()
            prepare(dataclasses.replace(call.problem, prefetch=prefetch), shape)(tensors(call))
            same(f"{shape} prefetch={prefetch}", call, first)


@pytest.mark.gpu
@pytest.mark.parametrize("prefetch", [False, True])
@pytest.mark.parametrize("batch", [1, 64])
def test_inputs_wait_for_the_kernel_that_writes_them(device: torch.device, prefetch: bool, batch: int) -> None:
    """Each layer's x is partly the last layer's out: back to back, eager and in a graph, as with a wait between."""
    layers = [draw(Draw(batch=batch, heads=3, seed=seed), device) for seed in range(12)]
    waited, eager, captured = linked(layers, prefetch), linked(layers, prefetch), linked(layers, prefetch)
    for layer in waited:
        layer.run("triton")
        torch.cuda.synchronize()
    for layer in eager:
        layer.run("triton")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in captured:
            layer.run("triton")
    graph.replay()
    torch.cuda.synchronize()
    for number, want in enumerate(waited):
        same(f"layer {number} eager", eager[number], want)
        same(f"layer {number} in a graph", captured[number], want)


def linked(layers: list[Call], prefetch: bool) -> list[Call]:
    """Copies of the layers in which each out lies in the next one's x, where k goes in."""
    copies = [layer.clone() for layer in layers]
    for layer, after in itertools.pairwise(copies):
        layer.arguments["out"] = after.arguments["x"].tensor_split(3, dim=1)[1]
        layer.arguments["prefetch"] = prefetch
    return copies


@pytest.mark.case(7)
@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "chain"])
def test_the_first_call_may_be_a_captured_one(device: torch.device, backend: str) -> None:
    call = draw(Draw(batch=2, heads=13, head_dim=64), device)  # H that nothing else compiles for
    eager = call.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call.run(backend)
    graph.replay()
    eager.run(backend)
    same("captured at the first call", call, eager)
