"""Gates: decay at its ends, bounds, head counts, routes. Public faults 10, 16 and 19; 18 is in ``tests/build``."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch

from fused_kda import FallbackWarning, api, fused_kda_decode, gates, stats
from fused_kda.testing.battery import Subject
from fused_kda.testing.compare import check_call, check_equal, expected
from fused_kda.testing.problems import Draw, draw

BF16, FP32 = torch.bfloat16, torch.float32


@pytest.mark.case(10)
@pytest.mark.parametrize("a_log", [3.0, -5.0])
@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_decay_at_its_ends_is_finite(subject: Subject, lower_bound: float | None, a_log: float) -> None:
    """z to 120, beyond 88 where exp overflows: with A_log = 3 all is forgotten there, with -5 only half of it is."""
    call = subject.draw(lower_bound=lower_bound)
    raw_g = call.arguments["raw_g"]
    raw_g.copy_(torch.linspace(-120.0, 120.0, raw_g.numel()).view_as(raw_g))
    call.arguments["dt_bias"].zero_()
    call.arguments["A_log"].fill_(a_log)
    other = call.clone()
    subject.agree(call)
    assert call.arguments["out"].isfinite().all()
    assert call.arguments["state"][list(call.slots)].isfinite().all()
    other.arguments["lower_bound"] = -5.0 if lower_bound is None else None
    other.run(subject.backend)
    slots = list(call.slots)
    assert not torch.equal(other.arguments["state"][slots], call.arguments["state"][slots])


@pytest.mark.case(10)
@pytest.mark.parametrize("bound", [0.0, 5.0, float("nan"), float("-inf")])
def test_bad_bounds_raise(subject: Subject, bound: float) -> None:
    call = subject.draw()
    before = call.clone()
    with pytest.raises(ValueError, match=r"^lower_bound: expected a (negative|finite) number, got "):
        call.run(subject.backend, lower_bound=bound)
    assert call.touched_elsewhere(before) == []


HEADS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96)


@pytest.mark.case(16)
@pytest.mark.parametrize("heads", HEADS)
def test_gate_and_kernel_agree_for_every_head_count(subject: Subject, heads: int) -> None:
    """What the gate says is what the call does, with every form of A_log, bf16 conv weights and a bias."""
    if subject.device.type == "cpu" and subject.backend != "reference" and heads > 3:
        pytest.skip("an interpreter takes a second per head")
    wanted = {"heads": heads, "batch": 1, "weight_dtype": BF16, "bias_dtype": FP32}
    plain = draw(Draw(head_dim=subject.size.head_dim, **wanted), subject.device)
    verdict = next(v for v in gates.explain(plain.problem) if v.backend == subject.backend)
    if not verdict.open:
        with pytest.raises(NotImplementedError) as refused:
            plain.run(subject.backend)
        assert all(reason in str(refused.value) for reason in verdict.reasons)
        return
    shapes = [(heads,), (1, 1, heads, 1), (1, heads)]
    outs = []
    for shape in shapes:
        call = plain.clone()
        call.arguments["A_log"] = call.arguments["A_log"].view(shape)
        outs.append(call.run(subject.backend))
    subject.agree(plain)
    for out in outs:
        check_equal("out", out, plain.arguments["out"])


@pytest.mark.case(16)
def test_a_wide_head_count_costs_no_fallback(subject: Subject) -> None:
    """The gate's answer does not depend on H: no shape is off for being unlisted."""
    answers = {
        heads: gates.supported(draw(Draw(heads=heads, head_dim=128, batch=1), subject.device).problem)
        for heads in (1, 5, 7, 96)
    }
    assert len(set(answers.values())) == 1, answers


@pytest.mark.case(19)
@pytest.mark.parametrize("gate", [0.0, 30.0, -30.0])
@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_every_route_is_the_same_function(subject: Subject, lower_bound: float | None, gate: float) -> None:
    """Each backend, asked for by name, meets one float64 truth: a fallback changes no token's meaning."""
    call = subject.draw(lower_bound=lower_bound)
    call.arguments["output_gate"].fill_(gate)
    truth = expected(call)
    others = [backend for backend in gates.supported(call.problem) if backend != subject.backend]
    for backend in (subject.backend, *others):
        again = call.clone()
        wanted = expected(call, chain=True) if backend == "chain" else truth
        check_call(again, again.run(backend), wanted)


@pytest.mark.case(19)
def test_each_closed_gate_in_turn_still_ends_in_the_truth(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fastest gates closed one after the other: ``auto`` says so, and the answer stays within tolerance."""
    call = subject.draw()
    arch = gates.architecture(subject.device)
    table = gates.TABLE
    for closed in range(len(gates.BACKENDS)):
        shut = gates.BACKENDS[:closed]
        rows = (replace(row, condition=lambda: "shut by a test") if row.backend in shut else row for row in table)
        monkeypatch.setattr(gates, "TABLE", tuple(rows))
        api.reset()
        again = call.clone()
        selection = gates.select(again.problem)
        assert selection.backend not in shut
        wanted = expected(again, chain=selection.backend == "chain")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            out = fused_kda_decode(**again.arguments)
        check_call(again, out, wanted)
        passed_over = [name for name in shut if any(row.auto for row in gates.rows(name, arch))]
        fallbacks = [warning for warning in caught if warning.category is FallbackWarning]
        assert len(fallbacks) == bool(passed_over)
        assert [backend for backend, _ in stats()] == [selection.backend]
