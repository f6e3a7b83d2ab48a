"""The correctness battery: what every backend must pass, small enough to run anywhere.

``fused-kda check`` prints it as a table and the tests run it check by check. Each check draws calls in hostile memory
(:mod:`.problems`), runs them on one backend and judges the result by derived budgets or by bits (:mod:`.compare`).
:class:`Size` says how large: a few rows on a CPU or in Triton's interpreter, a thousand on a GPU.

A check whose calls the backend's gate does not admit is *not run*, and says why; it never counts as passed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from .. import gates
from .compare import Mismatch, check_call, check_equal, expected
from .problems import Call, Draw, draw

Status = Literal["pass", "fail", "not run"]


class NotRun(Exception):
    """The check cannot be run on this machine or backend; the text says why."""


@dataclass(frozen=True, slots=True)
class Size:
    """How large the battery's calls are.

    Attributes:
        heads, head_dim: H and D of every call that does not ask for others.
        rows: B of most calls, at least 3.
        batches: batch sizes whose results must have the same bits; the largest one is the pool's number of live rows.
        repeats: runs from one snapshot that must leave the same bits.
        steps: consecutive steps on one pool.
    """

    heads: int = 2
    head_dim: int = 128
    rows: int = 4
    batches: tuple[int, ...] = (1, 2, 3, 5, 9)
    repeats: int = 5
    steps: int = 4


#: For Triton's interpreter, where one program takes tens of milliseconds.
TINY = Size(heads=1, head_dim=64, rows=3, batches=(1, 2, 3), repeats=2, steps=2)
#: For a GPU: crosses every launch-shape boundary up to 1,024 rows.
LARGE = Size(
    heads=3, rows=9, batches=(1, 2, 3, 4, 7, 8, 15, 16, 31, 32, 63, 64, 128, 255, 256, 512, 1024), repeats=100, steps=8
)


def default_size(device: torch.device, backend: str) -> Size:
    """LARGE on a GPU; on a CPU the small default, or TINY for a backend that only an interpreter runs there."""
    if device.type != "cpu":
        return LARGE
    return Size() if backend == "reference" else TINY


@dataclass(frozen=True, slots=True)
class Subject:
    """What is being checked: one backend on one device, at one size."""

    backend: str
    device: torch.device
    size: Size

    def draw(self, **wanted: Any) -> Call:
        """Draw a call of the subject's size, changed as ``wanted`` (fields of :class:`Draw`) says.

        Raises:
            NotRun: the backend's gate is closed for it.
        """
        base = Draw(batch=self.size.rows, heads=self.size.heads, head_dim=self.size.head_dim)
        call = draw(replace(base, **wanted), self.device)
        verdict = next(v for v in gates.explain(call.problem) if v.backend == self.backend)
        if not verdict.open:
            raise NotRun("; ".join(verdict.reasons))
        return call

    def agree(self, call: Call, *, extreme: bool = False) -> None:
        """Run the call; its live rows must meet the float64 reference, and no byte beyond its own may change.

        With ``extreme``, heads that fp32 cannot hold are not compared (:func:`.compare.limits`).
        """
        before = call.clone()
        wanted = expected(call, chain=self.backend == "chain", extreme=extreme)
        out = call.run(self.backend)
        check_call(call, out, wanted)
        faults = call.touched_elsewhere(before)
        if faults:
            raise Mismatch(f"bytes that no live row owns were written: {'; '.join(faults)}")


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the battery: a short name, what it asserts, and the function that runs it or raises."""

    name: str
    asserts: str
    run: Callable[[Subject], None]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a check said about a backend. ``reason`` is empty for a pass."""

    backend: str
    check: str
    status: Status
    reason: str
    seconds: float


def run_check(check: Check, subject: Subject) -> Outcome:
    """Run one check and turn whatever it raises into an outcome: a backend that raises has failed."""
    start = time.perf_counter()
    status: Status = "pass"
    reason = ""
    try:
        check.run(subject)
    except NotRun as missing:
        status, reason = "not run", str(missing)
    except Mismatch as mismatch:
        status, reason = "fail", str(mismatch)
    except Exception as error:  # a compiler's or driver's error is a finding about the backend, not about the battery
        status, reason = "fail", f"{type(error).__name__}: {error}"
    return Outcome(subject.backend, check.name, status, reason, time.perf_counter() - start)


def run_battery(subject: Subject, checks: Iterable[Check] | None = None) -> list[Outcome]:
    """Run the checks (all of :data:`CHECKS` if None) one after the other."""
    return [run_check(check, subject) for check in (CHECKS if checks is None else checks)]


def _agreement(*variants: dict[str, Any]) -> Callable[[Subject], None]:
    """A check that draws each variant and compares it with the float64 reference."""

    def run(subject: Subject) -> None:
        for seed, variant in enumerate(variants):
            subject.agree(subject.draw(seed=seed, **variant))

    return run


def _null_rows(subject: Subject) -> None:
    """Null rows at the end, in the middle and alone: exact zeros, and live rows with the bits of an unpadded run."""
    rows = subject.size.rows
    for null_slot in (0, -1):
        for nulls in ((rows - 1,), (0, rows // 2), tuple(range(rows))):
            call = subject.draw(null_slot=null_slot, null_rows=nulls, seed=rows + null_slot)
            alone = call.clone()
            subject.agree(call)
            if not call.live:
                continue
            compact = take(alone, call.live)
            out = compact.run(subject.backend)
            _same(f"live rows without padding (null_slot={null_slot})", call, compact, list(call.live), out)


def _layouts_equal(subject: Subject) -> None:
    """SD, DS, DS with spare taps and shared pages hold the same values: every result has the same bits."""
    sd = subject.draw(layout="SD")
    out = sd.run(subject.backend)
    for variant in ({}, {"spare_taps": 2}, {"page_shared": True}):
        ds = subject.draw(layout="DS", **variant)
        _same(f"DS {variant or ''} against SD", sd, ds, None, ds.run(subject.backend), out)


def _batch_invariance(subject: Subject) -> None:
    """A row's results have the same bits in every batch size and at every position."""
    most = max(subject.size.batches)
    whole = subject.draw(batch=most)
    snapshot = whole.clone()
    whole.run(subject.backend)
    for batch in subject.size.batches:
        for first in sorted({0, (most - batch) // 2, most - batch}):
            rows = list(range(first, first + batch))
            part = take(snapshot.clone(), rows[::-1])
            out = part.run(subject.backend)
            _same(f"B={batch} from row {first}, against B={most}", whole, part, rows[::-1], out)


def _repeats(subject: Subject) -> None:
    """The same call from the same snapshot leaves the same bits every time."""
    snapshot = subject.draw()
    first = snapshot.clone()
    first.run(subject.backend)
    for number in range(1, subject.size.repeats):
        again = snapshot.clone()
        _same(f"repeat {number}", first, again, None, again.run(subject.backend))


def _steps(subject: Subject) -> None:
    """Consecutive steps on one pool, every other one on the reference: each continues where the last one ended."""
    for layout in ("SD", "DS"):
        call = subject.draw(layout=layout)
        for step in range(subject.size.steps):
            fresh = draw(_like(subject, layout, seed=step + 1), subject.device).arguments
            call.arguments.update({name: fresh[name] for name in ("x", "raw_g", "raw_beta", "output_gate")})
            if step % 2:
                call.run("reference")
            else:
                subject.agree(call)


def _like(subject: Subject, layout: Any, seed: int) -> Draw:
    size = subject.size
    return Draw(batch=size.rows, heads=size.heads, head_dim=size.head_dim, layout=layout, seed=seed)


def _extremes(subject: Subject) -> None:
    """Saturated gates: an unbounded decay far from zero, output gates of +-30, all finite and within the budget."""
    for lower_bound in (None, -5.0):
        call = subject.draw(lower_bound=lower_bound)
        call.arguments["A_log"].fill_(3.0)
        call.arguments["dt_bias"].zero_()
        raw_g = call.arguments["raw_g"]
        raw_g.copy_(torch.linspace(-80.0, 80.0, raw_g.numel()).view_as(raw_g))
        gate = call.arguments["output_gate"]
        gate.copy_(torch.linspace(-30.0, 30.0, gate.numel()).view_as(gate))
        subject.agree(call)


def _graph(subject: Subject) -> None:
    """Captured once, replayed with other indices and inputs in the same buffers: the bits of eager calls."""
    replayed = subject.draw(batch=max(subject.size.rows, 4), slots=4 * subject.size.rows + 8)
    if subject.device.type != "cuda":
        raise NotRun(f"graphs are captured on a CUDA or HIP device, not on {subject.device.type}")
    if subject.backend == "reference":
        raise NotRun("the reference reads indices on the host, which a capture forbids")
    for pool in ("conv_state", "state"):
        replayed.arguments[pool].nan_to_num_(nan=0.25)
    eager = replayed.clone()
    warm = replayed.clone()
    warm.run(subject.backend)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed.run(subject.backend)
    slots = replayed.problem.slots
    generator = torch.Generator().manual_seed(0)
    for step in range(subject.size.steps):
        order = torch.randperm(slots - 1, generator=generator)[: replayed.problem.batch] + 1
        order[step % replayed.problem.batch] = 0
        for call in (replayed, eager):
            call.arguments["state_indices"].copy_(order)
            call.arguments["x"].mul_(0.9)
        graph.replay()
        out = eager.run(subject.backend)
        for name, want in (
            ("out", out),
            ("conv_state", eager.arguments["conv_state"]),
            ("state", eager.arguments["state"]),
        ):
            check_equal(f"{name} of replay {step}", replayed.arguments[name], want)


_ROW_INPUTS = ("x", "raw_beta", "state_indices", "has_initial_state", "output_gate", "out")


def take(call: Call, rows: Iterable[int]) -> Call:
    """The call restricted to some of its rows, in the order given, on the same pools; out poisoned anew."""
    chosen = list(rows)
    slots = dict(zip(call.live, call.slots, strict=True))
    taken = {name: None if call.arguments[name] is None else call.arguments[name][chosen] for name in _ROW_INPUTS}
    taken["out"] = torch.full_like(call.arguments["out"][chosen], float("nan"))
    arguments = {**call.arguments, **taken, "raw_g": call.arguments["raw_g"][:, chosen]}
    live = [place for place, row in enumerate(chosen) if row in slots]
    return Call(arguments, tuple(live), tuple(slots[chosen[place]] for place in live))


def _same(
    what: str, whole: Call, part: Call, rows: list[int] | None, out: torch.Tensor, against: torch.Tensor | None = None
) -> None:
    """The bits of ``part`` (which ran rows ``rows`` of ``whole``, or all of them) are those of ``whole``."""
    slots = list(part.slots)
    reference = whole.arguments["out"] if against is None else against
    check_equal(f"{what}: out", out, reference if rows is None else reference[rows])
    for name in ("conv_state", "state"):
        check_equal(f"{what}: {name}", part.arguments[name][slots], whole.arguments[name][slots])


_BF16 = torch.bfloat16

CHECKS: tuple[Check, ...] = (
    Check("SD", "agrees with float64 within the derived budget, window bit-exact", _agreement({"layout": "SD"})),
    Check("DS", "the same on DS", _agreement({"layout": "DS"})),
    Check(
        "DS, spare taps",
        "the same on DS with spare history rows",
        _agreement(*({"layout": "DS", "spare_taps": n} for n in (1, 4))),
    ),
    Check(
        "shared pages",
        "conv and state in one page",
        _agreement(*({"layout": kind, "page_shared": True} for kind in ("SD", "DS"))),
    ),
    Check(
        "softplus gate", "Kimi-Linear's gate", _agreement({"lower_bound": None}, {"lower_bound": None, "layout": "DS"})
    ),
    Check("no norm", "without the gated norm", _agreement({"norm_dtype": None})),
    Check("bias", "conv bias, fp32 and bf16", _agreement({"bias_dtype": torch.float32}, {"bias_dtype": _BF16})),
    Check(
        "bf16 state",
        "recurrent pool in bf16, both gates",
        _agreement(
            {"state_dtype": _BF16},
            {"state_dtype": _BF16, "layout": "DS", "lower_bound": None, "norm_dtype": None},
            {"state_dtype": _BF16, "page_shared": True},
        ),
    ),
    Check(
        "weight forms",
        "[3,W,P], [3P,W] and [3P,1,W], fp32 and bf16, read in place",
        _agreement(
            *(
                {"weight_form": form, "weight_dtype": dtype}
                for form in ("checkpoint", "checkpoint_3d")
                for dtype in (torch.float32, _BF16)
            ),
            {"weight_dtype": _BF16, "norm_dtype": _BF16},
        ),
    ),
    Check(
        "sliced inputs",
        "x, gate and beta as columns of one projection",
        _agreement({"sliced": True}, {"sliced": True, "batch": 1}),
    ),
    Check(
        "indices",
        "int64, and a strided column of a wider table",
        _agreement({"index_dtype": torch.int64}, {"index_stride": 16}, {"index_dtype": torch.int64, "index_stride": 3}),
    ),
    Check("head dims", "D = 64, 128 and 256", _agreement(*({"head_dim": dim} for dim in (64, 128, 256)))),
    Check("other widths", "W = 2 and 3", _agreement({"conv_width": 2}, {"conv_width": 3, "layout": "DS"})),
    Check("head counts", "H = 1 and 5", _agreement({"heads": 1}, {"heads": 5, "batch": 2})),
    Check(
        "unaligned pools",
        "slot pitches that are no multiple of 16 bytes",
        _agreement({"guard": 3}, {"guard": 1, "layout": "DS", "state_dtype": _BF16}),
    ),
    Check("null rows", "zeros, pools untouched, under either policy", _null_rows),
    Check(
        "initial state",
        "rows without one start from zero whatever the slot holds",
        _agreement({"mask": True}, {"mask": True, "layout": "DS", "null_slot": -1, "null_rows": (1,)}),
    ),
    Check("extreme gates", "finite and within the budget where gates saturate", _extremes),
    Check("steps", "consecutive steps, alternating with the reference", _steps),
    Check("SD = DS", "the same bits in every layout", _layouts_equal),
    Check("batch invariance", "the same bits in every batch size and position", _batch_invariance),
    Check("repeats", "the same bits every time", _repeats),
    Check("graph replay", "capture, then replay with changed indices: the bits of eager calls", _graph),
)
