"""Several at once: Python threads and streams, two devices, forked and spawned processes."""

from __future__ import annotations

import functools
import json
import multiprocessing
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

import fake_backend
from fused_kda import api, gates, stats
from fused_kda.contract import DecodeProblem
from fused_kda.kernels import reference
from fused_kda.layouts import LayoutKind
from fused_kda.testing.compare import check_equal
from fused_kda.testing.problems import Call, Draw, draw

RESULTS = ("out", "conv_state", "state")


def at_once(works: list[Callable[[], None]]) -> None:
    """Run each in a thread of its own, all let go together; raise what the first of them raised."""
    gate = threading.Barrier(len(works))
    raised: list[BaseException] = []

    def run(work: Callable[[], None]) -> None:
        gate.wait()
        try:
            work()
        except BaseException as error:  # whatever it is, the test's own thread raises it again
            raised.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # a thread loses its turn as often as can be
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
    finally:
        sys.setswitchinterval(interval)
    assert not any(thread.is_alive() for thread in threads)
    if raised:
        raise raised[0]


def same(what: str, one: Call, other: Call) -> None:
    for name in RESULTS:
        check_equal(f"{name}: {what}", one.arguments[name], other.arguments[name])


def on_one_pool(count: int, **wanted: Any) -> list[Call]:
    """Calls of three rows each, on disjoint slots of the same two pools, the last of each a null row."""
    whole = draw(Draw(batch=2 * count, heads=2, guard=0, **wanted))
    found = []
    for number in range(count):
        mine = draw(Draw(batch=3, heads=2, guard=0, seed=number + 1, **wanted))
        slots = whole.slots[2 * number : 2 * number + 2]
        indices = torch.tensor([*slots, 0], dtype=torch.int32)
        pools = {name: whole.arguments[name] for name in ("conv_state", "state")}
        found.append(Call({**mine.arguments, **pools, "state_indices": indices}, (0, 1), tuple(slots)))
    return found


@pytest.mark.parametrize("kind", ["one pool", "pools of their own", "specialisations of their own"])
def test_threads_on_the_reference(kind: str) -> None:
    """Cold at the start: the threads race for the plans, too. Every one gets the bits of its calls alone."""
    count, steps = 6, 8
    if kind == "one pool":
        calls = on_one_pool(count, head_dim=8)
        pool = {name: calls[0].arguments[name] for name in ("conv_state", "state")}
        before = {name: value.clone() for name, value in pool.items()}
    else:
        own = kind == "specialisations of their own"
        calls = [draw(Draw(batch=3, heads=1 + n if own else 2, head_dim=8, seed=n)) for n in range(count)]
    alone = [call.clone() for call in calls]
    for call in alone:
        for _ in range(steps):
            call.run("reference")
    api.reset()

    def work(call: Call) -> None:
        for _ in range(steps):
            call.run("reference")

    at_once([functools.partial(work, call) for call in calls])
    for number, (call, want) in enumerate(zip(calls, alone, strict=True)):
        slots = list(call.slots)
        check_equal(f"out of thread {number}", call.arguments["out"], want.arguments["out"])
        for name in ("conv_state", "state"):
            check_equal(f"{name} of thread {number}", call.arguments[name][slots], want.arguments[name][slots])
    if kind == "one pool":
        named = {slot for call in calls for slot in call.slots}
        others = [slot for slot in range(len(pool["state"])) if slot not in named]
        for name in pool:
            check_equal(f"{name} that nobody named", pool[name][others], before[name][others])
    assert stats() == {("reference", "requested"): count * steps}


