"""Values at the ends: zero vectors, and a row that holds NaN or infinities, on every backend."""

from __future__ import annotations

import pytest
import torch

from fused_kda.testing.battery import Subject
from fused_kda.testing.compare import Mismatch, check_call, check_equal, expected, limits
from fused_kda.testing.extremes import EXTREMES, POISON
from fused_kda.testing.problems import Draw, draw


@pytest.mark.parametrize("lower_bound", [None, -5.0])
@pytest.mark.parametrize("norm_dtype", [None, torch.float32])
def test_zero_vectors_give_zeros(subject: Subject, lower_bound: float | None, norm_dtype: torch.dtype | None) -> None:
    """q zero: the output is exactly zero. k zero as well: the state decays, and nothing is added to it."""
    call = subject.draw(extremes=("q zero", "k zero"), lower_bound=lower_bound, norm_dtype=norm_dtype, layout="DS")
    before = call.clone()
    subject.agree(call)
    assert torch.count_nonzero(call.arguments["out"]) == 0
    slots = list(call.slots)
    old, new = (one.arguments["state"][slots].abs() for one in (before, call))
    assert bool((new <= old).all())
    assert bool((new < old).any())


@pytest.mark.parametrize("name", POISON)
def test_a_spoilt_row_harms_itself_alone(subject: Subject, name: str) -> None:
    spoilt, clean = (subject.draw(batch=3, poison=poison, page_shared=True) for poison in (name, None))
    before = spoilt.clone()
    spoilt.run(subject.backend)
    clean.run(subject.backend)
    rows, slots = list(clean.live[:-1]), list(clean.slots[:-1])
    check_equal("out", spoilt.arguments["out"][rows], clean.arguments["out"][rows])
    for pool in ("conv_state", "state"):
        check_equal(pool, spoilt.arguments[pool][slots], clean.arguments[pool][slots])
    assert spoilt.touched_elsewhere(before) == []
    assert not spoilt.arguments["out"][clean.live[-1]].isfinite().all()


def test_an_update_that_overflows_before_it_meets_k(subject: Subject) -> None:
    """v of 1e36 and a k so small that its norm is 1,000: past what fp32 can hold, in that head alone."""
    call = subject.draw(batch=1, heads=2, layout="DS")
    dim = call.problem.spec.head_dim
    x, weight = call.arguments["x"].view(3, 2, dim), call.arguments["weight"].view(3, -1, 2, dim)
    window = call.arguments["conv_state"][call.slots[0]].view(3, 2, dim, -1)
    for section, value in enumerate((1.0, 1e-20, 1e36)):
        x[section, 0] = value
        weight[section, :, 0] = 1.0
        window[section, 0] = 0.0
    assert limits(call).fits.tolist() == [[False, True]]
    subject.agree(call, extreme=True)


@pytest.mark.parametrize("name", EXTREMES)
def test_each_extreme_is_judged_in_most_heads(name: str) -> None:
    """What is never compared would prove nothing."""
    call = draw(Draw(batch=8, heads=4, head_dim=64, extremes=(name,), lower_bound=None))
    judged = limits(call).fits
    assert judged.float().mean() >= (0.1 if "huge" in name else 1.0)


def test_a_head_out_of_range_is_left_out_and_its_neighbours_are_not() -> None:
    call = draw(Draw(batch=2, heads=2, head_dim=16))
    call.arguments["state"][call.slots[0], 1, 3, 5] = 1e38
    assert limits(call).fits.tolist() == [[True, False], [True, True]]
    want = expected(call, extreme=True)
    call.run("reference")
    check_call(call, call.arguments["out"], want)
    call.arguments["state"][call.slots[0], 1] = float("nan")
    check_call(call, call.arguments["out"], want)
    call.arguments["state"][call.slots[0], 0, 0, 0] += 1.0
    with pytest.raises(Mismatch, match=r"^state: 1 of"):
        check_call(call, call.arguments["out"], want)
