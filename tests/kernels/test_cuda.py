"""The CUDA kernel on a GPU, beyond the battery of every backend: shapes, order, addresses, capture, threads."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("cuda.core")

import numpy as np
from cuda.core import Device, LaunchConfig, Program, ProgramOptions, Stream, launch

from fused_kda import api, gates
from fused_kda.bench.cells import Cell, make_layers
from fused_kda.contract import Tensors
from fused_kda.kernels.cuda import launch as launching
from fused_kda.kernels.cuda.shape import EIGHTHS, HALVES, QUARTERS, REGISTERS, WHOLE, Shape, choose
from fused_kda.layouts import ConvLayout, PageLayout
from fused_kda.testing.battery import take
from fused_kda.testing.compare import check_call, check_equal, expected
from fused_kda.testing.problems import Call, Draw, draw

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16
SHAPES = [REGISTERS, EIGHTHS, QUARTERS, HALVES, WHOLE]


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture
def arch(device: torch.device) -> str:
    name = gates.architecture(device)
    if not gates.rows("cuda", name):
        pytest.skip(f"the cuda backend has no row for {name}")
    return name


def tensors(call: Call) -> Tensors:
    return Tensors(*(call.arguments[name] for name in Tensors._fields))


def run_shape(call: Call, shape: Shape, prefetch: bool, arch: str) -> None:
    problem = dataclasses.replace(call.problem, prefetch=prefetch)
    launching.make_launch(problem, shape, arch)(tensors(call))


def results(call: Call) -> dict[str, torch.Tensor]:
    return {name: call.arguments[name] for name in ("out", "conv_state", "state")}


@pytest.mark.parametrize("layout", ["SD", "DS"])
@pytest.mark.parametrize("state_dtype", [torch.float32, BF16])
@pytest.mark.parametrize("mask", [False, True])
def test_every_launch_shape_leaves_the_same_bits(
    device: torch.device, arch: str, layout: Any, state_dtype: torch.dtype, mask: bool
) -> None:
    if int(arch[3:-1]) < 9:
        pytest.skip("one shape alone below SM90")
    wanted = Draw(batch=7, heads=3, layout=layout, state_dtype=state_dtype, mask=mask, null_rows=(2, 6), guard=16)
    snapshot = draw(wanted, device)
    first = snapshot.clone()
    run_shape(first, REGISTERS, False, arch)
    check_call(first, first.arguments["out"], expected(snapshot))
    for shape in SHAPES:
        for prefetch in (False, True):
            for hint in {False, not prefetch}:
                call = snapshot.clone()
                run_shape(call, dataclasses.replace(shape, hint=hint), prefetch, arch)
                for name, got in results(call).items():
                    check_equal(f"{name} by {shape} prefetch={prefetch} hint={hint}", got, results(first)[name])


@pytest.mark.case(21, backend="cuda")
def test_a_thousand_runs_leave_one_hash(device: torch.device, arch: str) -> None:
    for batch, heads in ((2, 3), (40, 12), (128, 12)):
        snapshot = make_layers(Cell(heads, batch), device)[0]
        first = snapshot.clone()
        first.run("cuda")
        again = snapshot.clone()
        different = torch.zeros((), dtype=torch.int64, device=device)
        for _ in range(1000):
            for name, pool in results(again).items():
                pool.copy_(snapshot.arguments[name])
            again.run("cuda")
            for name, got in results(again).items():
                whole = torch.int16 if got.itemsize == 2 else torch.int32
                different += (got.view(whole) != results(first)[name].view(whole)).sum()
        assert int(different) == 0


# ---- Order: what the previous kernel on the stream writes.

_PRODUCER = """
extern "C" __global__ void produce(unsigned* to0, const unsigned* from0, long long words0, unsigned* to1,
    const unsigned* from1, long long words1, unsigned* to2, const unsigned* from2, long long words2) {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  long long start, now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
  do { asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); } while (now - start < 20000000);
  for (long long i = threadIdx.x; i < words0; i += blockDim.x) to0[i] = from0[i];
  for (long long i = threadIdx.x; i < words1; i += blockDim.x) to1[i] = from1[i];
  for (long long i = threadIdx.x; i < words2; i += blockDim.x) to2[i] = from2[i];
}
"""


@pytest.fixture
def produce(device: torch.device, arch: str) -> Callable[..., None]:
    """Launch a kernel that lets its dependents start at once, sleeps 20 ms, only then copies up to three tensors."""
    if int(arch[3:-1]) < 9:
        pytest.skip("dependent launch needs SM90")
    Device(device.index).set_current()
    kernel = Program(_PRODUCER, "c++", ProgramOptions(arch=arch)).compile("cubin").get_kernel("produce")

    def run(*copies: tuple[torch.Tensor, torch.Tensor]) -> None:
        arguments: list[Any] = []
        for to, source in copies:
            assert to.is_contiguous()
            assert source.is_contiguous()
            assert to.nbytes % 4 == 0
            arguments += [to.data_ptr(), source.data_ptr(), np.int64(to.nbytes // 4)]
        arguments += [0, 0, np.int64(0)] * (3 - len(copies))
        stream = Stream.from_handle(torch.cuda.current_stream().cuda_stream)
        launch(stream, LaunchConfig(grid=1, block=1024), kernel, *arguments)

    return run


def _old_and_new(device: torch.device, batch: int) -> tuple[Call, Call]:
    """Two calls of the same metadata, the second with other inputs, states and slots; dense pools, all slots finite."""
    old, new = (draw(Draw(batch=batch, heads=4, guard=0, slots=batch + 6, seed=seed), device) for seed in (1, 2))
    for call in (old, new):
        for pool in ("conv_state", "state"):
            call.arguments[pool].nan_to_num_(nan=0.5)
    return old, new


@pytest.mark.parametrize("batch", [1, 6, 20, 90])
@pytest.mark.parametrize("prefetch", [False, True])
def test_inputs_that_the_previous_kernel_writes_late_are_seen(
    device: torch.device, produce: Any, batch: int, prefetch: bool
) -> None:
    old, new = _old_and_new(device, batch)
    want = old.clone()
    for name in ("x", "raw_g", "output_gate"):
        want.arguments[name] = new.arguments[name].clone()
    want.run("cuda", prefetch=prefetch)
    warm = old.clone()
    warm.run("cuda", prefetch=prefetch)
    torch.cuda.synchronize()
    produce(*((old.arguments[name], new.arguments[name]) for name in ("x", "raw_g", "output_gate")))
    old.run("cuda", prefetch=prefetch)
    for name, got in results(old).items():
        check_equal(name, got, results(want)[name])


@pytest.mark.parametrize("batch", [1, 6, 20, 90])
def test_without_prefetch_pools_and_indices_written_late_are_seen(
    device: torch.device, produce: Any, batch: int
) -> None:
    old, new = _old_and_new(device, batch)
    new.arguments["state_indices"] = (
        old.arguments["state_indices"].roll(1) if batch > 1 else torch.full_like(old.arguments["state_indices"], 3)
    )
    names = ("state", "weight", "state_indices")
    want = old.clone()
    for name in names:
        want.arguments[name] = new.arguments[name].clone()
    want.run("cuda")
    warm = old.clone()
    warm.run("cuda")
    torch.cuda.synchronize()
    produce(*((old.arguments[name], new.arguments[name]) for name in names))
    old.run("cuda")
    for name, got in results(old).items():
        check_equal(name, got, results(want)[name])


@pytest.mark.parametrize("batch", [1, 6, 20])
def test_with_prefetch_the_state_is_read_before_the_previous_kernel_ends(
    device: torch.device, produce: Any, batch: int
) -> None:
    """The early part is early, so its promise is the caller's to keep; were it not, the tests above proved nothing."""
    old, new = _old_and_new(device, batch)
    stale = old.clone()
    stale.run("cuda", prefetch=True)
    torch.cuda.synchronize()
    produce((old.arguments["state"], new.arguments["state"]))
    old.run("cuda", prefetch=True)
    check_equal("out", old.arguments["out"], stale.arguments["out"])


