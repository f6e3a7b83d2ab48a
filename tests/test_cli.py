"""The command line: what each command prints, as text and as JSON, and how it ends when it cannot go on."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from fused_kda import gates
from fused_kda.cli import app, doctor, model
from fused_kda.cli import inspect as inspect_command
from fused_kda.kernels import reference
from fused_kda.testing.battery import CHECKS


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "160"})


def run_json(*arguments: str) -> Any:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_help_lists_the_commands() -> None:
    result = run("--help")
    assert result.exit_code == 0
    for command in ("generate", "eval", "check", "doctor"):
        assert command in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("check", "--backend", "warp"), "--backend: expected all or some of"),
        (("check", "--device", "tpu"), "--device: expected cpu or cuda[:number], got 'tpu'"),
        (("check", "--device", "meta"), "--device: expected cpu or cuda[:number], got 'meta'"),
        (("check", "--device", "cuda:99"), "CUDA devices, got 'cuda:99'"),
    ],
)
def test_what_cannot_be_carried_out_ends_with_one_line_and_code_2(arguments: tuple[str, ...], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_a_malformed_switch_ends_every_command_with_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSED_KDA_STRICT", "yes")
    gates.settings.cache_clear()
    result = run("doctor")
    assert result.exit_code == 2
    assert result.stderr.strip() == "fused-kda: FUSED_KDA_STRICT: expected 0 or 1, got 'yes'"


DEMO = re.findall(r'fused-kda generate "(.+)"', (Path(__file__).parents[1] / "Makefile").read_text())
ANSWERS = ("57", "4", "19")


class TestGenerate:
    @pytest.mark.parametrize(("prompt", "answer"), list(zip(DEMO, ANSWERS, strict=True)))
    def test_the_demo_is_answered_rightly(self, prompt: str, answer: str) -> None:
        result = run("generate", prompt, "--device", "cpu")
        assert result.exit_code == 0, result.output
        solution, last = result.stdout.strip().splitlines()
        assert solution.endswith(f"#### {answer}")
        assert re.fullmatch(r"\d+ tokens, \d+ tokens/s, backend reference, no kernel launches per layer", last)

    def test_one_token_is_prefill_alone(self) -> None:
        result = run("generate", DEMO[0], "--device", "cpu", "--max-tokens", "1")
        assert result.stdout.splitlines()[1] == "1 tokens, no decode step, no backend was asked"

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (("Señor",), "text: expected printable ASCII, got 'ñ'"),
            (("2 + 2", "--backend", "warp"), "--backend: expected auto or one of"),
            (("2 + 2", "--backend", "cuda"), "backend: expected one that can run this problem (reference"),
        ],
    )
    def test_what_cannot_be_done_ends_with_one_line_and_code_2(self, arguments: tuple[str, ...], message: str) -> None:
        result = run("generate", *arguments, "--device", "cpu")
        assert result.exit_code == 2
        assert result.stderr.startswith(f"fused-kda: {message}")
        assert len(result.stderr.strip().splitlines()) == 1


class TestEval:
    def test_json(self) -> None:
        report = run_json("eval", "--limit", "8", "--layout", "DS", "--state-dtype", "bf16", "--device", "cpu")
        assert (report["problems"], report["layout"], report["state_dtype"]) == (8, "DS", "bf16")
        assert report["backends"] == ["reference"]
        assert report["correct"] == 8 - len(report["wrong"])
        assert report["exact_match"] == report["correct"] / 8

    def test_a_share_below_the_one_asked_for_ends_with_code_1(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(model, "exact_match", lambda outcomes: 0.25)
        result = run("eval", "--limit", "2", "--device", "cpu", "--min-exact-match", "0.5")
        assert result.exit_code == 1
        assert result.stdout.startswith("exact match 25.0%")
        assert "exact match 0.2500 is below 0.5" in result.stderr


class TestCheck:
    def test_prints_every_check_and_the_reasons_of_what_was_not_run(self) -> None:
        result = run("check", "--backend", "reference", "--device", "cpu")
        assert result.exit_code == 0, result.output
        for check in CHECKS:
            assert check.name in result.stdout
        assert "reference: not run: graph replay: graphs are captured on" in result.stdout
        assert f"{len(CHECKS) - 1} pass, 0 fail, 1 not run" in result.stdout

    def test_json(self) -> None:
        report = run_json("check", "--backend", "reference", "--device", "cpu")
        assert report["device"] == report["architecture"] == "cpu"
        assert [outcome["check"] for outcome in report["outcomes"]] == [check.name for check in CHECKS]
        assert {outcome["status"] for outcome in report["outcomes"]} == {"pass", "not run"}

    def test_a_failed_check_ends_with_code_1(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(reference, "decode_step", lambda problem, tensors: tensors.out.zero_())
        result = run("check", "--backend", "reference", "--device", "cpu")
        assert result.exit_code == 1
        assert "checks failed" in result.stderr
        assert "reference: fail: SD" in result.stdout

    def test_nothing_run_is_not_success(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(gates, "TABLE", tuple(replace(row, archs=("sm_00",)) for row in gates.TABLE))
        result = run("check", "--backend", "reference", "--device", "cpu")
        assert result.exit_code == 1
        assert "no check could be run on reference" in result.stderr
        assert "every check: architecture cpu is not in sm_00" in result.stdout


class TestDoctor:
    def test_text_names_devices_versions_backends_and_switches(self) -> None:
        result = run("doctor")
        assert result.exit_code == 0, result.output
        for word in ("cpu", "torch", "reference", "open", *(switch.variable for switch in gates.SWITCHES)):
            assert word in result.stdout

    def test_json(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        (tmp_path / "cuda").mkdir()
        (tmp_path / "cuda" / "kernel").write_bytes(b"cubin")
        monkeypatch.setenv("FUSED_KDA_STRICT", "1")
        monkeypatch.setenv("FUSED_KDA_CACHE_DIR", str(tmp_path))
        report = run_json("doctor")
        assert report["devices"][0]["device"] == "cpu"
        assert report["versions"]["torch"] == torch.__version__
        assert report["auto"]["cpu"] == "reference"
        on_cpu = {gate["backend"]: gate for gate in report["backends"] if gate["device"] == "cpu"}
        assert tuple(on_cpu) == gates.BACKENDS
        assert on_cpu["reference"]["open"]
        assert report["caches"][0]["directory"] == str(tmp_path / "cuda")
        assert (report["caches"][0]["files"], report["caches"][0]["bytes"]) == (1, 5)
        values = {switch["variable"]: switch["value"] for switch in report["switches"]}
        assert values["FUSED_KDA_STRICT"] == "1"
        assert values["FUSED_KDA_DEBUG"] is None

    def test_a_closed_gate_says_what_would_open_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        row = gates.rows("reference")[0]
        cpu = torch.device("cpu")
        monkeypatch.setattr(gates, "TABLE", (replace(row, archs=("sm_90", "gfx942")),))
        found = doctor.gate("reference", cpu)
        assert not found.open
        assert found.reasons == ("no row for architecture cpu",)
        assert found.opens_with == "one of sm_90, gfx942"

        monkeypatch.setattr(gates, "TABLE", (replace(row, modules=("triton.absent", "torch")),))
        found = doctor.gate("reference", cpu)
        assert found.reasons == ("module triton.absent is not installed (pip install 'fused-kda[triton]')",)
        assert found.opens_with == "pip install 'fused-kda[triton]'"

        monkeypatch.setattr(gates, "TABLE", (replace(row, condition=lambda: "the driver is too old"),))
        found = doctor.gate("reference", cpu)
        assert (found.open, found.reasons, found.opens_with) == (False, ("the driver is too old",), "")


class TestInspect:
    def test_cuda(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pytest.importorskip("cuda.core")
        from fused_kda.kernels.cuda import inspect

        every = inspect.listed
        monkeypatch.setattr(inspect, "listed", lambda arch, layouts: every(arch, layouts)[:1])
        report = run_json("inspect", "--backend", "cuda", "--arch", "sm_80,sm_90a", "--layout", "ds")
        assert list(report["architectures"]) == ["sm_80", "sm_90a"]
        for (kernel,) in report["architectures"].values():
            assert kernel["kernel"].startswith("DS ")
            assert kernel["registers"] > 0
            assert kernel["counts"]["LDG"] > 0
            assert kernel["faults"] == ""
        text = run("inspect", "--backend", "cuda", "--arch", "sm_80", "--layout", "SD").stdout
        assert "cuda for sm_80, 1 kernels" in text
        assert "LDG" in text

    def test_a_kernel_that_spills_ends_with_code_1(self, monkeypatch: pytest.MonkeyPatch) -> None:
        kernel = {"kernel": "SD", "registers": 255, "faults": "8 registers spilt"}
        monkeypatch.setattr(inspect_command, "_read_triton", lambda arch, layouts, jobs: [kernel])
        result = run("inspect", "--backend", "triton", "--arch", "gfx942")
        assert result.exit_code == 1
        assert "gfx942 SD: 8 registers spilt" in result.stderr

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (("--backend", "cuda", "--arch", "gfx942"), "--arch: expected one of sm_80"),
            (("--backend", "triton", "--arch", "cpu"), "--arch: expected one of sm_80"),
            (("--backend", "cuda", "--arch", "sm_90", "--layout", "HD"), "--layout: expected SD, DS or both, got 'HD'"),
        ],
    )
    def test_what_cannot_be_compiled_ends_with_code_2(self, arguments: tuple[str, ...], message: str) -> None:
        result = run("inspect", *arguments)
        assert result.exit_code == 2
        assert result.stderr.startswith(f"fused-kda: {message}")
