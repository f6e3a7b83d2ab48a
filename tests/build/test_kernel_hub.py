"""The build for the Hugging Face ``kernels`` library, loaded by that library beside the installed package."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("kernels")

ROOT = Path(__file__).resolve().parents[2]
LOADED = """
import json, sys
from pathlib import Path
import torch
import fused_kda
from kernels import get_loaded_kernels, get_local_kernel

torch.set_num_threads(1)
from fused_kda.testing.problems import Draw, draw

kernel = get_local_kernel(Path(sys.argv[1]), backend="cpu")
(loaded,) = get_loaded_kernels()
namespace = kernel._ops.NAMESPACE
call = draw(Draw(heads=2, layout="DS", mask=True))
mine, theirs, third = call.clone(), call.clone(), call.clone()
mine.run("reference")
kernel.fused_kda_decode(**theirs.arguments, backend="reference")
third.arguments["prefetch"] = False
getattr(torch.ops, namespace).decode(**third.arguments)
compiled = torch.compile(lambda arguments: kernel.fused_kda_decode(**arguments), fullgraph=True, backend="eager")
fourth = call.clone()
compiled(fourth.arguments)
print(json.dumps({
    "module": kernel.__name__,
    "file": kernel.__file__,
    "name": str(loaded.metadata.name),
    "namespace": namespace,
    "ops": [hasattr(torch.ops.fused_kda, "decode"), hasattr(getattr(torch.ops, namespace), "decode")],
    "equal": [
        bool((mine.arguments[name].nan_to_num() == other.arguments[name].nan_to_num()).all())
        for other in (theirs, third, fourth) for name in ("out", "conv_state", "state")
    ],
    "stats": [[list(key) for key in module.stats()] for module in (fused_kda, kernel)],
    "warm": kernel.warmup(theirs.arguments),
    "gates": str(kernel.explain(**theirs.arguments)).splitlines(),
    "mixed": [name for name in sys.modules if name.startswith(kernel.__name__) and sys.modules[name] in
              [module for other, module in sys.modules.items() if other.startswith("fused_kda")]],
}))
"""


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("hub") / "kernel-hub"
    runpy.run_path(str(ROOT / "packaging" / "kernel_hub.py"))["write"](directory)
    return directory


def test_the_folder_is_a_universal_variant(hub: Path) -> None:
    assert [path.name for path in (hub / "build").iterdir()] == ["torch-universal"]
    variant = hub / "build" / "torch-universal"
    metadata = json.loads((variant / "metadata.json").read_text())
    namespace: str = runpy.run_path(str(variant / "_ops.py"))["NAMESPACE"]
    assert metadata["id"] == namespace != "fused_kda"
    assert metadata["python-depends"] == []
    assert {path.suffix for path in variant.rglob("*") if path.is_file()} == {".py", ".cu", ".json"}
    for path in variant.rglob("*.py"):
        lines = [line.strip() for line in path.read_text().splitlines()]
        absolute = [line for line in lines if line.startswith(("import fused_kda", "from fused_kda"))]
        assert absolute == [], f"{path.name} would reach for an installed package"


def test_the_name_follows_the_sources(hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = runpy.run_path(str(ROOT / "packaging" / "kernel_hub.py"))
    again = script["write"](tmp_path / "again")
    assert (again / "_ops.py").read_text() == (hub / "build" / "torch-universal" / "_ops.py").read_text()
    fewer = tuple(name for name in script["MODULES"] if name != "pool")
    monkeypatch.setitem(script["write"].__globals__, "MODULES", fewer)
    other = script["write"](tmp_path / "other")
    assert (other / "_ops.py").read_text() != (again / "_ops.py").read_text()


def test_the_library_loads_it_beside_the_installed_package(hub: Path) -> None:
    """The same op under the name it assigns: results of both, of the torch op and of a traced call are equal."""
    command = [sys.executable, "-c", LOADED, str(hub)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["module"] == found["namespace"]
    assert found["namespace"].startswith("_fused_kda_")
    assert found["file"] == str(hub / "build" / "torch-universal" / "__init__.py")
    assert found["name"] == "fused-kda"
    assert found["ops"] == [True, True]
    assert found["equal"] == [True] * 9
    assert found["stats"][0] == [["reference", "requested"]]
    assert found["stats"][1][0] == ["reference", "requested"]
    assert found["warm"] == {"prebuilt": 0, "cache": 0, "compiled": 0}
    assert found["gates"][-1] == "reference: open"
    assert found["mixed"] == []