def test_the_environment_forbids_what_the_call_allows(
    device: torch.device, produce: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FUSED_KDA_PREFETCH", "0")
    api.reset()
    old, new = _old_and_new(device, 3)
    want = old.clone()
    want.arguments["state"] = new.arguments["state"].clone()
    want.run("cuda", prefetch=True)
    torch.cuda.synchronize()
    produce((old.arguments["state"], new.arguments["state"]))
    old.run("cuda", prefetch=True)
    check_equal("out", old.arguments["out"], want.arguments["out"])


# ---- Addresses.


@pytest.mark.large
@pytest.mark.case(12, backend="cuda")
@pytest.mark.parametrize("layout", ["SD", "DS"])
def test_slots_on_both_sides_of_two_to_the_31(device: torch.device, arch: str, layout: Any) -> None:
    """K3's unsharded page, 1,400 slots: conv bytes, conv elements, state bytes and state elements pass 2^31 in turn."""
    heads, slots = 96, 1400
    page = PageLayout(ConvLayout(layout, 3 * heads * 128, 3), BF16, torch.float32, heads, 128)
    wraps = {2**31 // page.page_bytes, 2**31 * 2 // page.page_bytes, 2**31 * 4 // page.page_bytes}
    named = sorted({slot + step for slot in wraps for step in (0, 1)} | {slots - 1})
    small = draw(Draw(batch=len(named), heads=heads, layout=layout, guard=0, page_shared=True), device)
    pool = torch.empty(slots, page.page_bytes, dtype=torch.uint8, device=device)
    pool.view(torch.int32).random_()
    conv, state = page.views(pool, 3)
    for slot, old in zip(named, small.slots, strict=True):
        conv[slot].copy_(small.arguments["conv_state"][old])
        state[slot].copy_(small.arguments["state"][old])
    before = pool.clone()
    large = small.clone()
    large.arguments.update(conv_state=conv, state=state)
    large.arguments["state_indices"].copy_(torch.tensor(named))
    large = dataclasses.replace(large, slots=tuple(named))
    want = expected(small)
    small.run("cuda")
    check_call(large, large.run("cuda"), want)
    check_equal("out", large.arguments["out"], small.arguments["out"])
    for name, now in (("conv_state", conv), ("state", state)):
        check_equal(name, now[named], small.arguments[name][list(small.slots)])
    pool[named] = before[named]
    assert torch.equal(pool.view(torch.int64), before.view(torch.int64))


def test_more_tiles_than_a_grid_dimension_of_65535(device: torch.device, arch: str) -> None:
    whole = make_layers(Cell(1, 66000), device)[0]
    whole.arguments["raw_beta"] = whole.arguments["raw_beta"][0]
    snapshot = whole.clone()
    whole.run("cuda")
    rows = [0, 1, 65534, 65535, 65536, 65999]
    part = take(snapshot, rows)
    want = expected(part)
    check_call(part, part.run("cuda"), want)
    slots = list(part.slots)
    check_equal("out", whole.arguments["out"][rows], part.arguments["out"])
    check_equal("state", whole.arguments["state"][slots], part.arguments["state"][slots])


# ---- Capture, streams, threads, what is compiled.


@pytest.mark.case(7, backend="cuda")
def test_the_first_call_may_be_inside_a_capture(device: torch.device, arch: str) -> None:
    """A specialisation that nothing has compiled yet, captured without a warm-up call, replayed with new indices."""
    heads = 13
    captured = draw(Draw(batch=3, heads=heads, slots=20), device)
    for pool in ("conv_state", "state"):
        captured.arguments[pool].nan_to_num_(nan=0.25)
    eager = captured.clone()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        captured.run("cuda")
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        order = torch.randperm(19, generator=generator)[:3] + 1
        for call in (captured, eager):
            call.arguments["state_indices"].copy_(order)
        graph.replay()
        eager.run("cuda")
        for name, got in results(captured).items():
            check_equal(name, got, results(eager)[name])


def test_side_streams_and_threads(device: torch.device, arch: str) -> None:
    """Eight threads, a stream each, one plan: every one gets its own results."""
    snapshots = [draw(Draw(batch=5, heads=3, seed=seed), device) for seed in range(8)]
    wants = [snapshot.clone() for snapshot in snapshots]
    for want in wants:
        want.run("cuda")
    calls = [[snapshot.clone() for _ in range(30)] for snapshot in snapshots]
    torch.cuda.synchronize()
    failed: list[BaseException] = []

    def work(mine: list[Call]) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream(device)):
                for call in mine:
                    call.run("cuda")
        except BaseException as error:
            failed.append(error)

    workers = [threading.Thread(target=work, args=(mine,)) for mine in calls]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    torch.cuda.synchronize()
    assert failed == []
    for mine, want in zip(calls, wants, strict=True):
        for call in mine:
            for name, got in results(call).items():
                check_equal(name, got, results(want)[name])


def test_batch_slots_pitches_and_scalars_compile_nothing_new(
    device: torch.device, arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[Any] = []
    original = launching.compile_cubin

    def counting(*arguments: Any) -> bytes:
        compiled.append(arguments)
        return original(*arguments)

    monkeypatch.setattr(launching, "compile_cubin", counting)
    launching.loaded_kernel.cache_clear()
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    shapes = set()
    for changes in ({"batch": 3}, {"batch": 4}, {"slots": 40}, {"guard": 32}, {"lower_bound": -1.0}, {"sliced": True}):
        call = draw(dataclasses.replace(Draw(batch=3, heads=2, guard=16), **changes), device)
        shapes.add(choose(call.problem, arch, sms))
        for scalars in ({}, {"norm_eps": 1e-6}, {"scale": 0.5}):
            call.clone().run("cuda", **scalars)
    call.clone().run("cuda", null_slot=-1)
    assert len(shapes) == 1
    assert len(compiled) == 1


def test_auto_takes_this_backend_without_a_warning(device: torch.device, arch: str) -> None:
    call = draw(Draw(), device)
    call.run("auto")
    assert api.stats() == {("cuda", "auto"): 1}
