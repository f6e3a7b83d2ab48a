"""The sanitizer lane without a GPU: what it reaches, what counts as clean, and that its faults are only its own."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import subprocess
from pathlib import Path
from typing import Any

import pytest
import sanitize_matrix
import sanitize_run
import torch
from sanitize_matrix import BACKENDS, CUDA_SHAPES, FAULTS, FAULTY, Case, cases
from sanitize_run import FOUND, Lane, Outcome

from fused_kda.contract import Specialization
from fused_kda.testing.problems import draw

FP32, BF16 = torch.float32, torch.bfloat16
SOURCE = Path(__file__).parents[2] / "src"
#: What each part of a specialisation must be somewhere in a backend's cases; "any" must take several values.
VALUES: dict[str, Any] = {
    "heads": {2, 3},
    "head_dim": {"cuda": {128}, "triton": {64, 128, 256}, "chain": {64, 128, 256}},
    "conv_width": {"cuda": {4}, "triton": {2, 3, 4}, "chain": {2, 3, 4}},
    "conv_layout": "any",
    "weight_strides": "any",
    "dtype": {BF16},
    "weight_dtype": {FP32, BF16},
    "bias_dtype": {None, FP32, BF16},
    "norm_dtype": {None, FP32, BF16},
    "param_dtype": {FP32},
    "state_dtype": {FP32, BF16},
    "index_dtype": {torch.int32, torch.int64},
    "bounded": {False, True},
    "has_initial_state": {False, True},
    "state_alignment": {2, 4, 16},
    "conv_alignment": {2, 16},
}


@functools.cache
def specs(backend: str) -> list[tuple[Case, Specialization]]:
    return [(case, draw(case.draw).problem.spec) for case in cases(backend)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_part_of_a_specialisation_takes_all_its_values(backend: str) -> None:
    assert set(VALUES) == {field.name for field in dataclasses.fields(Specialization)}
    for name, wanted in VALUES.items():
        got = {getattr(spec, name) for _, spec in specs(backend)}
        want = wanted[backend] if isinstance(wanted, dict) else wanted
        assert len(got) > 1 if want == "any" else got == want, name
    layouts = {(spec.conv_layout.kind, spec.conv_layout.taps - spec.conv_width + 1) for _, spec in specs(backend)}
    assert layouts == {("SD", 0), ("DS", 0), ("DS", 1), ("DS", 2)}


def test_every_launch_shape_of_the_cuda_kernel_is_reached_early_late_and_hinted() -> None:
    shape = pytest.importorskip("fused_kda.kernels.cuda.shape")
    assert {name for name, value in vars(shape).items() if isinstance(value, shape.Shape)} == set(CUDA_SHAPES)
    reached = {(case.shape, case.hint, case.prefetch) for case in cases("cuda")}
    assert reached >= set(itertools.product(CUDA_SHAPES, (False,), (False, True)))
    assert reached >= {(name, True, False) for name in CUDA_SHAPES}
    for case, spec in specs("cuda"):
        assert spec.state_alignment == 16 or case.shape == "REGISTERS", "nothing launches that"


def test_every_launch_shape_of_the_triton_kernel_is_reached() -> None:
    pytest.importorskip("triton")
    from fused_kda.kernels.triton.shape import shapes

    aligned = [(case, spec) for case, spec in specs("triton") if spec.state_alignment == 16]
    for dtype, prefetch in itertools.product((FP32, BF16), (False, True)):
        reached, known = set(), set()
        for case, spec in aligned:
            if (spec.state_dtype, case.prefetch) == (dtype, prefetch):
                offered = [shape for _, shape in shapes(spec, "sm_90", prefetch)]
                known |= {(spec.head_dim, shape) for shape in offered}
                reached.add((spec.head_dim, offered[int(case.shape or 0)]))
        assert len(known) >= 4
        assert known == reached


def test_any_two_values_meet() -> None:
    axes: dict[str, tuple[Any, ...]] = {"a": (0, 1, 2), "b": ("x", "y"), "c": (None, 1), "d": (0, 1, 2, 3)}
    rows = sanitize_matrix.covering(axes, lambda row: (row["a"], row["b"]) != (2, "y"))
    met = {(one, row[one], other, row[other]) for row in rows for one, other in itertools.combinations(axes, 2)}
    for one, other in itertools.combinations(axes, 2):
        for left, right in itertools.product(axes[one], axes[other]):
            assert ((one, left, other, right) in met) == ((left, right) != (2, "y")), (one, left, other, right)
    assert len(rows) < 20
    assert rows == sanitize_matrix.covering(axes, lambda row: (row["a"], row["b"]) != (2, "y"))


def outcome(lane: Lane, **found: Any) -> Outcome:
    return Outcome(lane, **{"launches": 0, "errors": None, "status": 0, "seconds": 1.0, "output": "", **found})


def test_what_counts_as_clean() -> None:
    lane = Lane("memcheck", "chain", "2/3")
    launches = len(cases("chain")[1::3])
    assert outcome(lane, launches=launches, errors=0).passed
    assert not outcome(lane, launches=launches - 1, errors=0).passed, "a program that gave up is not clean"
    assert not outcome(lane, launches=launches, errors=None).passed, "nor is one that no tool watched"
    assert not outcome(lane, launches=launches, errors=1).passed
    assert not outcome(lane, launches=launches, errors=0, status=1).passed


def test_what_counts_as_a_fault_that_was_noticed() -> None:
    lane = Lane("racecheck", "cuda", fault=True)
    assert outcome(lane, errors=3, status=FOUND).passed
    assert not outcome(lane, errors=0, status=1).passed, "the program failed, the tool said nothing"
    assert not outcome(lane, errors=None, status=1).passed
    assert not outcome(lane, errors=3, status=0).passed


SAY = """#!/bin/sh
case "$*" in
  *--fault*) echo "========= ERROR SUMMARY: {faults} errors"; exit {status};;
  *) echo "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)"; echo "{launches} launches";;