def test_threads_and_a_full_table_of_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans are dropped and counted while others are made and read."""
    monkeypatch.setattr(api, "MAX_PLANS", 3)
    calls = [draw(Draw(batch=batch, heads=1, head_dim=8)) for batch in range(1, 7)]

    def work(first: int) -> None:
        for number in range(60):
            calls[(first + number) % len(calls)].clone().run("reference")
            stats()

    at_once([functools.partial(work, first) for first in range(4)])
    assert len(api._plans) <= 3 + 4


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["cuda", "triton", "chain"])
def test_threads_and_streams_on_a_gpu(backend: str) -> None:
    """Eight threads, a stream each, four specialisations, all cold: the bits of the same calls one after the other."""
    heads, dim = {"cuda": (7, 128), "triton": (9, 64), "chain": (10, 64)}[backend]  # that nothing else compiles for
    layouts: tuple[LayoutKind, ...] = ("SD", "DS")
    calls = [
        draw(replace(Draw(5, heads, dim, null_rows=(2,)), layout=layouts[n % 2], mask=n % 4 < 2, seed=n), "cuda")
        for n in range(8)
    ]
    alone = [call.clone() for call in calls]
    torch.cuda.synchronize()

    def work(call: Call) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(50):
                call.run(backend)
            torch.cuda.current_stream().synchronize()

    at_once([functools.partial(work, call) for call in calls])
    for number, (call, want) in enumerate(zip(calls, alone, strict=True)):
        for _ in range(50):
            want.run(backend)
        same(f"thread {number}", call, want)
    assert stats()[(backend, "requested")] == 2 * 8 * 50


# ---- Two devices, where there is none.


class Elsewhere(torch.Tensor):
    """A tensor of the host that says it lives on ``cuda:index``."""

    index: int

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", self.index)


def moved(call: Call, index: int) -> Call:
    """The call with tensors that say they live on a GPU."""

    def say(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        there = torch.Tensor._make_subclass(Elsewhere, value)
        there.index = index
        return there

    return Call({name: say(value) for name, value in call.arguments.items()}, call.live, call.slots)


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Two GPUs of the imagination, of different architectures; the list says which device was current in what order."""
    entered: list[object] = []
    current = [0]

    @contextmanager
    def device(index: int) -> Iterator[None]:
        entered.append(index)
        before, current[0] = current[0], index
        yield
        current[0] = before

    archs = {"cuda:0": "sm_90", "cuda:1": "sm_80"}
    monkeypatch.setattr(gates, "architecture", lambda device: archs.get(str(device), "cpu"))
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    return entered


