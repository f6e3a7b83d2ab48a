"""Prebuilt kernels, warm-up and refusal on a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("cuda.bindings")

from fused_kda import api, build, fused_kda_decode, gates, kernel_counts, warmup
from fused_kda.binaries import PrebuiltSet
from fused_kda.testing.compare import check_call, expected
from fused_kda.testing.problems import Call, Draw, draw

pytestmark = pytest.mark.gpu
PROCESS = Path(__file__).with_name("prebuilt_process.py")
#: A directory for this GPU that was built elsewhere, to be used instead of building one here.
CARRIED = Path(".prebuilt")
#: What the directory below holds enough for; the other checks of the battery need further specialisations.
NEEDED = (
    *("SD", "DS", "softplus gate", "null rows", "extreme gates", "steps", "batch invariance", "repeats"),
    *("graph replay", "sliced inputs"),
)


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture
def arch(device: torch.device) -> str:
    name = gates.architecture(device)
    if not gates.rows("cuda", name):
        pytest.skip(f"the cuda backend has no row for {name}")
    return name


@pytest.fixture(scope="session")
def prebuilt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    arch = gates.architecture(torch.device("cuda", torch.cuda.current_device()))
    specs = build.specializations(
        [12], ["SD", "DS"], [torch.float32, torch.bfloat16], bounded=[True, False], weights=["planes"]
    )
    wanted = build.requests([arch], specs)
    if (CARRIED / "manifest.json").exists():
        carried = PrebuiltSet(CARRIED)
        lacking = {carried.lacks(one.backend, one.arch, one.spec, one.prefetch) for one in wanted} - {None}
        print(f"{CARRIED}, built by {carried.tools}: {lacking or 'serves'}")
        if not lacking:
            return CARRIED.resolve()
    directory = tmp_path_factory.mktemp("prebuilt")
    build.write(directory, wanted, jobs=os.cpu_count() or 1)
    return directory


def start(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(PROCESS), *arguments]
    everything = {**os.environ, **environment}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=everything)


def finish(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, error = process.communicate()
    assert process.returncode == 0, error[-4000:]
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    return found


@pytest.mark.case(7, 18, 25)
@pytest.mark.timeout(600)
def test_without_compiler_and_disk_the_bits_are_those_of_compiling_here(
    arch: str, prebuilt: Path, tmp_path: Path
) -> None:
    """Home and temporary directories cannot be written, PATH is empty, NVRTC and Triton's compiler are not there."""
    nowhere = dict.fromkeys(("HOME", "XDG_CACHE_HOME", "TMPDIR", "TRITON_CACHE_DIR", "TRITON_HOME"), "/proc")
    without = start(str(prebuilt), PATH="/nowhere", **nowhere)
    compiled = finish(start(FUSED_KDA_CACHE_DIR=str(tmp_path)))
    found = finish(without)
    assert found["forbidden"] == []
    assert found["directories"] == [str(prebuilt)]
    assert found["hashes"] == compiled["hashes"]
    assert found["counts"]["compiled"] == found["counts"]["cache"] == 0
    assert found["counts"]["prebuilt"] >= compiled["counts"]["compiled"] > 0
    assert compiled["counts"]["prebuilt"] == 0
    outcomes = {(backend, check): (status, reason) for backend, check, status, reason in found["outcomes"]}
    print({status: sum(one[0] == status for one in outcomes.values()) for status in ("pass", "fail", "not run")})
    assert [key for key, (status, _) in outcomes.items() if status == "fail"] == []
    for backend in ("cuda", "triton", "chain"):
        for check in NEEDED:
            assert outcomes[backend, check] == ("pass", ""), (backend, check)
    others = [reason for _, (status, reason) in outcomes.items() if status == "not run"]
    assert others
    assert all("holds no kernel for this specialisation" in reason or " is not in " in reason for reason in others)


