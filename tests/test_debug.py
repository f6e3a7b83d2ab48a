"""What finds a fault in data: debug mode, with layer, row and slot; and the finite check that may stay on."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import torch

from fused_kda import api, debug, fused_kda_decode
from fused_kda.finite import Finding, FiniteCheck
from fused_kda.pool import StatePool
from fused_kda.testing.battery import Subject
from fused_kda.testing.compare import check_equal
from fused_kda.testing.problems import Call, Draw, draw

NAN, INF = float("nan"), float("inf")


def on_pool(pool: StatePool, layer: int, slots: list[int], **changes: Any) -> Call:
    """A drawn call on a layer of the pool, its rows in the given slots."""
    conv_state, state, null_slot = pool.layer(layer)
    heads, dim = state.shape[1:3]
    call = draw(Draw(batch=len(slots), heads=heads, head_dim=dim, layout="SD"), state.device)
    indices = torch.tensor(slots, dtype=torch.int32, device=state.device)
    given = {"conv_state": conv_state, "state": state, "null_slot": null_slot, "state_indices": indices}
    live = [(row, slot) for row, slot in enumerate(slots) if null_slot < slot < pool.slots]
    return Call({**call.arguments, **given, **changes}, tuple(r for r, _ in live), tuple(s for _, s in live))


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> StatePool:
    monkeypatch.setenv("FUSED_KDA_DEBUG", "1")
    api.reset()
    return StatePool(3, 6, 2, 8)


@pytest.mark.parametrize(
    ("slots", "place", "text"),
    [
        ([4, 2, 4], None, r"state_indices: expected each live slot once, got slot: rows \{4: \[0, 2\]\} \(layer 1\)"),
        ([1, 6, 2], None, r"state_indices: expected -1 <= slot < 6, got \[6\] in rows \[1\] \(layer 1\)"),
        ([1, 5, 2], ("state", 2), r"state: expected finite .*, got others in \(row, slot\) \[\(2, 2\)\] \(layer 1\)"),
        ([0, 5, 2], ("conv_state", 5), r"conv_state: expected .*, got .* \[\(1, 5\)\] \(layer 1\)"),
    ],
)
def test_debug_mode_names_row_slot_and_layer(pool: StatePool, slots: list[int], place: Any, text: str) -> None:
    call = on_pool(pool, 1, slots)
    if place is not None:
        getattr(pool.layer(1), place[0])[place[1]][1, 1] = INF
    before = call.clone()
    with pytest.raises(ValueError, match=f"^{text}$"):
        call.run("reference")
    assert call.touched_elsewhere(before) == []
    assert call.arguments["out"].isnan().all()


def test_every_bad_row_is_named(pool: StatePool) -> None:
    for slot in (1, 3, 4):
        pool.layer(2).state[slot, 1, 2, 3] = NAN
    initial = torch.tensor([True, False, True, True])
    call = on_pool(pool, 2, [4, 3, 5, 1], has_initial_state=initial)
    with pytest.raises(ValueError, match=r"got others in \(row, slot\) \[\(0, 4\), \(3, 1\)\] \(layer 2\)$"):
        call.run("reference")


def test_a_label_lasts_as_long_as_its_pool() -> None:
    before = dict(debug._labels)
    one = StatePool(2, 3, 1, 4)
    address = one.layer(1).state.data_ptr()
    assert debug._labels[address] == "layer 1"
    other = torch.zeros(2, 1, 4, 4)
    debug.label(other, "model.layers.7")
    assert debug._labels[other.data_ptr()] == "model.layers.7"
    del one, other
    assert debug._labels == before


@pytest.mark.gpu
def test_debug_mode_leaves_captures_alone_and_says_so(
    pool: StatePool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(debug, "_skipped", set())
    on_device = StatePool(1, 5, 2, 128, device="cuda")
    call = on_pool(on_device, 0, [1, 2])
    call.run("cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call.run("cuda")
        call.run("cuda")
    graph.replay()
    torch.cuda.synchronize()
    assert [record.message for record in caplog.records if "captured graph" in record.message] == [
        "debug mode: steps of a captured graph are not checked, neither now nor at a replay"
    ]
    call.arguments["state_indices"].fill_(2)
    with pytest.raises(ValueError, match=r"expected each live slot once"):
        call.run("cuda")


# ---- The finite check.


@pytest.mark.parametrize("place", ["state", "window", "x", "raw_g", "raw_beta", "output_gate"])
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_one_bad_number_reaches_the_output_and_is_found(subject: Subject, place: str, value: float) -> None:
    """Of a slot or of a row's inputs; only that slot is marked, and only that row's output is not finite."""
    dim = subject.size.head_dim
    pool = StatePool(2, 6, 2, dim, device=subject.device)
    check = FiniteCheck(pool)
    call = on_pool(pool, 1, [5, 0, 3, 2])
    sound = call.clone()
    if place == "state":
        pool.layer(1).state[3, 1, 2, 5] = value
    elif place == "window":
        pool.layer(1).conv_state[3, 3, 1] = value
    elif place == "raw_g":
        call.arguments[place][0, 2, 1, 4] = NAN  # an infinite gate is a decay of 0 or 1, which is sound
    elif place in ("raw_beta", "output_gate"):
        call.arguments[place][2].flatten()[1] = NAN  # likewise
    else:
        call.arguments[place][2, 7] = value
    out = call.run(subject.backend)
    check.watch(1, out, call.arguments["state_indices"])
    assert check.found() == [Finding(1, 3)]
    assert torch.equal(out.isfinite().flatten(1).all(1).cpu(), torch.tensor([True, True, False, True]))
    want = sound.run(subject.backend)
    assert torch.equal(out[[0, 1, 3]], want[[0, 1, 3]])


def watched(pool: StatePool, rows: torch.Tensor, slots: list[int], layer: int = 0, **form: Any) -> FiniteCheck:
    check = FiniteCheck(pool)
    indices = torch.tensor(slots, device=rows.device, **{"dtype": torch.int32, **form})
    check.watch(layer, rows, indices)
    return check


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
def test_findings_add_up_until_they_are_cleared(device: str) -> None:
    pool = StatePool(3, 9, 2, 64, device=device)
    out = torch.zeros(1, 4, 2, 64, dtype=torch.bfloat16, device=device)
    check = watched(pool, out, [1, 2, 3, 4])
    assert check.found() == []
    out[0, 1, 1, 63] = NAN
    out[0, 3, 0, 0] = -INF
    for layer, slots in ((0, [8, 7, 6, 5]), (2, [1, 2, 3, 4])):
        check.watch(layer, out, torch.tensor(slots, device=device))
    out.zero_()
    check.watch(0, out, torch.tensor([5, 6, 7, 8], device=device))
    assert check.found() == [Finding(0, 5), Finding(0, 7), Finding(2, 2), Finding(2, 4)]
    check.clear(7)
    assert check.found() == [Finding(0, 5), Finding(2, 2), Finding(2, 4)]
    check.clear()
    assert check.found() == []


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("form", [torch.int32, torch.int64])
def test_rows_that_name_no_slot_are_no_findings(device: str, form: torch.dtype) -> None:
    out = torch.full((6, 2, 64), NAN, dtype=torch.bfloat16, device=device)
    for null_slot, found in ((0, [Finding(0, 3)]), (-1, [Finding(0, 0), Finding(0, 3)])):
        pool = StatePool(1, 5, 1, 1, null_slot=null_slot, device=device)
        assert watched(pool, out, [0, -1, 5, 99, -(2**31), 3], dtype=form).found() == found
    check = watched(pool, out[:0], [])
    assert check.found() == []


@pytest.mark.parametrize("device", DEVICES)
def test_outputs_are_read_where_they_are(device: str) -> None:
    """Column slices with NaN beside them, a strided index, widths that no block divides, values at the edge of bf16."""
    pool = StatePool(1, 5, 1, 1, device=device)
    wide = torch.full((3, 3000), NAN, dtype=torch.bfloat16, device=device)
    out = wide[:, 5 : 5 + 1157]
    out.fill_(torch.finfo(torch.bfloat16).max)
    table = torch.tensor([[0, 4], [0, 2], [0, 1]], dtype=torch.int32, device=device)
    check = FiniteCheck(pool)
    check.watch(0, out, table[:, 1])
    assert check.found() == []
    out[1, 1156] = INF
    check.watch(0, out, table[:, 1:])
    assert check.found() == [Finding(0, 2)]


_INTERPRETED = """
import json, torch
from fused_kda.kernels.finite import mark
flags = torch.zeros(8, dtype=torch.int32)
out = torch.zeros(5, 1300, dtype=torch.bfloat16)
out[1, 1299], out[2, 0], out[3, 7] = float("nan"), float("-inf"), float("inf")
out[4] = torch.finfo(torch.bfloat16).max
slots = torch.tensor([1, 3, 0, 9, 6], dtype=torch.int32)
mark[(5,)](flags, out, slots, 7, 0, 1290, 1300, 1, BLOCK=1024, PDL=False)
narrow = flags.tolist()
mark[(5,)](flags, out, slots, 7, -1, 1300, 1300, 1, BLOCK=1024, PDL=False)
print(json.dumps([narrow, flags.tolist()]))
"""


def test_the_fused_check_in_tritons_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    done = subprocess.run([sys.executable, "-c", _INTERPRETED], capture_output=True, text=True, check=True)
    narrow, whole = json.loads(done.stdout)
    assert narrow == [0] * 8
    assert whole == [1, 0, 0, 1, 0, 0, 0, 0]


@pytest.mark.gpu
def test_the_fused_check_is_one_launch_without_a_wait_and_is_captured() -> None:
    pytest.importorskip("triton")
    pool = StatePool(1, 9, 2, 128, device="cuda")
    check = FiniteCheck(pool)
    call = on_pool(pool, 0, [3, 1, 0])
    out, indices = call.arguments["out"], call.arguments["state_indices"]
    out.zero_()
    check.watch(0, out, indices)
    torch.cuda.synchronize()
    allocations = torch.cuda.memory_stats()["allocation.all.allocated"]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        torch.cuda.set_sync_debug_mode("error")
        try:
            check.watch(0, out, indices)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
    ran = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert ran == ["mark"]
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == allocations
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fused_kda_decode(**call.arguments, backend="cuda")
        check.watch(0, out, indices)
    graph.replay()
    assert check.found() == []
    pool.layer(0).state[7, 0, 1, 1] = NAN
    indices.copy_(torch.tensor([3, 7, 1]))
    graph.replay()
    assert check.found() == [Finding(0, 7)]


@pytest.mark.gpu
@pytest.mark.parametrize("prefetch", [False, True])
@pytest.mark.parametrize("batch", [1, 40])
def test_the_check_between_two_steps_changes_no_bit(prefetch: bool, batch: int) -> None:
    """Steps on one pool, in a graph, with the check between them: the bits of steps that wait for each other.

    With ``prefetch`` a step reads the pool before the kernel ahead, which is the check, has ended. That is sound since
    the check lets it start only after the step before has ended.
    """
    pytest.importorskip("triton")
    waited = draw(Draw(batch=batch, heads=12, guard=0), "cuda")
    waited.run("cuda", prefetch=prefetch)
    chained = waited.clone()
    check = FiniteCheck(StatePool(1, waited.problem.slots, 1, 1, device="cuda"))
    out, indices = chained.arguments["out"], chained.arguments["state_indices"]
    check.watch(0, out, indices)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(50):
            chained.run("cuda", prefetch=prefetch)
            check.watch(0, out, indices)
    graph.replay()
    for _ in range(50):
        waited.run("cuda")
        torch.cuda.synchronize()
    for name in ("out", "conv_state", "state"):
        check_equal(name, chained.arguments[name], waited.arguments[name])
    assert check.found() == []


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "gfx942"])
def test_the_fused_check_compiles_for(arch: str) -> None:
    pytest.importorskip("triton")
    from fused_kda.kernels.finite import marking
    from fused_kda.kernels.jit import compiled, interpreted

    build = marking(arch, torch.int32)
    if interpreted(build.kernel):
        pytest.skip("needs compiled kernels")
    compiled_kernel = compiled(build, arch)
    if arch == "sm_90":
        assert "griddepcontrol.wait" in compiled_kernel.asm["ptx"]
    elif arch == "sm_80":
        assert "griddepcontrol" not in compiled_kernel.asm["ptx"]


def test_from_a_finding_to_a_quarantine_and_back() -> None:
    pool = StatePool(2, 4, 2, 8)
    first, second = pool.allocate(2)
    check = FiniteCheck(pool)
    pool.layer(1).state[second, 0, 0, 0] = NAN
    call = on_pool(pool, 1, [first, second])
    check.watch(1, call.run("reference"), call.arguments["state_indices"])
    (finding,) = check.found()
    pool.quarantine(finding.slot, f"not finite in layers {pool.not_finite(finding.slot)}")
    assert pool.quarantined == {second: "not finite in layers [1]"}
    assert pool.not_finite(first) == []
    assert pool.layer(1).state[second].isnan().any(), "kept, to be looked at"
    assert pool.allocate() == 3
    pool.release(finding.slot)
    check.clear(finding.slot)
    assert pool.allocate() == second
    assert not pool.layer(1).state[second].any()
    assert check.found() == []
