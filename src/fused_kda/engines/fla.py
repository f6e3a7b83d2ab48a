"""fla and Hugging Face transformers: one-token steps of fla's KDA layers through the op.

:func:`patch` sets ``forward`` on each ``fla.layers.kda.KimiDeltaAttention`` of a model; :func:`unpatch` takes it away.
A step with one new token per row and a cache from earlier tokens runs through the op; every other call runs fla's own
code on the same cache. Nothing is staged: parameters are read, and joined where the op wants one tensor, at each step.

Of fla's conv caches ``[N, P, W]``, newest tap last, the op advances the last W - 1 columns; column 0 leaves the window
with the next token and nothing reads it. The recurrent state is advanced in place, as fla advances its conv caches:
to branch from a cache, copy it first.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from . import Route, refused

#: What a module must have to be taken for fla's KDA layer.
PARTS = (
    "q_proj", "k_proj", "v_proj", "f_proj", "b_proj", "g_proj", "o_norm", "o_proj",
    "A_log", "dt_bias", "use_short_conv", "num_v_heads", "head_v_dim", "allow_neg_eigval", "lower_bound", "layer_idx",
)  # fmt: skip
CONVS = ("q_conv1d", "k_conv1d", "v_conv1d")


def patch(model: nn.Module, *, backend: str = "auto") -> int:
    """Send the one-token steps of a model's KDA layers through the op.

    Args:
        model: anything that holds fla KDA layers, e.g. ``KDAForCausalLM``. Layers that are patched already are kept.
        backend: "auto" (a backend of one launch, else fla's own code) or a backend's name.

    Returns:
        How many layers were patched now.

    Raises:
        ValueError: the model has no such layer.
    """
    layers = [module for module in model.modules() if all(hasattr(module, part) for part in PARTS)]
    if not layers:
        raise ValueError("model: expected at least one fla KDA layer, got none")
    fresh = [layer for layer in layers if _patched(layer) is None]
    for layer in fresh:
        # What stands there may itself be a wrapper (accelerate's hooks): it is kept and put back.
        layer.forward = functools.partial(
            _forward, layer, layer.forward, "forward" in vars(layer), Route("fla", backend)
        )
    return len(fresh)


def unpatch(model: nn.Module) -> int:
    """Give a model's layers their own ``forward`` back; returns how many had been patched."""
    count = 0
    for layer in model.modules():
        forward = _patched(layer)
        if forward is not None:
            _, own, kept, _ = forward.args
            if kept:
                layer.forward = own
            else:
                del layer.forward
            count += 1
    return count


def _patched(layer: nn.Module) -> functools.partial[Any] | None:
    forward = vars(layer).get("forward")
    return forward if isinstance(forward, functools.partial) and forward.func is _forward else None


class Windows(tuple[torch.Tensor, ...]):
    """fla's three conv caches ``[N, P, W]``, as views of ``joined`` ``[N, 3P, W]``, which is what the op takes."""

    joined: torch.Tensor

    @classmethod
    def of(cls, caches: tuple[torch.Tensor, ...]) -> Windows:
        """The caches themselves where they are such views, else copies: after a prefill, or after a beam search has
        reordered them."""
        if isinstance(caches, cls):
            return caches
        joined = torch.cat(tuple(caches), dim=1)
        windows = cls(joined.chunk(3, dim=1))
        windows.joined = joined
        return windows


def _forward(
    layer: Any,
    own: Callable[..., Any],
    kept: bool,
    route: Route,
    hidden_states: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    past_key_values: Any = None,
    use_cache: bool | None = False,
    output_attentions: bool | None = False,
    **kwargs: Any,
) -> tuple[torch.Tensor, None, Any]:
    """The layer's forward: a decode step through the op, anything else through ``own``."""
    if torch.is_grad_enabled() or layer.training or hidden_states.shape[1] != 1:
        refused("fla", "not a decode step (training, or several tokens)", expected=True)
    else:
        cached: Any = None
        if past_key_values is not None and len(past_key_values) > layer.layer_idx:
            cached = past_key_values[layer.layer_idx]
        reason = _refusal(layer, cached, use_cache, kwargs)
        if reason is not None:
            refused("fla", reason)
        else:
            out = _step(layer, route, hidden_states, attention_mask, cached, past_key_values)
            if out is not None:
                return out, None, past_key_values
    result: tuple[torch.Tensor, None, Any] = own(
        hidden_states=hidden_states,
        attention_mask=attention_mask,
        past_key_values=past_key_values,
        use_cache=use_cache,
        output_attentions=output_attentions,
        **kwargs,
    )
    return result


def _refusal(layer: Any, cached: Any, use_cache: bool | None, kwargs: dict[str, Any]) -> str | None:
    """Why fla has to do this one-token step, or None. What shapes and dtypes say is left to the gates."""
    if kwargs.get("cu_seqlens") is not None:
        return "packed sequences (cu_seqlens)"
    if not use_cache:
        return "use_cache is off"
    if cached is None or cached.get("recurrent_state") is None or cached.get("conv_state") is None:
        return "no state of earlier tokens in the cache"
    if not layer.use_short_conv:
        return "the layer has no short convolutions"
    if layer.num_v_heads != layer.num_heads or layer.head_v_dim != layer.head_dim:
        return "more or wider value heads than key heads"
    if layer.allow_neg_eigval:
        return "allow_neg_eigval"
    norm = layer.o_norm
    convs = [getattr(layer, name) for name in CONVS]
    if any(conv.activation not in ("silu", "swish") for conv in convs) or norm.activation != "sigmoid":
        return "another activation than SiLU in the convolutions or sigmoid in the norm"
    # The op reads these modules' parameters past the modules, so nothing may have been put around or into them.
    # Projections are called as modules: LoRA and quantisation work there.
    weights = [conv.weight for conv in convs] + [norm.weight, layer.A_log, layer.dt_bias]
    if any(type(weight) is not nn.Parameter for weight in weights):
        return "wrapped, parametrised, sharded or absent parameters of the convolutions, the norm or the gate"
    if any(module._forward_hooks or module._forward_pre_hooks for module in (*convs, norm)):
        return "hooks on the convolutions or the norm"
    return None


def _step(
    layer: Any,
    route: Route,
    hidden_states: torch.Tensor,
    attention_mask: torch.Tensor | None,
    cached: dict[str, Any],
    cache: Any,
) -> torch.Tensor | None:
    """One token per row: ``[B, 1, hidden]`` to the layer's output; state and windows of the cache are advanced."""
    batch, device = hidden_states.shape[0], hidden_states.device
    state, windows = cached["recurrent_state"], cached["conv_state"]
    autocast = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
    kind = (batch, hidden_states.dtype, autocast, device, windows[0].dtype, state.dtype, state.stride())
    if route.closed(kind):
        return None
    windows = Windows.of(windows)
    convs = [getattr(layer, name) for name in CONVS]
    rows = hidden_states[:, 0]
    x = torch.cat((layer.q_proj(rows), layer.k_proj(rows), layer.v_proj(rows)), dim=-1)
    indices = torch.arange(batch, dtype=torch.int32, device=device)
    if attention_mask is not None:
        # fla drops a row whose newest token is padding; to the op it is a null row: zeros, its slot untouched.
        indices = torch.where(attention_mask[:, -1].bool(), indices, -1)
    call = {
        "x": x,
        "weight": torch.cat([conv.weight for conv in convs]),
        "bias": None if convs[0].bias is None else torch.cat([conv.bias for conv in convs]),
        "conv_state": windows.joined[..., 1:],
        "raw_g": layer.f_proj(rows),
        "raw_beta": layer.b_proj(rows),
        "A_log": layer.A_log.float(),
        "dt_bias": layer.dt_bias.float(),
        "state_indices": indices,
        "state": state,
        "output_gate": layer.g_proj(rows),
        "norm_weight": layer.o_norm.weight,
        "lower_bound": layer.lower_bound,
        "norm_eps": layer.o_norm.eps,
        "null_slot": -1,
    }
    out = route.decode(kind, call)
    if out is None:
        return None
    cache.update(layer_idx=layer.layer_idx, recurrent_state=state, conv_state=windows, offset=1)
    projected: torch.Tensor = layer.o_proj(out.view(batch, 1, -1))
    return projected
