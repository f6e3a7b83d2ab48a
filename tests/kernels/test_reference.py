"""The PyTorch reference against the scalar oracle, and its own promises: bits, hostile memory, rounding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings

import oracle
from fused_kda.testing.battery import take
from fused_kda.testing.compare import Mismatch, check_close, check_equal
from fused_kda.testing.problems import Call, Draw, draw
from strategies import SCALAR, problems

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"layout": "DS", "spare_taps": 1, "state_dtype": BF16, "lower_bound": None, "null_rows": (1,)},
        {"page_shared": True, "mask": True, "sliced": True, "norm_dtype": None},
    ],
    ids=["plain", "DS-bf16-softplus", "paged-masked-sliced"],
)
def test_model_sized_heads_agree_with_the_oracle(head_dim: int, options: dict[str, Any]) -> None:
    oracle.agree(draw(Draw(batch=3, heads=1, head_dim=head_dim, **options)))


def test_scale_and_eps_are_applied() -> None:
    call = draw(Draw(head_dim=8))
    call.arguments.update(scale=0.37, norm_eps=0.5)
    oracle.agree(call)
    without_norm = draw(Draw(head_dim=8, norm_dtype=None))
    without_norm.arguments["scale"] = 2.0
    oracle.agree(without_norm)


def test_the_eps_of_q_and_k_is_added_to_their_sum_of_squares() -> None:
    """Seen only where q and k are small: here their squares sum to about the eps."""
    call = draw(Draw(head_dim=16, norm_dtype=None))
    call.arguments["weight"] *= 1e-3
    oracle.agree(call)


@pytest.mark.parametrize("a_log", [3.0, 0.0, -5.0])
@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_gates_at_their_ends(lower_bound: float | None, a_log: float) -> None:
    """z from -120 to 120, where exp overflows in fp32, and output gates of +-30."""
    call = draw(Draw(head_dim=16, lower_bound=lower_bound))
    call.arguments["raw_g"].copy_(torch.linspace(-120.0, 120.0, 96).view(1, 3, 2, 16))
    call.arguments["dt_bias"].zero_()
    call.arguments["A_log"].fill_(a_log)
    call.arguments["output_gate"].copy_(torch.linspace(-30.0, 30.0, 96).view(3, 2, 16))
    oracle.agree(call)


@pytest.mark.parametrize("form", ["[1,B,H,D]", "[B,H,D]", "[B,P]"])
def test_every_row_form_gives_the_same_bits(form: str) -> None:
    plain = draw(Draw(head_dim=8, null_rows=(1,)))
    shaped = plain.clone()
    batch, heads, dim = 3, 2, 8
    shape = {"[1,B,H,D]": (1, batch, heads, dim), "[B,H,D]": (batch, heads, dim), "[B,P]": (batch, heads * dim)}[form]
    for name in ("raw_g", "output_gate", "out"):
        shaped.arguments[name] = shaped.arguments[name].reshape(shape)
    shaped.arguments["raw_beta"] = shaped.arguments["raw_beta"].reshape(
        (1, batch, heads) if len(shape) == 4 else (batch, heads)
    )
    shaped.arguments["state_indices"] = shaped.arguments["state_indices"].reshape(batch, 1)
    shaped.arguments["A_log"] = shaped.arguments["A_log"].reshape(1, 1, heads, 1)
    shaped.arguments["dt_bias"] = shaped.arguments["dt_bias"].reshape(heads, dim)
    out = shaped.run("reference")
    assert out.shape == shape
    check_equal("out", out.reshape(batch, heads, dim), plain.run("reference"))
    check_equal("state", shaped.arguments["state"], plain.arguments["state"])


@pytest.mark.parametrize(("head_dim", "heads"), [(8, 1), (8, 3), (20, 1)])
def test_every_batch_size_gives_a_row_the_same_bits(head_dim: int, heads: int) -> None:
    """B = 1..1024, every size (PyTorch's loops switch code at the end of a vector and at a thread's share)."""
    whole = draw(Draw(batch=1024, heads=heads, head_dim=head_dim, guard=0, lower_bound=None if heads == 3 else -5.0))
    before = whole.clone()
    want = whole.run("reference")
    for batch in range(1, 1025):
        first = (batch * 7) % (1025 - batch)
        call = take(before, range(first, first + batch))
        pools = {name: before.arguments[name][list(call.slots)] for name in ("conv_state", "state")}
        compact = {**call.arguments, **pools, "state_indices": torch.arange(batch), "null_slot": -1}
        out = Call(compact, tuple(range(batch)), tuple(range(batch))).run("reference")
        rows = slice(first, first + batch)
        check_equal(f"out, B={batch}", out, want[rows])
        check_equal(f"state, B={batch}", pools["state"], whole.arguments["state"][list(call.slots)])


@pytest.mark.parametrize("batch", [1, 2, 3, 5, 16, 33])
@pytest.mark.parametrize("threads", [1, 2])
def test_model_sized_rows_have_the_same_bits_in_any_batch(batch: int, threads: int) -> None:
    whole = draw(Draw(batch=40, heads=3, lower_bound=None))
    part = take(whole.clone(), range(40 - batch, 40))
    want = whole.run("reference")
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        out = part.run("reference")
    finally:
        torch.set_num_threads(before)
    check_equal("out", out, want[40 - batch :])
    slots = list(part.slots)
    check_equal("state", part.arguments["state"][slots], whole.arguments["state"][slots])


@settings(max_examples=40)
@given(problems(SCALAR))
def test_layouts_give_the_same_bits(wanted: Draw) -> None:
    plain = replace(wanted, layout="SD", spare_taps=0, page_shared=False)
    sd = draw(plain)
    out = sd.run("reference")
    for other in ({"layout": "DS"}, {"layout": "DS", "spare_taps": 2}, {"guard": 7}):
        variant = draw(replace(plain, **other))
        check_equal(f"out {other}", variant.run("reference"), out)
        slots = list(sd.slots)
        check_equal(f"window {other}", variant.arguments["conv_state"][slots], sd.arguments["conv_state"][slots])
        check_equal(f"state {other}", variant.arguments["state"][slots], sd.arguments["state"][slots])


def test_a_bf16_state_is_the_fp32_result_rounded_once() -> None:
    half = draw(Draw(head_dim=16, state_dtype=BF16))
    full = half.clone()
    full.arguments["state"] = half.arguments["state"].float()
    check_equal("out", half.run("reference"), full.run("reference"))
    slots = list(half.slots)
    check_equal("state", half.arguments["state"][slots], full.arguments["state"][slots].to(BF16))


def test_the_window_moves_bit_for_bit() -> None:
    """Also a NaN's payload, -0.0 and subnormals: the window is never converted."""
    call = draw(Draw(batch=1, heads=1, head_dim=8))
    slot = call.slots[0]
    strange = torch.tensor([0x7FC1, -0x8000, 0x0001, 0x7F80, -0x0001, 0x3F80, 0x0080, -0x7FFF], dtype=torch.int16)
    call.arguments["x"].copy_(strange.repeat(3).view(BF16))
    call.run("reference")
    assert torch.equal(call.arguments["conv_state"][slot][:, -1].contiguous().view(torch.int16), strange.repeat(3))


