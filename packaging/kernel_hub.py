"""Write the package as a build for the Hugging Face ``kernels`` library: ``python packaging/kernel_hub.py DIRECTORY``.

The library's convention, as its loader reads it: ``build/torch-universal/`` is a variant for any backend, a Python
package without compiled parts that imports itself relatively, with ``metadata.json`` (the ``id`` is the name under
which it is imported) and ``_ops.py``, which names the torch namespace of its ops. Both are made unique by a hash of the
sources, so several versions and an installed package can be loaded side by side.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "fused_kda"
#: The op and what it stands on. Layers, adapters and commands are for an installed package.
MODULES = (
    *("__init__", "api", "binaries", "contract", "debug", "gates", "layouts", "machine", "ops", "pool", "switches"),
    *("kernels/**/*",),
)
OPS = """\
import torch

NAMESPACE = "{namespace}"
ops = getattr(torch.ops, NAMESPACE)


def add_op_namespace_prefix(op_name: str) -> str:
    return f"{{NAMESPACE}}::{{op_name}}"
"""
CARD = """\
---
library_name: kernels
license: apache-2.0
---

One decode step of a Kimi Delta Attention layer as one kernel launch.

```python
from kernels import get_kernel

fused_kda = get_kernel("owner/fused-kda", version={version})
fused_kda.fused_kda_decode(...)
```
"""


def write(directory: Path) -> Path:
    """Write the repository folder anew and return its one variant."""
    sources = {}
    for name in MODULES:
        for path in sorted(PACKAGE.glob(name if "*" in name else f"{name}.py")):
            if path.suffix in (".py", ".cu"):
                sources[path.relative_to(PACKAGE).as_posix()] = path.read_text()
    release = re.search(r'__version__ = "(\d+)\.(\d+)', sources["__init__.py"])
    if release is None:
        raise ValueError("__init__.py: expected a __version__, found none")
    digest = hashlib.sha256(json.dumps(sources).encode()).hexdigest()[:12]
    namespace = f"_fused_kda_{digest}"
    version = max(1, int(release[1]))
    metadata = {
        "id": namespace,
        "name": "fused-kda",
        "version": version,
        "license": "Apache-2.0",
        "python-depends": [],
        "kernel-depends": [],
        "backend": {"type": "cpu"},  # the least that it needs; the loader takes a universal variant for every backend
    }
    variant = directory / "build" / "torch-universal"
    if directory.exists():
        shutil.rmtree(directory)
    for name, text in {**sources, "_ops.py": OPS.format(namespace=namespace)}.items():
        (variant / name).parent.mkdir(parents=True, exist_ok=True)
        (variant / name).write_text(text)
    (variant / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")
    shutil.copy(ROOT / "LICENSE", directory)
    (directory / "README.md").write_text(CARD.format(version=version))
    return variant


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="written anew")
    print(write(parser.parse_args().directory))
