"""The decode step in plain PyTorch: any device, any activation dtype, any D, W in 2..4, both layouts.

This is the oracle that every other backend is compared with, and the default on a machine without a GPU. It computes in
fp32, or in float64 for float64 activations (or on request), and rounds once per output: y to the activation dtype, the
state to its pool's dtype. The conv window is moved bit for bit in its own dtype.

Rows are independent to the bit: everything is elementwise but the sums over the last dimension, whose order is fixed
(:func:`_sum`). Elementwise means position-independent only where PyTorch's vector code and the scalar code for its
loop's remainder agree; they do for exp, log1p, rsqrt and plain arithmetic, but not for sigmoid and softplus, which are
therefore written out here. Reading ``state_indices`` on the host synchronises a GPU.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..contract import QK_NORM_EPS, DecodeProblem, Tensors

Launch = Callable[[Tensors], None]


def prepare(problem: DecodeProblem) -> Launch:
    """A launch for the problem: takes the call's tensors, mutates conv_state, state and out."""

    def launch(tensors: Tensors) -> None:
        decode_step(problem, tensors)

    return launch


def decode_step(
    problem: DecodeProblem,
    tensors: Tensors,
    compute_dtype: torch.dtype | None = None,
    *,
    intermediate_dtype: torch.dtype | None = None,
) -> None:
    """Advance every live row by one token.

    Args:
        problem: the checked call.
        tensors: its tensors; conv_state, state and out are written.
        compute_dtype: float32 or float64; None means float64 for float64 activations and float32 otherwise.
        intermediate_dtype: round q, k, v after SiLU and o before the norm to it, as a chain of kernels does that
            passes them through memory; None keeps them in the compute dtype.
    """
    spec = problem.spec
    compute = compute_dtype or (torch.float64 if spec.dtype == torch.float64 else torch.float32)
    heads, dim, batch = spec.heads, spec.head_dim, problem.batch
    out = tensors.out.view(batch, heads, dim) if tensors.out.ndim != 4 else tensors.out[0]

    indices = tensors.state_indices.flatten().tolist()
    live = [row for row, slot in enumerate(indices) if problem.null_slot < slot < problem.slots]
    if len(live) < batch:
        out.zero_()
        if not live:
            return
        device = problem.device
        rows = torch.tensor(live, device=device)

        def pick(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.index_select(0, rows)

    else:

        def pick(tensor: torch.Tensor) -> torch.Tensor:
            return tensor

    count = len(live)
    slots = torch.tensor([indices[row] for row in live], dtype=torch.int64, device=problem.device)
    started = None if tensors.has_initial_state is None else pick(tensors.has_initial_state)

    q, k, v, window = _convolution(problem, tensors, pick(tensors.x), slots, started, compute)
    if intermediate_dtype is not None:
        q, k, v = (part.to(intermediate_dtype).to(compute) for part in (q, k, v))
    q = q * torch.rsqrt(_sum(q * q).unsqueeze(-1) + QK_NORM_EPS) * problem.scale
    k = k * torch.rsqrt(_sum(k * k).unsqueeze(-1) + QK_NORM_EPS)

    raw_g = pick(_rows(tensors.raw_g, batch, heads, dim)).to(compute).contiguous()
    z = raw_g + tensors.dt_bias.view(heads, dim).to(compute)
    decay = torch.exp(_log_decay(z, tensors.A_log.view(heads, 1).to(compute), problem.lower_bound))
    beta = _sigmoid(pick(tensors.raw_beta.view(batch, heads)).to(compute).contiguous())

    state = tensors.state[slots].to(compute)
    if started is not None:
        state = torch.where(started.view(count, 1, 1, 1), state, 0.0)
    k_row = k.unsqueeze(-2)
    state = state * decay.unsqueeze(-2)
    delta = (v - _sum(state * k_row)) * beta.unsqueeze(-1)
    state = state + delta.unsqueeze(-1) * k_row
    y = _sum(state * q.unsqueeze(-2))
    if intermediate_dtype is not None:
        y = y.to(intermediate_dtype).to(compute)

    if tensors.norm_weight is not None and tensors.output_gate is not None:
        gate = pick(_rows(tensors.output_gate, batch, heads, dim)).to(compute).contiguous()
        y = y * torch.rsqrt(_sum(y * y).unsqueeze(-1) / dim + problem.norm_eps)
        y = y * tensors.norm_weight.view(dim).to(compute) * _sigmoid(gate)

    tensors.conv_state[slots] = window
    tensors.state[slots] = state.to(spec.state_dtype)
    if count < batch:
        out[rows] = y.to(spec.dtype)
    else:
        out.copy_(y)


def _convolution(
    problem: DecodeProblem,
    tensors: Tensors,
    x: torch.Tensor,
    slots: torch.Tensor,
    started: torch.Tensor | None,
    compute: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v ``[N, H, D]`` after SiLU, and the new window ``[N, 3P, W-1]``."""
    spec = problem.spec
    heads, dim, width = spec.heads, spec.head_dim, spec.conv_width
    history = tensors.conv_state[slots]
    if started is not None:
        history = torch.where(
            started.view(-1, 1, 1), history, torch.zeros((), dtype=history.dtype, device=history.device)
        )
    weight = torch.as_strided(
        tensors.weight,
        (width, 3, heads * dim),
        (spec.weight_strides[1], spec.weight_strides[0], spec.weight_strides[2]),
    )
    weight = weight.reshape(width, 3 * heads * dim).to(compute)
    taps = [history[..., tap] for tap in range(width - 1)] + [x]
    products = [weight[tap] * taps[tap].to(compute).contiguous() for tap in range(width)]
    total = products[0] if tensors.bias is None else tensors.bias.view(-1).to(compute) + products[0]
    for product in products[1:]:
        total = total + product
    total = total * _sigmoid(total)
    q, k, v = total.view(-1, 3, heads, dim).unbind(1)
    window = torch.cat((history[..., 1:], x.unsqueeze(-1)), dim=-1)
    return q.contiguous(), k.contiguous(), v.contiguous(), window


def _log_decay(z: torch.Tensor, a_log: torch.Tensor, lower_bound: float | None) -> torch.Tensor:
    a = torch.exp(a_log)
    if lower_bound is not None:
        return lower_bound * _sigmoid(a * z)
    return -a * (z.clamp_min(0.0) + torch.log1p(torch.exp(-z.abs())))


def _sigmoid(x: torch.Tensor) -> torch.Tensor:
    return 1.0 / (1.0 + torch.exp(-x))


def _sum(terms: torch.Tensor) -> torch.Tensor:
    """Sum over the contiguous last dimension, in an order that depends on its length alone.

    PyTorch's own sum is that on a CPU; on a GPU its order follows the number of sums, so there a fixed tree of halves.
    """
    if terms.device.type == "cpu":
        return terms.sum(-1)
    while terms.shape[-1] > 1:
        half, odd = divmod(terms.shape[-1], 2)
        halves = terms[..., :half] + terms[..., half : 2 * half]
        terms = torch.cat((halves, terms[..., -1:]), dim=-1) if odd else halves
    return terms[..., 0]


def _rows(tensor: torch.Tensor, batch: int, heads: int, dim: int) -> torch.Tensor:
    """``[B, H, D]`` view of any of the row forms that the contract allows."""
    if tensor.ndim == 4:
        return tensor[0]
    return tensor if tensor.ndim == 3 else tensor.view(batch, heads, dim)
