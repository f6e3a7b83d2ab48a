"""Sections of docs/reliability.md that come from long runs on a GPU: sanitizer, soak, the finite check's cost.

Figures are those of results documents (:mod:`fused_kda.bench.results`) of the kinds "sanitize", "soak" and "finite",
the newest of each; where there is none, the section says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..bench.cells import MODEL_LAYERS

Document = Mapping[str, Any]


def render(documents: Iterable[Document]) -> str:
    """The sections as Markdown, headings of level two, without a line at the end.

    Args:
        documents: results documents; of each kind the one with the latest date counts.
    """
    newest: dict[str, Document] = {}
    for document in documents:
        kind = document.get("kind", "")
        if kind not in newest or document["machine"]["date"] >= newest[kind]["machine"]["date"]:
            newest[kind] = document
    sections = [
        _sanitizer(newest.get("sanitize")),
        _soak(newest.get("soak")),
        _LONG_HORIZON,
        _suspicion(newest.get("finite")),
        _CONCURRENCY,
    ]
    return "\n\n".join(sections)


def _sanitizer(document: Document | None) -> str:
    text = """## Sanitizer

`make sanitize` runs every GPU backend under memcheck, racecheck, synccheck and initcheck: a set of calls in which
any two values of any two axes meet (layout, spare taps, shared pages, alignment, dtypes of state, weights, bias and
norm, index type and stride, gate, initial state, head dim, conv width, launch shape, early reads), each launch
compared with float64 as well. Every tensor is an allocation of its own size, and what a launch must not read is
never written before it: `out`, slots that no row names or that have no usable state, the guards between slots.
Beside that, one fault for each tool is built into the CUDA kernel by a macro that nothing else defines; the lane
fails if a tool does not report its fault. The Triton kernels have no such fault; that the tools look at them, too,
rests on the name that the filter lets through."""
    if document is None:
        return f"{text}\n\n{_NOT_RUN}"
    lanes = [lane for lane in document["lanes"] if lane["tool"] is not None]
    clean, faulty = ([lane for lane in lanes if lane["fault"] is fault] for fault in (False, True))
    tools = list(dict.fromkeys(lane["tool"] for lane in lanes))
    filters = document["filters"]
    rows = [
        [
            f"`{backend}`",
            f"`{filters[backend]}`" if filters[backend] else "all",
            *(
                "; ".join(
                    f"{one['launches']} launches, {one['errors']} errors"
                    for one in clean
                    if (one["backend"], one["tool"]) == (backend, tool)
                )
                for tool in tools
            ),
        ]
        for backend in dict.fromkeys(lane["backend"] for lane in clean)
    ]
    table = _table(["backend", "kernels checked (`--kernel-name`)", *tools], rows)
    found = _table(
        ["tool", "its fault", "reported", "exit status"],
        [[one["tool"], f"`{one['fault_name']}`", str(one["errors"]), str(one["status"])] for one in faulty],
    )
    failed = sum(not lane["passed"] for lane in document["lanes"])
    return f"{text}\n\n{_source(document)}\n\n{table}\n\n{found}\n\nLanes that failed: {failed}."


def _soak(document: Document | None) -> str:
    text = """## Soak

`make soak` runs continuous batching drawn from a seed: sequences join and leave, a freed slot goes to the next one
without being cleared, each step runs in the smallest bucket that holds it, as the replay of a graph that was
captured once. Every 1,000 steps two rows are sampled, the one with most tokens among them; each is followed in
float64 from its first token. The budget is four times the error of the reference in fp32 over the same tokens, and
one rounding (`testing/compare.py`); a share of 1 would be all of it. The same traffic on SD and on DS must leave
one digest, over every output of every step and both pools at the end, and device memory must be the same at every
check."""
    if document is None:
        return f"{text}\n\n{_NOT_RUN}"
    rows = [
        [
            f"`{one['backend']}`",
            one["state_dtype"],
            f"{one['steps']:,}",
            f"{one['sequences']:,}",
            f"{one['row_steps']:,}",
            f"{one['samples']}",
            f"{one['longest_followed']:,}",
            f"{one['state_share']:.2f}",
            f"{one['out_share']:.2f}",
            f"{len(set(one['digests']))} from {len(one['digests'])} runs",
            "none" if not one["faults"] else "; ".join(one["faults"]),
        ]
        for one in document["soak"]
    ]
    heads = ["backend", "state", "steps", "sequences", "rows", "rows followed", "longest, tokens"]
    heads += ["share of the state's budget", "of the output's", "digests", "faults"]
    return f"{text}\n\n{_source(document)}\n\n{_table(heads, rows)}"


_LONG_HORIZON = """## Long horizon

