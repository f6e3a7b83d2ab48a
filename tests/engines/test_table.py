"""The compatibility table: its page is current, and what it says is what the gates say."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

import fake_backend
from fused_kda import engines, gates
from fused_kda.cli import app
from fused_kda.engines import imports, sglang, vllm
from fused_kda.engines.table import TABLE
from fused_kda.shapes import shape_problem

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "surfaces", {})
    monkeypatch.setattr(imports, "surfaces", engines.surfaces)
    monkeypatch.setattr("fused_kda.cli.engine.surfaces", engines.surfaces)
    monkeypatch.setattr(imports, "_watcher", imports._Watcher())


def doctor(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["doctor", *arguments], env={"COLUMNS": "160"})


def test_the_page_is_current() -> None:
    render = runpy.run_path(str(ROOT / "docs" / "render_engines.py"))["render"]
    page = (ROOT / "docs" / "engines.md").read_text()
    assert page == render(), "docs/engines.md is stale: python docs/render_engines.py"
    for entry in TABLE:
        assert f"| {entry.engine} | {entry.versions} | {entry.model} |" in page


def test_an_engine_is_given_backends_of_one_launch_alone() -> None:
    offered = {
        backend
        for entry in TABLE
        for layout in entry.layouts
        for backend in entry.backends("sm_90", layout, torch.float32)
    }
    assert offered == {row.backend for row in gates.TABLE if row.launches == 1 and "sm_90" in row.archs}


def test_the_table_is_the_gates_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    """A head dim or a state dtype that a row lacks leaves the cell empty."""
    entry = next(entry for entry in TABLE if entry.model == "Kimi-K3")
    for ranges, expected in (
        ({}, ("fast",)),
        ({"head_dims": (64,)}, ()),
        ({"layouts": ("DS",)}, ()),
        ({"state_dtypes": (torch.bfloat16,)}, ()),
        ({"launches": 3}, ()),
        ({"auto": False}, ()),
    ):
        fake_backend.install(monkeypatch, **{"archs": ("sm_90",), **ranges})
        assert entry.backends("sm_90", "SD", torch.float32) == expected, ranges


@pytest.mark.parametrize("heads", [1, 3, 64, 96])
def test_a_problem_of_shapes_alone_is_that_of_a_dense_call(heads: int) -> None:
    for layout in ("SD", "DS"):
        problem = shape_problem(heads=heads, layout=layout, state_dtype=torch.bfloat16, lower_bound=-5.0)
        assert (problem.spec.heads, problem.layout, problem.spec.state_dtype) == (heads, layout, torch.bfloat16)
        assert problem.spec.state_alignment == problem.spec.conv_alignment == 16


class TestDoctor:
    @pytest.mark.parametrize("name", ["vllm", "sglang", "fla"])
    def test_it_names_models_and_reasons(self, name: str) -> None:
        result = doctor("--engine", name)
        assert result.exit_code == 0, result.output
        assert result.stdout.startswith(f"{name}: ")
        for entry in TABLE:
            assert (entry.model.split(",")[0] in result.stdout) == any(
                other.engine == name and other.model == entry.model for other in TABLE
            )

    @pytest.mark.parametrize("plugin", [vllm, sglang], ids=["vllm", "sglang"])
    def test_it_shows_every_surface(self, monkeypatch: pytest.MonkeyPatch, plugin: Any) -> None:
        monkeypatch.setenv("FUSED_KDA_SGLANG", "1")
        name = plugin.__name__.rpartition(".")[2]
        report = json.loads(doctor("--engine", name, "--json").stdout)
        assert [surface["name"] for surface in report["surfaces"]] == ["plug-in", *plugin.MODULES]

    def test_a_backend_of_one_launch_is_named_for_every_cell(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
        fake_backend.install(monkeypatch)
        report = json.loads(doctor("--engine", "vllm", "--json").stdout)
        assert {cell["backend"] for cell in report["models"]} == {"fast"}

    def test_an_unknown_engine_ends_with_one_line(self) -> None:
        result = doctor("--engine", "tgi")
        assert result.exit_code == 2
        assert result.stderr.strip() == "fused-kda: --engine: expected one of vllm, sglang, fla, got 'tgi'"
