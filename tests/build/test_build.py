"""``fused-kda build``: what it compiles is what the gates' table has, and one row moves everything that reads it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from conftest import SkippingSubject
from fused_kda import build, gates
from fused_kda.binaries import PrebuiltSet
from fused_kda.cli import app, doctor
from fused_kda.testing.battery import TINY
from fused_kda.testing.problems import Draw, draw

pytest.importorskip("cuda.core")
pytest.importorskip("triton")

pytestmark = pytest.mark.case(18)
ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
FP32 = torch.float32


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, arguments)


def change_row(monkeypatch: pytest.MonkeyPatch, backend: str, **changes: Any) -> None:
    rows = (dataclasses.replace(row, **changes) if row.backend == backend else row for row in gates.TABLE)
    monkeypatch.setattr(gates, "TABLE", tuple(rows))


def test_a_specialisation_is_what_the_contract_makes_of_a_call() -> None:
    for layout in ("SD", "DS"):
        for dtype, bounded in ((FP32, True), (torch.bfloat16, False)):
            call = draw(Draw(heads=3, layout=layout, state_dtype=dtype, lower_bound=-5.0 if bounded else None))  # type: ignore[arg-type]
            assert build.specialization(3, layout, dtype, bounded) == call.problem.spec  # type: ignore[arg-type]
    assert build.specialization(3, weight="checkpoint") == draw(Draw(heads=3, weight_form="checkpoint")).problem.spec


def test_each_architecture_gets_what_its_rows_have() -> None:
    specs = build.specializations([2, 5], ["SD"], [FP32], [True], ["planes"])
    for arch in build.architectures():
        wanted = build.requests([arch], specs)
        having = [b for b in gates.BACKENDS if any(row.compiler is not None for row in gates.rows(b, arch))]
        assert having
        assert [one.backend for one in wanted] == [b for b in having for _ in range(2 * len(specs))]
        assert {(one.spec, one.prefetch) for one in wanted} == {(spec, p) for spec in specs for p in (False, True)}
    (target,) = {one.target for one in build.requests(["sm_90a"], specs, ["cuda"])}
    assert target == "sm_90a"
    assert {one.arch for one in build.requests(["sm_90a"], specs)} == {"sm_90"}


@pytest.mark.parametrize("arch", ["sm_70", "gfx90a", "cpu", "sm_90b"])
def test_an_architecture_outside_the_table_fails_with_the_list(tmp_path: Path, arch: str) -> None:
    with pytest.raises(ValueError, match=f"^arch: expected some of {', '.join(build.architectures())}, got '{arch}'$"):
        build.requests(["sm_90", arch], [build.specialization(2)])
    result = run("build", "--arch", f"sm_90,{arch}", "--heads", "2", "--out", str(tmp_path / "out"))
    assert result.exit_code == 2
    assert f"--arch: expected some of {', '.join(build.architectures())}, got {arch}" in result.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("option", "value", "text"),
    [
        ("--heads", "12,x", "--heads: expected numbers above 0, got '12,x'"),
        ("--layouts", "HD", "--layouts: expected some of SD, DS, got 'HD'"),
        ("--state-dtypes", "fp16", "--state-dtypes: expected some of fp32, bf16, got 'fp16'"),
        ("--backends", "tilelang", "--backends: expected some of cuda, triton, chain, reference, got 'tilelang'"),
        ("--weights", ",", "--weights: expected at least one, got ','"),
    ],
)
def test_a_bad_option_is_named(tmp_path: Path, option: str, value: str, text: str) -> None:
    arguments = {"--arch": "sm_80", "--heads": "2", "--out": str(tmp_path / "out"), option: value}
    result = run("build", *(word for pair in arguments.items() for word in pair))
    assert (result.exit_code, text in result.stderr) == (2, True), result.stderr


def test_one_row_moves_build_run_time_doctor_page_and_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cuda backend's rows lose DS: nothing else is told, and everything follows."""
    monkeypatch.setattr(gates, "architecture", lambda device: "sm_80")
    ds, sd = build.specialization(2, "DS"), build.specialization(2, "SD")
    call = draw(Draw(layout="DS"))
    subject = SkippingSubject("cuda", CPU, TINY)

    def seen() -> dict[str, bool]:
        page = runpy.run_path(str(ROOT / "docs" / "render_gates.py"))["render"]()
        (line,) = [one for one in page.splitlines() if one.startswith("| `cuda` | sm_80")]
        try:
            subject.draw(layout="DS")
            skipped = ""
        except pytest.skip.Exception as skip:
            skipped = str(skip)
        return {
            "built": any(one.backend == "cuda" for one in build.requests(["sm_80"], [ds])),
            "run": "cuda" in gates.supported(call.problem),
            "doctor": "SD/DS" in doctor.gate("cuda", CPU).covers,
            "page": "SD, DS" in line,
            "tested": "conv layout DS is not in SD" not in skipped,
        }

    assert all(seen().values())
    change_row(monkeypatch, "cuda", layouts=("SD",))
    assert not any(seen().values())
    assert any(one.backend == "cuda" for one in build.requests(["sm_80"], [sd]))
    with pytest.raises(ValueError, match=r"^arch: .* got sm_80: conv layout DS is not in SD$"):
        build.requests(["sm_80"], [ds], ["cuda"])


