"""What docs/security.md promises: nothing that is read is executed, files are private, dependencies have reasons."""

from __future__ import annotations

import ast
import re
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "fused_kda"
PAGE = (ROOT / "docs" / "security.md").read_text()
SOURCES = [*sorted(PACKAGE.rglob("*.py")), *sorted((ROOT / "examples").rglob("*.py"))]

#: Modules that turn bytes into objects or code.
MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "yaml", "jsonpickle", "codeop"}
NAMES = {"eval", "exec", "compile", "__import__"}
#: Functions that do so, or start a shell.
CALLS = {
    *("torch.load", "torch.save", "torch.jit.load", "torch.hub.load", "numpy.load", "np.load"),
    *("os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput"),
}


def dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def faults(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name for name in names if not node.level and (name.split(".")[0] in MODULES or name in CALLS))
        elif isinstance(node, ast.Call):
            name = dotted(node.func)
            if name in NAMES or name in CALLS:
                yield name
            if any(word.arg == "shell" for word in node.keywords):
                yield f"{name}(shell=...)"
            if name.startswith("subprocess.") and isinstance(node.args[0], ast.JoinedStr | ast.Constant):
                yield f"{name} of a string"
            if dotted(node.func).endswith("import_module") and node.args and "pickle" in ast.unparse(node.args[0]):
                yield ast.unparse(node)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_nothing_that_is_read_is_executed(path: Path) -> None:
    assert list(faults(path.read_text())) == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "def f():\n    import yaml.constructor",
        "import torch\ntorch.load('x')",
        "from torch import load",
        "eval('1')",
        "exec(text)",
        "os.system('ls')",
        "subprocess.run('ls', check=True)",
        "subprocess.run(f'ls {x}')",
        "subprocess.run(command, shell=True)",
        "numpy.load(path, allow_pickle=True)",
        "importlib.import_module('pickle')",
    ],
)
def test_the_walk_finds_what_it_looks_for(source: str) -> None:
    assert len(list(faults(source))) == 1


def test_the_walk_lets_harmless_names_pass() -> None:
    assert list(faults("model.eval()\nre.compile('x')\nsubprocess.run([tool, name])\nfrom .code import x")) == []


def test_the_programs_that_are_started_are_those_of_the_page() -> None:
    starting = [path for path in PACKAGE.rglob("*.py") if "subprocess" in path.read_text()]
    users = {path.relative_to(PACKAGE).as_posix() for path in starting}
    assert users == {
        "bench/results.py", "kernels/cuda/inspect.py", "kernels/resources.py", "kernels/triton/inspect.py",
    }  # fmt: skip
    assert "`cuobjdump` (static figures), `git`" in PAGE


def listed(heading: str, columns: int) -> list[tuple[str, ...]]:
    """Rows of the table below a line of the page."""
    rows = []
    for line in PAGE.split(f"\n{heading}\n\n")[1].splitlines()[2:]:
        if not line.startswith("|"):
            break
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        assert len(cells) == columns
        assert all(cells), line
        rows.append(tuple(cell.strip("`") for cell in cells))
    return rows


def test_every_dependency_has_a_reason() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

    def names(requirements: list[str]) -> list[str]:
        return [match[0] for match in (re.match(r"[A-Za-z0-9._-]+", one) for one in requirements) if match]

    always = listed("Always installed:", 2)
    assert sorted(name for name, _ in always) == sorted(names(project["dependencies"]))
    extras = listed("Extras, for what they are named after:", 3)
    wanted = [(name, extra) for extra, given in project["optional-dependencies"].items() for name in names(given)]
    assert sorted((name, extra) for name, extra, _ in extras) == sorted(wanted)


@pytest.mark.skipif(sys.platform == "win32", reason="modes are POSIX")
def test_the_kernel_cache_is_private_whatever_the_umask(tmp_path: Path) -> None:
    import os

    from fused_kda.kernels.cache import private_directory

    before = os.umask(0)
    try:
        open_before = tmp_path / "open" / "cuda"
        open_before.mkdir(parents=True, mode=0o777)
        for root in (tmp_path / "new", tmp_path / "open"):
            directory = private_directory(root, "cuda")
            assert directory is not None
            assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    finally:
        os.umask(before)


@pytest.mark.skipif(sys.platform == "win32", reason="modes are POSIX")
def test_entries_of_the_cuda_cache_are_for_their_user_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cuda.core")
    import os

    from fused_kda import gates
    from fused_kda.kernels.cuda import compile as compiling
    from fused_kda.kernels.cuda import inspect

    monkeypatch.setenv("FUSED_KDA_CACHE_DIR", str(tmp_path))
    gates.settings.cache_clear()
    entry = inspect.listed("sm_90")[0]
    before = os.umask(0)
    try:
        compiling.compile_cubin(entry.spec, entry.shape, entry.prefetch, "sm_90")
    finally:
        os.umask(before)
    files = [path for path in (tmp_path / "cuda").rglob("*") if path.is_file() and path.stat().st_size > 1000]
    assert files
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
