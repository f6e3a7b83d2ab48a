"""The gated delta rule over whole sequences, chunk by chunk: what prefill and training run.

One step, as in :mod:`fused_kda.kernels.reference`, with decay ``a_t = exp(g_t)``, one value per K channel::

    S = S * a_t;    d_t = beta_t * (v_t - S k_t);    S = S + d_t k_t^T;    o_t = S q_t

Let ``a(j, i)`` be the product of the decays of steps j+1 .. i. With S the state before a chunk, the chunk's steps obey

    d_i = beta_i * (v_i - S (k_i a(0,i)) - sum_{j<i} A_ij d_j)            A_ij = sum_c k_i k_j a(j,i)
    o_i = S (q_i a(0,i)) + sum_{j<=i} B_ij d_j                            B_ij = sum_c q_i k_j a(j,i)

so all d of a chunk follow from one inverse of the unit lower triangular ``I + diag(beta) A``, and the state is touched
once per chunk instead of once per step (the UT transform of DeltaNet and Kimi Linear).

``a(j,i)`` differs by channel, so A and B are no plain products, and splitting it as ``a(0,i) / a(0,j)`` overflows
under strong decay. Here blocks are joined two by two, from single steps up to the chunk: where i lies right and j left
of a block's middle m, ``a(j,i) = a(j,m) a(m,i)``, so that corner of A is a product of two matrices. Each block keeps
its keys scaled to its end, its keys and queries scaled to its start, and its total decay; joining two blocks takes one
multiplication of each. Nothing is ever divided and no exponent is positive: any decay is safe, however strong.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect

import torch

#: Steps per chunk, a power of two. On a CPU 16, 32 and 64 are within a fifth of each other.
CHUNK = 32


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

    def cut(*parts: torch.Tensor) -> torch.Tensor:
        """``[B, T, H, n]`` to ``[B * H, chunks, chunk, n]``, zeros after the last step; parts side by side."""
        width = parts[0].shape[-1]
        whole = q.new_zeros(batch, heads, count * chunk, len(parts) * width)
        for index, part in enumerate(parts):
            whole[:, :, :steps, index * width : (index + 1) * width] = part.transpose(1, 2)
        return whole.view(batch * heads, count, chunk, -1)

    beta = cut(beta.unsqueeze(-1))
    inverse, scores, kq_in, k_out, total = _within_chunks(cut(k, q), cut(log_decay).exp(), beta)
    k_in, q_in = kq_in.chunk(2, -1)
    inverse = inverse * beta.transpose(-1, -2)
    fresh = inverse @ cut(v)
    reads = inverse @ k_in

    state = q.new_zeros(batch * heads, dim, dim) if initial_state is None else initial_state.flatten(0, 1)
    pieces: list[torch.Tensor] = []
    for n in range(count):
        columns = state.transpose(-1, -2)
        delta = torch.baddbmm(fresh[:, n], reads[:, n], columns, alpha=-1)
        pieces.append(torch.baddbmm(q_in[:, n] @ columns, scores[:, n], delta))
        state = torch.baddbmm(state * total[:, n], delta.transpose(-1, -2), k_out[:, n])
    o = torch.cat(pieces, 1).view(batch, heads, count * chunk, dim)[:, :, :steps].transpose(1, 2)
    return o, state.view(batch, heads, dim, dim)


def _within_chunks(
    kq: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """All that does not need the state, for every chunk at once.

    Args:
        kq: keys and queries side by side, ``[N, M, C, 2D]`` for N heads of M chunks of C steps, C a power of two.
            Overwritten where no gradient is asked for.
        decay: ``[N, M, C, D]``, in [0, 1].
        beta: ``[N, M, C, 1]``.

    Returns:
        ``(I + diag(beta) A)^-1 [N, M, C, C]``; ``B [N, M, C, C]``; keys and queries times the decay from the chunk's
        start, their own step included, ``[N, M, C, 2D]``; keys times the decay after their step up to the chunk's end,
        ``[N, M, C, D]``; the chunk's decay ``[N, M, 1, D]``.
    """
    in_place = not (torch.is_grad_enabled() and (kq.requires_grad or decay.requires_grad))
    dim = decay.shape[-1]
    keys, queries = kq.chunk(2, -1)
    scores = (keys * queries).sum(-1)[..., None, None]  # [N, M, blocks, block, block], like inverse
    inverse = torch.ones_like(scores)
    total = decay.unsqueeze(-2)  # [N, M, blocks, 1, D]
    k_out = keys.clone()
    by_kind = torch.unflatten(kq, -1, (2, dim))
    own = decay.unsqueeze(-2)
    kq_in = (by_kind.mul_(own) if in_place else by_kind * own).flatten(-2)
    half = 1
    while half < kq.shape[2]:
        total_left, total_right = _pairs(total)
        inverse_left, inverse_right = _pairs(inverse)
        scores_left, scores_right = _pairs(scores)
        beta_right = torch.unflatten(beta, 2, (-1, 2, half))[:, :, :, 1]
        in_blocks = torch.unflatten(kq_in, 2, (-1, 2, half))
        out_blocks = torch.unflatten(k_out, 2, (-1, 2, half))

        corner = torch.unflatten(in_blocks[:, :, :, 1], -1, (2, dim)).flatten(-3, -2)
        corner = corner @ out_blocks[:, :, :, 0].transpose(-1, -2)
        coupling, below = torch.unflatten(corner, -2, (half, 2)).unbind(-2)
        inverse = _lower(inverse_left, -(inverse_right @ ((beta_right * coupling) @ inverse_left)), inverse_right)
        scores = _lower(scores_left, below, scores_right)

        kq_in = _scaled(in_blocks, 1, torch.cat((total_left, total_left), -1), in_place).flatten(2, 4)
        k_out = _scaled(out_blocks, 0, total_right, in_place).flatten(2, 4)
        total = total_left * total_right
        half *= 2
    return inverse.squeeze(2), scores.squeeze(2), kq_in, k_out, total.squeeze(2)


def _pairs(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Left and right partners of neighbouring blocks, ``[N, M, blocks, r, c]`` to two of half as many."""
    left, right = torch.unflatten(blocks, 2, (-1, 2)).unbind(3)
    return left, right


def _lower(left: torch.Tensor, below: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """The block lower triangular matrix ``[[left, 0], [below, right]]``."""
    return torch.cat((torch.cat((left, torch.zeros_like(below)), -1), torch.cat((below, right), -1)), -2)


def _scaled(blocks: torch.Tensor, side: int, factor: torch.Tensor, in_place: bool) -> torch.Tensor:
    """``[N, M, blocks, 2, half, n]`` with one side (0 left, 1 right) of every block times ``[N, M, blocks, 1, n]``."""
    if in_place:
        blocks.select(3, side).mul_(factor)
        return blocks
    sides = list(blocks.unbind(3))
    sides[side] = sides[side] * factor
    return torch.stack(sides, 3)


def fla_reason(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why fla-core's ``chunk_kda`` cannot run prefill here, in words; None where it can."""
    if device.type != "cuda":
        return f"it needs a GPU, the device is {device}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"its activations are bfloat16 or float16, not {str(dtype).removeprefix('torch.')}"
    return _fla_install_reason()


@functools.cache
def _fla_install_reason() -> str | None:
    if importlib.util.find_spec("fla") is None:
        return "module fla is not installed (pip install 'fused-kda[fla]')"
    from fla.ops.kda import chunk_kda

    # Older versions take any keyword and would return the state transposed.
    if "state_v_first" not in inspect.signature(chunk_kda).parameters:
        return "fla-core is too old: chunk_kda has no state_v_first (0.6 has)"
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
