# Triton's language, not Python's: no annotations, tuples grow by +, and an `if` on a constant picks code.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, assignment"
# ruff: noqa: RUF005, SIM108
"""Device functions that the Triton kernels share: the pieces of one decode step, for one (row, head).

Vectors over q, k, v channels or value rows are fp32 ``[D]``. A tile of the state is ``[rows, D / LANE_K, LANE_K]``:
few lanes share a state row, each with 16-byte pieces, and a sum over K is a sum inside a thread and then over those
lanes alone. What is broadcast over a tile is ``[1, D / LANE_K, LANE_K]``.

Kernels are compiled without contraction of a product and a sum into one instruction; where that is wanted it is written
``tl.fma``. So the bits of a result are those of the source, the same in each of its specialisations.
"""

import triton
import triton.language as tl

from ..contract import QK_NORM_EPS as _QK_NORM_EPS

QK_NORM_EPS = tl.constexpr(_QK_NORM_EPS)
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def rounded(values, dtype: tl.constexpr):
    """fp32 values in another dtype, to nearest, ties to even."""
    if INTERPRETED and dtype == tl.bfloat16:
        # The interpreter's conversion only drops the low half: bring the rounded value there first.
        bits = values.to(tl.uint32, bitcast=True)
        nearest = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).to(tl.float32, bitcast=True)
        values = tl.where(values == values, nearest, values)
    return values.to(dtype)


@triton.jit
def load_taps(window, mask, WIDTH: tl.constexpr, TAP_STRIDE: tl.constexpr):
    """The W - 1 history taps, oldest first, as stored; zero where masked. ``window``: addresses of tap 0."""
    taps = (tl.load(window, mask=mask, other=0.0),)
    for tap in tl.static_range(1, WIDTH - 1):
        taps = taps + (tl.load(window + tap * TAP_STRIDE, mask=mask, other=0.0),)
    return taps


@triton.jit
def store_window(window, taps, x, WIDTH: tl.constexpr, TAP_STRIDE: tl.constexpr):
    """Shift the window by one and append x, bit for bit."""
    for tap in tl.static_range(WIDTH - 2):
        tl.store(window + tap * TAP_STRIDE, taps[tap + 1])
    tl.store(window + (WIDTH - 2) * TAP_STRIDE, x)


@triton.jit
def load_weights(weight, WIDTH: tl.constexpr, WEIGHT_TAP: tl.constexpr):
    """The W conv weights in fp32, oldest tap first."""
    weights = (tl.load(weight).to(tl.float32),)
    for tap in tl.static_range(1, WIDTH):
        weights = weights + (tl.load(weight + tap * WEIGHT_TAP).to(tl.float32),)
    return weights


@triton.jit
def convolve(taps, x, weights, bias, WIDTH: tl.constexpr):
    """SiLU of the causal convolution at the new token."""
    total = tl.fma(weights[0], taps[0].to(tl.float32), bias)
    for tap in tl.static_range(1, WIDTH - 1):
        total = tl.fma(weights[tap], taps[tap].to(tl.float32), total)
    total = tl.fma(weights[WIDTH - 1], x.to(tl.float32), total)
    return total * tl.sigmoid(total)


@triton.jit
def softplus(z):
    """log(1 + exp(z)); finite and accurate for every finite z."""
    e = tl.exp(-tl.abs(z))
    one_plus = 1.0 + e
    # log1p by Kahan: what rounding took from 1 + e divides out again.
    lost = one_plus == 1.0
    log1p = tl.where(lost, e, tl.log(one_plus) * (e / tl.where(lost, 1.0, one_plus - 1.0)))
    return tl.maximum(z, 0.0) + log1p


@triton.jit
def decay_factor(raw_g, dt_bias, a_log, lower_bound, BOUNDED: tl.constexpr):
    """exp(log-decay), one value per K channel. ``a_log`` is a scalar."""
    z = raw_g + dt_bias
    a = tl.exp(a_log)
    if BOUNDED:
        log_decay = lower_bound * tl.sigmoid(a * z)
    else:
        log_decay = -a * softplus(z)
    return tl.exp(log_decay)


@triton.jit
def qk_products(q, k, scale):
    """``(q_norm, k_norm, kq)``: the factors that normalise q (with scale) and k, and k . q of the normalised.

    One reduction for all three sums, since each crosses the warps.
    """
    of_q, of_k = tl.split(tl.sum(tl.join(tl.join(q * q, k * q), tl.join(k * k, k * q)), axis=0))
    qq, kq = tl.split(of_q)
    kk, _ = tl.split(of_k)
    q_norm = tl.rsqrt(qq + QK_NORM_EPS) * scale
    k_norm = tl.rsqrt(kk + QK_NORM_EPS)
    return q_norm, k_norm, kq * q_norm * k_norm


