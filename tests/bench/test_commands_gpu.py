"""The commands on a GPU, at small sizes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fused_kda.cli import app

pytestmark = pytest.mark.gpu


def run(path: Path, *arguments: str) -> Any:
    result = CliRunner().invoke(app, [*arguments, "--device", "cuda", "--save", str(path)])
    assert result.exit_code == 0, result.output
    return json.loads(path.read_text())


@pytest.mark.parametrize("mode", ["--graph", "--eager"])
def test_bench(tmp_path: Path, mode: str) -> None:
    sizes = ("--heads", "12", "--batch", "4", "--layers", "2", "--replays", "2", mode)
    result = run(tmp_path / "bench.json", "bench", *sizes, "--backend", "cuda,chain")
    found = {(r["provider"], r["layout"]): r for r in result["cells"]}
    for layout in ("SD", "DS"):
        assert found["cuda", layout]["launches"] == found["limit", layout]["launches"] == 1
        assert found["chain", layout]["launches"] == 3
        assert found["cuda", layout]["chain_over"] > 1
    assert result["machine"]["driver"] != "unknown"
    assert ("host_us" in result) is (mode == "--eager")


def test_bench_model(tmp_path: Path) -> None:
    sizes = ("--layers", "3", "--batch", "2", "--replays", "2")
    result = run(tmp_path / "model.json", "bench-model", *sizes)
    found = {(r["model"], r["backend"]): r["launches"] for r in result["cells"]}
    for model in ("k3-tp8", "kimi-linear"):
        # The chain is three launches where the op is one; the same projections and norm around both.
        assert found[model, "chain"] - found[model, "cuda"] == 2 * 3


@pytest.mark.filterwarnings("ignore:prefill runs in plain PyTorch")  # where fla-core is not installed
def test_eval(tmp_path: Path) -> None:
    result = run(tmp_path / "eval.json", "eval", "--backend", "all", "--limit", "16", "--drift-steps", "128")
    found = {(one["backend"], one["layout"], one["state_dtype"]): one for one in result["agreement"]}
    for backend in ("cuda", "triton", "chain"):
        assert found[backend, "DS", "float32"]["different"] == 0
    assert 0 < result["drift"]["state"][-1] < 0.1
