"""docs/performance.md, the README's table and the pictures, from results files alone: no figure is typed in.

``docs/render_performance.py`` writes them; a test renders them again and compares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from . import results
from .decode import MEASURES, geometric_mean
from .plot import Panel, drift_panels, latency_panels

Document = dict[str, Any]
Record = Mapping[str, Any]

BEGIN, END = "<!-- performance: written by `make docs-performance` -->", "<!-- performance: end -->"
LATENCY, DRIFT = "images/latency.png", "images/drift.png"

_HEAD = f"""# Performance

Written by `make docs-performance` from the files in `benchmarks/results/`; edit neither by hand. Each section names its
file, and the command that wrote it.

* **µs** are medians per layer: a CUDA graph of as many layers as a model has, or more, each with its own pools,
  together several times the L2 cache; bf16 activations, bounded gate, gated norm. All providers of a cell take turns
  within each replay round.
* **Limit** is the fastest in-place read-multiply-write of the same state bytes that we could write, **copy** a copy of
  as many bytes; both are measured in the same run. *% of limit* is the limit's time over a backend's.
* What fails its check against float64 is not timed. Launches are counted in the captured graph.

`fused-kda bench --compare FILE` measures the cells of one of these files again and fails where one is slower.

![Latency over the batch]({LATENCY})

Targets for `cuda` on an H200: geometric mean over the fp32 table at least 87 % of the limit (1.15 x its time), no cell
below 69 % (1.45 x); DS within 1 % of SD; a bf16 state at most 0.60 of the fp32 time from B = 32 on; at most 20 µs of
host time for a call.
"""


def read_all(directory: Path) -> list[Document]:
    """Every results file of a directory, oldest first, its name under "file"."""
    found = [{**results.read(path), "file": path.name} for path in sorted(directory.glob("*.json"))]
    return sorted(found, key=lambda document: document["machine"]["date"])


def render(documents: Sequence[Document]) -> str:
    """The page: in each part the newest day first, and there the document with the most cells."""
    sections: list[Callable[[Document], str | None]] = [_decode_section, _model_section, _eval_section, _host_section]
    parts = [_HEAD]
    ordered = sorted(documents, key=lambda one: (one["machine"]["date"], len(_cells(one))), reverse=True)
    for section in sections:
        parts += [text for text in map(section, ordered) if text is not None]
    return "\n".join(parts)


def headline(documents: Sequence[Document]) -> Document | None:
    """What README and plot show: of the graph runs that have the chain beside something faster, with early reads, those
    of the newest day, and of them the one with the most cells.
    """

    def fits(document: Document) -> bool:
        cells = _cells(document)
        providers = {cell["provider"] for cell in cells} - {*MEASURES}
        compared = "chain" in providers and len(providers) > 1
        return compared and document.get("graph", True) and all(cell["prefetch"] for cell in cells)

    found = [document for document in documents if _is_decode(document) and fits(document)]
    return max(found, key=lambda document: (document["machine"]["date"], len(_cells(document))), default=None)


def pictures(documents: Sequence[Document]) -> dict[str, list[Panel]]:
    """What each picture shows, by its path under docs/."""
    found = {}
    document = headline(documents)
    if document is not None:
        # Other projects are in the tables: the picture keeps to what the package ships.
        own = [cell for cell in _cells(document) if cell["layout"] == _first(_cells(document), "layout")]
        found[LATENCY] = latency_panels(own)
    evaluated = [document for document in documents if document.get("kind") == "eval"]
    if evaluated:
        found[DRIFT] = drift_panels(evaluated[-1]["drift"])
    return found


def render_readme(documents: Sequence[Document]) -> str:
    """What stands between the README's marks."""
    document = headline(documents)
    if document is None:
        return "No results are committed yet."
    machine, cells = document["machine"], _cells(document)
    dtype, layout = _first(cells, "state_dtype"), _first(cells, "layout")
    chosen = [cell for cell in cells if (cell["state_dtype"], cell["layout"]) == (dtype, layout)]
    fused = _first([cell for cell in chosen if cell["provider"] not in MEASURES], "provider")
    lines = [
        f"{machine['device']}, {_short(dtype)} state, layout {layout}, µs per layer "
        f"([how it is measured, and the rest of it](docs/performance.md)):\n",
        f"| H | B | limit | `{fused}` | % of limit | `chain` | x chain |",
        "|---|---|---|---|---|---|---|",
    ]
    for heads, batch in _sizes(chosen):
        here = [cell for cell in chosen if (cell["heads"], cell["batch"]) == (heads, batch)]
        own, chain = _one(here, provider=fused), _one(here, provider="chain")
        row = [str(heads), str(batch), _time(_one(here, provider="limit")), _time(own), _limit(own), _time(chain)]
        lines.append(_row([*row, _quotient(chain, own)]))
    of_limit = geometric_mean([1 / cell["over_limit"] for cell in chosen if cell["provider"] == fused])
    chains = [_one(chosen, provider="chain", heads=h, batch=b) for h, b in _sizes(chosen)]
    owns = [_one(chosen, provider=fused, heads=h, batch=b) for h, b in _sizes(chosen)]
    gains = [_over(chain, own) for chain, own in zip(chains, owns, strict=True) if chain and own]
    mean = [f"**{100 * of_limit:.0f}**", "", f"**{geometric_mean(gains):.2f}**"]
    lines.append(_row(["mean", "", "", "", *mean]))
    lines.append(f"\n![Latency over the batch, and the limit](docs/{LATENCY})")
    models = [document for document in documents if document.get("kind") == "model"]
    if models:
        lines += ["", "What that is worth to a stack of KDA layers with its GEMMs:", "", *_worth(models[-1])]
    return "\n".join(lines)


