"""The same step through other projects' public calls, where they are installed: ``fused-kda bench --against NAME``.

Each adapter takes a drawn call of the op and gives a :class:`Bound`. What a project cannot do with the call it says by
raising; the bench reports that as the reason and times nothing. They round in places of their own, so their results are
held to the budget of the unfused chain.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from ..testing.problems import Call
from .timing import Step


@dataclass(frozen=True, slots=True)
class Bound:
    """A peer bound to one layer's call.

    Attributes:
        step: one decode step; advances the peer's own caches or the call's pools.
        collect: brings what the last step left into the call's own pools and returns its out ``[B, H, D]``.
    """

    step: Step
    collect: Callable[[], torch.Tensor]


class NotHere(NotImplementedError):
    """The peer cannot take this call here; the text says why."""


def bind(name: str, call: Call) -> Bound:
    """Bind a peer to a call.

    Raises:
        NotHere: it is not installed, or lacks what the call asks for.
    """
    return PEERS[name](call)


def _module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise NotHere(f"{name} cannot be imported: {error}") from error


def _attribute(module: str, name: str) -> Any:
    try:
        return getattr(_module(module), name)
    except AttributeError as error:
        raise NotHere(f"{module} has no {name}: another version") from error


def _fla(call: Call) -> Bound:
    """fla-core: three conv updates, ``fused_recurrent_kda``, gated norm, as its KDA layer calls them.

    It has no pool: each row's caches lie side by side. The conv caches ``[B, P, W]`` are updated in place; the
    recurrence writes a new fp32 state ``[B, H, D, D]`` at every step, which is kept, so that no layer finds the memory
    of the one before.
    """
    convolve = _attribute("fla.modules.conv.triton.ops", "causal_conv1d_update")
    recur = _attribute("fla.ops.kda", "fused_recurrent_kda")
    norm = _attribute("fla.modules.fused_norm_gate", "rms_norm_gated")
    given = call.arguments
    if given["state"].dtype != torch.float32:
        raise NotHere("fla: its recurrence writes fp32 states")
    slots = list(call.slots)
    batch, heads, dim = len(slots), given["state"].shape[1], given["state"].shape[3]
    window, initial = given["conv_state"][slots], given["state"][slots]
    whole = torch.cat((torch.zeros_like(window[..., :1]), window), dim=-1)
    caches = [part.contiguous() for part in whole.chunk(3, dim=1)]
    weights = [plane.t().contiguous() for plane in given["weight"]]
    parts = given["x"].unsqueeze(1).chunk(3, dim=-1)
    gate = given["output_gate"].reshape(batch, 1, heads, dim)
    raw_g = given["raw_g"].reshape(batch, 1, heads, dim)
    beta = given["raw_beta"].reshape(batch, 1, heads)
    last: list[torch.Tensor] = []

    def step() -> None:
        q, k, v = (
            convolve(x, cache, weight=weight, activation="silu")[0].unflatten(-1, (heads, dim))
            for x, cache, weight in zip(parts, caches, weights, strict=True)
        )
        o, state = recur(
            q, k, v, raw_g, beta, A_log=given["A_log"], dt_bias=given["dt_bias"], initial_state=initial,
            output_final_state=True, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True,
            use_beta_sigmoid_in_kernel=True, lower_bound=given["lower_bound"], state_v_first=True,
        )  # fmt: skip
        last[:] = (norm(o, gate, given["norm_weight"], None, activation="sigmoid", eps=1e-5), state)

    def collect() -> torch.Tensor:
        given["conv_state"][slots] = torch.cat(caches, dim=1)[..., 1:]
        given["state"][slots] = last[1]
        return last[0]

    return Bound(step, collect)


def _vllm(call: Call) -> Bound:
    """vLLM's wrapper of ``_C::fused_kda_decode``, whose arguments are this op's own."""
    decode = _attribute("vllm._custom_ops", "fused_kda_decode")
    if not hasattr(torch.ops._C, "fused_kda_decode"):
        raise NotHere("vllm: this build lacks _C::fused_kda_decode")
    given = dict(call.arguments)
    given["out"] = given["out"].unsqueeze(0)
    for own in ("has_initial_state", "prefetch"):
        del given[own]
    return Bound(lambda: decode(**given), lambda: given["out"])


def _sglang(call: Call) -> Bound:
    """SGLang's ``kda_fused_decode``: pools in SD order ``[slots, W-1, 3P]``, three weights, fp32 state."""
    module = "sglang.kernels.ops.attention.kda_fused_decode"
    decode, covered = _attribute(module, "kda_fused_decode"), _attribute(module, "covered")
    given = call.arguments
    x, state, index = given["x"], given["state"], given["state_indices"]
    batch, dim = x.shape[0], state.shape[3]
    conv = given["conv_state"].transpose(1, 2)
    raw_g, beta = given["raw_g"].reshape(batch, -1), given["raw_beta"].reshape(batch, -1)
    gate = given["output_gate"].reshape(batch, -1)
    if not covered(x, raw_g, beta, conv, state, index, gate):
        raise NotHere("sglang: covered() says no (it has H 3, 6 and 12, the SD layout and fp32 states)")
    bias = x.new_zeros(x.shape[1], dtype=torch.float32)

    def step() -> None:
        given["out"] = decode(
            x, raw_g, beta, conv, *given["weight"], bias, given["A_log"], given["dt_bias"], gate, given["norm_weight"],
            state, index, dim**-0.5, 1e-5, given["lower_bound"],
        )  # fmt: skip

    return Bound(step, lambda: given["out"])


def _flashinfer(call: Call) -> Bound:
    """FlashInfer's ``fused_kda_decode``, which needs SM100 or SM103."""
    decode = _attribute("flashinfer.kda_decode", "fused_kda_decode")
    given = call.arguments
    out = given["out"].unsqueeze(0)

    def step() -> None:
        decode(
            given["x"], given["weight"], given["conv_state"], given["raw_g"], given["raw_beta"], given["A_log"],
            given["dt_bias"], given["state_indices"], given["state"], given["output_gate"], given["norm_weight"],
            lower_bound=given["lower_bound"], norm_eps=1e-5, output=out,
        )  # fmt: skip

    return Bound(step, lambda: out)


#: By the name that ``--against`` takes.
PEERS: dict[str, Callable[[Call], Bound]] = {
    "fla": _fla,
    "vllm": _vllm,
    "sglang": _sglang,
    "flashinfer": _flashinfer,
}
