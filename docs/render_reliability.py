"""Write docs/reliability.md from benchmarks/results: ``python docs/render_reliability.py``. A test holds it current.

The public faults and the fuzz come from what the test runs recorded (``pytest --record-cases FILE``), the rest from the
results of longer runs (:mod:`fused_kda.testing.hardening`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fused_kda.bench.page import read_all
from fused_kda.testing import hardening

PAGE = Path(__file__).with_name("reliability.md")
RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
TESTS = Path(__file__).parents[1] / "tests"

#: What people met in public with kernels of this kind, and what happens here instead.
FAULTS: dict[int, tuple[str, str]] = {
    1: (
        "padded rows all write the reserved slot",
        "null rows are exactly zero whatever their inputs hold, no slot changes, live rows have the bits of a run "
        "without padding",
    ),
    2: (
        "two sentinels, 0 and -1",
        "`null_slot` decides; slot 0 is live under -1 alone, and no index wraps into the pool",
    ),
    3: ("the padded tail of the output is never written", "every row is written, in each form of `out`"),
    4: ("a non-finite null slot leaks through masking", "no live row changes by a bit"),
    5: (
        "a stale but valid index in the padded tail of a replayed batch",
        "the op believes the index buffer: who replays with fewer rows rewrites the whole buffer, as the adapters do; "
        "a rewritten tail touches nothing",
    ),
    6: ("values frozen at capture", "50 replays with other slots, inputs and masks have the bits of eager calls"),
    7: (
        "the first call inside a capture; buffers that grow later",
        "works without a warm-up call, with `out` left to the op, and after larger eager batches",
    ),
    8: ("a slot reused with the last tenant's bytes", "`has_initial_state=False` starts from zero whatever lies there"),
    9: (
        "prefill and decode disagree on the window's order",
        "decode continues what prefill left, SD and DS, also where backends take turns on one pool",
    ),
    10: (
        "the bounded gate where softplus was trained; unsafe softplus",
        "both gates are finite at their ends; bounds that are not finite and negative raise",
    ),
    11: ("state stored in the wrong dtype", "read in its own dtype or refused, never reinterpreted"),
    12: (
        "a 32-bit slot offset wraps",
        "exact on both sides of 2^31 bytes and elements, all other bytes as before",
    ),
    13: (
        "indices that are not contiguous int32 of one dimension",
        "int64 and strides are read in place, others refused",
    ),
    14: (
        "a strided pool silently copied, or a binary used for other strides",
        "the caller's own storage changes, or the call is refused",
    ),
    15: ("x, gate and beta as slices of one projection", "read in place at any element, with the bits of dense inputs"),
    16: (
        "the fused op off on every layer for a shape that nobody listed",
        "any number of heads; gate, kernel and reason agree",
    ),
    17: ("DS silently bypasses the fused kernel", "the bits of SD, in as many launches"),
    18: (
        "the gate of the build and that of the run disagree",
        "both read one table; the gate answers from what is there",
    ),
    19: ("the fallback is another function", "with each gate closed in turn the answer meets one float64 truth"),
    20: (
        "a change of the batch size changes tokens",
        "a request has the same bits in batches of every size, at every position",
    ),
    21: ("a window shifted while a sibling block still reads it", "200 runs from one snapshot leave the same bits"),
    22: (
        "a transferred slot overwritten by a step still in flight",
        "a slot that an unfinished step lists is not handed out ([transfer](transfer.md))",
    ),
    23: (
        "one page, two views, one stride",
        "every byte lands where it belongs; a peer with another layout is refused before a byte moves",
    ),
    24: (
        "an in-place update that the compiler is not told of",
        "opcheck passes, compiled steps equal eager ones, no pool is cloned",
    ),
    25: (
        "a cache directory that is read-only, shared or half written",
        "kernels come from a private or prebuilt place; a bad entry is made anew, never loaded",
    ),
}

TEXT = """\
<!-- Written by docs/render_reliability.py from benchmarks/results. Edit neither by hand. -->
# Reliability

What has been done to break the op, and what came of it. Every figure here is one that a test run or a program wrote
into a file of `benchmarks/results/`; where there is none, the page says "not run".

## Public faults

Each of these was reported in public against some kernel of this kind. Each is a family of inputs, and the tests that
carry its number (`@pytest.mark.case`) try the family. A skipped test counts as not run.

{runs}

{faults}

{notes}

What happens instead, and the tests that hold it:

{outcomes}

A limit of what a compiler can keep (24): what is read from a pool between two steps of one compiled graph, and used
only after the second step, makes Inductor move the read behind that step and copy the pool. A read that the second step
depends on costs nothing, nor does one with `torch._inductor.config.reorder_for_locality = False`.

## Fuzz

`tests/test_fuzz.py` draws whole problems: H from 1 to 96, B from 0 to 2,048 with both sides of every boundary, all
layouts, spare taps, shared pages, pitches and base addresses at odd elements, slices of one projection, every form of
the row tensors, patterns of null rows, all dtypes, both gates, scalars. Values include exact zeros in q, k and v,
1e-20, 3e38, gates at +-80, A_log at minus infinity and +10; NaN and infinities in one row's input or slot must not
change a bit of any other row. Each is compared with float64 within a derived budget (`testing/compare.py`), on a CPU
also with a second oracle that works one scalar at a time (`tests/oracle.py`), and byte by byte for what must not
change. A failure prints a program that repeats it, which then stays in the test as an example.

{fuzz}

