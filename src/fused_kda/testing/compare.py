"""Tolerances that are derived, and comparisons that say where and by how much.

The budget for an element is the error that an independent low-precision evaluation of the same call makes against
float64, times :data:`SAFETY`, plus one rounding to the element's dtype. For a fused kernel the low-precision evaluation
is the reference in fp32; for the unfused chain it is the reference that rounds where the chain does (q, k, v after SiLU
and o before the norm, to the activation dtype). Errors are taken relative to the largest value of a (row, head), since
the sums inside mix all of its channels.

Of values at the ends of fp32's range the contract promises less: a head whose exact intermediate values, or sums of
their magnitudes in any order, exceed :data:`RANGE` may come out as anything, but no other head, row or slot may change
for it, and the window still moves bit for bit. At the other end a kernel may take a product that is below fp32's normal
numbers for zero: what that can cost, times what multiplies it afterwards, is added to the budget. See :func:`limits`.
And a decay far below one is exp of a large number, which turns a last bit of that number into many of its own: the
functions inside the gate are granted the errors that GPUs document, see :func:`_gate_slack`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..contract import QK_NORM_EPS, DecodeProblem, Tensors, decode_problem
from ..kernels.reference import decode_step
from .problems import Call

#: One call's error is a sample of what another order of the same sums may make, not a bound on it.
SAFETY = 4.0

#: Far enough below fp32's largest value (2**128) for the rounding of sums, in whichever order, not to matter.
RANGE = 2.0**120

#: fp32's smallest normal number.
NORMAL = 2.0**-126

#: Unit roundoff: half the distance between neighbours, relative to the smaller one.
ROUNDOFF = {
    torch.bfloat16: 2.0**-8,
    torch.float16: 2.0**-11,
    torch.float32: 2.0**-24,
    torch.float64: 2.0**-53,
}


class Mismatch(AssertionError):
    """A result beyond its budget; the text says which, where, and both values."""


@dataclass(frozen=True, slots=True)
class Expected:
    """What one call must leave behind, for its live rows in ascending order.

    Attributes:
        out, out_budget: float64 ``[N, H, D]`` and the allowed absolute error of each element.
        state, state_budget: float64 ``[N, H, D, D]`` likewise.
        window: ``[N, 3P, W-1]`` in the activation dtype, exact.
        judged: bool ``[N, H]``: the heads whose out and state are compared.
    """

    out: torch.Tensor
    out_budget: torch.Tensor
    state: torch.Tensor
    state_budget: torch.Tensor
    window: torch.Tensor
    judged: torch.Tensor


def expected(call: Call, *, chain: bool = False, extreme: bool = False) -> Expected:
    """Evaluate a call in float64 and derive its budgets. The call's tensors are not touched.

    Args:
        call: drawn, not yet run.
        chain: whether the backend rounds between launches as the unfused chain does.
        extreme: judge only the heads that fp32 can hold, and allow for what it may lose to underflow (:func:`limits`)
            and to the functions inside the gate. Without it all heads are judged, by the reference's errors alone.
    """
    dtype = call.arguments["x"].dtype
    state_dtype = call.arguments["state"].dtype
    exact_out, exact_state, window = _evaluate(call, torch.float64, None)
    low = torch.float64 if dtype == torch.float64 else torch.float32
    low_out, low_state, _ = _evaluate(call, low, dtype if chain else None)
    bounds = limits(call) if extreme else None
    shaken_out, shaken_state = exact_out, exact_state
    if extreme:
        shaken_out, shaken_state, _ = _evaluate(call, torch.float64, None, ROUNDOFF[low])
    judged = torch.ones(exact_out.shape[:2], dtype=torch.bool, device=window.device) if bounds is None else bounds.fits
    exact_out, low_out = _only(judged, exact_out), _only(judged, low_out)
    exact_state, low_state = _only(judged, exact_state), _only(judged, low_state)
    out_slack = (_only(judged, shaken_out) - exact_out).abs().amax(-1, keepdim=True)
    state_slack = (_only(judged, shaken_state) - exact_state).abs()
    out_budget = budget(exact_out, low_out.double(), (-1,), dtype) + out_slack
    state_budget = budget(exact_state, low_state.double(), (-2, -1), state_dtype) + state_slack
    if bounds is not None:
        out_budget += _only(judged, bounds.out_loss)
        state_budget += _only(judged, bounds.state_loss).view(*judged.shape, 1, 1)
    return Expected(
        out=exact_out,
        out_budget=out_budget,
        state=exact_state,
        state_budget=state_budget,
        window=window,
        judged=judged,
    )


def _only(judged: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """``[N, H, ...]`` with zeros in the heads that are not judged."""
    return torch.where(judged.view(*judged.shape, *[1] * (values.ndim - 2)), values, torch.zeros_like(values))


def check_call(call: Call, out: torch.Tensor, wanted: Expected) -> None:
    """Compare a call that has run with what was expected of it: out, null rows, window, state.

    Raises:
        Mismatch: naming the first that is off.
    """
    batch, heads, dim = call.problem.batch, call.problem.spec.heads, call.problem.spec.head_dim
    rows = out.reshape(batch, heads, dim)
    live, slots = list(call.live), list(call.slots)
    null = [row for row in range(batch) if row not in set(live)]
    if bool((rows[null] != 0).any()):
        raise Mismatch(f"out: null rows {null} are not exactly zero")
    check_equal("window", call.arguments["conv_state"][slots], wanted.window)
    check_close("out", _only(wanted.judged, rows[live]), wanted.out, wanted.out_budget)
    state = _only(wanted.judged, call.arguments["state"][slots])
    check_close("state", state, wanted.state, wanted.state_budget)


def check_close(name: str, got: torch.Tensor, want: torch.Tensor, budget: torch.Tensor) -> None:
    """Raise :class:`Mismatch` unless ``|got - want| <= budget`` everywhere; NaN never passes."""
    error = (got.double() - want.double()).abs()
    bad = ~(error <= budget)
    if not bool(bad.any()):
        return
    excess = torch.where(bad, (error / budget.clamp_min(1e-300)).nan_to_num(nan=torch.inf, posinf=torch.inf), 0.0)
    worst = tuple(int(i) for i in torch.unravel_index(excess.argmax(), excess.shape))
    raise Mismatch(
        f"{name}: {int(bad.sum())} of {bad.numel()} elements beyond the budget, {int(got.isnan().sum())} NaN; worst at "
        f"{worst}: got {got[worst].item():.9g}, want {want[worst].item():.9g}, budget {budget[worst].item():.3g}"
    )


def check_equal(name: str, got: torch.Tensor, want: torch.Tensor) -> None:
    """Raise :class:`Mismatch` unless both tensors have the same bits (a NaN equals the same NaN)."""
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[got.itemsize]
    if got.shape != want.shape or got.dtype != want.dtype:
        raise Mismatch(f"{name}: got {got.dtype} {list(got.shape)}, want {want.dtype} {list(want.shape)}")
    different = got.contiguous().view(whole) != want.contiguous().view(whole)
    if bool(different.any()):
        first = tuple(int(i) for i in different.nonzero()[0])
        raise Mismatch(
            f"{name}: {int(different.sum())} of {different.numel()} elements differ in their bits; first at {first}: "
            f"got {got[first].item():.9g}, want {want[first].item():.9g}"
        )


def budget(exact: torch.Tensor, low: torch.Tensor, over: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Allowed absolute error per element, as the module says.

    Args:
        exact: float64 result.
        low: the same by an independent low-precision evaluation, in float64.
        over: dimensions whose largest value an error is relative to.
        dtype: to which the result under test is rounded.
    """
    scale = exact.abs().amax(over, keepdim=True)
    error = (low - exact).abs().amax(over, keepdim=True)
    relative = torch.where(scale > 0, error / scale.clamp_min(1e-300), torch.zeros_like(scale))
    worst = relative.max() if relative.numel() else torch.zeros((), dtype=exact.dtype, device=exact.device)
    computed = SAFETY * torch.maximum(worst * scale, error)
    smallest = torch.finfo(dtype).tiny
    return computed + ROUNDOFF[dtype] * (exact.abs() + computed) + smallest


