"""The same bits: in either layout, at every batch size, every time. Public faults 17, 20 and 21."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fused_kda import gates
from fused_kda.bench.cells import Cell, make_layers
from fused_kda.testing.battery import Subject, take
from fused_kda.testing.compare import check_equal
from fused_kda.testing.problems import Call

BF16 = torch.bfloat16
POOLS = ("conv_state", "state")


@pytest.mark.case(17)
@pytest.mark.parametrize("wanted", [{}, {"spare_taps": 1}, {"page_shared": True}, {"state_dtype": BF16}])
def test_ds_is_sd_to_the_bit_in_as_many_launches(subject: Subject, wanted: dict[str, Any]) -> None:
    sd = subject.draw(layout="SD", **{name: value for name, value in wanted.items() if name != "spare_taps"})
    ds = subject.draw(layout="DS", **wanted)
    check_equal("out", ds.run(subject.backend), sd.run(subject.backend))
    for name in POOLS:
        slots = list(sd.slots)
        check_equal(name, ds.arguments[name][slots], sd.arguments[name][slots])
    arch = gates.architecture(subject.device)
    launches = {
        layout: {row.launches for row in gates.rows(subject.backend, arch) if layout in row.layouts}
        for layout in ("SD", "DS")
    }
    assert launches["SD"] == launches["DS"]


@pytest.mark.gpu
@pytest.mark.case(17)
@pytest.mark.parametrize("layout", ["SD", "DS"])
@pytest.mark.parametrize("backend", ["cuda", "triton", "chain"])
def test_each_layout_is_as_many_launches_as_the_gates_say(backend: str, layout: Any) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    rows = gates.rows(backend, gates.architecture(device))
    if not rows or rows[0].machine_reasons():
        pytest.skip(f"{backend} has no open gate here")
    call = make_layers(Cell(3, 8, layout), device)[0]
    call.run(backend)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call.run(backend)
        torch.cuda.synchronize()
    ran = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert len(ran) == rows[0].launches, ran


def crowd(subject: Subject, heads: int, batch: int, layout: Any = "SD", dtype: torch.dtype = torch.float32) -> Call:
    """A call of many rows, drawn where it runs."""
    if subject.device.type == "cpu":
        return subject.draw(batch=batch, layout=layout, state_dtype=dtype)
    return make_layers(Cell(heads, batch, layout, dtype), subject.device)[0]


@pytest.mark.large
@pytest.mark.case(20)
@pytest.mark.parametrize(("layout", "state_dtype"), [("SD", torch.float32), ("DS", BF16)])
def test_a_request_keeps_its_bits_while_the_batch_changes(subject: Subject, layout: str, state_dtype: Any) -> None:
    """One request in batches of 1 to 1,024 rows, another size and another position each step, against the same request
    alone: on a GPU every size, so every dispatch boundary is crossed by it."""
    sizes = range(1, 1025) if subject.device.type == "cuda" else subject.size.batches
    if subject.backend == "reference" and subject.device.type == "cuda":
        sizes = (1, 2, 31, 32, 33, 256)
    crowded = crowd(subject, 12, max(sizes), layout, state_dtype)
    if crowded.arguments["raw_beta"].ndim == 3:  # the battery's ``take`` wants rows first
        crowded.arguments["raw_beta"] = crowded.arguments["raw_beta"][0]
    alone = take(crowded.clone(), [0])
    different = torch.zeros((), dtype=torch.int64, device=subject.device)
    for step, size in enumerate(sizes):
        rows = list(range(1, size))
        rows.insert(step % size, 0)
        together = take(crowded, rows)
        got, want = together.run(subject.backend)[step % size], alone.run(subject.backend)[0]
        different += (got.view(torch.int16) != want.view(torch.int16)).sum()
    assert int(different) == 0
    for name in POOLS:
        slot = alone.slots[0]
        check_equal(name, crowded.arguments[name][slot], alone.arguments[name][slot])


RUNS = [(12, 32, "SD"), (12, 32, "DS"), (12, 128, "SD"), (12, 1024, "DS"), (96, 32, "DS"), (96, 128, "SD")]
RUNS += [(96, 1024, "DS")]


@pytest.mark.large
@pytest.mark.case(21)
@pytest.mark.parametrize(("heads", "batch", "layout"), RUNS)
def test_200_runs_from_one_snapshot_leave_one_hash(subject: Subject, heads: int, batch: int, layout: str) -> None:
    """A block that shifts the window while a sibling still reads it would not do so the same way 200 times."""
    large = subject.device.type == "cuda" and subject.backend != "reference"
    if not large and (heads, batch) != (12, 32):
        pytest.skip("a race needs a GPU's blocks: elsewhere the smallest size is enough")
    snapshot = crowd(subject, heads, batch if large else subject.size.rows, layout)
    given = snapshot.arguments
    slots = list(snapshot.slots)
    window = torch.cat((given["conv_state"][slots][..., 1:], given["x"].unsqueeze(-1)), dim=-1)
    first = snapshot.clone()
    first.run(subject.backend)
    check_equal("window", first.arguments["conv_state"][slots], window)
    again = snapshot.clone()
    for number in range(200 if large else subject.size.repeats):
        for name in POOLS:
            again.arguments[name].copy_(given[name])
        again.arguments["out"].fill_(float("nan"))
        again.run(subject.backend)
        for name in (*POOLS, "out"):
            whole = torch.int16 if given[name].itemsize == 2 else torch.int32
            same = torch.equal(again.arguments[name].view(whole), first.arguments[name].view(whole))
            assert same, f"{name} of run {number} differs"
