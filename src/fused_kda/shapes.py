"""Problems known by their shapes alone, before any tensor exists."""

from __future__ import annotations

from typing import Literal

import torch

from .contract import DecodeProblem, decode_problem
from .layouts import ConvLayout, LayoutKind, conv_view

WeightForm = Literal["planes", "checkpoint"]


def shape_problem(
    *,
    heads: int,
    head_dim: int = 128,
    conv_width: int = 4,
    layout: LayoutKind = "SD",
    dtype: torch.dtype = torch.bfloat16,
    state_dtype: torch.dtype = torch.float32,
    lower_bound: float | None = None,
    weight: WeightForm = "planes",
) -> DecodeProblem:
    """A step with dense, aligned pools, fp32 parameters, int32 indices and the gated norm.

    Args:
        heads, head_dim, conv_width, layout, dtype, state_dtype, lower_bound: as the contract names them.
        weight: conv weight as ``[3, W, P]`` ("planes") or as ``[3P, W]`` ("checkpoint").

    Raises:
        TypeError, ValueError: no call of the op has such shapes.
    """
    inner = heads * head_dim

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    taps = conv_width - 1
    conv_layout = ConvLayout(layout, 3 * inner, taps)
    gate = empty(1, heads, head_dim, dtype=dtype)
    return decode_problem(
        x=empty(1, 3 * inner, dtype=dtype),
        weight=empty(3, conv_width, inner) if weight == "planes" else empty(3 * inner, conv_width),
        bias=None,
        conv_state=conv_view(empty(1, *conv_layout.storage_shape, dtype=dtype), conv_layout, taps),
        raw_g=gate,
        raw_beta=empty(1, heads, dtype=dtype),
        A_log=empty(heads),
        dt_bias=empty(inner),
        state_indices=empty(1, dtype=torch.int32),
        state=empty(1, heads, head_dim, head_dim, dtype=state_dtype),
        output_gate=gate,
        norm_weight=empty(head_dim),
        lower_bound=lower_bound,
    )
