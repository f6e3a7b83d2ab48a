"""A stand-in for fla 0.6's KDA layer and cache in plain PyTorch: the same parts, shapes, caches and in-place habits.

Its numbers are those of fla's unfused chain: fp32 inside each kernel, the model's dtype between them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional


def _compute(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


class ShortConvolution(nn.Conv1d):
    """Depthwise causal convolution; cache ``[N, D, W]``, newest last; a one-token call updates it in place."""

    def __init__(self, channels: int, width: int, bias: bool) -> None:
        super().__init__(channels, channels, width, groups=channels, padding=width - 1, bias=bias)
        self.activation = "silu"

    def forward(
        self, x: torch.Tensor, cache: torch.Tensor | None = None, output_final_state: bool = False, **_: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """``[B, T, D]`` to the same, and the last W inputs."""
        width = self.kernel_size[0]
        history = x.new_zeros(x.shape[0], x.shape[2], width) if cache is None else cache
        taps = torch.cat((history, x.transpose(1, 2)), dim=-1)
        wide = _compute(x.dtype)
        bias = None if self.bias is None else self.bias.to(wide)
        y = functional.conv1d(taps[..., 1:].to(wide), self.weight.to(wide), bias, groups=x.shape[2])
        final = taps[..., -width:]
        if cache is not None and x.shape[1] == 1:
            cache.copy_(final)
            final = cache
        return functional.silu(y).to(x.dtype).transpose(1, 2), final.contiguous() if output_final_state else None


class FusedRMSNormGated(nn.Module):
    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps, self.activation = eps, "sigmoid"

    def forward(self, x: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        wide = x.to(_compute(x.dtype))
        y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (y * self.weight.to(y.dtype) * torch.sigmoid(g.to(y.dtype))).to(x.dtype)


def recurrent_kda(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, *,
    A_log: torch.Tensor, dt_bias: torch.Tensor, initial_state: torch.Tensor | None, output_final_state: bool,
    lower_bound: float | None, allow_neg_eigval: bool = False, **_: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """fla's recurrence with gate, q/k norm and beta inside, over ``[B, T, H, D]``; a new state ``[B, H, V, K]``."""
    compute = _compute(q.dtype)
    dtype, heads = q.dtype, v.shape[2]
    groups = heads // q.shape[2]
    q, k = (part.repeat_interleave(groups, dim=2) for part in (q, k))
    q, k, v, g, beta = (part.to(compute) for part in (q, k, v, g, beta))
    q, k = (part * torch.rsqrt(part.square().sum(-1, keepdim=True) + 1e-6) for part in (q, k))
    z = g + dt_bias.to(compute).view(heads, -1)
    a = A_log.to(compute).exp().view(heads, 1)
    decay = (-a * functional.softplus(z) if lower_bound is None else lower_bound * torch.sigmoid(a * z)).exp()
    beta = torch.sigmoid(beta) * (2 if allow_neg_eigval else 1)
    batch, steps, _, dim = k.shape
    state = q.new_zeros(batch, heads, v.shape[-1], dim) if initial_state is None else initial_state.to(compute)
    outputs = []
    for t in range(steps):
        state = state * decay[:, t].unsqueeze(-2)
        delta = (v[:, t] - (state @ k[:, t].unsqueeze(-1)).squeeze(-1)) * beta[:, t].unsqueeze(-1)
        state = state + delta.unsqueeze(-1) * k[:, t].unsqueeze(-2)
        outputs.append((state @ q[:, t].unsqueeze(-1)).squeeze(-1) * dim**-0.5)
    final = state.float() if compute == torch.float32 else state
    return torch.stack(outputs, 1).to(dtype), final if output_final_state else None


class Cache:
    """Per layer a dict of states; ``reorder_cache`` as beam search calls it."""

    def __init__(self) -> None:
        self.states: list[dict[str, Any]] = []
        self.seen = 0

    def __len__(self) -> int:
        return len(self.states)

    def __getitem__(self, layer: int) -> dict[str, Any]:
        return self.states[layer]

    def update(self, *, layer_idx: int, recurrent_state: Any, conv_state: Any, offset: int) -> None:
        while len(self.states) <= layer_idx:
            self.states.append({"recurrent_state": None, "conv_state": None})
        state = self.states[layer_idx]
        if recurrent_state is not None:
            state["recurrent_state"] = recurrent_state
        if conv_state is not None:
            state["conv_state"] = conv_state
        self.seen += offset if layer_idx == 0 else 0

    def reorder_cache(self, rows: torch.Tensor) -> None:
        for state in self.states:
            state["recurrent_state"] = state["recurrent_state"].index_select(0, rows)
            state["conv_state"] = tuple(part.index_select(0, rows) for part in state["conv_state"])


