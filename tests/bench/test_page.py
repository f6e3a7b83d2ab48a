"""The page, the README's figures and the pictures follow from the committed results, and from nothing else."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from fused_kda.bench import page, plot

ROOT = Path(__file__).parents[2]
COMMITTED = page.read_all(ROOT / "benchmarks" / "results")
STALE = "is stale: make docs-performance"


def test_the_performance_page_is_current() -> None:
    assert (ROOT / "docs" / "performance.md").read_text() == page.render(COMMITTED), f"docs/performance.md {STALE}"


def test_the_readmes_figures_are_current() -> None:
    readme = (ROOT / "README.md").read_text()
    assert readme == page.insert(readme, page.render_readme(COMMITTED)), f"README.md {STALE}"


@pytest.mark.parametrize("name", page.pictures(COMMITTED))
def test_the_pictures_are_current(name: str) -> None:
    images = pytest.importorskip("PIL.Image")
    with images.open(ROOT / "docs" / name) as picture:
        shown = picture.text[plot.DIGEST_KEY]
    assert shown == plot.digest(page.pictures(COMMITTED)[name]), f"docs/{name} {STALE}"


def test_no_other_picture_is_committed() -> None:
    assert {f"images/{path.name}" for path in (ROOT / "docs" / "images").iterdir()} == set(page.pictures(COMMITTED))


def test_a_changed_figure_changes_page_readme_and_picture() -> None:
    changed = copy.deepcopy(COMMITTED)
    headline = page.headline(changed)
    assert headline is not None
    cell = next(cell for cell in headline["cells"] if cell["provider"] == "cuda")
    cell["us"]["median"] *= 1.01
    assert page.render(changed) != page.render(COMMITTED)
    assert page.render_readme(changed) != page.render_readme(COMMITTED)
    assert plot.digest(page.pictures(changed)[page.LATENCY]) != plot.digest(page.pictures(COMMITTED)[page.LATENCY])


def test_the_readme_keeps_what_is_around_its_marks() -> None:
    around = f"before\n{page.BEGIN}\nold\n{page.END}\nafter"
    assert page.insert(around, "new") == f"before\n{page.BEGIN}\nnew\n{page.END}\nafter"
    for broken in ("no marks", page.BEGIN, f"{page.END}{page.BEGIN}", around + around):
        with pytest.raises(ValueError, match="once each"):
            page.insert(broken, "new")


def test_the_headline_is_the_largest_comparison_of_the_newest_day() -> None:
    def run(date: str, cells: int, **changes: Any) -> dict[str, Any]:
        pair = [bench("cuda", 2.0, **changes), bench("chain", 3.0, **changes)]
        found = document("bench", geometric_means={}, graph=True, cells=pair * cells)
        return found | {"machine": {**found["machine"], "date": date}}

    newest = run("2026-02-02", 3)
    alone = run("2026-03-03", 1)
    alone["cells"] = [cell for cell in alone["cells"] if cell["provider"] == "cuda"]
    others = [run("2026-01-01", 9), run("2026-02-02", 2), run("2026-02-02", 9, prefetch=False), alone]
    others.append(run("2026-03-03", 9) | {"graph": False})
    assert page.headline([newest, *others]) is page.headline([*others, newest]) is newest
    assert page.headline(others[2:]) is None


def bench(provider: str, us: float, **cell: Any) -> dict[str, Any]:
    key = {"heads": 12, "batch": 1, "layout": "SD", "state_dtype": "float32", "prefetch": True, "launches": 1.0}
    return {**key, "provider": provider, "us": {"median": us}, "over_limit": us / 2, **cell}


def document(kind: str, **content: Any) -> dict[str, Any]:
    machine = {"device": "Card", "date": "2026-01-01", "torch": "2.11", "sms": 4, "driver": "1.2"}
    return {"kind": kind, "command": "fused-kda", "machine": machine, "commit": "unknown", "source": "abc",
            "file": f"{kind}.json", **content}  # fmt: skip


def test_the_decode_table_has_limit_copy_gain_on_the_chain_layouts_and_dtypes() -> None:
    cells = [
        bench("limit", 2.0), bench("copy", 2.5), bench("cuda", 2.5), bench("chain", 10.0, launches=3.0),
        bench("limit", 2.0, layout="DS"), bench("cuda", 2.52, layout="DS"), bench("chain", 10.0, layout="DS"),
        bench("limit", 1.0, state_dtype="bfloat16"), bench("cuda", 1.3, state_dtype="bfloat16"),
        {"provider": "fla", "not_timed": "not installed"},
    ]  # fmt: skip
    text = page.render([document("bench", geometric_means={}, graph=True, cells=cells)])
    assert "4 SMs, driver 1.2, torch 2.11, commit unknown, source abc. Command: `fused-kda`" in text
    assert "| H | B | limit | copy | cuda | % of limit | x chain | DS / SD | chain | % of limit | DS / SD |" in text
    assert "| 12 | 1 | 2.00 | 2.50 | 2.50 | 80.0 | 4.00 | 1.008 | 10.00 | 20.0 | 1.000 |" in text
    assert "| 12 | 1 | 1.00 | 1.30 | 153.8 | 0.520 |" in text
    assert "Not timed: fla: not installed." in text


def model(backend: str, us: float, launches: float, **more: Any) -> dict[str, Any]:
    times = {"median": us, "mean": us, "p99": us}
    return {"model": "k3", "layers": 2, "hidden": 8, "heads": 1, "batch": 4, "layout": "SD", "prefetch": True,
            "state_dtype": "float32", "backend": backend, "us": times, "tokens_per_s": 4 / us * 1e6,
            "launches": launches, "op_us": us / 4, "gemms_us": us / 2, **more}  # fmt: skip


def test_the_model_table_and_what_each_gain_is_worth() -> None:
    cells = [
        model("cuda", 800.0, 10), model("cuda", 880.0, 10, prefetch=False), model("cuda", 800.0, 10, layout="DS"),
        model("cuda", 600.0, 10, state_dtype="bfloat16"), model("chain", 1000.0, 14),
        model("chain", 900.0, 14, state_dtype="bfloat16"),
    ]  # fmt: skip
    text = page.render([document("model", cells=cells)])
    assert "| 4 | 0.800 | 0.800 | 5000 | 5.0 | 50% | 25% | 25% | 1.000 | 7.0 | 1.250 | 1.100 | 1.000 | 0.750 |" in text
    assert "* k3: the fused op against the chain saves 20.0% (B = 4) to 20.0% (B = 4) of the step; a bf16" in text


def test_pictures_are_drawn_with_their_digest(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    images = pytest.importorskip("PIL.Image")
    records = [bench(name, us * batch, batch=batch) for name, us in (("limit", 1.0), ("cuda", 2.0)) for batch in (1, 2)]
    panels = plot.latency_panels([*records, bench("copy", 1.0), {"provider": "fla", "not_timed": "absent"}])
    assert [panel.series for panel in panels] == [{"limit": [(1, 1.0), (2, 2.0)], "cuda": [(1, 2.0), (2, 4.0)]}]
    plot.draw(panels, tmp_path / "folder" / "picture.png")
    with images.open(tmp_path / "folder" / "picture.png") as picture:
        assert picture.text[plot.DIGEST_KEY] == plot.digest(panels)
    with pytest.raises(ValueError, match="expected timed cells"):
        plot.draw([], tmp_path / "none.png")
