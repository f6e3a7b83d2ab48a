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


def sglang_step(subject: Subject, *, layers: int = 3, layer: int = 1, **wanted: Any) -> tuple[Call, dict[str, Any]]:
    """A decode batch of SGLang: the call as the op has it, and SGLang's own arguments over the same memory.

    q | k | v | gate come from one projection, f_a | beta from another. A slot's envelope holds the conv windows of all
    layers, tap by tap, then their recurrent states. Slot 0 is live; the padded row's index is -1.
    """
    call = subject.draw(batch=6, null_rows=(5,), null_slot=-1, slots=7, **wanted)
    given = dict(call.arguments)
    slots, heads, dim, _ = given["state"].shape
    inner, taps = heads * dim, given["conv_state"].shape[2]
    conv_bytes, state_bytes = 3 * inner * taps * 2, inner * dim * 4
    envelope = torch.full((slots, layers * (conv_bytes + state_bytes)), 0xFF, dtype=torch.uint8, device=subject.device)
    first = layer * conv_bytes
    conv_states = envelope[:, first : first + conv_bytes].view(torch.bfloat16).view(slots, taps, 3 * inner)
    first = layers * conv_bytes + layer * state_bytes
    ssm_states = envelope[:, first : first + state_bytes].view(torch.float32).view(slots, heads, dim, dim)
    conv_states.copy_(given["conv_state"].transpose(1, 2))
    ssm_states.copy_(given["state"])
    qkvg = given["x"].new_zeros(6, 4 * inner)
    bfa = given["x"].new_zeros(6, dim + heads + -(dim + heads) % 8)
    mixed_qkv, gate, beta = qkvg[:, : 3 * inner], qkvg[:, 3 * inner :], bfa[:, dim : dim + heads]
    for target, name in ((mixed_qkv, "x"), (gate, "output_gate"), (beta, "raw_beta")):
        target.copy_(given[name].reshape(target.shape))
    indices = given["state_indices"].clone().to(torch.int32)
    indices[5] = -1
    parameter = given["weight"].transpose(1, 2).reshape(3 * inner, -1).contiguous()  # [3P, W], as the layer keeps it
    own = {
        "mixed_qkv": mixed_qkv,
        "a": given["raw_g"].reshape(6, inner).contiguous(),
        "b": beta,
        "conv_states": conv_states,
        **dict(zip(("w_q_t", "w_k_t", "w_v_t"), (part.t() for part in parameter.split(inner)), strict=True)),
        "conv_bias": None,
        "A_log": given["A_log"],
        "dt_bias": given["dt_bias"],
        "onorm_g": gate,
        "onorm_weight": given["norm_weight"],
        "ssm_states": ssm_states,
        "cache_indices": indices,
        "scale": dim**-0.5,
        "onorm_eps": 1e-5,
        "lower_bound": given["lower_bound"],
    }
    given |= {
        "x": mixed_qkv, "output_gate": gate.unflatten(1, (heads, dim)), "raw_beta": beta, "state_indices": indices,
        "conv_state": conv_states.transpose(1, 2), "state": ssm_states, "out": None,
    }  # fmt: skip
    return replace(call, arguments=given), own