What fp32 cannot hold has no right value: where a bound on the intermediate values of a (row, head) passes 2^120, its
output and state are not compared, but every other head, row and slot is, and its window is (`limits` in
`testing/compare.py`). The kernels take the update as (delta times k's norm) times k, with k as it comes out of the
convolution: where k is tiny and its norm near its largest, 1,000, values of v above about 1e35 overflow; where k is
huge, updates below 1e-38 times k are lost, as is a decay below 1e-38, which GPUs may take for zero. A decay of e^-37
has lost five bits to the exponent, and GPUs' exp is good to two units in the last place. The runs of the fuzz on an
H200 found these three in the way of judging, not in the kernels: they are the failures in the table, where the first
run counted each one's repetition, too. The budget now allows for what is documented of them, and the problems stay in
the test.

A zero q or k normalises to zeros. With `norm_eps=0` an output that is exactly zero before the norm is 0 / 0 by the
formula, and NaN, in that row and head alone; keep `norm_eps` above zero.

## Bad input

`tests/test_bad_input.py` holds {invalid} invalid calls: each argument wrong in each way (not a tensor, None, dtype,
device, size, rank, stride; scalars of another type, out of range, NaN, infinite), with the exact text of the error. For
each one every byte under every tensor is the same afterwards; on a GPU as well.

{hardening}
"""


def render(documents: Sequence[Mapping[str, Any]], invalid: int) -> str:
    """The whole page.

    Args:
        documents: results documents; of the kind "cases" all are read.
        invalid: how many calls the table of bad input has.
    """
    records = [document for document in documents if document.get("kind") == "cases"]
    cells = _best(records)
    backends = sorted({backend for _, backend in cells}, key=_order)
    letters: dict[str, str] = {}
    rows = []
    for number, (fault, _) in FAULTS.items():
        known = any(case == number for case, _ in cells)
        shown = [_cell(cells.get((number, backend)), letters) if known else "not run" for backend in backends]
        rows.append([str(number), fault, *shown])
    outcomes = []
    for number, (_, outcome) in FAULTS.items():
        tests = {test for (case, _), (cell, _) in cells.items() if case == number for test in cell["tests"]}
        files: dict[str, list[str]] = {}
        for test in sorted(tests):
            path, _, name = test.partition("::")
            files.setdefault(path.removeprefix("tests/"), []).append(name.removeprefix("test_"))
        named = "; ".join(f"`{path}`: {', '.join(names)}" for path, names in files.items())
        outcomes.append([str(number), outcome, named or "none"])
    return TEXT.format(
        runs="\n".join(f"* `{record['command']}`: {_machine(record)}" for record in records) or "No run is recorded.",
        faults=_table(["", "fault", *(_head(backend, cells) for backend in backends)], rows),
        notes="\n".join(f"* {letter}: not run: {reason}" for reason, letter in letters.items()),
        outcomes=_table(["", "outcome", "tests"], outcomes),
        fuzz=_table(
            ["backend", "problems", "failed", "where"],
            [
                [f"`{one['backend']}`", f"{one['tried']:,}", str(one["failed"]), _machine(record)]
                for record in records
                for one in record["fuzz"]
            ],
        ),
        invalid=invalid,
        hardening=hardening.render(documents),
    )


Cell = tuple[Mapping[str, Any], Mapping[str, Any]]


def _best(records: Iterable[Mapping[str, Any]]) -> dict[tuple[int, str], Cell]:
    """By fault and backend the cell of the run in which most of its tests ran, the latest of equals; and that run."""
    found: dict[tuple[int, str], Cell] = {}
    for record in sorted(records, key=lambda record: str(record["machine"]["date"])):
        for cell in record["cases"]:
            key = (cell["case"], cell["backend"])
            if key not in found or _ran(cell) >= _ran(found[key][0]):
                found[key] = (cell, record)
    return found


def _ran(cell: Mapping[str, Any]) -> int:
    return int(cell["passed"]) + int(cell["failed"])


def _cell(found: Cell | None, letters: dict[str, str]) -> str:
    if found is None:
        return "-"
    cell, _ = found
    parts = []
    if cell["failed"]:
        parts.append(f"**{cell['failed']} FAILED**")
    if cell["passed"]:
        parts.append(f"{cell['passed']} passed")
    if cell["not run"]:
        marks = [letters.setdefault(reason, _letter(len(letters))) for reason in cell["reasons"]]
        parts.append(f"{cell['not run']} not run ({', '.join(marks)})")
    return ", ".join(parts)


def _letter(number: int) -> str:
    high, low = divmod(number, 26)
    return ("abcdefghijklmnopqrstuvwxyz"[high - 1] if high else "") + "abcdefghijklmnopqrstuvwxyz"[low]


def _order(backend: str) -> tuple[bool, int]:
    name, _, device = backend.partition(" on ")
    names = ("reference", "cuda", "triton", "chain", "none")
    return device != "cpu", names.index(name)


def _head(backend: str, cells: Mapping[tuple[int, str], Cell]) -> str:
    """``triton, interpreter``, ``cuda, NVIDIA H200``, ``no backend's, CPU`` ..."""
    name, _, device = backend.partition(" on ")
    where = "CPU"
    if device == "cuda":
        machines = [record["machine"] for (_, other), (_, record) in cells.items() if other == backend]
        where = next((machine["device"] for machine in machines if "sms" in machine), "GPU")
    elif name in ("triton", "chain"):
        where = "interpreter"
    return f"{'no one backend' if name == 'none' else name}, {where}"


def _machine(record: Mapping[str, Any]) -> str:
    machine = record["machine"]
    return f"{machine['device']}, torch {machine['torch']}, {machine['date']}"


def _table(head: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    lines = [list(head), ["---"] * len(head), *map(list, body)]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)


if __name__ == "__main__":
    sys.path.append(str(TESTS))
    from test_bad_input import INVALID

    PAGE.write_text(render(read_all(RESULTS), len(INVALID)))