class KimiDeltaAttention(nn.Module):
    def __init__(
        self, hidden: int = 64, heads: int = 2, dim: int = 128, *, value_heads: int | None = None,
        lower_bound: float | None = None, conv_bias: bool = False, use_short_conv: bool = True,
        allow_neg_eigval: bool = False, layer_idx: int = 0,
    ) -> None:  # fmt: skip
        super().__init__()
        value_heads = value_heads or heads
        self.use_short_conv, self.allow_neg_eigval, self.lower_bound = use_short_conv, allow_neg_eigval, lower_bound
        self.num_heads, self.num_v_heads, self.layer_idx = heads, value_heads, layer_idx
        self.head_dim = self.head_v_dim = dim
        keys, values = heads * dim, value_heads * dim
        self.q_proj, self.k_proj = (nn.Linear(hidden, keys, bias=False) for _ in range(2))
        self.v_proj = nn.Linear(hidden, values, bias=False)
        self.q_conv1d, self.k_conv1d = (ShortConvolution(keys, 4, conv_bias) for _ in range(2))
        self.v_conv1d = ShortConvolution(values, 4, conv_bias)
        self.f_proj = nn.Sequential(nn.Linear(hidden, dim, bias=False), nn.Linear(dim, values, bias=False))
        self.b_proj = nn.Linear(hidden, value_heads, bias=False)
        self.A_log = nn.Parameter(torch.empty(value_heads).uniform_(1, 16).log())
        self.dt_bias = nn.Parameter(torch.randn(values))
        self.g_proj = nn.Sequential(nn.Linear(hidden, dim, bias=False), nn.Linear(dim, values, bias=True))
        self.o_norm = FusedRMSNormGated(dim, 1e-5)
        self.o_proj = nn.Linear(values, hidden, bias=False)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = False,
        output_attentions: bool | None = False,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None, Any]:
        steps = hidden_states.shape[1]
        if attention_mask is not None and not bool(attention_mask[:, -steps:].all()):
            return self._by_row(hidden_states, attention_mask[:, -steps:], past_key_values, use_cache)
        cached = past_key_values and len(past_key_values) > self.layer_idx and past_key_values[self.layer_idx]
        windows = cached["conv_state"] if cached else (None, None, None)
        parts = [proj(hidden_states) for proj in (self.q_proj, self.k_proj, self.v_proj)]
        if self.use_short_conv:
            convs = (self.q_conv1d, self.k_conv1d, self.v_conv1d)
            steps_of = [
                conv(part, cache=window, output_final_state=bool(use_cache))
                for conv, part, window in zip(convs, parts, windows, strict=True)
            ]
            parts, windows = [y for y, _ in steps_of], tuple(window for _, window in steps_of)
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in parts)
        o, state = recurrent_kda(
            q, k, v, self.f_proj(hidden_states).unflatten(-1, (-1, self.head_dim)), self.b_proj(hidden_states),
            A_log=self.A_log, dt_bias=self.dt_bias, initial_state=cached["recurrent_state"] if cached else None,
            output_final_state=bool(use_cache), lower_bound=self.lower_bound, allow_neg_eigval=self.allow_neg_eigval,
        )  # fmt: skip
        if past_key_values is not None:
            kept = windows if self.use_short_conv and use_cache else None
            past_key_values.update(layer_idx=self.layer_idx, recurrent_state=state, conv_state=kept, offset=steps)
        o = self.o_norm(o, self.g_proj(hidden_states).unflatten(-1, (-1, self.head_dim)))
        return self.o_proj(o.flatten(-2)), None, past_key_values

    def _by_row(
        self, hidden_states: torch.Tensor, mask: torch.Tensor, cache: Any, use_cache: bool | None
    ) -> tuple[torch.Tensor, None, Any]:
        """Padding tokens are dropped row by row: they give zeros and leave the row's state as it was."""
        out = torch.zeros_like(hidden_states)
        rows = Cache()
        before = cache[self.layer_idx] if cache is not None and len(cache) > self.layer_idx else None
        for row, live in enumerate(mask.bool()):
            one = Cache()
            one.states = [{} for _ in range(self.layer_idx)]
            if before is not None:
                window = tuple(part[row : row + 1] for part in before["conv_state"])
                state = before["recurrent_state"][row : row + 1]
                one.update(layer_idx=self.layer_idx, recurrent_state=state, conv_state=window, offset=0)
            if bool(live.any()):
                out[row, live] = KimiDeltaAttention.forward(
                    self, hidden_states[row : row + 1, live], past_key_values=one, use_cache=use_cache
                )[0][0]
            rows.states.append(one[self.layer_idx])
        if cache is not None:
            cache.update(
                layer_idx=self.layer_idx,
                recurrent_state=torch.cat([state["recurrent_state"] for state in rows.states]),
                conv_state=tuple(
                    torch.cat(parts) for parts in zip(*(s["conv_state"] for s in rows.states), strict=True)
                ),
                offset=hidden_states.shape[1],
            )
        return out, None, cache
