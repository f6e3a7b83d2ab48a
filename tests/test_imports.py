"""Importing the package: torch alone, no device, quickly; and one direction between the rooms."""

from __future__ import annotations

import ast
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fused_kda import gates

SOURCE = Path(__file__).resolve().parents[1] / "src"

#: A room may import from its own rank and below.
RANKS = (
    ("layouts",),
    ("_ops", "contract", "shapes", "switches"),
    ("binaries", "machine"),  # prebuilt kernels as files; what is here to compile and run
    ("gates", "debug"),
    ("kernels",),
    ("api", "build"),
    ("ops", "pool", "finite"),
    ("",),  # the package itself: the public names
    ("nn",),
    ("engines", "transfer", "testing", "bench"),
    ("cli",),
)
RANK = {room: rank for rank, rooms in enumerate(RANKS) for room in rooms}


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted((SOURCE / "fused_kda").rglob("*.py"))}


def imports(name: str) -> Iterator[str]:
    """Every module of the project that a module imports, wherever in its text, under its full name."""
    path = MODULES[name]
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "fused_kda")
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")
                base = ".".join([*parents[: len(parents) - node.level + 1], *filter(None, [node.module])])
            if base.split(".")[0] == "fused_kda":
                for alias in node.names:
                    deeper = f"{base}.{alias.name}"
                    yield deeper if deeper in MODULES else base


def room(name: str) -> str:
    return name.split(".")[1] if "." in name else ""


def backend(name: str) -> str | None:
    parts = name.split(".")
    return parts[2] if len(parts) > 2 and parts[1] == "kernels" and parts[2] in gates.BACKENDS else None


@pytest.mark.parametrize("name", MODULES)
def test_imports_go_one_way(name: str) -> None:
    assert room(name) in RANK, f"{name} is in no room"
    for imported in imports(name):
        assert RANK[room(imported)] <= RANK[room(name)], f"{name} imports {imported}"
        if backend(name) and backend(imported):
            assert backend(name) == backend(imported), f"backend {name} imports {imported}"


def test_the_walk_finds_imports() -> None:
    """It would be satisfied by anything if it found none."""
    found = {name: set(imports(name)) for name in MODULES}
    assert found["fused_kda.contract"] == {"fused_kda.layouts"}
    below = ("_ops", "binaries", "contract", "debug", "gates")
    assert found["fused_kda.api"] == {f"fused_kda.{name}" for name in below}
    assert found["fused_kda.kernels.reference"] == {"fused_kda.contract"}
    assert found["fused_kda"] == {"fused_kda.ops", "fused_kda.api"}


def fresh(code: str) -> Any:
    """Run code in a new interpreter and return what it prints, read as JSON."""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


ALONE = """
import importlib.abc, json, sys
import torch

class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        top = name.split(".")[0]
        if top not in sys.stdlib_module_names and top not in ("torch", "torchgen", "fused_kda"):
            raise ModuleNotFoundError(f"{name} is not there", name=name)
        return None

sys.meta_path.insert(0, Refuse())
before = set(sys.modules)
import fused_kda
after = sorted(name for name in set(sys.modules) - before if name.startswith("fused_kda"))
initialized = torch.cuda.is_initialized()

heads, dim = 2, 16
bf16 = torch.bfloat16
out = fused_kda.fused_kda_decode(
    torch.ones(2, 3 * heads * dim, dtype=bf16), torch.ones(3, 4, heads * dim), None,
    torch.zeros(4, 3 * heads * dim, 3, dtype=bf16), torch.ones(2, heads, dim, dtype=bf16),
    torch.ones(2, heads, dtype=bf16), torch.zeros(heads), torch.zeros(heads * dim),
    torch.tensor([1, 0]), torch.zeros(4, heads, dim, dim),
)
print(json.dumps([after, initialized, bool(out[0].any()), bool(out[1].any()), sorted(fused_kda.stats())]))
"""


def test_it_needs_torch_alone_and_touches_no_device() -> None:
    loaded, initialized, live, null, used = fresh(ALONE)
    assert {"fused_kda", "fused_kda.api", "fused_kda.ops"} <= set(loaded)
    below_api = {"_ops", "layouts", "contract", "switches", "binaries", "machine", "debug", "gates"}
    assert {room(name) for name in loaded} <= {"", *below_api, "api", "ops"}
    assert not initialized
    assert (live, null) == (True, False)
    assert used == [["reference", "auto"]]


def test_it_adds_little_to_importing_torch() -> None:
    code = "import json, time, torch; start = time.perf_counter(); import fused_kda; print(time.perf_counter() - start)"
    assert statistics.median(fresh(code) for _ in range(3)) < 0.2
