"""Pictures of results, readable in black and white: every series has a marker and a line style of its own.

matplotlib is imported only here, and only when something is drawn. A picture carries the digest of what it shows, so
that a test can tell whether it is current.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

#: (line style, marker, colour): the colours differ in lightness, too.
_STYLES = (
    ("-", "o", "#1b3a6b"),
    ("--", "s", "#c05a00"),
    (":", "^", "#2e7d32"),
    ("-.", "D", "#7b3f9d"),
    ("--", "v", "#6d6d6d"),
    (":", "P", "#a02020"),
    ("-.", "X", "#007a87"),
    ("-", "*", "#b8860b"),
)
_LIMIT = ("-", "", "#9a9a9a")
#: The key under which a picture's PNG metadata has its digest.
DIGEST_KEY = "Data"


@dataclass(frozen=True, slots=True)
class Panel:
    """One pair of axes.

    Attributes:
        title, x_label, y_label: its texts.
        series: points ``(x, y)`` by name, in the order of the legend; "limit" is drawn as a plain line.
    """

    title: str
    x_label: str
    y_label: str
    series: dict[str, list[tuple[float, float]]]


def latency_panels(records: Sequence[Mapping[str, Any]]) -> list[Panel]:
    """Microseconds per layer over the batch: a panel for each number of heads and state dtype, a series per provider.

    With both layouts, those of the second carry its name.
    """
    timed = [record for record in records if "us" in record and record["provider"] != "copy"]
    first = next((record["layout"] for record in timed), "")
    panels: dict[tuple[int, str], Panel] = {}
    for record in timed:
        if record["provider"] == "limit" and record["layout"] != first:
            continue
        heads, dtype = record["heads"], record["state_dtype"]
        title = f"H = {heads}, {dtype.replace('bfloat', 'bf').replace('float', 'fp')} state"
        panel = panels.setdefault((heads, dtype), Panel(title, "rows in the batch", "µs per layer", {}))
        name = record["provider"] if record["layout"] == first else f"{record['provider']} {record['layout']}"
        panel.series.setdefault(name, []).append((record["batch"], record["us"]["median"]))
    for panel in panels.values():
        for points in panel.series.values():
            points.sort()
    return [panels[key] for key in sorted(panels, key=lambda key: (key[1] != "float32", key[0]))]


def drift_panels(moved: Mapping[str, Any]) -> list[Panel]:
    """A bf16 state's distance from an fp32 one over decode steps, and what it does to the logits.

    Both are zero at first (the first logits come from a state not yet rounded), which no logarithm shows.
    """

    def series(name: str) -> list[tuple[float, float]]:
        return [(step, value) for step, value in zip(moved["steps"], moved[name], strict=True) if value > 0]

    steps = "decode steps"
    return [
        Panel("bf16 state against fp32", steps, "difference / norm of the state", {"worst layer": series("state")}),
        Panel("logits", steps, "difference", {"largest difference": series("logits")}),
    ]


def digest(panels: Sequence[Panel]) -> str:
    """SHA-256 of everything that the panels show."""
    return hashlib.sha256(json.dumps([asdict(panel) for panel in panels]).encode()).hexdigest()


def draw(panels: Sequence[Panel], path: Path) -> None:
    """Draw panels side by side, two to a row, both axes logarithmic, into a PNG that carries their :func:`digest`.

    Raises:
        ModuleNotFoundError: matplotlib is not installed (the extra ``plot``).
        ValueError: there is nothing to draw.
    """
    if not panels:
        raise ValueError("plot: expected timed cells, got none")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, LogLocator, NullFormatter, NullLocator, StrMethodFormatter

    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(5.6 * columns, 4.0 * rows), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    for number, panel in enumerate(panels):
        axes = figure.add_subplot(rows, columns, number + 1)
        names = [name for name in panel.series if name != "limit"]
        for name, points in panel.series.items():
            style, marker, colour = _LIMIT if name == "limit" else _STYLES[names.index(name) % len(_STYLES)]
            x, y = zip(*points, strict=True)
            width = 3.0 if name == "limit" else 1.3
            axes.plot(x, y, linestyle=style, marker=marker, markersize=5, color=colour, linewidth=width, label=name)
        axes.set(xscale="log", yscale="log", title=panel.title, xlabel=panel.x_label, ylabel=panel.y_label)
        ticks = sorted({x for points in panel.series.values() for x, _ in points})
        axes.xaxis.set_major_locator(FixedLocator(ticks) if len(ticks) <= 12 else LogLocator(2))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_locator(LogLocator(10, subs=(1, 2, 5)))
        axes.yaxis.set_minor_formatter(NullFormatter())
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.grid(visible=True, which="major", color="#dddddd", linewidth=0.6)
        axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={DIGEST_KEY: digest(panels)})