def test_a_row_that_is_gone_is_gone_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gates, "architecture", lambda device: "sm_80")
    change_row(monkeypatch, "cuda", archs=("sm_100",))
    assert {one.backend for one in build.requests(["sm_80"], [build.specialization(2)])} == {"triton", "chain"}
    assert gates.supported(draw(Draw()).problem)[0] == "triton"
    assert doctor.gate("cuda", CPU).reasons == ("no row for architecture sm_80",)


def test_the_directory_holds_what_the_manifest_says(tmp_path: Path) -> None:
    """Both compilers; twice, with the same bytes; over an earlier build, and never over anything else."""
    out = tmp_path / "out"
    arguments = (
        "--heads",
        "2",
        "--layouts",
        "SD",
        "--state-dtypes",
        "fp32",
        "--gate",
        "bounded",
        "--weights",
        "planes",
    )
    both = ("--backends", "cuda,chain")  # the one-launch Triton kernel goes the way of the chain's, and takes seconds
    first = run("build", "--arch", "sm_80,gfx942", *arguments, *both, "--out", str(out), "--jobs", "1", "--json")
    assert first.exit_code == 0, first.output
    manifest = json.loads((out / "manifest.json").read_text())
    assert json.loads(first.stdout) == manifest
    assert set(manifest["tools"]) >= {"nvrtc", "triton"}
    assert set(manifest["sources"]) == {"cuda", "chain"}
    listed = {}
    for kernel in manifest["kernels"].values():
        assert kernel["registers"] > 0
        assert kernel["spills"] == 0
        assert set(kernel["files"]) == {"cuda": {"cubin"}}.get(
            kernel["backend"], {"cubin" if kernel["arch"] == "sm_80" else "hsaco", "json"}
        )
        listed |= dict(kernel["files"].values())
    there = {path.relative_to(out).as_posix(): path.read_bytes() for path in out.rglob("*") if path.is_file()}
    assert {name: hashlib.sha256(content).hexdigest() for name, content in there.items()} == {
        **listed,
        "manifest.json": hashlib.sha256(there["manifest.json"]).hexdigest(),
    }
    for name, content in there.items():
        assert str(ROOT).encode() not in content, f"{name} tells where it was built"
    held = PrebuiltSet(out)
    for one in build.requests(["sm_80", "gfx942"], [build.specialization(2)], ["cuda", "chain"]):
        assert held.lacks(one.backend, one.arch, one.spec, one.prefetch) is None

    again = run("build", "--arch", "sm_80", *arguments, "--backends", "cuda", "--out", str(out), "--jobs", "2")
    assert again.exit_code == 0, again.output
    assert "2 problems, 2 kernels" in again.stdout
    assert {path.name for path in out.iterdir()} == {"cuda", "manifest.json"}
    for path in (out / "cuda").rglob("*.cubin"):
        assert path.read_bytes() == there[path.relative_to(out).as_posix()]

    (tmp_path / "else").mkdir()
    (tmp_path / "else" / "notes").write_text("mine")
    refused = run("build", "--arch", "sm_80", *arguments, "--backends", "cuda", "--out", str(tmp_path / "else"))
    assert refused.exit_code == 2
    assert "--out: expected a new or empty directory, or an earlier build, got" in refused.stderr
    assert (tmp_path / "else" / "notes").read_text() == "mine"
