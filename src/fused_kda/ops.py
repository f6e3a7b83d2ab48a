"""``torch.ops.fused_kda.decode``: the op as the dispatcher and the compiler see it.

The schema declares what is mutated (conv_state, state, out), so that ``torch.compile`` neither reorders reads of the
pools around a step nor clones them. ``out`` is not optional here and nothing is returned;
:func:`fused_kda.fused_kda_decode` allocates it, and calls this op by itself while a graph is being traced.
"""

from __future__ import annotations

import torch

from ._ops import add_op_namespace_prefix
from .api import fused_kda_decode

SCHEMA = (
    "(Tensor x, Tensor weight, Tensor? bias, Tensor(a!) conv_state, Tensor raw_g, Tensor raw_beta, Tensor A_log, "
    "Tensor dt_bias, Tensor state_indices, Tensor(b!) state, Tensor(c!) out, float? lower_bound=None, "
    "Tensor? output_gate=None, Tensor? norm_weight=None, float norm_eps=1e-5, float? scale=None, int null_slot=0, "
    'Tensor? has_initial_state=None, bool prefetch=False, str backend="auto") -> ()'
)

QUALNAME = add_op_namespace_prefix("decode")

# Exact strides: the conv layout, the row strides and the pitches are the arguments' meaning, and no copy is wanted.
torch.library.define(QUALNAME, SCHEMA, tags=(torch.Tag.needs_exact_strides, torch.Tag.pt2_compliant_tag))


def _decode(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    conv_state: torch.Tensor,
    raw_g: torch.Tensor,
    raw_beta: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state_indices: torch.Tensor,
    state: torch.Tensor,
    out: torch.Tensor,
    lower_bound: float | None = None,
    output_gate: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    norm_eps: float = 1e-5,
    scale: float | None = None,
    null_slot: int = 0,
    has_initial_state: torch.Tensor | None = None,
    prefetch: bool = False,
    backend: str = "auto",
) -> None:
    fused_kda_decode(
        x, weight, bias, conv_state, raw_g, raw_beta, A_log, dt_bias, state_indices, state, out,
        lower_bound=lower_bound, output_gate=output_gate, norm_weight=norm_weight, norm_eps=norm_eps, scale=scale,
        null_slot=null_slot, has_initial_state=has_initial_state, prefetch=prefetch, backend=backend,
    )  # fmt: skip


def _decode_fake(*args: object, **kwargs: object) -> None:
    """Nothing to compute: the op only mutates."""


torch.library.impl(QUALNAME, "CompositeExplicitAutograd", _decode)
torch.library.register_fake(QUALNAME, _decode_fake)