def insert(readme: str, text: str) -> str:
    """The README with ``text`` between its marks.

    Raises:
        ValueError: the marks are not there once each, in order.
    """
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end or BEGIN in rest or END in before + after:
        raise ValueError(f"README.md: expected {BEGIN!r} and {END!r} once each, in this order")
    return f"{before}{BEGIN}\n{text}\n{END}{after}"


def _is_decode(document: Document) -> bool:
    return "geometric_means" in document


def _cells(document: Document) -> list[Record]:
    """The timed records of a bench document."""
    return [cell for cell in document.get("cells", ()) if "over_limit" in cell]


def _heading(title: str, document: Document) -> list[str]:
    machine = document["machine"]
    facts = [f"{machine['sms']} SMs"] if "sms" in machine else []
    facts += [f"driver {machine['driver']}"] if "driver" in machine else []
    facts += [f"torch {machine['torch']}"]
    if "source" in document:
        facts += [f"commit {document['commit']}", f"source {document['source']}"]
    return [
        f"## {title}, {machine['device']}, {machine['date']}: `{document['file']}`\n",
        f"{', '.join(facts)}. Command: `{document['command']}`\n",
    ]


def _decode_section(document: Document) -> str | None:
    if not _is_decode(document):
        return None
    lines = _heading("Decode step" if document.get("graph", True) else "Decode step, eager", document)
    cells = _cells(document)
    for dtype in dict.fromkeys(cell["state_dtype"] for cell in cells):
        for prefetch in (True, False):
            chosen = [cell for cell in cells if cell["state_dtype"] == dtype and cell["prefetch"] == prefetch]
            if chosen:
                early = "" if prefetch else ", nothing read ahead of the previous kernel (`prefetch=False`)"
                lines += [f"### {_short(dtype)} state{early}\n", *_decode_table(chosen, cells), ""]
    if "kind" in document:
        counted = {cell["provider"]: cell["launches"] for cell in cells if cell["launches"] is not None}
        words = ", ".join(f"{name} {count:g}" for name, count in counted.items())
        lines += [f"Launches per layer, counted: {words}.\n"] if words else []
        missing = {(c["provider"], c["not_timed"]): None for c in document["cells"] if "not_timed" in c}
        lines += [f"Not timed: {name}: {reason}.\n" for name, reason in missing]
    return "\n".join(lines)