`tests/soak/test_long_horizon.py` takes 4,096 steps with nothing to correct an error, with fp32 and bf16 state, on
the reference in CI and on each GPU backend under `make gpu-test`. What was written under one key at the first step
is there at the last, not one bit changed by 4,095 writes under orthogonal keys. A pure decay is the initial state
times the decay to the 4,096th power.

With **bf16 state** that last sentence ends where bf16 does: a decay nearer to one than 2^-9 rounds back to the
value before, so a channel that should forget slowly does not forget at all. The tests hold that, too; it is a
property of the number format and the same on every backend. fp32 state has no such end in practice (2^-25)."""


def _suspicion(document: Document | None) -> str:
    text = """## Finding a fault, and living with it

* **Debug mode** (`FUSED_KDA_DEBUG=1`) looks at the data of every eager step before it: a live slot named twice, an
  index out of range, a NaN or infinity in a window or state that the step would use. The error names rows and
  slots, and the layer where the pool is a `StatePool` or somebody has called `fused_kda.debug.label`. Nothing has
  been touched then. It synchronises; steps inside a graph are not checked, and a warning says so.
* **`fused_kda.finite.FiniteCheck`** may stay on. A NaN or an infinity in what a step uses makes the row's output
  non-finite in the same step, so it looks at the output alone: one launch, no wait, no allocation, inside graphs,
  too. Marks add up on the device until somebody reads them. It belongs behind the last KDA layer of a model, which
  every earlier layer's numbers reach through the residual stream; behind each layer of a small batch it is dear.
  `StatePool.not_finite(slot)` then names the layers.
* **`StatePool.quarantine(slot, reason)`** keeps a slot out of circulation, its bytes as they are, until
  `release(slot)` zeroes it and gives it back."""
    if document is None:
        return f"{text}\n\nWhat the finite check costs, by `python -m fused_kda.bench.finite`. {_NOT_RUN}"
    rows = [
        [
            str(one["heads"]),
            str(one["batch"]),
            f"{one['step']:.2f}",
            f"{one['added']:.2f}",
            f"{100 * one['added'] / one['step']:.0f} %",
            f"{100 * one['added'] / (MODEL_LAYERS * one['step']):.1f} %",
            f"{one['host']:.1f}",
        ]
        for one in document["finite"]
    ]
    heads = ["H", "B", "step, µs a layer", "check, µs", "behind every layer", f"behind the last of {MODEL_LAYERS}"]
    heads.append("host, µs an eager check")
    return f"{text}\n\nWhat the finite check adds to the op in a graph: {_source(document)}\n\n{_table(heads, rows)}"


_CONCURRENCY = """## Concurrency

The op may be called from several Python threads at once, each on its own stream, as long as no two steps that may
overlap name one slot. Plans and kernels are kept by device, so devices do not meet. A child that is forked before
the device is used works like its parent, a spawned one always; a child that is forked after it has no device, and
torch's error says so. A `StatePool` belongs to one thread. `tests/test_concurrency.py` has each of these."""

_NOT_RUN = "Not yet run: no results are committed."


def _source(document: Document) -> str:
    machine = document["machine"]
    return f"`{document['command']}` on {machine['device']}, {machine['date']}:"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
