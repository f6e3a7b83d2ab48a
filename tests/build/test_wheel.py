"""Wheel and sdist: what is in them, and that they run installed, outside the repository."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from fused_kda import build

pytest.importorskip("twine")
pytest.importorskip("cuda.core")

ROOT = Path(__file__).resolve().parents[2]
#: Where this environment has torch and the other dependencies.
DEPENDENCIES = Path(torch.__file__).resolve().parents[1]


def command(*words: object, cwd: Path, **options: Any) -> str:
    done = subprocess.run(
        [str(word) for word in words], cwd=cwd, capture_output=True, text=True, check=False, **options
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel and the sdist that it is made from, of a copy of the sources with one prebuilt kernel inside.

    As ``make dist`` and ``make wheel-prebuilt`` make them; the second differs from the first by that directory alone.
    """
    staged = tmp_path_factory.mktemp("staged")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, staged)
    shutil.copytree(
        ROOT / "src", staged / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info", "prebuilt")
    )
    inside = staged / "src" / "fused_kda" / "prebuilt"
    build.write(inside, build.requests(["sm_80"], [build.specialization(1)], ["cuda"]))
    out = tmp_path_factory.mktemp("dist")
    command(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, staged, cwd=staged)
    return out


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    (path,) = dist.glob("*.whl")
    return path


def test_names_and_metadata_are_sound(dist: Path, wheel: Path) -> None:
    assert wheel.name.endswith("-py3-none-any.whl"), "no compiled parts of Python"
    listed = sorted(dist.iterdir())
    assert [path.suffix for path in listed] == [".whl", ".gz"]
    command(sys.executable, "-m", "twine", "check", "--strict", *listed, cwd=dist)


def test_kernel_source_model_and_prebuilt_kernels_are_inside(dist: Path, wheel: Path) -> None:
    sources = ROOT / "src"
    needed = [
        path.relative_to(sources).as_posix()
        for path in (sources / "fused_kda").rglob("*")
        if path.suffix in (".py", ".cu", ".safetensors", ".typed") and "prebuilt" not in path.parts
    ]
    names = set(zipfile.ZipFile(wheel).namelist())
    assert set(needed) <= names
    assert {Path(name).suffix for name in needed} == {".py", ".cu", ".safetensors", ".typed"}
    assert "fused_kda/prebuilt/manifest.json" in names
    assert sum(name.endswith(".cubin") for name in names) == 2
    assert not [name for name in names if name.startswith(("tests", "docs")) or name.endswith(".pyc")]
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archived = {name.partition("/")[2].removeprefix("src/") for name in archive.getnames()}
    assert set(needed) <= archived


USE = """
import json, torch
import fused_kda
from fused_kda import binaries, build, gates
from fused_kda.nn.generation import load_model, evaluate, exact_match
from fused_kda.nn.word_problems import generate_problems
from fused_kda.testing.problems import Draw, draw

torch.set_num_threads(1)
draw(Draw(heads=1)).run("auto")
decoder = load_model(device=torch.device("cpu"), backend="auto", layout="DS", state_dtype=torch.float32, slots=5)
(held,) = gates.prebuilt_sets()
print(json.dumps({
    "file": fused_kda.__file__,
    "version": fused_kda.__version__,
    "stats": [list(key) for key in fused_kda.stats()],
    "exact": exact_match(evaluate(decoder, generate_problems("eval", 4))),
    "prebuilt": str(held.directory),
    "lacks": held.lacks("cuda", "sm_80", build.specialization(1), True),
}))
"""


def test_installed_into_an_empty_environment_it_runs(wheel: Path, tmp_path: Path) -> None:
    """A fresh environment that has the wheel and, by a path alone, torch and the other dependencies; no repository."""
    environment = tmp_path / "venv"
    venv.create(environment, with_pip=False, symlinks=True)
    python = environment / "bin" / "python"
    (packages,) = (environment / "lib").glob("python*/site-packages")
    pip = (sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check")
    command(*pip, "install", "--quiet", "--no-index", "--no-deps", wheel, cwd=tmp_path)
    (packages / "dependencies.pth").write_text(f"{DEPENDENCIES}\n")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "FUSED_KDA"))}
    found = json.loads(command(python, "-c", USE, cwd=elsewhere, env=clean).splitlines()[-1])
    installed = packages / "fused_kda"
    assert found["file"] == str(installed / "__init__.py")
    assert found["stats"] == [["reference", "auto"]]
    assert found["exact"] >= 0.75
    assert (found["prebuilt"], found["lacks"]) == (str(installed / "prebuilt"), None)
    report = json.loads(command(environment / "bin" / "fused-kda", "doctor", "--json", cwd=elsewhere, env=clean))
    assert report["versions"]["fused-kda"] == found["version"]
    assert report["auto"]["cpu"] == "reference"
    assert report["prebuilt"][0]["architectures"] == ["sm_80"]
    assert report["prebuilt"][0]["stale"] == []
