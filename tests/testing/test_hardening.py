"""The reliability page's sections from results, with documents and without."""

from __future__ import annotations

from typing import Any

from sanitize_run import FILTERS, Lane, Outcome

from fused_kda.testing.hardening import render

MACHINE = {"device": "A GPU", "date": "2026-01-02"}


def document(kind: str, date: str = MACHINE["date"], **content: Any) -> dict[str, Any]:
    return {"kind": kind, "command": f"make {kind}", "machine": {**MACHINE, "date": date}, **content}


def lanes(*passed: bool) -> list[dict[str, Any]]:
    good = Outcome(Lane("memcheck", "chain", "1/7"), 4, 0, 0, 1.0, "").record()
    found = Outcome(Lane("memcheck", "cuda", fault=True), 1, 5, 86, 1.0, "").record()
    alone = Outcome(Lane(None, "chain"), 1, None, 0, 1.0, "").record()
    return [{**good, "passed": passed[0]}, found, {**alone, "passed": True}]


def test_without_results_every_section_says_so() -> None:
    text = render([])
    headings = [line for line in text.splitlines() if line.startswith("## ")]
    assert headings == [
        "## Sanitizer", "## Soak", "## Long horizon", "## Finding a fault, and living with it", "## Concurrency",
    ]  # fmt: skip
    assert text.count("Not yet run: no results are committed.") == 3


def test_the_newest_of_each_kind_is_shown() -> None:
    one = {
        "backend": "cuda", "state_dtype": "float32", "steps": 100000, "sequences": 123, "row_steps": 4567, "samples": 9,
        "longest_followed": 5000, "state_share": 0.25, "out_share": 0.5, "digests": ["a", "a"], "faults": [],
    }  # fmt: skip
    old = document("soak", "2025-12-31", soak=[{**one, "faults": ["drift"]}])
    costs = {"heads": 12, "batch": 8, "step": 4.0, "step_and_check": 5.25, "added": 1.25, "host": 9.0}
    text = render(
        [
            document("soak", soak=[one]),
            old,
            document("finite", finite=[costs]),
            document("sanitize", filters=FILTERS, lanes=lanes(True)),
        ]
    )
    assert "Not yet run" not in text
    assert "`make soak` on A GPU, 2026-01-02:" in text
    assert "| `cuda` | float32 | 100,000 | 123 | 4,567 | 9 | 5,000 | 0.25 | 0.50 | 1 from 2 runs | none |" in text
    assert "drift" not in text
    assert "| 12 | 8 | 4.00 | 1.25 | 31 % | 0.5 % | 9.0 |" in text
    assert "| `chain` | all | 4 launches, 0 errors |" in text
    assert "| memcheck | `oob` | 5 | 86 |" in text
    assert "Lanes that failed: 0." in text


def test_failures_are_shown() -> None:
    text = render([document("sanitize", filters=FILTERS, lanes=lanes(False))])
    assert "Lanes that failed: 1." in text
