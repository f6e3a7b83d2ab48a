"""The Triton kernel without a GPU: what the compiler makes of it for every architecture, and the locks that hold it."""

from __future__ import annotations

import dataclasses
import functools
import re
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from fused_kda import gates
from fused_kda.kernels.jit import compiled, interpreted, target
from fused_kda.kernels.triton import inspect
from fused_kda.kernels.triton.inspect import Case, Figures
from fused_kda.kernels.triton.kernel import decode

if interpreted(decode):
    pytest.skip("needs the compiler", allow_module_level=True)

ROOT = Path(__file__).parents[2]
LOCKS = ROOT / inspect.LOCKS


@functools.cache
def figures(arch: str) -> dict[str, Figures]:
    return inspect.table(inspect.cases(arch))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("arch", inspect.ARCHS)
def test_no_kernel_has_a_fault_and_all_are_as_locked(arch: str) -> None:
    now = figures(arch)
    assert {case.name: now[case.name].faults(case) for case in inspect.cases(arch) if now[case.name].faults(case)} == {}
    version, locked = inspect.read_lock(arch, LOCKS)
    if version != inspect.triton.__version__:
        pytest.skip(f"the lock holds for Triton {version}, this is {inspect.triton.__version__}")
    assert inspect.differences(locked, now) == [], "renew with `make lock` if the change is meant"


def test_the_amd_matrix_is_whole() -> None:
    for arch in ("gfx942", "gfx950"):
        plain = [case for case in inspect.cases(arch) if case.head_dim == 128 and not case.extra]
        assert len(plain) == len(set(plain)) == 2 * 2 * 2 * 4 * 2
        assert {case.heads for case in plain} == {3, 12, 24, 96}


def test_the_locks_hold_for_the_pinned_triton_and_the_tables_architectures() -> None:
    pins = (ROOT / "requirements-static.txt").read_text()
    for arch in inspect.ARCHS:
        assert f"triton=={inspect.read_lock(arch, LOCKS)[0]}\n" in pins
    listed = {arch for row in gates.rows("triton") for arch in row.archs if arch != "cpu"}
    assert set(inspect.ARCHS) <= listed
    for arch in listed:
        target(arch)


def test_faults_are_told() -> None:
    case = Case("gfx942")
    sound = Figures(200, 80, 0, 0, 2048, 2, 30, 16, 100)
    assert sound.faults(case) == []
    for change in (
        {"spills": 1}, {"scratch_bytes": 4}, {"shared_bytes": 1 << 17}, {"occupancy": 1}, {"wide_loads": 15},
        {"wide_stores": 0}, {"lane_ops": 0},
    ):  # fmt: skip
        assert len(dataclasses.replace(sound, **change).faults(case)) == 1, change


def test_a_changed_a_new_and_a_lost_case_are_told_apart(tmp_path: Path) -> None:
    row = Figures(200, 80, 0, 0, 2048, 2, 30, 16, 100)
    inspect.write_lock("gfx942", {"one": row, "two": row}, tmp_path)
    version, locked = inspect.read_lock("gfx942", tmp_path)
    assert version == inspect.triton.__version__
    assert inspect.differences(locked, {"one": row, "two": row}) == []
    assert inspect.differences(locked, {"one": dataclasses.replace(row, registers=201), "three": row}) == [
        "one: registers 200 -> 201",
        "three: new",
        "two: gone",
    ]


def reductions(case: Case) -> list[str]:
    """Every sum of a compiled kernel in order, with the layout of its operand over threads and registers."""
    text = compiled(case.build(), case.arch).asm["ttgir"]
    names = dict(re.findall(r"^(#\w+) = (.*)$", text, re.MULTILINE))
    found = re.findall(r"^\s*\}\) : \((tensor<[^)]*>)\) ->", text, re.MULTILINE)
    for _ in range(3):  # layouts are named by other layouts
        found = [re.sub(r"#(?!ttg)\w+", lambda match: names.get(match[0], match[0]), entry) for entry in found]
    return found


@pytest.mark.timeout(600)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "gfx942"])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
def test_sums_are_laid_out_alike_in_every_specialisation(arch: str, state_dtype: torch.dtype) -> None:
    """So their order, and with it a result's bits, does not depend on the conv layout or on what else is given."""
    base = Case(arch, state_dtype=state_dtype)
    others = [
        dataclasses.replace(base, layout="DS"),
        dataclasses.replace(base, layout="DS", extra=("spare",)),
        dataclasses.replace(base, extra=("mask", "bias")),
        dataclasses.replace(base, extra=("checkpoint",)),
        dataclasses.replace(base, heads=96),
    ]
    if arch == "sm_90":
        others.append(dataclasses.replace(base, extra=("prefetch",)))
    wanted = reductions(base)
    assert len(wanted) > 8
    for other in others:
        assert reductions(other) == wanted, other


@pytest.mark.parametrize("arch", ["sm_90", "sm_100", "sm_120"])
@pytest.mark.parametrize("batch", [1, 1024])
def test_what_is_read_before_the_kernel_ahead_has_ended(arch: str, batch: int) -> None:
    """Without prefetch nothing; with it all but x, raw_g, raw_beta, output_gate and later tiles. Never a store."""
    for extra in ((), ("prefetch",)):
        case = Case(arch, batch=batch, extra=extra)
        text = inspect.disassembled(compiled(case.build(), arch))
        order = re.findall(r"\b(LDG|STG|ACQBULK|PREEXIT|EXIT)\b", text)
        wait = order.index("ACQBULK")
        early, late = order[:wait], order[wait:]
        assert set(early) == ({"LDG"} if extra else set())
        later_tiles = (8 - case.shape().ahead) * 4  # 16-byte loads of a tile by each of 128 threads
        assert late[: late.index("STG")].count("LDG") >= 6
        if extra:
            assert late.count("LDG") == 6 + later_tiles
        assert late.index("PREEXIT") > 0, "dependents start only after this kernel's own wait"


def test_contraction_is_off() -> None:
    """No multiply-add but those that the source writes: the same count in SD and DS, whatever the compiler fancies."""
    counts = set()
    for layout in ("SD", "DS"):
        case = Case("sm_90", layout=layout)  # type: ignore[arg-type]
        text = compiled(case.build(), case.arch).asm["ptx"]
        assert "mad.f32" not in text
        counts.add(len(re.findall(r"\bfma\.rn\.f32\b", text)))
    assert len(counts) == 1


def test_an_unknown_architecture_is_named() -> None:
    with pytest.raises(ValueError, match="arch: expected sm_NN or a wave64 gfx9 name, got 'gfx1100'"):
        target("gfx1100")
