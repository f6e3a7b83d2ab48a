"""The gated delta rule over whole sequences, chunk by chunk: what prefill and training run.

One step, as in :mod:`fused_kda.kernels.reference`, with decay ``exp(g_t)``, one value per K channel::

    S = S * exp(g_t);    d_t = beta_t * (v_t - S k_t);    S = S + d_t k_t^T;    o_t = S q_t

Let ``G(j, i)`` be the sum of g over steps j+1 .. i. With S the state before a chunk, the chunk's steps obey

    d_i = beta_i * (v_i - S (k_i e^G(0,i)) - sum_{j<i}  A_ij d_j)         A_ij = sum_c k_i k_j e^G(j,i)
    o_i = S (q_i e^G(0,i)) + sum_{j<=i} B_ij d_j                          B_ij = sum_c q_i k_j e^G(j,i)

so all d of a chunk follow from one inverse of the unit lower triangular ``I + diag(beta) A``, and the state is touched
once per chunk instead of once per step (the UT transform of DeltaNet and Kimi Linear).

``e^G(j,i)`` depends on the channel, so A and B are no plain products, and splitting it as ``e^G(0,i) e^-G(0,j)``
overflows for strong decay. Here a chunk is halved again and again: where i lies right and j left of a block's middle m,
``G(j,i) = G(j,m) + G(m,i)``, two sums of negative terms, and that part of A is a product of two matrices whose factors
are at most 1. The sums are built up with the blocks by additions of like sign alone, so nothing cancels and any decay
is safe, however strong.
"""

from __future__ import annotations

import importlib.util

import torch

CHUNK = 64


def delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    *,
    chunk: int = CHUNK,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the gated delta rule over a batch of sequences. Differentiable; plain PyTorch.

    Args:
        q, k, v: ``[B, T, H, D]``, fp32 or fp64, q and k normalised, q scaled.
        log_decay: ``[B, T, H, D]``, <= 0.
        beta: ``[B, T, H]``, after the sigmoid.
        initial_state: ``[B, H, D(V), D(K)]``, or None for zero. Not mutated.
        chunk: steps per chunk, a power of two.

    A step with ``beta`` 0 and ``log_decay`` 0 leaves the state as it is: that is how shorter sequences are padded.

    Returns:
        ``(o [B, T, H, D], final state [B, H, D, D])``.
    """
    batch, steps, heads, dim = q.shape
    chunk = min(chunk, 1 << max(steps - 1, 0).bit_length())
    count = -(-steps // chunk)

    def cut(x: torch.Tensor) -> torch.Tensor:
        """``[B, T, H, n]`` to ``[B, H, chunks, chunk, n]``, the last chunk filled up with zeros."""
        x = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, count * chunk - steps))
        return torch.unflatten(x, 1, (count, chunk)).permute(0, 3, 1, 2, 4).contiguous()

    q, k, v, log_decay, beta = map(cut, (q, k, v, log_decay, beta.unsqueeze(-1)))
    inverse, scores, since_start, to_end = _within_chunks(q, k, log_decay, beta)
    fade = since_start.exp()
    fresh = inverse @ (beta * v)
    reads = inverse @ (beta * k * fade)
    q_in = q * fade
    k_out = k * to_end.exp()
    total = fade[..., -1:, :]

    state = q.new_zeros(batch, heads, dim, dim) if initial_state is None else initial_state
    pieces: list[torch.Tensor] = []
    for n in range(count):
        columns = state.transpose(-1, -2)
        delta = fresh[:, :, n] - reads[:, :, n] @ columns
        pieces.append(q_in[:, :, n] @ columns + scores[:, :, n] @ delta)
        state = state * total[:, :, n] + delta.transpose(-1, -2) @ k_out[:, :, n]
    o = torch.stack(pieces, 2).permute(0, 2, 3, 1, 4).reshape(batch, count * chunk, heads, dim)
    return o[:, :steps], state


def _within_chunks(
    q: torch.Tensor, k: torch.Tensor, log_decay: torch.Tensor, beta: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """All that does not need the state, for every chunk at once.

    Args:
        q, k, log_decay: ``[..., C, D]``, C a power of two.
        beta: ``[..., C, 1]``.

    Returns:
        ``(I + diag(beta) A)^-1 [..., C, C]``, ``B [..., C, C]``, and, both ``[..., C, D]``, the sums of log_decay from
        the chunk's start up to and with each step, and after each step up to the chunk's end.
    """
    size = q.shape[-2]
    # Everything is kept per block: [..., blocks, half, n]; blocks of one step to begin with.
    since_start = log_decay.unsqueeze(-2)
    to_end = torch.zeros_like(since_start)
    scores = (q * k).sum(-1)[..., None, None]
    inverse = torch.ones_like(scores)
    half = 1
    while half < size:
        q_right = torch.unflatten(q, -2, (-1, 2, half))[..., 1, :, :]
        k_left, k_right = torch.unflatten(k, -2, (-1, 2, half)).unbind(-3)
        beta_right = torch.unflatten(beta, -2, (-1, 2, half))[..., 1, :, :]
        start_left, start_right = torch.unflatten(since_start, -3, (-1, 2)).unbind(-3)
        end_left, end_right = torch.unflatten(to_end, -3, (-1, 2)).unbind(-3)
        inverse_left, inverse_right = torch.unflatten(inverse, -3, (-1, 2)).unbind(-3)
        scores_left, scores_right = torch.unflatten(scores, -3, (-1, 2)).unbind(-3)

        fade = start_right.exp()
        keys = (k_left * end_left.exp()).transpose(-1, -2)
        coupling = beta_right * ((k_right * fade) @ keys)
        inverse = _lower(inverse_left, -(inverse_right @ (coupling @ inverse_left)), inverse_right)
        scores = _lower(scores_left, (q_right * fade) @ keys, scores_right)
        since_start, to_end = (
            torch.cat((start_left, start_right + start_left[..., -1:, :]), -2),
            torch.cat((end_left + start_right[..., -1:, :], end_right), -2),
        )
        half *= 2
    return inverse.squeeze(-3), scores.squeeze(-3), since_start.squeeze(-3), to_end.squeeze(-3)


def _lower(left: torch.Tensor, below: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """The block lower triangular matrix ``[[left, 0], [below, right]]``."""
    return torch.cat((torch.cat((left, torch.zeros_like(below)), -1), torch.cat((below, right), -1)), -2)


def fla_reason(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why fla-core's ``chunk_kda`` cannot run prefill here, in words; None where it can."""
    if device.type != "cuda":
        return f"it needs a GPU, the device is {device}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"its activations are bfloat16 or float16, not {str(dtype).removeprefix('torch.')}"
    if importlib.util.find_spec("fla") is None:
        return "module fla is not installed (pip install 'fused-kda[fla]')"
    return None


def fla_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None,
    *,
    dtype: torch.dtype,
    bounded: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`delta_rule` by fla-core 0.6's ``chunk_kda`` on a GPU.

    Args:
        dtype: bfloat16 or float16, to which q, k and v are rounded (fla's kernels multiply in it); decay, beta and
            state stay fp32.
        bounded: log_decay is known to be >= -5, which lets fla use its faster intra-chunk kernel.
    """
    from fla.ops.kda import chunk_kda

    o, state = chunk_kda(
        q.to(dtype), k.to(dtype), v.to(dtype), log_decay, beta,
        scale=1.0, initial_state=initial_state, output_final_state=True, safe_gate=bounded, state_v_first=True,
    )  # fmt: skip
    return o.to(q.dtype), state
