"""Write docs/performance.md, the README's figures and the pictures from benchmarks/results: ``make docs-performance``.

A test holds all of them current.
"""

from __future__ import annotations

from pathlib import Path

from fused_kda.bench.page import insert, pictures, read_all, render, render_readme
from fused_kda.bench.plot import draw

DOCS = Path(__file__).parent
ROOT = DOCS.parent

if __name__ == "__main__":
    documents = read_all(ROOT / "benchmarks" / "results")
    (DOCS / "performance.md").write_text(render(documents))
    readme = ROOT / "README.md"
    readme.write_text(insert(readme.read_text(), render_readme(documents)))
    for name, panels in pictures(documents).items():
        draw(panels, DOCS / name)
