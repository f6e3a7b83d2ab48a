"""Measuring a cell: correctness first, figures that follow from the times, absent peers, the regression gate."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import fake_backend
from fused_kda import gates
from fused_kda.bench import decode, peers
from fused_kda.bench.cells import Cell
from fused_kda.bench.compare import ratios
from fused_kda.bench.timing import Timing
from fused_kda.testing.problems import Call

CPU = torch.device("cpu")
CELL = Cell(1, 2)


def measure(*backends: str, **changes: Any) -> dict[str, dict[str, Any]]:
    found = decode.measure(CELL, backends, device=CPU, model_layers=2, replays=2, **changes)
    return {record["provider"]: record for record in found}


def test_a_record_per_provider_with_every_sample() -> None:
    found = measure("reference", "cuda")
    assert list(found) == ["limit", "copy", "reference", "cuda"]
    for name in ("limit", "copy", "reference"):
        record = found[name]
        assert len(record["us"]["samples"]) == 2
        assert record["launches"] is None
        moved = CELL.step_bytes if name == "reference" else 2 * CELL.state_bytes
        assert record["gb_per_s"] == pytest.approx(moved / record["us"]["median"] / 1e3)
    assert found["limit"]["over_limit"] == 1
    assert found["cuda"]["not_timed"].startswith("architecture cpu is not in")
    assert not found["cuda"]["failed"]


def test_figures_against_the_limit_and_the_chain() -> None:
    times = {name: Timing((us,), 1) for name, us in (("limit", 2.0), ("chain", 12.0), ("cuda", 3.0))}
    cuda = decode.figures(CELL, "cuda", times, 69)
    assert (cuda["over_limit"], cuda["chain_over"], cuda["saved_us"]) == (1.5, 4.0, 69 * 9.0)
    assert decode.figures(CELL, "limit", times, 69)["chain_over"] is None
    assert decode.figures(CELL, "cuda", {k: times[k] for k in ("limit", "cuda")}, 69)["saved_us"] is None


def test_a_backend_that_fails_its_check_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_backend.install(monkeypatch)
    honest = Call.run

    def off_by_a_little(self: Call, backend: str, **changes: Any) -> torch.Tensor:
        out = honest(self, backend, **changes)
        if backend == "fast":
            out.view(-1)[5] *= 1.05
        return out

    monkeypatch.setattr(Call, "run", off_by_a_little)
    found = measure("fast", "reference")
    assert found["fast"]["failed"]
    assert found["fast"]["not_timed"].startswith("wrong: out: 1 of 256")
    assert "us" in found["reference"]


def test_what_auto_never_takes_is_timed_only_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_backend.install(monkeypatch, auto=False)
    assert measure("fast", by_name=False)["fast"]["not_timed"] == "only where it is asked for by name"
    assert "us" in measure("fast", by_name=True)["fast"]


@pytest.mark.parametrize("name", peers.PEERS)
def test_a_peer_that_is_not_installed_is_a_reason(name: str) -> None:
    record = measure(against=[name])[name]
    assert not record["failed"]
    assert record["not_timed"]  # installed or not: none of them runs on a CPU


def test_a_peer_is_checked_before_it_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = False

    def stand_in(call: Call) -> peers.Bound:
        def step() -> None:
            call.run("reference")
            if wrong:
                call.arguments["state"][call.slots[0]].mul_(1.5)

        return peers.Bound(step, lambda: call.arguments["out"])

    monkeypatch.setitem(peers.PEERS, "other", stand_in)
    assert "us" in measure(against=["other"])["other"]
    wrong = True
    assert measure(against=["other"])["other"]["not_timed"].startswith("wrong: state: ")


def test_a_reference_is_not_captured_into_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gates, "architecture", lambda device: "sm_90")
    problem = replace(decode.make_layers(CELL, CPU, 1)[0].problem, device=torch.device("cuda", 0))
    assert "no graph can hold it" in str(decode._closed("reference", problem, True, True))
    assert decode._closed("reference", problem, False, True) is None


def record(provider: str, us: float | None = None, **more: Any) -> dict[str, Any]:
    key = {"heads": 12, "batch": 1, "layout": "SD", "state_dtype": "float32", "prefetch": True, "provider": provider}
    return {**key, **({} if us is None else {"us": {"median": us}}), **more}


def test_geometric_means_leave_out_measures_and_what_was_not_timed() -> None:
    records = [record("limit", over_limit=1.0), record("cuda", over_limit=2.0), record("cuda", over_limit=8.0)]
    records.append(record("chain", not_timed="wrong"))
    assert decode.geometric_means(records) == {"cuda SD float32": pytest.approx(4.0)}


def test_the_regression_gate_compares_steps_cell_by_cell() -> None:
    old = [record("limit", 1.0), record("cuda", 2.0), record("triton", 2.0), record("chain", 3.0)]
    new = [record("limit", 9.0), record("cuda", 2.2), record("triton", not_timed="wrong"), record("fla", 1.0)]
    found = {one.key[-1]: one for one in ratios(old, new)}
    assert list(found) == ["limit", "cuda", "triton"]
    assert found["cuda"].ratio == pytest.approx(1.1)
    assert found["cuda"].worse(1.05)
    assert not found["cuda"].worse(1.2)
    assert found["triton"].worse(1.2)  # timed once, and not any more
    assert not found["limit"].worse(1.05)  # how the machine fared


def test_other_cells_are_not_compared() -> None:
    assert ratios([record("cuda", 2.0)], [record("cuda", 2.0) | {"batch": 2}]) == []