def _decode_table(chosen: Sequence[Record], cells: Sequence[Record]) -> list[str]:
    """Rows of H, B; the limit and the copy; of each provider µs, share of the limit, gain on the chain, DS over SD."""
    layouts = list(dict.fromkeys(cell["layout"] for cell in chosen))
    providers = [name for name in dict.fromkeys(cell["provider"] for cell in chosen) if name not in MEASURES]
    copied = any(cell["provider"] == "copy" for cell in chosen)
    narrow = chosen[0]["state_dtype"] != "float32"
    columns = ["H", "B", "limit", *(["copy"] if copied else [])]
    for name in providers:
        columns += [name, "% of limit"]
        columns += ["x chain"] if "chain" in providers and name != "chain" else []
        columns += [f"{layouts[1]} / {layouts[0]}"] if len(layouts) > 1 else []
        columns += ["/ fp32"] if narrow and name == providers[0] else []
    lines = [_row(columns), "|" + "---|" * len(columns)]
    means: dict[int, list[float]] = {}
    for heads, batch in _sizes(chosen):
        here = [cell for cell in chosen if (cell["heads"], cell["batch"]) == (heads, batch)]
        first = [cell for cell in here if cell["layout"] == layouts[0]]
        row = [str(heads), str(batch), _time(_one(first, provider="limit"))]
        row += [_time(_one(first, provider="copy"))] if copied else []
        chain = _one(first, provider="chain")
        for name in providers:
            own = _one(first, provider=name)
            row += [_time(own), _limit(own)]
            if own is not None:
                means.setdefault(len(row) - 1, []).append(100 / own["over_limit"])
            if "chain" in providers and name != "chain":
                row.append(_quotient(chain, own))
                if own is not None and chain is not None:
                    means.setdefault(len(row) - 1, []).append(_over(chain, own))
            if len(layouts) > 1:
                row.append(_quotient(_one(here, provider=name, layout=layouts[1]), own, 3))
            if narrow and name == providers[0]:
                same = {"heads": heads, "batch": batch, "layout": layouts[0], "prefetch": chosen[0]["prefetch"]}
                row.append(_quotient(own, _one(cells, provider=name, state_dtype="float32", **same), 3))
        lines.append(_row(row))
    last = ["geometric mean", *[""] * (len(columns) - 1)]
    for column, values in means.items():
        digits = 1 if columns[column] == "% of limit" else 2
        last[column] = f"**{geometric_mean(values):.{digits}f}**"
    lines.append(_row(last))
    return lines


def _model_section(document: Document) -> str | None:
    if document.get("kind") != "model":
        return None
    lines = [
        *_heading("A stack of KDA layers", document),
        "One decode step of a model's KDA layers in one CUDA graph: norm, merged input projection, f_b (and g_b), the",
        "op, output projection with the residual added in it; random bf16 weights. GEMMs and op are what they take",
        "alone in a graph of their own; the rest is the step less both. There is nothing else in the step (no",
        "attention, experts or all-reduce), so each gain is an upper bound of the same gain in a model.\n",
        *_worth(document),
        "",
    ]
    records = [record for record in document["cells"] if "us" in record]
    for model in dict.fromkeys(record["model"] for record in records):
        chosen = [record for record in records if record["model"] == model]
        size = chosen[0]
        lines += [f"### {model}: {size['layers']} layers, hidden {size['hidden']}, H = {size['heads']}\n"]
        lines += [*_model_table(chosen), ""]
    missing = {(r["backend"], r["not_timed"]): None for r in document["cells"] if "not_timed" in r}
    lines += [f"Not timed: {name}: {reason}.\n" for name, reason in missing]
    return "\n".join(lines)


#: What a change to the first variant is called, and how it is found.
_CHANGES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("chain", {"backend": "chain"}),
    ("no early reads", {"prefetch": False}),
    ("DS", {"layout": "DS"}),
    ("bf16 state", {"state_dtype": "bfloat16"}),
)


def _model_table(chosen: Sequence[Record]) -> list[str]:
    fused = chosen[0]["backend"]
    columns = [
        "B",
        f"TPOT ms, {fused}",
        "P99",
        "tokens/s",
        "launches per layer",
        "GEMMs",
        "op",
        "rest",
        "chain: TPOT ms",
    ]
    columns += ["launches per layer", *(f"{name} / first" for name, _ in _CHANGES)]
    lines = [_row(columns), "|" + "---|" * len(columns)]
    for batch in dict.fromkeys(record["batch"] for record in chosen):
        here = [record for record in chosen if record["batch"] == batch]
        base = here[0]
        median = base["us"]["median"]
        gemms, op = base["gemms_us"] / median, base["op_us"] / median
        row = [str(batch), f"{base['us']['mean'] / 1e3:.3f}", f"{base['us']['p99'] / 1e3:.3f}"]
        row += [f"{base['tokens_per_s']:.0f}", _per_layer(base)]
        row += [f"{share:.0%}" for share in (gemms, op, 1 - gemms - op)]
        chain = _variant(here, backend="chain")
        row += ["-", "-"] if chain is None else [f"{chain['us']['mean'] / 1e3:.3f}", _per_layer(chain)]
        row += [_quotient(_variant(here, **change), base, 3) for _, change in _CHANGES]
        lines.append(_row(row))
    return lines


