"""``bench``, ``bench-model`` and ``eval --backend all`` on a CPU: tables, files, pictures, and how they end."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from fused_kda.bench import results
from fused_kda.cli import app
from fused_kda.kernels import reference

BENCH = ("bench", "--device", "cpu", "--heads", "1", "--batch", "1,2", "--layers", "2", "--replays", "2")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "160"})


def saved(path: Path, *arguments: str) -> Any:
    result = run(*arguments, "--save", str(path))
    assert result.exit_code == 0, result.output
    return json.loads(path.read_text())


def test_bench_prints_a_table_and_writes_file_and_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    result = run(*BENCH, "--against", "vllm", "--save", str(tmp_path), "--plot", str(tmp_path / "plot.png"))
    assert result.exit_code == 0, result.output
    for word in ("limit", "copy", "reference", "% of limit", "ms saved in 2 layers", ") vllm: ", "4 cells in"):
        assert word in result.stdout, word
    (path,) = tmp_path.glob("*.json")
    document = json.loads(path.read_text())
    assert path.stem == results.default_name(document)
    assert document["command"] == (
        "fused-kda bench --heads 1 --batch 1,2 --against vllm --layers 2 --replays 2 --device cpu"
    )
    assert {(c["heads"], c["batch"], c["layout"]) for c in document["cells"]} == {
        (1, batch, layout) for batch in (1, 2) for layout in ("SD", "DS")
    }
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_bench_prints_csv_or_json_instead() -> None:
    rows = list(csv.DictReader(io.StringIO(run(*BENCH, "--csv").stdout)))
    assert {row["provider"] for row in rows} >= {"limit", "reference", "cuda"}
    assert all(float(row["us_median"]) > 0 for row in rows if not row["not_timed"])
    document = json.loads(run(*BENCH, "--json").stdout)
    assert document["kind"] == "bench"
    assert document["graph"] is False


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--layout", "HD"), "--layout: expected SD or DS, or both by comma, got 'HD'"),
        (("--heads", "1,x"), "--heads: expected positive whole numbers separated by commas, got '1,x'"),
        (("--batch", "0"), "--batch: expected positive whole numbers"),
        (("--state-dtype", "fp8"), "--state-dtype: expected fp32 or bf16"),
        (("--against", "other"), "--against: expected some of fla, vllm, sglang, flashinfer, got 'other'"),
        (("--graph",), "--graph: expected a CUDA device"),
        (("--compare", "absent.json"), "--compare: absent.json: expected a results file"),
    ],
)
def test_what_cannot_be_carried_out_ends_with_one_line_and_code_2(arguments: tuple[str, ...], message: str) -> None:
    result = run("bench", "--device", "cpu", *arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"fused-kda: {message}")
    assert len(result.stderr.strip().splitlines()) == 1


def test_a_backend_asked_for_by_name_must_be_timed() -> None:
    result = run(*BENCH, "--backend", "reference,cuda")
    assert result.exit_code == 1
    assert "nothing was timed of cuda" in result.stderr


def test_a_failed_check_ends_with_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "decode_step", lambda problem, tensors: tensors.out.zero_())
    result = run(*BENCH, "--backend", "reference")
    assert result.exit_code == 1
    assert "a check failed, so some cells were not timed: reference" in result.stderr


class TestCompare:
    @pytest.fixture
    def old(self, tmp_path: Path) -> Path:
        path = tmp_path / "old.json"
        saved(path, *BENCH, "--batch", "1", "--layout", "SD", "--backend", "reference")
        return path

    def change(self, old: Path, factor: float) -> None:
        document = json.loads(old.read_text())
        for cell in document["cells"]:
            cell["us"]["median"] *= factor
        old.write_text(json.dumps(document))

    def test_measures_the_old_cells_and_fails_where_one_is_slower(self, old: Path) -> None:
        self.change(old, 0.01)
        result = run("bench", "--device", "cpu", "--layers", "2", "--replays", "2", "--compare", str(old))
        assert result.exit_code == 1
        assert "1 of 1 steps are slower than 1.05 x before" in result.stderr
        assert "new / old" in result.stdout

    def test_ends_well_where_none_is(self, old: Path) -> None:
        self.change(old, 100.0)
        result = run("bench", "--device", "cpu", "--layers", "2", "--replays", "2", "--compare", str(old))
        assert result.exit_code == 0, result.output
        assert "1 cells in" in result.stdout

    def test_another_machine_is_no_comparison(self, old: Path) -> None:
        document = json.loads(old.read_text())
        document["machine"]["device"] = "another"
        old.write_text(json.dumps(document))
        result = run("bench", "--device", "cpu", "--compare", str(old))
        assert result.exit_code == 2
        assert "got those of another" in result.stderr

    def test_cells_must_be_shared(self, old: Path) -> None:
        result = run("bench", "--device", "cpu", "--heads", "3", "--compare", str(old))
        assert result.exit_code == 2
        assert "--compare: expected cells that both runs have, got none" in result.stderr

    def test_steps_must_be_shared(self, old: Path) -> None:
        result = run("bench", "--device", "cpu", "--layers", "2", "--no-prefetch", "--compare", str(old))
        assert result.exit_code == 2
        assert "--compare: expected steps that both runs have, got none" in result.stderr


MODEL = ("bench-model", "--device", "cpu", "--layers", "2", "--hidden", "32", "--heads", "1", "--replays", "2")


def test_bench_model_times_every_variant_and_says_where_the_time_goes(tmp_path: Path) -> None:
    document = saved(tmp_path / "model.json", *MODEL, "--batch", "2")
    assert document["kind"] == "model"
    timed = [record for record in document["cells"] if "us" in record]
    assert {record["model"] for record in timed} == {"k3-tp8", "kimi-linear"}
    variants = {(r["backend"], r["layout"], r["state_dtype"], r["prefetch"]) for r in timed}
    assert variants == {
        ("reference", "SD", "float32", True),
        ("reference", "SD", "float32", False),
        ("reference", "DS", "float32", True),
        ("reference", "SD", "bfloat16", True),
    }
    for record in timed:
        assert record["tokens_per_s"] == pytest.approx(2e6 / record["us"]["mean"])
        assert record["op_us"] > 0
        assert record["gemms_us"] > 0
    assert {record["backend"] for record in document["cells"] if "not_timed" in record} == {"chain"}


def test_bench_model_prints_shares() -> None:
    result = run(*MODEL, "--model", "kimi-linear")
    assert result.exit_code == 0, result.output
    for word in ("GEMMs", "op", "rest", "tokens/s", "kimi-linear", "chain: not timed:"):
        assert word in result.stdout
    assert "k3-tp8" not in result.stdout


def test_bench_model_refuses_a_stack_that_it_does_not_know() -> None:
    result = run(*MODEL, "--model", "k4")
    assert result.exit_code == 2
    assert "--model: expected some of k3-tp8, kimi-linear, got 'k4'" in result.stderr


def test_eval_of_every_backend_on_one_page(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    result = run("eval", "--backend", "all", "--device", "cpu", "--limit", "2", "--drift-steps", "8",
                 "--save", str(tmp_path / "eval.json"), "--plot", str(tmp_path / "drift.png"))  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "answers that differ" in result.stdout
    assert "a bf16 state after 8 decode steps" in result.stdout
    document = json.loads((tmp_path / "eval.json").read_text())
    assert document["kind"] == "eval"
    assert document["drift"]["steps"] == [1, 2, 4, 8]
    assert (tmp_path / "drift.png").read_bytes().startswith(b"\x89PNG")


def test_eval_ends_with_code_1_where_a_text_differs(wrong_backend: str) -> None:
    result = run("eval", "--backend", "all", "--device", "cpu", "--limit", "1", "--drift-steps", "1")
    assert result.exit_code == 1
    assert f"texts differ from the reference's with an fp32 state: {wrong_backend} SD" in result.stderr


def test_eval_saves_only_a_whole_page() -> None:
    result = run("eval", "--save", "somewhere.json")
    assert result.exit_code == 2
    assert "--save, --plot: expected with --backend all" in result.stderr
