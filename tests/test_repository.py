"""What holds the repository together: one set of pins, documents whose code runs and whose links lead somewhere."""

from __future__ import annotations

import re
import subprocess
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = sorted(path for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")))
PIN = re.compile(r"\b([A-Za-z][A-Za-z0-9_.-]*)==([0-9][A-Za-z0-9.]*)")
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
WITH_CODE = [path for path in DOCUMENTS if BLOCK.search(path.read_text())]


def _pins(name: str) -> dict[str, str]:
    text = (ROOT / name).read_text()
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return {match[1].lower().replace("_", "-"): match[2] for match in PIN.finditer("\n".join(lines))}


def test_hooks_metadata_and_constraints_pin_alike() -> None:
    constraints = _pins("constraints.txt")
    metadata = _pins("pyproject.toml")
    hooks = _pins(".pre-commit-config.yaml")
    assert set(metadata) >= {"ruff", "mypy", "clang-format"}
    assert set(hooks) == {"ruff", "clang-format"}  # mypy runs from the environment that the constraints made
    for name, version in {**metadata, **hooks}.items():
        assert constraints[name] == version, name
    hook_text = (ROOT / ".pre-commit-config.yaml").read_text()
    assert hook_text.count(f"ruff=={constraints['ruff']}") == hook_text.count("ruff==") == 2


def test_every_constraint_is_an_exact_pin() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert all(PIN.fullmatch(line) for line in lines)
    assert lines == sorted(lines, key=str.lower)


def test_continuous_integration_calls_the_make_targets() -> None:
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & 0o111
    subprocess.run(["bash", "-n", str(script)], check=True)
    lines = [line for line in script.read_text().splitlines() if line.startswith("make ")]
    assert [line.split()[-1] for line in lines] == ["lint", "test"]
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {"demo", "test", "lint", "gpu-test", "lock", "sanitize"} <= targets


def test_documents_have_code() -> None:
    assert {ROOT / "README.md", ROOT / "docs" / "layouts.md"} <= set(WITH_CODE)


@pytest.mark.parametrize("path", WITH_CODE, ids=lambda path: path.name)
def test_code_in_documents_runs(path: Path) -> None:
    for block in BLOCK.findall(path.read_text()):
        exec(compile(block, str(path), "exec"), {"__name__": "document"})


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_between_documents_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", path.read_text()):
        if not target.startswith("http"):
            assert (path.parent / target).exists(), target


@pytest.mark.parametrize("path", [ROOT / "README.md", ROOT / "CONTRIBUTING.md"], ids=lambda path: path.name)
def test_make_targets_named_in_documents_exist(path: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for named in re.findall(r"(?:^ {4}|`)make ([a-z-]+)", path.read_text(), re.MULTILINE):
        assert named in targets, named


def test_pytest_goes_into_every_folder_of_tests(pytestconfig: pytest.Config) -> None:
    """Its own list of folders to leave out has "build" in it."""
    left_out = pytestconfig.getini("norecursedirs")
    folders = {path.name for path in (ROOT / "tests").rglob("*") if path.is_dir() and path.name != "__pycache__"}
    assert [name for name in sorted(folders) if any(fnmatch(name, pattern) for pattern in left_out)] == []