esac
"""


@pytest.mark.parametrize(("faults", "status", "want"), [(2, FOUND, 0), (0, 0, 1)])
def test_the_lane_fails_where_a_fault_goes_unnoticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, faults: int, status: int, want: int
) -> None:
    """With a stand-in for the tool; the run without a tool is left out, since it needs a GPU."""
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(SAY.format(faults=faults, status=status, launches=len(cases("chain"))))
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    run_all = sanitize_run.run_all
    monkeypatch.setattr(
        sanitize_run, "run_all", lambda lanes, *rest: run_all([lane for lane in lanes if lane.tool], *rest)
    )
    assert sanitize_run.main(["--backend", "chain", "--tool", "racecheck"]) == want


def test_each_fault_changes_the_kernel() -> None:
    pytest.importorskip("cuda.core")
    from fused_kda.kernels.cuda import compile as compiling
    from fused_kda.kernels.cuda import shape

    spec = draw(FAULTY.draw).problem.spec
    sound = compiling.macros
    built = {compiling.compile_cubin(spec, shape.REGISTERS, False, "sm_90", cached=False)}
    with pytest.MonkeyPatch.context() as patch:
        for _, statement in FAULTS.values():
            patch.setattr(compiling, "macros", lambda *given, s=statement: {**sound(*given), "FUSED_KDA_FAULT": s})
            built.add(compiling.compile_cubin(spec, shape.REGISTERS, False, "sm_90", cached=False))
    assert len(built) == 1 + len(FAULTS)


def test_the_package_never_builds_a_fault() -> None:
    named = subprocess.run(["grep", "-rl", "FUSED_KDA_FAULT", "--include=*.py", "--include=*.cu", str(SOURCE)],
                           capture_output=True, text=True, check=True)  # fmt: skip
    assert [Path(name).name for name in named.stdout.split()] == ["fused_decode.cu"]