@triton.jit
def tile_offsets(D: tl.constexpr, ROWS: tl.constexpr, LANE_K: tl.constexpr):
    """Element offsets ``[ROWS, D / LANE_K, LANE_K]`` of a tile inside a ``[D(V), D(K)]`` matrix."""
    return (
        tl.arange(0, ROWS)[:, None, None] * D
        + tl.arange(0, D // LANE_K)[None, :, None] * LANE_K
        + tl.arange(0, LANE_K)[None, None, :]
    )


@triton.jit
def over_tile(values, D: tl.constexpr, LANE_K: tl.constexpr):
    """``[D]`` over K channels, shaped for broadcasting over a tile."""
    return tl.reshape(values, (D // LANE_K, LANE_K))[None, :, :]


@triton.jit
def sum_over_k(tile, VECTOR: tl.constexpr):
    """``[rows]`` sums of a tile ``[rows, D / LANE_K, LANE_K]``, in an order that does not depend on LANE_K.

    First the VECTOR neighbours that one thread holds; then halves of what is left: in registers as long as there are
    several pieces, then between lanes, where exchanging halves is the compiler's own order.
    """
    ROWS: tl.constexpr = tile.shape[0]
    PIECES: tl.constexpr = tile.shape[1]
    LANES: tl.constexpr = tile.shape[2] // VECTOR
    sums = tl.sum(tl.reshape(tile, (ROWS, PIECES, LANES, VECTOR)), axis=3)
    return tl.sum(add_halves(sums, ROWS, PIECES, LANES), axis=1)


@triton.jit
def add_halves(sums, ROWS: tl.constexpr, PIECES: tl.constexpr, LANES: tl.constexpr):
    """``[ROWS, LANES]`` sums over the pieces of ``[ROWS, PIECES, LANES]``, halves added until one piece is left."""
    if PIECES == 1:
        result = tl.reshape(sums, (ROWS, LANES))
    else:
        half = tl.sum(tl.reshape(sums, (ROWS, 2, PIECES // 2, LANES)), axis=1)
        result = add_halves(half, ROWS, PIECES // 2, LANES)
    return result


@triton.jit
def advance_tile(tile, decay, k, q, v, q_norm, k_norm, kq, beta):
    """One tile of value rows through the delta rule: ``(o [rows], new state tile)``.

    With S the decayed state, one pass over it gives both of a row's sums, on q and k not yet normalised:
    ``u = S k``, ``o = S q + d (k . q)``, ``d = (v - u) beta``, ``S += d k^T``.
    """
    VECTOR: tl.constexpr = 128 // tile.dtype.primitive_bitwidth
    decayed = tile.to(tl.float32) * decay
    u = sum_over_k(decayed * k, VECTOR) * k_norm
    r = sum_over_k(decayed * q, VECTOR) * q_norm
    d = (v - u) * beta
    o = tl.fma(d, tl.broadcast_to(kq, d.shape), r)
    step = tl.broadcast_to((d * k_norm)[:, None, None], decayed.shape)
    return o, tl.fma(step, tl.broadcast_to(k, decayed.shape), decayed)


@triton.jit
def gated_norm(o, factor, norm_eps, D: tl.constexpr):
    """RMSNorm over a head's D values, then ``factor`` (norm weight times sigmoid of the output gate)."""
    return o * tl.rsqrt(tl.sum(o * o, axis=0) * (1.0 / D) + norm_eps) * factor


@triton.jit
def cut(values, COUNT: tl.constexpr):
    """A vector's COUNT equal parts, in order. COUNT is a power of two."""
    if COUNT == 1:
        parts = (values,)
    else:
        SIZE: tl.constexpr = values.shape[0] // 2
        low, high = tl.split(tl.permute(tl.reshape(values, (2, SIZE)), (1, 0)))
        parts = cut(low, COUNT // 2) + cut(high, COUNT // 2)
    return parts


@triton.jit
def joined(parts, COUNT: tl.constexpr):
    """The vector whose COUNT equal parts are given in order: the reverse of :func:`cut`."""
    if COUNT == 1:
        values = parts[0]
    else:
        low = joined(parts[: COUNT // 2], COUNT // 2)
        high = joined(parts[COUNT // 2 :], COUNT // 2)
        values = tl.reshape(tl.permute(tl.join(low, high), (1, 0)), (2 * low.shape[0],))
    return values
