"""The KDA layer of Kimi-K3 and Kimi-Linear around the op: projections, training forward, prefill and decode."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from ..api import FallbackWarning, fused_kda_decode
from ..contract import QK_NORM_EPS, DecodeProblem, decode_problem
from ..layouts import Shard
from ..pool import LayerPool
from .chunked import delta_rule, fla_delta_rule, fla_reason
from .parallel import RowParallelLinear, TensorParallel

#: Rows of the merged projection are a multiple of this, so that its GEMM and the row stride of its slices stay aligned.
ROW_MULTIPLE = 16
PREFILL_BACKENDS = ("auto", "torch", "fla")

_warned: set[str] = set()


class KimiDeltaAttention(nn.Module):
    """Kimi Delta Attention with the checkpoint's own parameters.

    One merged projection feeds the op: its column slices are x (q | k | v), the raw beta and, in the K3 family, the
    output gate; they go to the op as views. Columns, in this order:

    * full-rank output gate (Kimi-K3): q, k, v, g, f_a, b, padding;
    * low-rank output gate (Kimi-Linear): q, k, v, b, f_a, g_a, padding.

    Args:
        hidden_size: width of the residual stream.
        num_heads: H of the whole layer.
        head_dim: D (keys, values and the rank of the low-rank gates alike).
        conv_width: W.
        lower_bound: -5.0 in Kimi-K3: ``log_decay = lower_bound * sigmoid(exp(A_log) * z)``; None in Kimi-Linear:
            ``-exp(A_log) * softplus(z)``.
        full_rank_gate: True in Kimi-K3.
        norm_eps: of the gated RMSNorm.
        dtype: of the projections and thus of the activations: bfloat16, or float32 / float64 where the op's reference
            backend runs. Conv weight ``[3P, W]``, A_log ``[H]``, dt_bias ``[P]`` and norm weight ``[D]`` are fp32
            (float64 for float64).
        device: where the parameters are made.
        parallel: the ranks that share the layer's heads; None: this process has them all. A layer on one of several
            ranks has ``num_heads`` of its own, and its :attr:`shard` says which. It does not train.

    Shapes below: P = H * D with H of this rank, C = hidden_size.

    Raises:
        ValueError: lower_bound out of range, or the heads cannot be shared evenly.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        head_dim: int = 128,
        conv_width: int = 4,
        *,
        lower_bound: float | None,
        full_rank_gate: bool,
        norm_eps: float = 1e-5,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
        parallel: TensorParallel | None = None,
    ) -> None:
        super().__init__()
        if lower_bound is not None and not (math.isfinite(lower_bound) and lower_bound < 0):
            raise ValueError(f"lower_bound: expected a finite negative number or None, got {lower_bound}")
        #: Which heads these are.
        self.shard = Shard(num_heads, head_dim, parallel.size if parallel else 1, parallel.rank if parallel else 0)
        self.hidden_size = hidden_size
        self.num_heads = num_heads = self.shard.local_heads
        self.head_dim = head_dim
        self.conv_width = conv_width
        self.lower_bound = lower_bound
        self.full_rank_gate = full_rank_gate
        self.norm_eps = norm_eps

        inner = num_heads * head_dim
        widths = {"q": inner, "k": inner, "v": inner}
        widths |= {"g": inner, "f_a": head_dim, "b": num_heads} if full_rank_gate else {"b": num_heads, "f_a": head_dim}
        if not full_rank_gate:
            widths["g_a"] = head_dim
        #: Columns of the merged projection's output (rows of its weight) by section.
        self.columns: dict[str, slice] = {}
        end = 0
        for name, width in widths.items():
            self.columns[name] = slice(end, end + width)
            end += width
        rows = -(-end // ROW_MULTIPLE) * ROW_MULTIPLE

        wide = torch.float64 if dtype == torch.float64 else torch.float32
        self.in_proj = nn.Linear(hidden_size, rows, bias=False, dtype=dtype, device=device)
        self.f_b_proj = nn.Linear(head_dim, inner, bias=False, dtype=dtype, device=device)
        self.g_b_proj = None if full_rank_gate else nn.Linear(head_dim, inner, bias=False, dtype=dtype, device=device)
        if parallel is None:
            self.o_proj = nn.Linear(inner, hidden_size, bias=False, dtype=dtype, device=device)
        else:
            self.o_proj = RowParallelLinear(inner, hidden_size, parallel, dtype=dtype, device=device)
        self.conv_weight = nn.Parameter(torch.empty(3 * inner, conv_width, dtype=wide, device=device))
        self.A_log = nn.Parameter(torch.empty(num_heads, dtype=wide, device=device))
        self.dt_bias = nn.Parameter(torch.empty(inner, dtype=wide, device=device))
        self.norm_weight = nn.Parameter(torch.empty(head_dim, dtype=wide, device=device))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw fresh parameters for training.

        Where the projected gate is 0, a head's log decay per step is log-uniform in [-0.1, -0.001] over its channels;
        ``exp(A_log)``, which scales what the input changes about that, is uniform in [1, 16].
        """
        for linear in (self.in_proj, self.f_b_proj, self.g_b_proj, self.o_proj):
            if linear is not None:
                linear.reset_parameters()
        padding = max(section.stop for section in self.columns.values())
        self.in_proj.weight[padding:].zero_()
        bound = self.conv_width**-0.5
        self.conv_weight.uniform_(-bound, bound)
        self.norm_weight.fill_(1.0)
        self.A_log.uniform_(1.0, 16.0).log_()
        rate = torch.empty_like(self.dt_bias).uniform_(math.log(0.001), math.log(0.1)).exp_()
        a = self.A_log.exp().repeat_interleave(self.head_dim)
        if self.lower_bound is None:
            self.dt_bias.copy_((rate / a).expm1().log())
        else:
            self.dt_bias.copy_((rate / -self.lower_bound).logit() / a)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Whole sequences from zero state, differentiable.

        Args:
            hidden: ``[B, T, C]``.

        Returns:
            ``[B, T, C]``. Projections run in the layer's dtype or under autocast, everything between them in fp32.
        """
        projected = self.in_proj(hidden)
        extended = functional.pad(self._x(projected), (0, 0, self.conv_width - 1, 0))
        out: torch.Tensor = self.o_proj(self._core(extended, projected, None, None, "torch")[0])
        return out

    @torch.no_grad()
    def prefill(
        self,
        hidden: torch.Tensor,
        pool: LayerPool,
        slots: Sequence[int],
        *,
        lengths: Sequence[int] | None = None,
        has_initial_state: Sequence[bool] | None = None,
        backend: str = "auto",
    ) -> torch.Tensor:
        """Run prompts, or further pieces of them, and leave their windows and states in the pool.

        Args:
            hidden: ``[sum(lengths), C]``, the sequences one after the other.
            pool: this layer's pools. **Mutated** in the named slots alone.
            slots: each sequence's slot: live, and no slot twice.
            lengths: tokens of each sequence, >= 1; None for one sequence.
            has_initial_state: which sequences continue from what their slot holds; the others start from zero whatever
                the slot holds. None: all start from zero.
            backend: "torch" (any device), "fla" (fla-core's ``chunk_kda``, GPU), or "auto": fla where it can run. On a
                GPU where it cannot, one :class:`fused_kda.FallbackWarning` says why.

        Returns:
            ``[sum(lengths), C]``. Sequences are padded to the longest for the work in between: memory follows
            ``len(lengths) * max(lengths)``.

        Raises:
            ValueError, TypeError: shapes, dtypes, lengths or slots do not fit; nothing has been written.
            NotImplementedError: backend "fla" cannot run here; the text says why.
        """
        lengths = (hidden.shape[0],) if lengths is None else tuple(lengths)
        slots = tuple(slots)
        self._check_prefill(hidden, pool, slots, lengths, has_initial_state)
        backend = self._prefill_backend(backend, hidden)
        index = torch.tensor(slots, device=hidden.device)
        ends = torch.tensor(lengths, device=hidden.device).unsqueeze(1)
        started = torch.tensor(has_initial_state or (False,) * len(slots), device=hidden.device)
        window = pool.conv_state[index].where(started.view(-1, 1, 1), 0.0)
        state = pool.state[index].where(started.view(-1, 1, 1, 1), 0.0)

        projected = self.in_proj(hidden)
        valid = None
        if min(lengths) == max(lengths):
            padded = torch.unflatten(projected, 0, (len(lengths), -1))
        else:
            valid = torch.arange(max(lengths), device=hidden.device) < ends
            padded = projected.new_zeros(*valid.shape, projected.shape[1])
            padded[valid] = projected
        extended = torch.cat((window.transpose(1, 2), self._x(padded)), 1)
        y, state = self._core(extended, padded, state, valid, backend)
        # The W - 1 rows before a sequence's end, its old window included where it is shorter than that.
        last = ends + torch.arange(self.conv_width - 1, device=hidden.device)
        window = extended.gather(1, last.unsqueeze(-1).expand(-1, -1, extended.shape[2]))
        pool.conv_state[index] = window.transpose(1, 2)
        pool.state[index] = state.to(pool.state.dtype)
        out: torch.Tensor = self.o_proj(y.flatten(0, 1) if valid is None else y[valid])
        return out

    @torch.no_grad()
    def decode(
        self,
        hidden: torch.Tensor,
        pool: LayerPool,
        state_indices: torch.Tensor,
        *,
        has_initial_state: torch.Tensor | None = None,
        backend: str = "auto",
    ) -> torch.Tensor:
        """Advance a batch of sequences by one token. Which sequences those are may change from step to step.

        Args:
            hidden: ``[B, C]``, the layer's dtype.
            pool: this layer's pools. **Mutated** in the named slots alone.
            state_indices: ``[B]`` int32 or int64, each row's slot; a row whose index is not live gives zeros.
            has_initial_state: None or ``[B]`` bool; where False the row starts from zero whatever its slot holds.
            backend: of :func:`fused_kda.fused_kda_decode`.

        Returns:
            ``[B, C]``.

        Raises:
            As :func:`fused_kda.fused_kda_decode`.
        """
        projected = self.in_proj(hidden)
        raw_g, gate = self._gates(projected)
        call = self._call(projected, raw_g, gate, pool, state_indices, has_initial_state)
        y = fused_kda_decode(**call, backend=backend)
        out: torch.Tensor = self.o_proj(y)
        return out

    def decode_problems(
        self, pool: LayerPool, *, index_dtype: torch.dtype = torch.int32, has_initial_state: bool = False
    ) -> list[DecodeProblem]:
        """What :meth:`decode` asks of the op on this pool, for :func:`fused_kda.warmup`.

        Args:
            pool: this layer's pools.
            index_dtype: of the indices that steps will be given.
            has_initial_state: whether they will be given that mask.
        """
        weight = self.in_proj.weight.detach()
        projected, raw_g = weight.new_empty(1, weight.shape[0]), weight.new_empty(1, self.num_heads * self.head_dim)
        gate = raw_g if self.g_b_proj is not None else projected[:, self.columns["g"]]
        indices = torch.empty(1, dtype=index_dtype, device=weight.device)
        mask = torch.empty(1, dtype=torch.bool, device=weight.device) if has_initial_state else None
        with torch.no_grad():
            return [decode_problem(**self._call(projected, raw_g, gate, pool, indices, mask))]

    def _call(
        self,
        projected: torch.Tensor,
        raw_g: torch.Tensor,
        gate: torch.Tensor,
        pool: LayerPool,
        state_indices: torch.Tensor,
        has_initial_state: torch.Tensor | None,
    ) -> dict[str, Any]:
        """The op's arguments for one step."""
        return {
            "x": self._x(projected),
            "weight": self.conv_weight,
            "bias": None,
            "conv_state": pool.conv_state,
            "raw_g": raw_g,
            "raw_beta": projected[:, self.columns["b"]],
            "A_log": self.A_log,
            "dt_bias": self.dt_bias,
            "state_indices": state_indices,
            "state": pool.state,
            "lower_bound": self.lower_bound,
            "output_gate": gate,
            "norm_weight": self.norm_weight,
            "norm_eps": self.norm_eps,
            "null_slot": pool.null_slot,
            "has_initial_state": has_initial_state,
            "prefetch": True,  # the kernel ahead is a projection's GEMM: it writes no weight, pool or index
        }

    def _gates(self, projected: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """raw_g and output gate, both ``[..., P]``, from the merged projection."""
        raw_g = self.f_b_proj(projected[..., self.columns["f_a"]])
        if self.g_b_proj is None:
            return raw_g, projected[..., self.columns["g"]]
        return raw_g, self.g_b_proj(projected[..., self.columns["g_a"]])

    def _core(
        self,
        extended: torch.Tensor,
        projected: torch.Tensor,
        state: torch.Tensor | None,
        valid: torch.Tensor | None,
        backend: str,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """All between the input and the output projection, for whole sequences.

        Args:
            extended: raw x ``[B, W-1 + T, 3P]``, each sequence's window before it.
            projected: ``[B, T, columns]``.
            state: ``[B, H, D, D]`` before the first token; None for zero.
            valid: ``[B, T]`` bool, the tokens that count; None for all.
            backend: "torch" or "fla".

        Returns:
            ``(y [B, T, P] in the activations' dtype, state after the last token that counts, fp32 or fp64)``.
        """
        raw_g, gate = self._gates(projected)
        with torch.autocast(projected.device.type, enabled=False):
            q, k, v = self._convolution(extended)
            beta = projected[..., self.columns["b"]].to(q.dtype).sigmoid()
            log_decay = self._log_decay(raw_g.to(q.dtype))
            if valid is not None:  # a step that does not count neither decays nor writes
                beta = beta.where(valid.unsqueeze(-1), 0.0)
                log_decay = log_decay.where(valid[..., None, None], 0.0)
            state = None if state is None else state.to(q.dtype)
            if backend == "fla":
                bounded = self.lower_bound is not None and self.lower_bound >= -5.0
                o, state = fla_delta_rule(q, k, v, log_decay, beta, state, dtype=projected.dtype, bounded=bounded)
            else:
                o, state = delta_rule(q, k, v, log_decay, beta, state)
            y = o * torch.rsqrt(o.square().mean(-1, keepdim=True) + self.norm_eps) * self.norm_weight
            y = y.flatten(-2) * gate.to(y.dtype).sigmoid()
        return y.to(projected.dtype), state

    def _convolution(self, extended: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k, v ``[B, T, H, D]`` from raw x ``[B, W-1 + T, 3P]``: conv in the op's order, SiLU, norms, scale."""
        extended = extended.to(self.conv_weight.dtype)
        steps = extended.shape[1] - self.conv_width + 1
        total = self.conv_weight[:, 0] * extended[:, :steps]
        for tap in range(1, self.conv_width):
            total = torch.addcmul(total, self.conv_weight[:, tap], extended[:, tap : tap + steps])
        q, k, v = self._by_head(functional.silu(total), 3).unbind(-3)
        q = q * (torch.rsqrt(q.square().sum(-1, keepdim=True) + QK_NORM_EPS) * self.head_dim**-0.5)
        k = k * torch.rsqrt(k.square().sum(-1, keepdim=True) + QK_NORM_EPS)
        return q, k, v

    def _log_decay(self, raw_g: torch.Tensor) -> torch.Tensor:
        """``[B, T, H, D]``, <= 0, from raw_g ``[B, T, P]``."""
        z = self._by_head(raw_g + self.dt_bias)
        a = self.A_log.exp().unsqueeze(-1)
        if self.lower_bound is None:
            return -a * functional.softplus(z)
        return self.lower_bound * torch.sigmoid(a * z)

    def _by_head(self, tensor: torch.Tensor, *planes: int) -> torch.Tensor:
        return torch.unflatten(tensor, -1, (*planes, self.num_heads, self.head_dim))

    def _x(self, projected: torch.Tensor) -> torch.Tensor:
        """q | k | v of the merged projection, ``[..., 3P]``: a view."""
        return projected[..., : self.columns["v"].stop]

    def _check_prefill(
        self,
        hidden: torch.Tensor,
        pool: LayerPool,
        slots: tuple[int, ...],
        lengths: tuple[int, ...],
        has_initial_state: Sequence[bool] | None,
    ) -> None:
        if not lengths or min(lengths) < 1:
            raise ValueError(f"lengths: expected at least one sequence, each of >= 1 token, got {list(lengths)}")
        if tuple(hidden.shape) != (sum(lengths), self.hidden_size):
            raise ValueError(f"hidden: expected shape [{sum(lengths)}, {self.hidden_size}], got {list(hidden.shape)}")
        count, size = len(lengths), pool.state.shape[0]
        if len(slots) != count or len(set(slots)) != count or not all(pool.null_slot < s < size for s in slots):
            raise ValueError(
                f"slots: expected {count} different slots, each > {pool.null_slot} and < {size}, got {list(slots)}"
            )
        if has_initial_state is not None and len(has_initial_state) != count:
            raise ValueError(f"has_initial_state: expected {count} values, got {len(has_initial_state)}")
        inner = self.num_heads * self.head_dim
        for name, tensor, shape in (
            ("conv_state", pool.conv_state, (size, 3 * inner, self.conv_width - 1)),
            ("state", pool.state, (size, self.num_heads, self.head_dim, self.head_dim)),
        ):
            if tuple(tensor.shape) != shape:
                raise ValueError(f"pool.{name}: expected shape {list(shape)}, got {list(tensor.shape)}")
        dtype = self.in_proj.weight.dtype
        if pool.conv_state.dtype != dtype:
            raise TypeError(f"pool.conv_state: expected dtype {dtype} (the layer's), got {pool.conv_state.dtype}")

    def _prefill_backend(self, backend: str, hidden: torch.Tensor) -> str:
        if backend not in PREFILL_BACKENDS:
            raise ValueError(f"backend: expected one of {', '.join(PREFILL_BACKENDS)}, got {backend!r}")
        if backend == "torch":
            return backend
        reason = fla_reason(hidden.device, hidden.dtype)
        if reason is None:
            return "fla"
        if backend == "fla":
            raise NotImplementedError(f"backend: fla cannot run this prefill: {reason}")
        if hidden.device.type == "cuda" and reason not in _warned:
            _warned.add(reason)
            warnings.warn(
                f"prefill runs in plain PyTorch, fla-core cannot take it: {reason}", FallbackWarning, stacklevel=4
            )
        return "torch"