def test_each_device_has_a_plan_of_its_own_the_second_one_first(
    devices: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = fake_backend.install(monkeypatch, archs=("sm_80", "sm_90"))
    ran: list[int] = []

    def prepare(problem: DecodeProblem) -> Callable[..., None]:
        backend.prepared.append(problem)
        here = problem.device.index

        def launch(tensors: Any) -> None:
            assert torch.cuda.current_device() == here == tensors.x.device.index
            ran.append(here)
            plain = type(tensors)(*(None if t is None else t.as_subclass(torch.Tensor) for t in tensors))
            reference.decode_step(problem_on_host, plain)

        return launch

    monkeypatch.setattr(sys.modules["fused_kda.kernels.fast"], "prepare", prepare)
    call = draw(Draw(head_dim=8))
    problem_on_host = call.problem
    want = call.clone()
    want.run("reference")
    for index in (1, 0, 1, 0):
        there = call.clone()
        moved(there, index).run("auto")
        same(f"cuda:{index}", there, want)
    assert [problem.device.index for problem in backend.prepared] == [1, 0]
    assert ran == [1, 0, 1, 0]
    assert devices == [1, 1], "the caller's own device needs no change"
    assert torch.cuda.current_device() == 0


def test_tensors_of_two_devices_are_refused(devices: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    fake_backend.install(monkeypatch, archs=("sm_80", "sm_90"))
    call = draw(Draw(head_dim=8))
    on_first, on_second = moved(call, 0), moved(call, 1)
    for name in ("state", "state_indices", "weight"):
        with pytest.raises(TypeError, match=rf"^{name}: expected device cuda:1 .*, got cuda:0$"):
            on_second.run("auto", **{name: on_first.arguments[name]})


def test_triton_kernels_are_kept_by_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A binary is loaded into one device's context: the same build on another device is another entry."""
    pytest.importorskip("triton")
    from fused_kda.kernels import jit
    from fused_kda.kernels.triton.compile import decode_build
    from fused_kda.kernels.triton.shape import choose

    loads: list[object] = []

    def obtain(*_: Any) -> object:
        loads.append(object())
        return loads[-1]

    monkeypatch.setattr(jit, "obtain", obtain)
    spec = draw(Draw(heads=31, head_dim=64)).problem.spec
    build = decode_build(spec, "sm_90", choose(spec, "sm_90", 1, False), False)
    jit._loaded.cache_clear()
    keep = [jit._loaded(build, "sm_90", device) for device in (1, 0, 1, 0)]
    jit._loaded.cache_clear()
    assert keep == [loads[0], loads[1], loads[0], loads[1]]
    assert loads[0] is not loads[1]


def test_cuda_kernels_are_kept_by_device(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cuda.core")
    from fused_kda.kernels.cuda import launch, shape

    loads: list[int] = []

    def load(code: bytes, name: str, device: int, shared: int) -> tuple[int, int]:
        loads.append(device)
        return device, len(loads)

    monkeypatch.setattr(launch, "load", load)
    monkeypatch.setattr(launch, "compile_cubin", lambda *_: b"")
    spec = draw(Draw(heads=31, head_dim=128)).problem.spec
    keep = [launch.loaded_kernel(spec, shape.REGISTERS, False, "sm_90", device) for device in (1, 0, 1, 0)]
    launch.loaded_kernel.cache_clear()
    assert loads == [1, 0]
    assert keep == [(1, 1), (0, 2), (1, 1), (0, 2)]


# ---- Processes.

CALL = Draw(batch=3, heads=2, head_dim=8, null_rows=(1,), seed=5)


def results_of_a_child(queue: Any) -> None:
    call = draw(CALL)
    call.run("reference")
    queue.put([call.arguments[name].contiguous().view(torch.uint8).flatten().tolist() for name in RESULTS] + [stats()])


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_child_process_computes_the_same_bits(method: str) -> None:
    """A forked child finds the parent's plans and uses them, a spawned one finds none; neither changes the parent's."""
    if method not in multiprocessing.get_all_start_methods():
        pytest.skip(f"no {method} on this system")
    mine = draw(CALL)
    mine.run("reference")
    wanted = [mine.arguments[name].contiguous().view(torch.uint8).flatten().tolist() for name in RESULTS]
    context = multiprocessing.get_context(method)
    queue = context.Queue()
    child = context.Process(target=results_of_a_child, args=(queue,))
    child.start()
    *got, counted = queue.get(timeout=120)
    child.join(60)
    assert child.exitcode == 0
    assert got == wanted
    assert counted == {("reference", "requested"): 2 if method == "fork" else 1}
    assert stats() == {("reference", "requested"): 1}


_FORK = """
import json, multiprocessing, sys
import torch, fused_kda
from fused_kda.testing.problems import Draw, draw

def run(inherited, queue):
    try:
        call = inherited if inherited is not None else draw(Draw(), "cuda")
        out = call.run(sys.argv[2])
        queue.put([float(out.float().sum()), ""])
    except Exception as error:
        queue.put([0.0, f"{type(error).__name__}: {error}"])

def in_a_child(inherited=None):
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=run, args=(inherited, queue))
    child.start()
    answer = queue.get(timeout=120)
    child.join(60)
    return answer

answers = []
assert not torch.cuda.is_initialized()
if sys.argv[1] == "before":
    answers.append(in_a_child())
call = draw(Draw(), "cuda")
before = call.clone()
if sys.argv[1] == "after":
    before.run(sys.argv[2])
    torch.cuda.synchronize()
    answers.append(in_a_child(call))
answers.append([float(call.run(sys.argv[2]).float().sum()), ""])
print(json.dumps(answers))
"""


def forked(when: str, backend: str) -> list[tuple[float, str]]:
    done = subprocess.run([sys.executable, "-c", _FORK, when, backend], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [(total, error) for total, error in json.loads(done.stdout.splitlines()[-1])]


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_fork_before_the_device_is_used(backend: str) -> None:
    """Importing the package touches no device: a child that is forked after it may use one, and so may the parent."""
    (child, no_error), (parent, _) = forked("before", backend)
    assert no_error == ""
    assert child == parent


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_fork_after_the_device_was_used(backend: str) -> None:
    """The child has the parent's plans and tensors, but no device: torch's error says so, and the parent goes on."""
    (_, error), (_, no_error) = forked("after", backend)
    assert "Cannot re-initialize CUDA in forked subprocess" in error
    assert no_error == ""