def _worth(document: Document) -> list[str]:
    """One line for each model and change: what share of the step it takes away, least and most over the batches."""
    records = [record for record in document["cells"] if "us" in record]
    lines = []
    for model in dict.fromkeys(record["model"] for record in records):
        chosen = [record for record in records if record["model"] == model]
        batches = list(dict.fromkeys(record["batch"] for record in chosen))
        words = []
        for title, slow, fast in (
            ("the fused op against the chain", {"backend": "chain"}, {}),
            ("a bf16 state against fp32", {}, {"state_dtype": "bfloat16"}),
            ("reading ahead of the previous kernel", {"prefetch": False}, {}),
        ):
            gains = {}
            for batch in batches:
                here = [record for record in chosen if record["batch"] == batch]
                before, after = _variant(here, **slow), _variant(here, **fast)
                if before is not None and after is not None:
                    gains[batch] = 1 - after["us"]["median"] / before["us"]["median"]
            if gains:
                least, most = min(gains, key=lambda b: gains[b]), max(gains, key=lambda b: gains[b])
                low, high = (round(gains[batch], 3) + 0.0 for batch in (least, most))  # no negative zero
                words.append(f"{title} saves {low:.1%} (B = {least}) to {high:.1%} (B = {most}) of the step")
        lines.append(f"* {model}: {'; '.join(words)}.")
    return lines


def _variant(here: Sequence[Record], **change: Any) -> Record | None:
    """The record that differs from the first variant by ``change`` alone."""
    base = here[0]
    wanted = {name: base[name] for name in ("backend", "layout", "state_dtype", "prefetch")} | change
    return _one(here, **wanted)


def _per_layer(record: Record) -> str:
    return "-" if record["launches"] is None else f"{record['launches'] / record['layers']:.1f}"


def _eval_section(document: Document) -> str | None:
    if document.get("kind") != "eval":
        return None
    lines = [
        *_heading("Answers", document),
        "The shipped model on problems kept out of training, token by token against the reference backend with layout",
        "SD and an fp32 state.\n",
        _row(["backend", "layout", "state", "exact match", "answers that differ"]),
        "|---|---|---|---|---|",
    ]
    for one in document["agreement"]:
        cells = [one["backend"], one["layout"], _short(one["state_dtype"])]
        if "not_run" in one:
            lines.append(_row([*cells, f"not run: {one['not_run']}", ""]))
        else:
            lines.append(_row([*cells, f"{one['exact_match']:.1%}", f"{one['different']} of {one['problems']}"]))
    moved = document["drift"]
    lines += [
        f"\nA bf16 state against an fp32 one, {moved['rows']} rows that read the same text (backend "
        f"{moved['backend']}): after {moved['steps'][-1]} decode steps it is off by {moved['state'][-1]:.2%} of its "
        f"norm (worst layer; at most {max(moved['state']):.2%} on the way), the most likely token was another one in "
        f"{moved['other_tokens'][-1]:.3%} of the steps.\n",
        f"![Drift of a bf16 state]({DRIFT})\n",
    ]
    return "\n".join(lines)


def _host_section(document: Document) -> str | None:
    times = document.get("host_us") or (document.get("us") if "cells" not in document else None)
    if not times:
        return None
    lines = [*_heading("Host time", document), "Microseconds from the Python call until it returns.\n"]
    columns = list(next(iter(times.values())))
    lines += [_row(["backend", *columns]), "|" + "---|" * (len(columns) + 1)]
    lines += [_row([backend, *(f"{us[column]:.1f}" for column in columns)]) for backend, us in times.items()]
    return "\n".join(lines) + "\n"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _sizes(cells: Iterable[Record]) -> list[tuple[int, int]]:
    return list(dict.fromkeys((cell["heads"], cell["batch"]) for cell in cells))


def _one(cells: Iterable[Record], **wanted: Any) -> Record | None:
    return next((cell for cell in cells if all(cell[key] == value for key, value in wanted.items())), None)


def _first(cells: Sequence[Record], name: str) -> Any:
    return cells[0][name]


def _short(dtype: str) -> str:
    return dtype.replace("bfloat", "bf").replace("float", "fp")


def _time(cell: Record | None) -> str:
    return "-" if cell is None else f"{cell['us']['median']:.2f}"


def _limit(cell: Record | None) -> str:
    return "-" if cell is None else f"{100 / cell['over_limit']:.1f}"


def _over(cell: Record, other: Record) -> float:
    ratio: float = cell["us"]["median"] / other["us"]["median"]
    return ratio


def _quotient(cell: Record | None, other: Record | None, digits: int = 2) -> str:
    return "-" if cell is None or other is None else f"{_over(cell, other):.{digits}f}"
