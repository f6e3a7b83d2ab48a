"""Writes docs/performance.md from the committed results: ``python -m fused_kda.bench.page``. No figure is typed in.

It reads every ``benchmarks/results/*.json`` that :mod:`.decode` or :mod:`.host` wrote; each file names its command.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

RESULTS, PAGE = Path("benchmarks/results"), Path("docs/performance.md")

_HEAD = """# Performance

Written by `python -m fused_kda.bench.page` from the files in `benchmarks/results/`; edit neither by hand.

Times are microseconds per layer: a CUDA graph of up to 69 layers, each with its own pools, together several times the
L2 cache; bf16 activations, bounded gate, gated norm; medians of replays in which all providers take turns. *Limit* is
the fastest in-place read-multiply-write of the same state bytes that we could write, measured in the same run. A
backend that fails its check against float64 is not timed.

Targets for `cuda` on an H200: geometric mean over the fp32 table at most 1.15 x limit, no cell above 1.45; DS within
1 % of SD; a bf16 state at most 0.60 of the fp32 time from B = 32 on; at most 20 us of host time for a call.
"""


def render(directory: Path) -> str:
    """The page for the results in a directory."""
    parts = [_HEAD]
    for path in sorted(directory.glob("*.json")):
        result = json.loads(path.read_text())
        if "geometric_means" in result:
            parts.append(_decode_section(path.name, result))
        elif "us" in result:
            parts.append(_host_section(path.name, result))
    return "\n".join(parts)


def _decode_section(name: str, result: dict[str, Any]) -> str:
    machine = result["machine"]
    lines = [
        f"## {machine['device']}, {machine['date']}: `{name}`\n",
        f"{machine['sms']} SMs, torch {machine['torch']}. Command: `{result['command']}`\n",
    ]
    cells = [cell for cell in result["cells"] if "over_limit" in cell]
    for dtype in dict.fromkeys(cell["state_dtype"] for cell in cells):
        for prefetch in (True, False):
            chosen = [cell for cell in cells if cell["state_dtype"] == dtype and cell["prefetch"] == prefetch]
            if chosen:
                early = "" if prefetch else ", nothing read ahead of the previous kernel (`prefetch=False`)"
                lines += [f"### {dtype} state{early}\n", *_table(chosen, cells), ""]
    return "\n".join(lines)


def _table(chosen: Sequence[dict[str, Any]], cells: Sequence[dict[str, Any]]) -> list[str]:
    """Rows of H, B; columns of limit and each (provider, layout) with its ratio to the limit; geometric means last."""
    columns = list(dict.fromkeys((cell["provider"], cell["layout"]) for cell in chosen if cell["provider"] != "limit"))
    layouts = list(dict.fromkeys(layout for _, layout in columns))
    titles = [f"{provider} {layout} | / limit" for provider, layout in columns]
    extra = ["DS / SD"] if len(layouts) > 1 else []
    extra += ["/ fp32"] if chosen[0]["state_dtype"] != "float32" else []
    head = ["H", "B", "limit", *titles, *extra]
    width = sum(title.count("|") + 1 for title in head)
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * width]
    for heads, batch in dict.fromkeys((cell["heads"], cell["batch"]) for cell in chosen):
        here = [cell for cell in chosen if (cell["heads"], cell["batch"]) == (heads, batch)]
        limit = _one(here, provider="limit", layout=layouts[0])
        row = [str(heads), str(batch), _time(limit)]
        for provider, layout in columns:
            cell = _one(here, provider=provider, layout=layout)
            row += [_time(cell), _ratio(cell, lambda cell: cell["over_limit"])]
        first = columns[0][0]
        base = _one(here, provider=first, layout=layouts[0])
        if len(layouts) > 1:
            row.append(_quotient(_one(here, provider=first, layout="DS"), _one(here, provider=first, layout="SD")))
        if chosen[0]["state_dtype"] != "float32":
            same = [cell for cell in cells if (cell["heads"], cell["batch"]) == (heads, batch)]
            wide = _one(same, provider=first, layout=layouts[0], state_dtype="float32", prefetch=chosen[0]["prefetch"])
            row.append(_quotient(base, wide))
        lines.append("| " + " | ".join(row) + " |")
    means = ["geometric mean", "", ""]
    for provider, layout in columns:
        ratios = [c["over_limit"] for c in chosen if (c["provider"], c["layout"]) == (provider, layout)]
        means += ["", f"**{math.exp(sum(map(math.log, ratios)) / len(ratios)):.3f}**"]
    lines.append("| " + " | ".join([*means, *[""] * len(extra)]) + " |")
    return lines


def _one(cells: Iterable[dict[str, Any]], **wanted: Any) -> dict[str, Any] | None:
    return next((cell for cell in cells if all(cell[key] == value for key, value in wanted.items())), None)


def _time(cell: dict[str, Any] | None) -> str:
    return "-" if cell is None else f"{cell['us']['median']:.2f}"


def _ratio(cell: dict[str, Any] | None, of: Callable[[dict[str, Any]], float]) -> str:
    return "-" if cell is None else f"{of(cell):.3f}"


def _quotient(cell: dict[str, Any] | None, other: dict[str, Any] | None) -> str:
    return "-" if cell is None or other is None else f"{cell['us']['median'] / other['us']['median']:.3f}"


def _host_section(name: str, result: dict[str, Any]) -> str:
    lines = [
        f"## Host time, {result['machine']['device']}, {result['machine']['date']}: `{name}`\n",
        f"Microseconds from the Python call until it returns. Command: `{result['command']}`\n",
    ]
    columns = list(next(iter(result["us"].values())))
    lines += ["| backend | " + " | ".join(columns) + " |", "|" + "---|" * (len(columns) + 1)]
    for backend, times in result["us"].items():
        lines.append(f"| {backend} | " + " | ".join(f"{times[column]:.1f}" for column in columns) + " |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, default=PAGE)
    options = parser.parse_args(arguments)
    options.page.write_text(render(options.results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