@dataclass(frozen=True, slots=True)
class Limits:
    """What fp32 can hold of one call, for its live rows in ascending order.

    Attributes:
        fits: bool ``[N, H]``: whether all that is computed on the way is below :data:`RANGE`, in any order of the sums.
        state_loss: float64 ``[N, H]``: what underflow may take from an element of the state.
        out_loss: float64 ``[N, H, D]``: and from one of the output.
    """

    fits: torch.Tensor
    state_loss: torch.Tensor
    out_loss: torch.Tensor


def limits(call: Call) -> Limits:
    """Bound the magnitudes of a call's intermediate values, in float64.

    They are the convolution's terms, the squares of q and k, both dots before and after q and k are normalised (a
    backend may do either), the update before it meets k, the new state, the squares of o; o itself, if it is the
    output, in the activation dtype. Decay is taken as 1. A head with inputs that are not finite does not fit.

    Underflow: decay times the state, (delta times k's norm) times k, products inside the dots before q's norm.
    """
    problem, t, _ = _compact(call, torch.float64)
    spec = problem.spec
    heads, dim, width = spec.heads, spec.head_dim, spec.conv_width
    started = torch.ones(problem.batch, dtype=torch.bool, device=problem.device)
    if t.has_initial_state is not None:
        started = t.has_initial_state
    plane, tap, channel = spec.weight_strides
    weight = torch.as_strided(t.weight, (3, heads * dim, width), (plane, channel, tap)).reshape(3 * heads * dim, width)
    history = torch.where(started.view(-1, 1, 1), t.conv_state, 0.0)
    terms = weight * torch.cat((history, t.x.unsqueeze(-1)), dim=-1)
    bias = torch.zeros_like(terms[..., 0]) if t.bias is None else t.bias.view(1, -1).expand_as(terms[..., 0])

    def by_head(channels: torch.Tensor) -> torch.Tensor:
        return channels.view(-1, 3, heads, dim)

    total = terms.sum(-1) + bias
    q, k, v = by_head(total * torch.sigmoid(total)).abs().unbind(1)
    q_norm = torch.rsqrt((q * q).sum(-1, keepdim=True) + QK_NORM_EPS) * abs(problem.scale)
    k_norm = torch.rsqrt((k * k).sum(-1, keepdim=True) + QK_NORM_EPS)
    unit_q, unit_k = q * q_norm, k * k_norm
    state = torch.where(started.view(-1, 1, 1, 1), t.state, 0.0).abs()

    def dot(vector: torch.Tensor) -> torch.Tensor:
        return (state @ vector.unsqueeze(-1)).squeeze(-1)

    delta = v + dot(unit_k)
    o = dot(unit_q) + delta * (unit_q * unit_k).sum(-1, keepdim=True)
    largest_state = state.amax((-2, -1))
    largest = (
        by_head(terms.abs().sum(-1) + bias.abs()).amax((1, 3)),
        (q * q).sum(-1), (k * k).sum(-1), (q * k).sum(-1), dot(q).amax(-1), dot(k).amax(-1),
        (delta * k_norm).amax(-1), largest_state + delta.amax(-1) * unit_k.amax(-1), (o * o).sum(-1),
    )  # fmt: skip
    fits = torch.stack(largest).amax(0) < RANGE  # False for NaN
    if t.norm_weight is None:
        fits &= o.amax(-1) < torch.finfo(call.arguments["x"].dtype).max / 2
    fits &= t.raw_g.isfinite().all(-1) & t.raw_beta.isfinite()
    gain = torch.ones_like(o)
    if t.norm_weight is not None and t.output_gate is not None:
        fits &= t.output_gate.isfinite().all(-1)
        gain = t.norm_weight.view(-1).abs() * torch.sigmoid(t.output_gate) * problem.norm_eps**-0.5
    lost = largest_state.unsqueeze(-1) * unit_q.sum(-1, keepdim=True) + dim * q_norm
    return Limits(fits, NORMAL * (largest_state + k.amax(-1)), NORMAL * lost * gain)


