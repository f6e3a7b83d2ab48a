"""docs/reliability.md: current, each public fault tested, and what was skipped never called passed."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fused_kda.bench.page import read_all
from test_bad_input import INVALID

ROOT = Path(__file__).resolve().parents[1]
MACHINE = {"device": "A CPU", "torch": "2", "date": "2026-01-02"}


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("render_reliability", ROOT / "docs" / "render_reliability.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_current(script: ModuleType) -> None:
    page = ROOT / "docs" / "reliability.md"
    assert page.read_text() == script.render(read_all(ROOT / "benchmarks" / "results"), len(INVALID))


def test_each_public_fault_has_tests(script: ModuleType) -> None:
    marked = {
        int(number)
        for path in (ROOT / "tests").rglob("test_*.py")
        for marks in re.findall(r"^(?:@|pytestmark = )pytest\.mark\.case\(([\d, ]+)", path.read_text(), re.MULTILINE)
        for number in re.findall(r"\d+", marks)
    }
    assert marked == set(script.FAULTS) == set(range(1, 26))


def record(backend: str, date: str = "2026-01-02", **counts: Any) -> dict[str, Any]:
    cell = {"case": 1, "backend": backend, "passed": 0, "failed": 0, "not run": 0, "tests": ["tests/a.py::test_b"]}
    fuzz = [{"backend": backend, "tried": 1234, "failed": 0}]
    machine = {**MACHINE, "date": date}
    cells = [{**cell, "reasons": [], **counts}]
    return {"kind": "cases", "command": "pytest", "machine": machine, "fuzz": fuzz, "cases": cells}


def row(page: str) -> list[str]:
    line = next(line for line in page.splitlines() if line.startswith("| 1 | padded rows"))
    return [cell.strip() for cell in line.strip("|").split("|")][2:]


@pytest.mark.parametrize(
    ("counts", "shown"),
    [
        ({"passed": 3}, "3 passed"),
        ({"not run": 2, "reasons": ["needs a GPU"]}, "2 not run (a)"),
        ({"passed": 1, "not run": 2, "reasons": ["x", "y"]}, "1 passed, 2 not run (a, b)"),
        ({"passed": 1, "failed": 1}, "**1 FAILED**, 1 passed"),
    ],
)
def test_a_cell_says_what_happened(script: ModuleType, counts: dict[str, Any], shown: str) -> None:
    page = script.render([record("cuda on cuda", **counts)], 120)
    assert row(page) == [shown]
    for letter, reason in zip("ab", counts.get("reasons", []), strict=False):
        assert f"* {letter}: not run: {reason}\n" in page
    assert "| `cuda on cuda` | 1,234 | 0 |" in page


def test_the_run_that_ran_most_counts(script: ModuleType) -> None:
    ran, skipped = record("cuda on cuda", passed=5), record("cuda on cuda", "2026-03-04", **{"not run": 5})
    assert row(script.render([ran, skipped], 120)) == ["5 passed"]
    later = record("cuda on cuda", "2026-02-03", passed=4, failed=1)
    assert row(script.render([ran, later], 120)) == ["**1 FAILED**, 4 passed"]


def test_what_is_skipped_is_recorded_as_not_run(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        """
import pytest

pytestmark = pytest.mark.case(7)

def test_passes(): pass
def test_fails(): assert False
def test_skips(): pytest.skip("no such machine")

@pytest.fixture
def closed(): pytest.skip("gate closed")

@pytest.mark.case(8, backend="cuda")
def test_is_skipped_in_its_fixture(closed): pass

@pytest.fixture
def broken():
    yield
    raise RuntimeError

def test_breaks_afterwards(broken): pass

def test_fuzzes(record_property): record_property("fuzz", ["x on cpu", {"tried": 5, "failed": 1}])
"""
    )
    target = tmp_path / "record.json"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "recording",
        "-p",
        "no:cacheprovider",
        "--record-cases",
        str(target),
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests")}
    done = subprocess.run([*command, str(tmp_path)], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert target.exists(), done.stdout + done.stderr
    document = json.loads(target.read_text())
    assert document["kind"] == "cases"
    assert "record.json" in document["command"]
    assert document["fuzz"] == [{"backend": "x on cpu", "tried": 5, "failed": 1}]
    found = {(cell["case"], cell["backend"]): cell for cell in document["cases"]}
    cell = found[7, "none on cpu"]
    assert (cell["passed"], cell["failed"], cell["not run"], cell["reasons"]) == (2, 2, 1, ["no such machine"])
    for case in (7, 8):
        cell = found[case, "cuda on cpu"]
        assert (cell["passed"], cell["failed"], cell["not run"], cell["reasons"]) == (0, 0, 1, ["gate closed"])
    assert cell["tests"] == ["test_it.py::test_is_skipped_in_its_fixture"]
