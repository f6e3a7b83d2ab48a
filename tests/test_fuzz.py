"""Whole problems drawn by hypothesis, on every backend that this machine has, against float64.

On a CPU: PyTorch's reference, also against the scalar oracle, and Triton's interpreter in the process that
``kernels/test_interpreter.py`` starts. On a GPU a few dozen specialisations share the problems, so that compilers take
little of the time. What fails prints a program that repeats it; put its Draw into REGRESSIONS.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace

import hypothesis
import pytest
import torch
from hypothesis import Phase

import oracle
from fused_kda import gates
from fused_kda.contract import DecodeProblem, Tensors
from fused_kda.kernels import reference
from fused_kda.testing.battery import Subject, default_size
from fused_kda.testing.compare import check_equal
from fused_kda.testing.problems import Draw, draw
from strategies import BF16, DTYPES, HEADS, SCALAR, WIDTHS, Space, problems, snippet, specialisation

pytestmark = pytest.mark.fuzz

SMALL = Space(heads=HEADS, dims=(1, 2, 3, 5, 8, 16), widths=WIDTHS, dtypes=DTYPES, elements=1 << 13, most=1 << 16)
#: For Triton's interpreter, where a program takes tens of milliseconds.
INTERPRETED = Space(heads=(1, 1, 2, 3), dims=(64, 64, 64, 128), widths=WIDTHS, elements=1 << 12, most=5 << 12)
LAUNCHED = Space(heads=HEADS, dims=(64, 128, 128, 128, 256), widths=WIDTHS)
#: Parts can run side by side. On a GPU a part has SPECIALISATIONS with PROBLEMS each, on a CPU a few problems of any.
PARTS, SPECIALISATIONS, PROBLEMS = 14, 3, 64
ON_A_CPU = {"reference": 26, "triton": 8, "chain": 6}

#: Problems that found a fault in a backend or in the way of judging it, and corners that are worth a run each time.
REGRESSIONS: tuple[Draw, ...] = (
    Draw(batch=0, heads=3),
    Draw(batch=1, heads=1, slots=1, null_slot=-1, page_shared=True),
    Draw(batch=2, heads=1, extremes=("q zero", "k zero"), lower_bound=None, norm_dtype=None),
    Draw(batch=2, heads=1, extremes=("large state", "one huge input"), state_dtype=BF16, poison="state"),
    Draw(batch=2, heads=1, extremes=("A_log at its ends", "gates at 80"), lower_bound=None, poison="raw_g"),
    # An update below fp32's normal numbers, before it meets a k of 1e15.
    Draw(
        batch=2,
        heads=2,
        state_dtype=BF16,
        lower_bound=None,
        mask=True,
        extremes=("large inputs", "beta at 80"),
        seed=28,
    ),
)
#: As an H200 met them, too large for an interpreter: the same, an update that overflows there, and a decay of e^-37.
LARGE_REGRESSIONS: tuple[Draw, ...] = (
    Draw(
        batch=9, heads=3, slots=11, page_shared=True, state_dtype=BF16, weight_dtype=BF16, norm_dtype=BF16,
        weight_form="checkpoint_3d", lower_bound=None, null_rows=(4,), mask=True, sliced=True, row_form="[B,P]",
        row_offset=3, row_gap=1, norm_eps=1e-6, prefetch=True, extremes=("large inputs", "beta at 80"), seed=167,
    ),
    Draw(
        heads=24, slots=6, guard=1, page_unit=2, pool_offset=1, state_dtype=BF16, weight_dtype=BF16, norm_dtype=None,
        weight_form="checkpoint_3d", index_dtype=torch.int64, index_stride=5, lower_bound=None, row_form="[B,H,D]",
        row_offset=3, row_gap=1, extremes=("all inputs tiny", "one huge input", "tiny inputs"), poison="raw_beta",
        seed=40532,
    ),
    Draw(
        batch=8, heads=7, slots=8, page_shared=True, weight_dtype=BF16, bias_dtype=torch.float32, norm_dtype=BF16,
        index_dtype=torch.int64, index_stride=16, lower_bound=None, null_rows=(6, 7), reserved=True,
        row_form="[B,H,D]", norm_eps=1e-6, scale=-0.5, extremes=("large state", "A_log at its ends"),
        poison="output_gate", seed=32767,
    ),
)  # fmt: skip


def space(subject: Subject) -> Space:
    if subject.backend == "reference":
        return SMALL
    if subject.device.type == "cpu":
        return INTERPRETED
    return replace(LAUNCHED, dims=(128,), widths=(4,)) if subject.backend == "cuda" else LAUNCHED


def agrees(subject: Subject, wanted: Draw) -> None:
    """The problem against float64; what is spoilt in one row changes no bit of another."""
    call = draw(wanted, subject.device)
    subject.agree(call, extreme=True)
    if wanted.poison is None or not call.live:
        return
    clean = draw(replace(wanted, poison=None), subject.device)
    clean.run(subject.backend)
    others, slots = list(call.live[:-1]), list(call.slots[:-1])
    rows = (wanted.batch, wanted.heads * wanted.head_dim)
    outs = [one.arguments["out"].reshape(rows)[others] for one in (call, clean)]
    check_equal("out of the other rows", *outs)
    for name in ("conv_state", "state"):
        check_equal(f"{name} of the other rows", call.arguments[name][slots], clean.arguments[name][slots])


@pytest.fixture
def counts(request: pytest.FixtureRequest, record_property: Callable[[str, object], None]) -> Iterator[Counter[str]]:
    """Problems tried, and failed, by a test; ``--record-cases`` adds them up."""
    found = Counter(tried=0, failed=0)
    yield found
    backend, device = request.node.callspec.params.get("subject", ("reference by the scalar oracle", "cpu"))
    record_property("fuzz", [f"{backend} on {torch.device(device).type}", dict(found)])


def run(
    check: Callable[[Draw], None], where: Space, spec: Draw | None, count: int, seed: int, repeat: tuple[str, str],
    counts: Counter[str],
) -> None:  # fmt: skip
    """Check ``count`` problems drawn from a seed. A failure prints a program that repeats it, and ends the run."""
    tried: set[Draw] = set()
    failed: set[Draw] = set()

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=count, derandomize=False, database=None, deadline=None, phases=[Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )  # fmt: skip
    @hypothesis.given(problems(where, spec))
    def each(wanted: Draw) -> None:
        tried.add(wanted)
        try:
            check(wanted)
        except Exception:
            failed.add(wanted)
            print(f"\n{snippet(wanted, *repeat)}\n")
            raise

    try:
        each()
    finally:
        counts.update(tried=len(tried), failed=len(failed))


@pytest.mark.parametrize("part", range(PARTS))
def test_drawn_problems(subject: Subject, part: int, counts: Counter[str]) -> None:
    gpu = subject.device.type != "cpu"
    where, count = space(subject), PROBLEMS if gpu else ON_A_CPU[subject.backend]
    for number in range(SPECIALISATIONS if gpu else 1):
        seed = part * SPECIALISATIONS + number
        spec = None
        if gpu:
            heads = HEADS[seed % len(HEADS)]
            spec = specialisation(random.Random(seed).choice, replace(where, heads=(heads,)))
        repeat = (subject.backend, subject.device.type)
        run(lambda wanted: agrees(subject, wanted), where, spec, count, seed, repeat, counts)


@pytest.mark.parametrize("wanted", REGRESSIONS, ids=range(len(REGRESSIONS)))
def test_problems_to_remember(subject: Subject, wanted: Draw) -> None:
    agrees(subject, wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("wanted", LARGE_REGRESSIONS, ids=["underflow", "overflow", "decay"])
@pytest.mark.parametrize("backend", ["cuda", "triton", "chain"])
def test_large_problems_to_remember(backend: str, wanted: Draw, width: int) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    problem = replace(wanted, conv_width=width)
    if backend not in gates.supported(draw(problem, device).problem):
        pytest.skip(f"{backend} does not have this problem")
    agrees(Subject(backend, device, default_size(device, backend)), problem)


@pytest.mark.parametrize("part", range(4))
def test_the_reference_agrees_with_the_scalar_oracle(part: int, counts: Counter[str]) -> None:
    repeat = ("reference", "cpu")
    run(lambda wanted: oracle.agree(draw(wanted)), SCALAR, None, 100, part, repeat, counts)


def _row_32_is_lost(problem: DecodeProblem, tensors: Tensors) -> None:
    if problem.batch > 32:
        tensors.out.view(problem.batch, -1)[32] = 3.0


def _a_spoilt_row_leaks(problem: DecodeProblem, tensors: Tensors) -> None:
    slots = tensors.state_indices.flatten().tolist()
    live = [row for row, slot in enumerate(slots) if problem.null_slot < slot < problem.slots]
    if live and not tensors.x[live].isfinite().all():
        tensors.state[slots[live[0]]] += 1.0


def _wide_gates_overflow(problem: DecodeProblem, tensors: Tensors) -> None:
    if bool((tensors.raw_g.abs() >= 80.0).any()):
        tensors.out.nan_to_num_().add_(1.0)


@pytest.mark.parametrize("fault", [_row_32_is_lost, _a_spoilt_row_leaks, _wide_gates_overflow])
def test_a_fault_that_few_inputs_show_is_found(
    fault: Callable[[DecodeProblem, Tensors], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    sound = reference.decode_step

    def broken(problem: DecodeProblem, tensors: Tensors) -> None:
        sound(problem, tensors)
        fault(problem, tensors)

    monkeypatch.setattr(reference, "decode_step", broken)
    cpu = torch.device("cpu")
    subject, found = Subject("reference", cpu, default_size(cpu, "reference")), Counter[str]()
    with pytest.raises(AssertionError):
        run(lambda wanted: agrees(subject, wanted), SMALL, None, PARTS * PROBLEMS, 0, ("reference", "cpu"), found)
    assert found["tried"] > 1


def test_a_failure_prints_a_program_that_repeats_it(capsys: pytest.CaptureFixture[str]) -> None:
    def refuses_padding(wanted: Draw) -> None:
        assert not wanted.null_rows

    with pytest.raises(AssertionError):
        run(refuses_padding, SCALAR, None, 100, 0, ("reference", "cpu"), Counter())
    program = capsys.readouterr().out.strip().rpartition("import torch")[2]
    assert "null_rows=(" in program
    exec(compile("import torch" + program, "printed program", "exec"), {})
