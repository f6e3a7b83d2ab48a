# Triton's language, not Python's: no annotations, tuples grow by +, and an `if` on a constant picks code.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, assignment"
# ruff: noqa: RUF005
"""The whole decode step as one Triton kernel, the same source for NVIDIA and AMD.

One program owns one (row, head); the grid is ``[B * H]``, heads fastest. The state's value rows go by in tiles of
BLOCK_V, of which AHEAD are in flight before the first is used. Everything stays in fp32 from the convolution to y,
which is rounded once; the gated norm needs the whole row, so the tiles' outputs are kept in registers until the last.

The state is asked for before the small inputs. That pays while the kernel still waits for the one ahead of it on the
stream, and costs nothing where it does not.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..device import (
    advance_tile,
    convolve,
    cut,
    decay_factor,
    gated_norm,
    joined,
    load_taps,
    load_weights,
    over_tile,
    qk_products,
    rounded,
    store_window,
    tile_offsets,
)


@triton.jit
def load_tiles(matrix, mask, STRIDE: tl.constexpr, COUNT: tl.constexpr):
    """The first COUNT tiles of the state, as stored; zero where masked."""
    tiles = (tl.load(matrix, mask=mask, other=0.0),)
    for tile in tl.static_range(1, COUNT):
        tiles = tiles + (tl.load(matrix + tile * STRIDE, mask=mask, other=0.0),)
    return tiles


@triton.jit
def decode(
    x, weight, bias, conv_state, raw_g, raw_beta, A_log, dt_bias, state_indices, state, out, output_gate, norm_weight,
    has_initial_state, slots, null_slot, conv_pitch, state_pitch, x_row, g_row, beta_row, gate_row, out_row,
    index_stride, initial_stride, lower_bound, norm_eps, scale,
    H: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, CHANNEL_STRIDE: tl.constexpr, TAP_STRIDE: tl.constexpr,
    CONV_UNIT: tl.constexpr, STATE_UNIT: tl.constexpr, WEIGHT_PLANE: tl.constexpr, WEIGHT_TAP: tl.constexpr,
    WEIGHT_CHANNEL: tl.constexpr, BOUNDED: tl.constexpr, PDL: tl.constexpr, PREFETCH: tl.constexpr,
    BLOCK_V: tl.constexpr, LANE_K: tl.constexpr, AHEAD: tl.constexpr, FENCED: tl.constexpr,
):  # fmt: skip
    """Tensors and strides as in :class:`fused_kda.contract.DecodeProblem`; an absent tensor is a constexpr None.

    Pitches come in units of CONV_UNIT and STATE_UNIT elements: 16 bytes where every slot is so aligned, which is how
    the compiler learns of it.
    """
    TILES: tl.constexpr = D // BLOCK_V
    SECTION: tl.constexpr = H * D * CHANNEL_STRIDE
    program = tl.program_id(0)
    row = (program // H).to(tl.int64)
    head = program % H
    c = tl.arange(0, D)
    channel = head * D + c
    result = out + row * out_row + channel
    if PDL and not PREFETCH:
        gdc_wait()

    slot = tl.load(state_indices + row * index_stride).to(tl.int64)
    if (slot <= null_slot) | (slot >= slots):
        if PDL and PREFETCH:
            gdc_wait()
        tl.store(result, tl.zeros((D,), out.dtype.element_ty))
        return

    started = True
    if has_initial_state is not None:
        started = tl.load(has_initial_state + row * initial_stride) != 0
    matrix = state + slot * state_pitch * STATE_UNIT + head * (D * D) + tile_offsets(D, BLOCK_V, LANE_K)
    window = conv_state + slot * conv_pitch * CONV_UNIT + channel * CHANNEL_STRIDE

    # What the kernel ahead does not write (with PREFETCH) comes before the wait, all else after it.
    tiles = load_tiles(matrix, started, BLOCK_V * D, AHEAD)
    q_taps = load_taps(window, started, WIDTH, TAP_STRIDE)
    k_taps = load_taps(window + SECTION, started, WIDTH, TAP_STRIDE)
    v_taps = load_taps(window + 2 * SECTION, started, WIDTH, TAP_STRIDE)
    weights = weight + channel * WEIGHT_CHANNEL
    q_weights = load_weights(weights, WIDTH, WEIGHT_TAP)
    k_weights = load_weights(weights + WEIGHT_PLANE, WIDTH, WEIGHT_TAP)
    v_weights = load_weights(weights + 2 * WEIGHT_PLANE, WIDTH, WEIGHT_TAP)
    q_bias = tl.zeros((D,), tl.float32)
    k_bias = q_bias
    v_bias = q_bias
    if bias is not None:
        q_bias = tl.load(bias + channel).to(tl.float32)
        k_bias = tl.load(bias + H * D + channel).to(tl.float32)
        v_bias = tl.load(bias + 2 * H * D + channel).to(tl.float32)
    a_log = tl.load(A_log + head)
    z_bias = tl.load(dt_bias + channel)
    if norm_weight is not None:
        factor = tl.load(norm_weight + c).to(tl.float32)
    if PDL and PREFETCH:
        gdc_wait()
    if PDL:
        gdc_launch_dependents()

    token = x + row * x_row + channel
    q_x = tl.load(token)
    k_x = tl.load(token + H * D)
    v_x = tl.load(token + 2 * H * D)
    g = tl.load(raw_g + row * g_row + channel).to(tl.float32)
    beta = tl.sigmoid(tl.load(raw_beta + row * beta_row + head).to(tl.float32))
    if norm_weight is not None:
        factor = factor * tl.sigmoid(tl.load(output_gate + row * gate_row + channel).to(tl.float32))

    q = convolve(q_taps, q_x, q_weights, q_bias, WIDTH)
    k = convolve(k_taps, k_x, k_weights, k_bias, WIDTH)
    v = cut(convolve(v_taps, v_x, v_weights, v_bias, WIDTH), TILES)
    decay = over_tile(decay_factor(g, z_bias, a_log, lower_bound, BOUNDED), D, LANE_K)
    q_norm, k_norm, kq = qk_products(q, k, scale)
    q = over_tile(q, D, LANE_K)
    k = over_tile(k, D, LANE_K)

    outputs = ()
    for t in tl.static_range(TILES):
        o, updated = advance_tile(tiles[t], decay, k, q, v[t], q_norm, k_norm, kq, beta)
        if t + AHEAD < TILES:
            tiles = tiles + (tl.load(matrix + (t + AHEAD) * (BLOCK_V * D), mask=started, other=0.0),)
        tl.store(matrix + t * (BLOCK_V * D), rounded(updated, state.dtype.element_ty))
        outputs = outputs + (o,)
        if FENCED:
            tl.debug_barrier()

    # Several threads may have loaded a channel's taps: all have done so before one of them stores the new window.
    tl.debug_barrier()
    store_window(window, q_taps, q_x, WIDTH, TAP_STRIDE)
    store_window(window + SECTION, k_taps, k_x, WIDTH, TAP_STRIDE)
    store_window(window + 2 * SECTION, v_taps, v_x, WIDTH, TAP_STRIDE)

    # Gathered, o has one element a thread, whatever the tiles: the sum of its squares then has one order.
    y = tl.gather(joined(outputs, TILES), c, axis=0)
    if norm_weight is not None:
        y = gated_norm(y, factor, norm_eps, D)
    tl.store(result, rounded(y, out.dtype.element_ty))
