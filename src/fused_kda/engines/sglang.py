"""SGLang: the op behind ``kda_fused_decode``, for every head count that Kimi-K3's layer can have.

:func:`register` is the entry point ``fused_kda`` of ``sglang.srt.plugins``; it does nothing unless
``FUSED_KDA_SGLANG=1``. Then ``covered`` and ``kda_fused_decode`` are this package's, and Kimi-K3's layer offers its
decode steps whatever its number of heads. Slot 0 is live and -1 is padding, as in SGLang's graphs.

Conv weights are published as views of the layer's parameter and read in place. The norm weight is the fp32 tensor that
SGLang's speculative kernels want: a copy where the parameter is bf16, renewed by every ``load_weights``, like SGLang's.
"""

from __future__ import annotations

from typing import Any

import torch

from .. import gates
from ..contract import decode_problem
from ..shapes import shape_problem
from . import Route, kind_of, mark, one_launch, refused
from .imports import after_import

#: Surface: the module that it is in.
MODULES = {
    "decode op": "sglang.kernels.ops.attention.kda_fused_decode",
    "Kimi-K3 layer": "sglang.srt.models.kimi_k3",
}


def register() -> None:
    """Prepare every surface, if asked to. May be called often, imports nothing of SGLang, raises nothing."""
    try:
        wanted = gates.settings().sglang
    except ValueError as error:
        mark("sglang", "plug-in", "failed", str(error))
        return
    if not wanted:
        mark("sglang", "plug-in", "off", "FUSED_KDA_SGLANG=0")
        return
    mark("sglang", "plug-in", "on", "FUSED_KDA_SGLANG=1")
    for (name, module), change in zip(MODULES.items(), (replace_op, widen_layer), strict=True):
        after_import("sglang", name, module, change)


def replace_op(module: Any) -> str:
    """Replace SGLang's ``covered`` and ``kda_fused_decode``; its own take the calls that the op refuses."""
    own, own_covered = module.kda_fused_decode, module.covered
    route = Route("sglang")
    verdicts: dict[object, str | None] = {}

    def covered(
        mixed_qkv: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        conv_states: torch.Tensor,
        ssm_states: torch.Tensor,
        cache_indices: torch.Tensor,
        onorm_g: torch.Tensor,
    ) -> bool:
        """Whether this package's op or SGLang's own takes the step. The rest of the call is the layer's, and sound."""
        given = (mixed_qkv, a, b, conv_states, ssm_states, cache_indices, onorm_g)
        kind = tuple((t.shape, t.stride(), t.dtype, t.device) for t in given)
        if kind not in verdicts:
            verdicts[kind] = step_refusal(*given)
        reason = verdicts[kind]
        if reason is not None:
            refused("sglang", reason)
        return reason is None or bool(own_covered(*given))

    def kda_fused_decode(
        mixed_qkv: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        conv_states: torch.Tensor,
        w_q_t: torch.Tensor,
        w_k_t: torch.Tensor,
        w_v_t: torch.Tensor,
        conv_bias: torch.Tensor | None,
        A_log: torch.Tensor,
        dt_bias: torch.Tensor,
        onorm_g: torch.Tensor,
        onorm_weight: torch.Tensor,
        ssm_states: torch.Tensor,
        cache_indices: torch.Tensor,
        scale: float,
        onorm_eps: float,
        lower_bound: float | None = None,
    ) -> torch.Tensor:
        """One step; ``[1, B, H, D]``. Both pools advance in place, rows with a negative index give zeros."""
        weight = joined((w_q_t, w_k_t, w_v_t))
        if weight is None:
            refused("sglang", "conv weights in three copies, made before the plug-in was on")
        else:
            call = decode_call(mixed_qkv, a, b, conv_states, ssm_states, cache_indices, onorm_g) | {
                "weight": weight, "bias": conv_bias, "A_log": A_log, "dt_bias": dt_bias, "norm_weight": onorm_weight,
                "lower_bound": lower_bound, "norm_eps": onorm_eps, "scale": scale,
            }  # fmt: skip
            out = route.decode(kind_of(call), call)
            if out is not None:
                return out
        if conv_bias is None:
            conv_bias = w_q_t.new_zeros(3 * w_q_t.shape[1])
        w_q_t, w_k_t, w_v_t = (part.contiguous() for part in (w_q_t, w_k_t, w_v_t))
        result: torch.Tensor = own(
            mixed_qkv, a, b, conv_states, w_q_t, w_k_t, w_v_t, conv_bias, A_log, dt_bias, onorm_g, onorm_weight,
            ssm_states, cache_indices, scale, onorm_eps, lower_bound,
        )  # fmt: skip
        return result

    module.covered, module.kda_fused_decode = covered, kda_fused_decode
    return "covered and kda_fused_decode are fused-kda's"