def _evaluate(
    call: Call, compute: torch.dtype, intermediate: torch.dtype | None, slack: float | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """out, state and window of the live rows, on compact pools, unrounded but for ``intermediate``.

    With ``slack``, a unit roundoff, the gate is off by what its functions may be off.
    """
    problem, tensors, moved = _compact(call, compute)
    if slack is not None:
        tensors = tensors._replace(raw_g=tensors.raw_g + slack * _gate_slack(problem, tensors))
    decode_step(problem, tensors, compute, intermediate_dtype=intermediate)
    return tensors.out, tensors.state, moved


def _gate_slack(problem: DecodeProblem, tensors: Tensors) -> torch.Tensor:
    """The errors of exp and log inside the gate as a change of raw_g ``[N, H, D]``, in units of the roundoff.

    An exp that is a power of two of a rounded product is off by |y| for exp(y), and GPUs document two units in the last
    place, four roundoffs, for each of exp and log besides. The log-decay -exp(A_log) softplus(z) then is off, relative
    to itself, by |A_log| + |z| + 8 (softplus is an exp where z is negative); sigmoid's argument exp(A_log) z by
    |A_log| + 8.
    """
    a_log = tensors.A_log.view(-1, 1).abs()
    a_log = torch.where(a_log.isfinite(), a_log, 0.0)
    z = tensors.raw_g + tensors.dt_bias.view(problem.spec.heads, problem.spec.head_dim)
    if problem.lower_bound is not None:
        return (a_log + 8.0) * z
    return (a_log + z.abs() + 8.0) * torch.nn.functional.softplus(z) / torch.sigmoid(z)


def _dense(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A copy with dense strides, which ``contiguous()`` does not give a tensor without elements."""
    return torch.empty(values.shape, dtype=dtype, device=values.device).copy_(values)


def _compact(call: Call, compute: torch.dtype) -> tuple[DecodeProblem, Tensors, torch.Tensor]:
    """The live rows as a call of their own on copies in another dtype, and the windows that it must leave."""
    given = call.arguments
    live, slots = list(call.live), list(call.slots)
    heads, dim = given["state"].shape[1:3]
    param = torch.float64 if compute == torch.float64 else torch.float32

    def rows(name: str, *inner: int) -> torch.Tensor | None:
        tensor = given[name]
        return None if tensor is None else tensor.reshape(len_rows, *inner)[live].to(compute)

    def whole(name: str, dtype: torch.dtype) -> torch.Tensor | None:
        tensor = given[name]
        return None if tensor is None else tensor.to(dtype)

    len_rows = given["x"].shape[0]
    initial = given["has_initial_state"]
    window = given["conv_state"][slots]
    arguments = {
        **given,
        "x": rows("x", 3 * heads * dim),
        "weight": whole("weight", compute),
        "bias": whole("bias", compute),
        "conv_state": _dense(window, compute),
        "raw_g": rows("raw_g", heads, dim),
        "raw_beta": rows("raw_beta", heads),
        "A_log": whole("A_log", param),
        "dt_bias": whole("dt_bias", param),
        "state_indices": torch.arange(len(live), device=window.device),
        "state": _dense(given["state"][slots], compute),
        "out": torch.empty(len(live), heads, dim, dtype=compute, device=window.device),
        "output_gate": rows("output_gate", heads, dim),
        "norm_weight": whole("norm_weight", compute),
        "has_initial_state": None if initial is None else initial[live],
        "null_slot": -1,
    }
    problem = decode_problem(**arguments)
    tensors = Tensors(**{name: arguments[name] for name in Tensors._fields})
    if initial is not None:
        window = torch.where(initial[live].view(-1, 1, 1), window, torch.zeros_like(window))
    moved = torch.cat((window[..., 1:], given["x"][live].unsqueeze(-1)), dim=-1)
    return problem, tensors, moved
