"""The CUDA kernel without a GPU: launch shapes, what the compiler makes of every listed specialisation, the cache."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fused_kda.layouts import ConvLayout
from fused_kda.testing.problems import Draw, draw

pytest.importorskip("cuda.core")

from fused_kda import gates
from fused_kda.kernels.cuda import compile as compiling
from fused_kda.kernels.cuda import inspect
from fused_kda.kernels.cuda.shape import REGISTERS, choose

ROOT = Path(__file__).parents[2]
LOCKS = ROOT / inspect.LOCKS
ARCHS = inspect.architectures()
SMS = {"sm_80": 108, "sm_86": 84, "sm_89": 142, "sm_90": 132, "sm_100": 148, "sm_103": 148, "sm_120": 188}


@pytest.fixture
def problem() -> Any:
    return draw(Draw(batch=1, heads=1)).problem


@pytest.mark.parametrize("arch", ARCHS)
def test_none_spills_or_moves_state_in_small_pieces_all_fit_an_sm_and_all_are_as_locked(arch: str) -> None:
    """One test, so that each specialisation is compiled once however the tests are spread over processes."""
    if inspect.cuobjdump() is None:
        pytest.skip("no cuobjdump: neither on PATH nor in an installed triton")
    found = inspect.report(arch)
    assert [(entry.name, entry.faults) for entry in found if entry.faults] == []
    shared = {"sm_80": 163, "sm_86": 99, "sm_89": 99, "sm_120": 99}.get(arch, 227) * 1024
    shapes = {entry.name: entry.shape for entry in inspect.listed(arch)}
    for entry in found:
        shape = shapes[entry.name]
        assert entry.shared + entry.dynamic <= shared, entry.name
        assert entry.registers * shape.threads * shape.min_ctas <= 65536, entry.name
    nvrtc, entries = inspect.read_lock(arch, LOCKS)
    if inspect.compiler() != nvrtc:
        pytest.skip(f"the lock holds for NVRTC {nvrtc}, this is {inspect.compiler()}")
    assert inspect.differences(found, entries) == [], "renew with `make lock` if the change is meant"


def test_the_locks_hold_for_the_pinned_nvrtc() -> None:
    pins = (ROOT / "constraints.txt").read_text()
    for arch in ARCHS:
        assert f"nvidia-cuda-nvrtc=={inspect.read_lock(arch, LOCKS)[0]}\n" in pins


def test_a_changed_a_new_and_a_lost_specialisation_are_told_apart(tmp_path: Path) -> None:
    one = inspect.Report("one", "sm_90", 80, 1, 0, 0, 0, 100, {}, "aa", "")
    two = dataclasses.replace(one, name="two")
    inspect.write_lock([one, two], tmp_path)
    nvrtc, entries = inspect.read_lock("sm_90", tmp_path)
    assert nvrtc == inspect.compiler()
    assert inspect.differences([one, two], entries) == []
    three = dataclasses.replace(one, name="three")
    worse = dataclasses.replace(one, registers=81, digest="bb")
    assert inspect.differences([worse, three], entries) == [
        "sm_90 one: registers 80 -> 81, digest aa -> bb",
        "sm_90 three: new",
        "sm_90 two: gone",
    ]


@pytest.mark.case(18)
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("prefetch", [True, False])
def test_every_shape_that_can_be_chosen_is_in_the_listed_set(
    problem: Any, arch: str, state_dtype: torch.dtype, prefetch: bool
) -> None:
    spec = dataclasses.replace(problem.spec, state_dtype=state_dtype, state_alignment=16)
    listed = {(entry.shape, entry.prefetch) for entry in inspect.listed(arch) if entry.spec.state_dtype == state_dtype}
    chosen = set()
    for batch in range(1, 1500):
        call = dataclasses.replace(problem, spec=spec, batch=batch, prefetch=prefetch)
        chosen.add((choose(call, arch, SMS[arch]), prefetch))
    assert chosen <= listed
    aligned = {pair for pair in listed if pair[1] == prefetch and not (prefetch and pair[0] == REGISTERS)}
    assert aligned <= chosen, "a listed shape that nothing chooses proves nothing"


@pytest.mark.parametrize("arch", ARCHS)
def test_unaligned_pools_take_plain_loads(problem: Any, arch: str) -> None:
    spec = dataclasses.replace(problem.spec, state_alignment=4)
    for batch in (1, 10, 100, 1000):
        assert choose(dataclasses.replace(problem, spec=spec, batch=batch), arch, 132) == REGISTERS


def test_every_part_of_a_specialisation_reaches_the_compiler(problem: Any) -> None:
    spec = problem.spec
    other: dict[str, Any] = {
        "heads": 7,
        "conv_layout": ConvLayout("DS", 384, 5),
        "weight_strides": (1, 2, 3),
        "weight_dtype": torch.bfloat16,
        "bias_dtype": torch.float32,
        "norm_dtype": None,
        "state_dtype": torch.bfloat16,
        "index_dtype": torch.int64,
        "bounded": False,
        "has_initial_state": True,
        "state_alignment": 4 if spec.state_alignment == 16 else 16,
        "conv_alignment": 2 if spec.conv_alignment == 16 else 16,
    }
    fixed = {"head_dim", "conv_width", "dtype", "param_dtype"}  # the gates let one value through
    assert set(other) | fixed == {field.name for field in dataclasses.fields(spec)}
    seen = [compiling.macros(spec, REGISTERS, True), compiling.macros(spec, REGISTERS, False)]
    for name, value in other.items():
        seen.append(compiling.macros(dataclasses.replace(spec, **{name: value}), REGISTERS, True))
    assert len({tuple(macros.items()) for macros in seen}) == len(seen)


@pytest.mark.case(18)
def test_the_gates_table_lets_only_what_is_compiled_through() -> None:
    for row in gates.rows("cuda"):
        assert row.head_dims == (128,)
        assert row.conv_widths == (4,)
        assert row.dtypes == (torch.bfloat16,)


_COMPILE = """
import sys
from fused_kda.kernels.cuda import compile, inspect
entry = inspect.listed("sm_90")[0]
if sys.argv[1] == "cached":
    compile._compile = None  # whatever compiles now fails
