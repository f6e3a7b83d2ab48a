# Triton's language, not Python's: no annotations, tuples grow by +, and an `if` on a constant picks code.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, assignment"
"""The three kernels of the unfused chain; each reads what the one before has written to memory in bf16.

1. ``convolve_row``: conv update with the window shift, one program per (row, section q | k | v, head).
2. ``recur``: gate, L2 norm, beta and delta rule, one program per (row, head, tile of BLOCK_V value rows).
3. ``normalise``: gated RMSNorm, one program per (row, head).

A null row is skipped by the first, zeroed by the second and the third.
"""

import triton
import triton.language as tl

from ..device import (
    advance_tile,
    convolve,
    decay_factor,
    gated_norm,
    load_taps,
    load_weights,
    over_tile,
    qk_products,
    rounded,
    store_window,
    tile_offsets,
)


@triton.jit
def convolve_row(
    x, weight, bias, conv_state, state_indices, has_initial_state, qkv,
    slots, null_slot, conv_pitch, x_row, index_stride, initial_stride,
    H: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, CHANNEL_STRIDE: tl.constexpr, TAP_STRIDE: tl.constexpr,
    CONV_UNIT: tl.constexpr, WEIGHT_PLANE: tl.constexpr, WEIGHT_TAP: tl.constexpr, WEIGHT_CHANNEL: tl.constexpr,
):  # fmt: skip
    """Write SiLU of the convolution to ``qkv [B, 3P]`` and shift the window. Grid ``[B * 3H]``."""
    program = tl.program_id(0)
    row = (program // (3 * H)).to(tl.int64)
    section = program % (3 * H) // H
    inner = program % H * D + tl.arange(0, D)
    channel = section * (H * D) + inner
    slot = tl.load(state_indices + row * index_stride).to(tl.int64)
    if (slot <= null_slot) | (slot >= slots):
        return
    started = True
    if has_initial_state is not None:
        started = tl.load(has_initial_state + row * initial_stride) != 0
    window = conv_state + slot * conv_pitch * CONV_UNIT + channel * CHANNEL_STRIDE
    taps = load_taps(window, started, WIDTH, TAP_STRIDE)
    weights = load_weights(weight + section * WEIGHT_PLANE + inner * WEIGHT_CHANNEL, WIDTH, WEIGHT_TAP)
    offset = tl.zeros((D,), tl.float32)
    if bias is not None:
        offset = tl.load(bias + channel).to(tl.float32)
    token = tl.load(x + row * x_row + channel)
    result = convolve(taps, token, weights, offset, WIDTH)
    tl.store(qkv + row * (3 * H * D) + channel, rounded(result, qkv.dtype.element_ty))
    # Several threads may have loaded a channel's taps: all have done so before one of them stores the new window.
    tl.debug_barrier()
    store_window(window, taps, token, WIDTH, TAP_STRIDE)


@triton.jit
def recur(
    qkv, raw_g, raw_beta, A_log, dt_bias, state_indices, state, has_initial_state, o,
    slots, null_slot, state_pitch, g_row, beta_row, o_row, index_stride, initial_stride, lower_bound, scale,
    H: tl.constexpr, D: tl.constexpr, STATE_UNIT: tl.constexpr, BOUNDED: tl.constexpr, BLOCK_V: tl.constexpr,
    LANE_K: tl.constexpr,
):  # fmt: skip
    """Advance the state and write ``o`` (row stride ``o_row``). Grid ``[B * H * D / BLOCK_V]``."""
    TILES: tl.constexpr = D // BLOCK_V
    program = tl.program_id(0)
    row = (program // (H * TILES)).to(tl.int64)
    head = program // TILES % H
    first = program % TILES * BLOCK_V
    rows = tl.arange(0, BLOCK_V)
    channel = head * D + tl.arange(0, D)
    result = o + row * o_row + head * D + first + rows
    slot = tl.load(state_indices + row * index_stride).to(tl.int64)
    if (slot <= null_slot) | (slot >= slots):
        tl.store(result, tl.zeros((BLOCK_V,), o.dtype.element_ty))
        return
    started = True
    if has_initial_state is not None:
        started = tl.load(has_initial_state + row * initial_stride) != 0

    inputs = qkv + row * (3 * H * D)
    q = tl.load(inputs + channel).to(tl.float32)
    k = tl.load(inputs + H * D + channel).to(tl.float32)
    v = tl.load(inputs + 2 * H * D + head * D + first + rows).to(tl.float32)
    g = tl.load(raw_g + row * g_row + channel).to(tl.float32)
    beta = tl.sigmoid(tl.load(raw_beta + row * beta_row + head).to(tl.float32))
    a_log = tl.load(A_log + head)
    z_bias = tl.load(dt_bias + channel)
    matrix = state + slot * state_pitch * STATE_UNIT + head * (D * D) + first * D + tile_offsets(D, BLOCK_V, LANE_K)
    tile = tl.load(matrix, mask=started, other=0.0)

    decay = over_tile(decay_factor(g, z_bias, a_log, lower_bound, BOUNDED), D, LANE_K)
    q_norm, k_norm, kq = qk_products(q, k, scale)
    y, updated = advance_tile(
        tile, decay, over_tile(k, D, LANE_K), over_tile(q, D, LANE_K), v, q_norm, k_norm, kq, beta
    )
    tl.store(matrix, rounded(updated, state.dtype.element_ty))
    tl.store(result, rounded(y, o.dtype.element_ty))


@triton.jit
def normalise(
    o, output_gate, norm_weight, state_indices, out,
    slots, null_slot, gate_row, out_row, index_stride, norm_eps,
    H: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Gated RMSNorm of ``o [B, P]`` into ``out``. Grid ``[B * H]``."""
    program = tl.program_id(0)
    row = (program // H).to(tl.int64)
    c = tl.arange(0, D)
    channel = program % H * D + c
    result = out + row * out_row + channel
    slot = tl.load(state_indices + row * index_stride).to(tl.int64)
    if (slot <= null_slot) | (slot >= slots):
        tl.store(result, tl.zeros((D,), out.dtype.element_ty))
        return
    values = tl.load(o + row * (H * D) + channel).to(tl.float32)
    gate = tl.load(output_gate + row * gate_row + channel).to(tl.float32)
    factor = tl.load(norm_weight + c).to(tl.float32) * tl.sigmoid(gate)
    tl.store(result, rounded(gated_norm(values, factor, norm_eps, D), out.dtype.element_ty))