@pytest.mark.case(7)
@pytest.mark.parametrize(("backend", "heads"), [("cuda", 17), ("triton", 18), ("chain", 20)])
def test_after_warmup_serving_compiles_nothing(
    device: torch.device, arch: str, backend: str, heads: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Strict: any batch, slot count and pitch, eager and captured; then another layer, which is an error."""
    monkeypatch.setenv("FUSED_KDA_COMPILE", "warmup")
    monkeypatch.setenv("FUSED_KDA_CACHE_DIR", str(tmp_path))
    api.reset()
    got = warmup(draw(Draw(batch=1, heads=heads), device).arguments, backend=backend)
    assert got["compiled"] > 0
    assert got["cache"] == got["prebuilt"] == 0
    before = kernel_counts()
    for batch in (1, 2, 7, 16, 33, 64, 130, 300):
        call = draw(Draw(batch=batch, heads=heads, slots=400, guard=16 * (batch % 3)), device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call.run(backend)
        graph.replay()
        call.run(backend)
    assert kernel_counts() == before
    other = draw(Draw(batch=2, heads=heads + 30), device)
    untouched = other.clone()
    with pytest.raises(RuntimeError, match=r"^FUSED_KDA_COMPILE=warmup: expected every kernel .* fused_kda\.warmup"):
        other.run(backend)
    assert other.touched_elsewhere(untouched) == []


@pytest.mark.case(7, backend="cuda")
def test_a_compilation_inside_a_capture_in_strict_mode_names_warmup(
    device: torch.device, arch: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FUSED_KDA_COMPILE", "warmup")
    monkeypatch.setenv("FUSED_KDA_CACHE_DIR", str(tmp_path))
    api.reset()
    call = draw(Draw(batch=2, heads=49), device)
    with pytest.raises(RuntimeError, match="warmup"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        call.run("cuda")
    warmup(call.arguments, backend="cuda")
    graph = torch.cuda.CUDAGraph()
    want = expected(call)
    with torch.cuda.graph(graph):
        call.run("cuda")
    graph.replay()
    check_call(call, call.arguments["out"], want)


def _foreign(directory: Path, arch: str, call: Call) -> None:
    """A directory whose manifest says ``arch`` and whose machine code is for another one."""
    other = "sm_100" if arch != "sm_100" else "sm_90"
    build.write(directory, [build.Request("cuda", arch, other, call.problem.spec, call.problem.prefetch)])


@pytest.mark.case(18, backend="cuda")
def test_code_for_another_architecture_is_refused_and_compiled(
    device: torch.device, arch: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    call = draw(Draw(batch=2, heads=22), device)
    _foreign(tmp_path / "set", arch, call)
    monkeypatch.setenv("FUSED_KDA_PREBUILT", str(tmp_path / "set"))
    monkeypatch.setenv("FUSED_KDA_CACHE_DIR", str(tmp_path / "cache"))
    api.reset()
    want = expected(call)
    check_call(call, call.run("cuda"), want)
    assert (kernel_counts()["prebuilt"], kernel_counts()["compiled"]) == (0, 1)


@pytest.mark.case(18, backend="cuda")
def test_code_for_another_architecture_closes_the_gate_where_nothing_compiles(
    device: torch.device, arch: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """No launch ever fails for want of a kernel image: the gate says so first."""
    call = draw(Draw(batch=2, heads=23), device)
    _foreign(tmp_path / "set", arch, call)
    monkeypatch.setenv("FUSED_KDA_PREBUILT", str(tmp_path / "set"))
    monkeypatch.setenv("FUSED_KDA_COMPILE", "never")
    api.reset()
    assert gates.supported(call.problem) == ("cuda", "reference")
    with pytest.raises(NotImplementedError, match=r"got cuda \(requested\): compiling is switched off .*; .* holds "):
        fused_kda_decode(**call.arguments, backend="cuda")
    assert gates.supported(call.problem) == ("reference",)
