"""The chain beyond the battery of every backend: it rounds where served chains round."""

from __future__ import annotations

import pytest
import torch

from fused_kda.contract import Tensors
from fused_kda.kernels.reference import decode_step
from fused_kda.testing.battery import Subject
from fused_kda.testing.problems import Call


def by_reference(call: Call, intermediate: torch.dtype | None) -> torch.Tensor:
    copy = call.clone()
    tensors = Tensors(*(copy.arguments[name] for name in Tensors._fields))
    decode_step(copy.problem, tensors, torch.float32, intermediate_dtype=intermediate)
    return tensors.out


@pytest.mark.parametrize("norm_dtype", [torch.float32, None])
def test_q_k_v_and_o_are_rounded_between_launches(subject: Subject, norm_dtype: torch.dtype | None) -> None:
    """Nearly every element is that of a reference that rounds there, and many are not those of one that does not."""
    if subject.backend != "chain":
        pytest.skip("the chain alone rounds between launches")
    call = subject.draw(norm_dtype=norm_dtype)
    rounding, exact = by_reference(call, torch.bfloat16), by_reference(call, None)
    out = call.clone().run("chain")
    with_rounding = (out == rounding).double().mean().item()
    without = (out == exact).double().mean().item()
    assert with_rounding > 0.95
    assert without < 0.9