def test_null_rows_do_not_reach_others_whatever_they_hold() -> None:
    padded = draw(Draw(batch=6, head_dim=16, null_rows=(0, 3, 5)))
    alone = take(padded.clone(), padded.live)
    for name, value in (("x", float("inf")), ("raw_beta", float("-inf"))):
        padded.arguments[name][[0, 3, 5]] = value
    out = padded.run("reference")
    check_equal("live rows", out[list(padded.live)], alone.run("reference"))
    assert torch.count_nonzero(out[[0, 3, 5]]) == 0


@pytest.mark.parametrize(
    ("name", "spoil"),
    [
        ("weight", lambda tensor: tensor.flip(1)),
        ("x", lambda tensor: tensor * 1.015625),
        ("raw_beta", lambda tensor: tensor + 0.015625),
        ("dt_bias", lambda tensor: tensor + 0.001),
        ("A_log", lambda tensor: tensor + 0.001),
        ("has_initial_state", lambda tensor: ~tensor),
        ("lower_bound", lambda bound: bound + 0.001),
        ("scale", lambda scale: scale * 1.02),
        ("norm_eps", lambda eps: eps * 1.1),
    ],
)
def test_the_comparison_has_teeth(name: str, spoil: Callable[[Any], Any]) -> None:
    """A small fault in any one input is beyond the tolerance of what it reaches."""
    call = draw(Draw(head_dim=16, mask=True, seed=3))
    call.arguments.update(scale=0.25, norm_eps=0.5)
    want = oracle.decode(call.arguments)
    spoilt = call.clone()
    spoilt.arguments[name] = spoil(spoilt.arguments[name])
    if name == "has_initial_state":
        spoilt.arguments["state"].nan_to_num_(nan=0.5)
        spoilt.arguments["conv_state"].nan_to_num_(nan=0.5)
    out = spoilt.run("reference")
    if name in ("scale", "norm_eps"):
        got, exact, error, stored = out, want.out, want.out_error, BF16
    else:
        slot = call.slots[1] if name == "has_initial_state" else call.slots[0]
        got, exact, error, stored = spoilt.arguments["state"][slot], want.states[slot], want.state_errors[slot], FP32
    with pytest.raises(Mismatch, match="beyond the budget"):
        check_close(name, got, exact, oracle.allowed(exact, error, FP32, stored))