def decode_call(
    mixed_qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    conv_states: torch.Tensor,
    ssm_states: torch.Tensor,
    cache_indices: torch.Tensor,
    onorm_g: torch.Tensor,
) -> dict[str, Any]:
    """The op's per-step arguments from SGLang's ``[B, 3P]``, ``[B, P]``, ``[B, H]``, ``[slots, 3, 3P]``,
    ``[slots, H, D, D]``, ``[B]``, ``[B, P]``. Views, no copies."""
    heads, dim = ssm_states.shape[1:3]
    return {
        "x": mixed_qkv,
        "raw_g": a.unflatten(1, (heads, dim)).unsqueeze(0),  # type: ignore[no-untyped-call]
        "raw_beta": b,
        "conv_state": conv_states.transpose(1, 2),
        "state": ssm_states,
        "state_indices": cache_indices,
        "output_gate": onorm_g,
        "null_slot": -1,
    }


def step_refusal(*given: torch.Tensor) -> str | None:
    """Why the op cannot take such a step, by the metadata of :func:`decode_call`'s arguments; None where it can."""

    def stand_in(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")

    state = given[4]
    if state.ndim != 4:
        return f"a recurrent pool of {state.ndim} dimensions"
    heads, dim = state.shape[1:3]
    layer: dict[str, Any] = {
        "weight": torch.empty(3, given[3].shape[1] + 1, heads * dim, device="meta"),
        "bias": None,
        "A_log": torch.empty(heads, device="meta"),
        "dt_bias": torch.empty(heads * dim, device="meta"),
        "norm_weight": torch.empty(dim, device="meta"),
    }
    try:
        problem = decode_problem(**decode_call(*map(stand_in, given)), **layer)
    except (TypeError, ValueError, RuntimeError, IndexError) as error:
        return str(error)
    name, reason = one_launch(problem, given[0].device)
    return reason if name is None else None


def joined(parts: tuple[torch.Tensor, ...]) -> torch.Tensor | None:
    """``[3, W, P]`` over three ``[W, P]`` views of one parameter; None where they are not evenly spaced in one."""
    first = parts[0]
    step = parts[1].storage_offset() - first.storage_offset()
    for index, part in enumerate(parts):
        if (
            part.untyped_storage().data_ptr() != first.untyped_storage().data_ptr()
            or part.storage_offset() != first.storage_offset() + index * step
            or (part.shape, part.stride(), part.dtype) != (first.shape, first.stride(), first.dtype)
        ):
            return None
    return first.as_strided((3, *first.shape), (step, *first.stride()))


def widen_layer(module: Any) -> str:
    """Let Kimi-K3's layer offer its decode steps whatever its number of heads, where a backend of one launch is."""
    layer_class = module.KimiK3DeltaAttention
    own = layer_class._prepare_fused_decode

    def _prepare_fused_decode(self: Any) -> None:
        """Publish the step's static arguments; SGLang calls this after every load of weights."""
        own(self)
        reason = "ROCm and NPU have routes of SGLang's own" if module._is_hip or module._is_npu else _publish(self)
        if reason is not None:
            refused("sglang", f"Kimi-K3 layer: {reason}")

    layer_class._prepare_fused_decode = _prepare_fused_decode
    return "Kimi-K3 layers publish views of their weights, for every head count that the gates' table has"


def _publish(block: Any) -> str | None:
    """Set ``_k3_fused_decode_args`` on the block's attention layer; the reason where the op cannot serve it."""
    layer, weight = block.attn, block.attn.conv_weights
    heads, dim = layer.A_log.numel(), block.head_dim
    inner = heads * dim
    if weight is None or weight.ndim != 2 or weight.shape[0] != 3 * inner:
        return f"conv weights of another shape than [{3 * inner}, W]"
    problem = shape_problem(heads=heads, head_dim=dim, conv_width=weight.shape[1], lower_bound=layer.lower_bound)
    name, reason = one_launch(problem, layer.A_log.device)
    if name is None:
        return reason
    layer._k3_fused_decode_args = (
        *(part.t() for part in weight.split(inner)),
        layer.bias,
        layer.A_log.detach().reshape(-1),
        block.o_norm.weight.data.float(),
        float(block.o_norm.eps),
    )
    block._kda_fused_decode_ready = True
    return None