code = compile.compile_cubin(entry.spec, entry.shape, entry.prefetch, "sm_90")
print(len(code))
"""


def _compile_in_a_process(directory: Path, mode: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "FUSED_KDA_CACHE_DIR": str(directory)}
    command = [sys.executable, "-c", _COMPILE, mode]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


@pytest.mark.case(25)
def test_a_second_process_compiles_nothing(tmp_path: Path) -> None:
    first = _compile_in_a_process(tmp_path, "compile")
    assert first.returncode == 0, first.stderr
    second = _compile_in_a_process(tmp_path, "cached")
    assert second.returncode == 0, second.stderr
    assert second.stdout == first.stdout
    assert _compile_in_a_process(tmp_path / "elsewhere", "cached").returncode != 0


def _compile_here(monkeypatch: pytest.MonkeyPatch, directory: Path) -> bytes:
    monkeypatch.setenv("FUSED_KDA_CACHE_DIR", str(directory))
    gates.settings.cache_clear()
    entry = inspect.listed("sm_90")[0]
    return compiling.compile_cubin(entry.spec, entry.shape, entry.prefetch, "sm_90")


@pytest.mark.case(25)
@pytest.mark.parametrize(
    "damage", [lambda data: data[: len(data) // 2], lambda data: b"", lambda data: data[:-1] + b"?"]
)
def test_a_damaged_entry_is_compiled_anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, damage: Any) -> None:
    code = _compile_here(monkeypatch, tmp_path)
    (file,) = [path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size > len(code)]
    file.write_bytes(damage(file.read_bytes()))
    assert _compile_here(monkeypatch, tmp_path) == code
    assert file.stat().st_size > len(code)


@pytest.mark.case(25)
def test_a_directory_that_cannot_be_written_is_no_obstacle(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a directory")
    assert _compile_here(monkeypatch, blocked / "cache")[:4] == b"\x7fELF"


_COMPILE_IN_THREADS = """
from concurrent.futures import ThreadPoolExecutor
from fused_kda.kernels.cuda import compile, inspect
entries = inspect.listed("sm_90")[:4]
make = lambda e: compile.compile_cubin(e.spec, e.shape, e.prefetch, "sm_90", cached=False)
print(len(list(ThreadPoolExecutor(4).map(make, entries))))
"""


def test_the_first_compilations_of_a_process_may_be_in_several_threads() -> None:
    for _ in range(2):  # without the lock around the import, about every second process failed
        done = subprocess.run([sys.executable, "-c", _COMPILE_IN_THREADS], capture_output=True, text=True, check=False)
        assert done.stdout == "4\n", done.stderr
