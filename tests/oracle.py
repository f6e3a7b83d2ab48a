"""A second oracle, for tests alone: the contract's formulas one scalar at a time, each with a bound on its error.

It shares nothing with ``kernels/reference.py``: no vector operation, no stride logic (tensors are read by their logical
shapes), and the output by the other algebra: both sums are taken over the decayed state, before the update.

Values are float64. Beside each one runs a first-order bound on the rounding error that an evaluation at unit roundoff u
may make, in units of u (Wilkinson's running error analysis); sums are bounded for every order of their terms.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fused_kda.testing.compare import ROUNDOFF, check_close, check_equal, limits
from fused_kda.testing.problems import Call

#: Roundings granted to exp, log1p and a square root: libraries are good to about one unit in the last place (two u).
FUNCTION = 4.0
#: The bounds are of first order and count this oracle's operations, not those of what it judges.
SAFETY = 2.0


@dataclass(frozen=True, slots=True)
class Real:
    """A value and the bound on its error, in units of the roundoff."""

    value: float
    error: float = 0.0

    def __add__(self, other: Real) -> Real:
        value = self.value + other.value
        return Real(value, self.error + other.error + abs(value))

    def __sub__(self, other: Real) -> Real:
        return self + Real(-other.value, other.error)

    def __mul__(self, other: Real) -> Real:
        value = self.value * other.value
        return Real(value, abs(self.value) * other.error + abs(other.value) * self.error + abs(value))


@dataclass(frozen=True, slots=True)
class Result:
    """What the step leaves behind, unrounded.

    Attributes:
        out, out_error: float64 ``[B, H, D]``, zeros in null rows, and the bound on its error in units of the roundoff.
        windows: by live slot, ``[3P, W-1]`` in the pool's dtype.
        states, state_errors: by live slot, float64 ``[H, D, D]``, and the bound.
    """

    out: torch.Tensor
    out_error: torch.Tensor
    windows: dict[int, torch.Tensor]
    states: dict[int, torch.Tensor]
    state_errors: dict[int, torch.Tensor]


def decode(arguments: Mapping[str, Any]) -> Result:
    """Evaluate one call of the op. ``arguments``: what ``fused_kda_decode`` takes, by name; nothing is written."""
    given = dict(arguments)
    slots, heads, dim, _ = given["state"].shape
    batch = given["x"].shape[0]
    inner = heads * dim
    weight = given["weight"]
    if weight.ndim == 3 and weight.shape[1] > 1:
        weight = weight.transpose(1, 2)
    taps = _reals(weight, 3 * inner, -1)
    bias = [Real(0.0)] * (3 * inner) if given["bias"] is None else _reals(given["bias"], 3 * inner)
    a_log, dt_bias = _reals(given["A_log"], heads), _reals(given["dt_bias"], inner)
    x, raw_g = _reals(given["x"], batch, 3 * inner), _reals(given["raw_g"], batch, inner)
    raw_beta = _reals(given["raw_beta"], batch, heads)
    scale = dim**-0.5 if given.get("scale") is None else given["scale"]
    eps = Real(given.get("norm_eps", 1e-5), 1e-5)
    normed = given["norm_weight"] is not None
    norm_weight = _reals(given["norm_weight"], dim) if normed else []
    output_gate = _reals(given["output_gate"], batch, inner) if normed else []
    started = given["has_initial_state"]

    result = Result(torch.zeros(batch, heads, dim).double(), torch.zeros(batch, heads, dim).double(), {}, {}, {})
    for row, slot in enumerate(given["state_indices"].reshape(-1).tolist()):
        if slot <= given.get("null_slot", 0) or slot >= slots:
            continue
        use_old = started is None or bool(started[row])
        window = given["conv_state"][slot] if use_old else torch.zeros_like(given["conv_state"][slot])
        result.windows[slot] = torch.stack([*window.unbind(-1)[1:], given["x"][row]], dim=-1)
        mixed = []
        for channel, history in enumerate(_reals(window, 3 * inner, -1)):
            terms = [w * s for w, s in zip(taps[channel], [*history, x[row][channel]], strict=True)]
            total = _sum([bias[channel], *terms])
            mixed.append(total * _sigmoid(total))
        old = given["state"][slot] if use_old else torch.zeros_like(given["state"][slot])
        new = torch.zeros(2, heads, dim, dim, dtype=torch.float64)
        for head, matrix in enumerate(_reals(old, heads, dim, dim)):
            own = slice(head * dim, (head + 1) * dim)
            q = [value * Real(scale, abs(scale)) for value in _unit(mixed[:inner][own])]
            k, v = _unit(mixed[inner : 2 * inner][own]), mixed[2 * inner :][own]
            a = _exp(a_log[head])
            decay = [
                _exp(_log_decay(a, g + shift, given["lower_bound"]))
                for g, shift in zip(raw_g[row][own], dt_bias[own], strict=True)
            ]
            beta = _sigmoid(raw_beta[row][head])
            kq = _dot(k, q)
            y = []
            for line in range(dim):
                faded = [s * d for s, d in zip(matrix[line], decay, strict=True)]
                delta = (v[line] - _dot(faded, k)) * beta
                y.append(_dot(faded, q) + delta * kq)
                fresh = [s + delta * kk for s, kk in zip(faded, k, strict=True)]
                new[0, head, line] = torch.tensor([s.value for s in fresh], dtype=torch.float64)
                new[1, head, line] = torch.tensor([s.error for s in fresh], dtype=torch.float64)
            if normed:
                factor = _rsqrt(_dot(y, y) * Real(1.0 / dim) + eps)
                opened = [w * _sigmoid(g) for w, g in zip(norm_weight, output_gate[row][own], strict=True)]
                y = [value * factor * gate for value, gate in zip(y, opened, strict=True)]
            result.out[row, head] = torch.tensor([value.value for value in y], dtype=torch.float64)
            result.out_error[row, head] = torch.tensor([value.error for value in y], dtype=torch.float64)
        result.states[slot], result.state_errors[slot] = new[0], new[1]
    return result


def allowed(exact: torch.Tensor, error: torch.Tensor, compute: torch.dtype, stored: torch.dtype) -> torch.Tensor:
    """Absolute tolerance: the error's bound at the compute dtype's roundoff, then one rounding on storing."""
    computed = SAFETY * ROUNDOFF[compute] * error
    return computed + ROUNDOFF[stored] * (exact.abs() + computed) + torch.finfo(stored).tiny


def agree(call: Call) -> None:
    """Run the call on the reference and compare everything with this oracle: also what must not change.

    Raises:
        AssertionError: what is off. Heads that the compute dtype cannot hold are not compared.
    """
    before = call.clone()
    want, judged = decode(call.arguments), limits(call).fits
    spec = call.problem.spec
    compute = torch.float64 if spec.dtype == torch.float64 else torch.float32

    out = call.run("reference").reshape(call.problem.batch, spec.heads, spec.head_dim)
    null = [row for row in range(call.problem.batch) if row not in call.live]
    assert torch.count_nonzero(out[null]) == 0
    for row, slot, heads in zip(call.live, call.slots, judged, strict=True):
        check_equal(f"window of slot {slot}", call.arguments["conv_state"][slot], want.windows[slot])
        exact, error = want.out[row][heads], want.out_error[row][heads]
        check_close(f"out of row {row}", out[row][heads], exact, allowed(exact, error, compute, spec.dtype))
        exact, error = want.states[slot][heads], want.state_errors[slot][heads]
        state = call.arguments["state"][slot][heads]
        check_close(f"state of slot {slot}", state, exact, allowed(exact, error, compute, spec.state_dtype))
    assert call.touched_elsewhere(before) == []


def _reals(tensor: torch.Tensor, *shape: int) -> list[Any]:
    """Nested lists of exact reals in the given shape."""

    def wrap(item: Any) -> Any:
        return [wrap(part) for part in item] if isinstance(item, list) else Real(item)

    return list(wrap(tensor.double().reshape(shape).tolist()))


def _sum(terms: Sequence[Real]) -> Real:
    size = sum(abs(term.value) for term in terms)
    values = [term.value for term in terms]
    total = math.fsum(values) if math.isfinite(size) else sum(values)  # fsum refuses infinities of both signs
    return Real(total, sum(t.error for t in terms) + (len(terms) - 1) * size)


def _dot(left: Sequence[Real], right: Sequence[Real]) -> Real:
    return _sum([a * b for a, b in zip(left, right, strict=True)])


def _exp(x: Real) -> Real:
    value = math.exp(x.value)
    return Real(value, value * (x.error + FUNCTION))


def _rsqrt(x: Real) -> Real:
    value = x.value**-0.5
    return Real(value, 0.5 * value / x.value * x.error + FUNCTION * value)


def _unit(values: Sequence[Real]) -> list[Real]:
    factor = _rsqrt(_dot(values, values) + Real(1e-6, 1e-6))
    return [value * factor for value in values]


def _open(x: float) -> float:
    shrunk = math.exp(-abs(x))
    return (1.0 if x >= 0 else shrunk) / (1.0 + shrunk)


def _sigmoid(x: Real) -> Real:
    value = _open(x.value)
    return Real(value, value * (1.0 - value) * x.error + (FUNCTION + 2.0) * value)


def _log_decay(a: Real, z: Real, lower_bound: float | None) -> Real:
    if lower_bound is not None:
        return Real(lower_bound) * _sigmoid(a * z)
    value = max(z.value, 0.0) + math.log1p(math.exp(-abs(z.value)))
    return Real(-1.0) * a * Real(value, _open(z.value) * z.error + (2.0 * FUNCTION + 1.0) * value)
