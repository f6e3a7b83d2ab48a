"""What the contract's checks leave of a sound call. What they refuse is in ``test_bad_input.py``."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fused_kda.contract import DecodeProblem, decode_problem
from fused_kda.layouts import ConvLayout
from fused_kda.testing.problems import Draw, draw

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


def test_gradients_are_no_matter_where_none_are_recorded() -> None:
    call = draw(Draw(head_dim=8))
    call.arguments["weight"].requires_grad_()
    with torch.no_grad():
        call.run("reference")
    with torch.inference_mode():
        call.run("reference")


def problem(**wanted: Any) -> DecodeProblem:
    return draw(Draw(head_dim=8, **wanted)).problem


def test_a_sound_call_becomes_its_problem() -> None:
    call = draw(Draw(head_dim=8, heads=2, batch=3, guard=6, sliced=True, index_stride=5, mask=True, bias_dtype=BF16))
    found = call.problem
    spec = found.spec
    assert (spec.heads, spec.head_dim, spec.conv_width) == (2, 8, 4)
    assert spec.conv_layout == ConvLayout("SD", 48, 3)
    assert spec.weight_strides == (64, 16, 1)
    assert (spec.dtype, spec.weight_dtype, spec.bias_dtype, spec.norm_dtype) == (BF16, FP32, BF16, FP32)
    assert (spec.param_dtype, spec.state_dtype, spec.index_dtype) == (FP32, FP32, torch.int32)
    assert (spec.bounded, spec.has_initial_state) == (True, True)
    assert (found.batch, found.slots, found.conv_pitch, found.state_pitch) == (3, 6, 150, 134)
    wide = 4 * 16 + 1 + 2 + 3
    assert (found.x_row, found.gate_row, found.beta_row) == (wide, wide, wide)
    assert (found.g_row, found.out_row, found.index_stride, found.initial_stride) == (16, 16, 5, 1)
    assert (found.lower_bound, found.norm_eps, found.null_slot, found.prefetch) == (-5.0, 1e-5, 0, False)
    assert found.scale == 8**-0.5
    assert found.layout == "SD"
    assert found.state_bytes == 3 * 2 * 64 * 4
    assert found.device == torch.device("cpu")
    assert hash(found) == hash(call.problem)


def test_strides_of_rows_are_those_between_rows() -> None:
    """Whatever the form: the leading 1 of [1, B, ...] and the trailing 1 of [B, 1] do not count."""
    call = draw(Draw(head_dim=8))
    table = torch.ones(3, 7, dtype=torch.int64)
    wide = torch.zeros(1, 3, 40, dtype=BF16)
    call.arguments.update(
        state_indices=table[:, 2:3],
        raw_g=wide[..., :16].view(1, 3, 2, 8),
        raw_beta=wide[..., 17:19],
        output_gate=wide[0, :, 20:36],
        out=torch.zeros(3, 24, dtype=BF16)[:, 8:],
        has_initial_state=torch.ones(3, 5, dtype=torch.bool)[:, 0],
    )
    found = call.problem
    assert (found.index_stride, found.g_row, found.beta_row, found.gate_row) == (7, 40, 40, 40)
    assert (found.out_row, found.initial_stride) == (24, 5)
    assert found.spec.index_dtype == torch.int64


@pytest.mark.parametrize(
    ("form", "strides"), [("planes", (64, 16, 1)), ("checkpoint", (64, 1, 4)), ("checkpoint_3d", (64, 1, 4))]
)
def test_weight_strides_of_every_form(form: Any, strides: tuple[int, int, int]) -> None:
    assert problem(weight_form=form).spec.weight_strides == strides


def test_strides_of_size_one_dimensions_do_not_matter() -> None:
    """One row, one slot: whatever strides such dimensions carry, the problem is the same."""
    call = draw(Draw(batch=1, heads=1, head_dim=8, slots=1, null_slot=-1, guard=0, mask=True))
    plain = call.problem
    for name in ("x", "raw_g", "raw_beta", "state_indices", "conv_state", "state", "out", "output_gate"):
        tensor = call.arguments[name]
        odd = [
            step if size > 1 else 977 + place
            for place, (size, step) in enumerate(zip(tensor.shape, tensor.stride(), strict=True))
        ]
        call.arguments[name] = tensor.as_strided(tensor.shape, odd)
    call.arguments["has_initial_state"] = call.arguments["has_initial_state"].as_strided((1,), (31,))
    assert call.problem == plain
    call.run("reference")


@pytest.mark.parametrize(
    ("guard", "state_dtype", "expected"), [(0, FP32, 16), (4, FP32, 16), (2, FP32, 4), (8, BF16, 16), (4, BF16, 2)]
)
def test_state_alignment_follows_the_pitch(guard: int, state_dtype: torch.dtype, expected: int) -> None:
    assert problem(guard=guard, state_dtype=state_dtype).spec.state_alignment == expected


def test_alignment_follows_the_base_address() -> None:
    call = draw(Draw(head_dim=8, guard=8))
    shifted = call.arguments["state"][1:]
    assert decode_problem(**call.arguments).spec.state_alignment == 16
    buffer = torch.zeros(shifted.numel() + 1)[1:].view(shifted.shape)
    changed = {**call.arguments, "state": buffer, "conv_state": call.arguments["conv_state"][1:]}
    assert decode_problem(**changed).spec.state_alignment == 4


def test_an_empty_pool_and_an_empty_batch_are_sound() -> None:
    empty_pool = draw(Draw(head_dim=8, null_rows=(0, 1, 2)))
    for name in ("conv_state", "state"):
        empty_pool.arguments[name] = empty_pool.arguments[name][:0]
    assert empty_pool.problem.slots == 0
    assert torch.count_nonzero(empty_pool.run("reference")) == 0
    assert problem(batch=0).batch == 0
