"""Steps as the engines make them: drawn calls, moved into each engine's own buffers, page by page."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from fused_kda.testing.battery import Subject
from fused_kda.testing.problems import Call


def vllm_call(subject: Subject, *, full_rank: bool, bucket: int = 8, live: int = 5, **wanted: Any) -> Call:
    """A plain decode batch of vLLM, padded to a CUDA graph's bucket.

    One projection holds q | k | v | gate | f_a | beta | padding (Kimi-K3) or q | k | v | beta | f_a (Kimi-Linear); x,
    the raw beta and a full-rank gate are its column slices. Conv and state share pages. The padded rows' inputs are
    NaN, their indices 0, the null block; ``out`` is the head of an output for more tokens than the batch has.
    """
    call = subject.draw(batch=bucket, null_rows=tuple(range(live, bucket)), page_shared=True, **wanted)
    given = dict(call.arguments)
    heads, dim = given["state"].shape[1:3]
    inner = heads * dim
    sizes = [3 * inner, inner, dim, heads] if full_rank else [3 * inner, heads, dim]
    padding = -sum(sizes) % 16 if full_rank else 0
    projected = given["x"].new_full((bucket, sum(sizes) + padding), float("nan"))
    parts = projected.split([*sizes, padding] if padding else sizes, dim=-1)
    x, beta = parts[0], parts[3 if full_rank else 1]
    gate = parts[1] if full_rank else given["x"].new_empty(bucket, inner)
    for target, name in ((x, "x"), (beta, "raw_beta"), (gate, "output_gate")):
        target.copy_(given[name].reshape(target.shape))
    indices = given["state_indices"].clone().to(torch.int32)
    indices[live:] = 0
    core = given["x"].new_full((1, bucket + 3, heads, dim), float("nan"))
    given |= {
        "x": x,
        "raw_beta": beta.unsqueeze(0),
        "raw_g": given["raw_g"].reshape(1, bucket, heads, dim).contiguous(),
        "output_gate": gate.view(bucket, heads, dim),
        "state_indices": indices,
        "out": core[:, :bucket],
    }
    return replace(call, arguments=given)


def core_of(call: Call) -> torch.Tensor:
    """The output ``[1, bucket + 3, H, D]`` whose head is the call's ``out``."""
    out = call.arguments["out"]
    _, bucket, heads, dim = out.shape
    return out.as_strided((1, bucket + 3, heads, dim), out.stride(), 0)


VLLM = (
    "x", "weight", "bias", "conv_state", "raw_g", "raw_beta", "A_log", "dt_bias", "state_indices", "state", "out",
    "lower_bound", "output_gate", "norm_weight",
)  # fmt: skip


def as_vllm(call: Call) -> dict[str, Any]:
    """The arguments that vLLM's call has, in its order: no null slot, no scale, no mask."""
    return {name: call.arguments[name] for name in VLLM}
