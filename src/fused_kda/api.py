"""The op as people call it: contract, then gate, then backend.

The hot path is one dict lookup on the call's metadata: a call whose shapes, strides, dtypes and scalars were seen
before goes straight to its backend's launch. Checks, the choice of a backend and compilation happen once per key.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from . import gates
from .contract import DecodeProblem, Tensors, decode_problem

logger = logging.getLogger("fused_kda")

#: Plans kept before all are dropped and made anew: a bound for callers whose strides never repeat.
MAX_PLANS = 8192


class FallbackWarning(RuntimeWarning):
    """An ``auto`` call took a slower backend than the best one that this machine has."""


class _Plan:
    """What a key resolved to. ``launch`` is None where there is nothing to do (B = 0)."""

    __slots__ = ("calls", "debug", "device_index", "launch", "out_shape", "problem", "selection")

    def __init__(
        self,
        problem: DecodeProblem,
        selection: gates.Selection,
        launch: Callable[[Tensors], None] | None,
        out_shape: torch.Size,
        debug: bool,
    ) -> None:
        self.problem = problem
        self.selection = selection
        self.launch = launch
        self.out_shape = out_shape
        self.debug = debug
        self.device_index = problem.device.index if problem.device.type == "cuda" else None
        self.calls = 0


_plans: dict[tuple[object, ...], _Plan] = {}
_retired: Counter[tuple[str, str]] = Counter()
_warned: set[tuple[str, str]] = set()


def fused_kda_decode(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    conv_state: torch.Tensor,
    raw_g: torch.Tensor,
    raw_beta: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state_indices: torch.Tensor,
    state: torch.Tensor,
    out: torch.Tensor | None = None,
    *,
    lower_bound: float | None = None,
    output_gate: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    norm_eps: float = 1e-5,
    scale: float | None = None,
    null_slot: int = 0,
    has_initial_state: torch.Tensor | None = None,
    prefetch: bool = False,
    backend: str = "auto",
) -> torch.Tensor:
    """Advance every sequence of a batch by one token through a KDA layer's core, both caches in place.

    Causal conv1d update, SiLU, gated delta rule, gated RMSNorm. One kernel launch on a GPU backend.

    Symbols: B rows; H heads on this rank; D head dim (K = V = D); W conv width; P = H * D; slots = pool size.

    Args:
        x: ``[B, 3P]``, q then k then v, bf16 (reference backend: also fp16, fp32, fp64); channel stride 1, any row
            stride. Read.
        weight: conv weight ``[3, W, P]`` (tap oldest to newest), ``[3P, W]`` or ``[3P, 1, W]``; fp32 or bf16; read in
            place, whatever its strides.
        bias: None or 3P elements, fp32 or bf16, contiguous. Read.
        conv_state: ``[slots, 3P, W-1]`` view of the pool, x's dtype, SD strides ``(pitch, 1, 3P)`` or DS strides
            ``(pitch, taps, 1)``. **Mutated**: a live row's window becomes ``[tap1, tap2, x]``, bit for bit.
        raw_g: ``[1, B, H, D]``, ``[B, H, D]`` or ``[B, P]``, x's dtype, dense rows, any row stride. Read.
        raw_beta: ``[1, B, H]`` or ``[B, H]``, x's dtype, dense rows, any row stride. Read.
        A_log: H elements, fp32, contiguous, any shape. Read.
        dt_bias: P elements, fp32, contiguous, any shape. Read.
        state_indices: ``[B]`` or ``[B, 1]``, int32 or int64, any stride. Read.
        state: recurrent pool ``[slots, H, D(V), D(K)]``, fp32 or bf16, each slot dense, any slot pitch. **Mutated**.
        out: like raw_g's forms, x's dtype, dense rows, any row stride. **Written**; allocated in raw_g's shape if None.
        lower_bound: finite and negative (Kimi-K3: -5.0) for ``lower_bound * sigmoid(a * z)``; None for the softplus
            gate ``-a * softplus(z)`` (Kimi-Linear).
        output_gate: ``[1, B, H, D]``, ``[B, H, D]`` or ``[B, P]``, x's dtype, dense rows, any row stride; given
            together with norm_weight, or neither: then the gated norm is left out. Read.
        norm_weight: D elements, fp32 or bf16. Read.
        norm_eps: added to the mean square of the norm; finite, >= 0.
        scale: factor of q; ``D ** -0.5`` if None.
        null_slot: a row whose index is ``<= null_slot`` or ``>= slots`` is a null row: its output is exactly zero and
            no pool is touched for it. 0 is vLLM's and FlashInfer's rule, -1 keeps slot 0 usable (SGLang, fla).
        has_initial_state: None or ``[B]`` bool; where False the slot's old content is never used and the row starts
            from zero state and history. Read.
        prefetch: let a GPU kernel read weights, pools and indices before the kernel ahead of it on the stream has
            finished (programmatic dependent launch). Only sound where that kernel writes none of them.
        backend: "auto" (the fastest open gate; see :func:`explain`) or a backend's name.

    Returns:
        ``out``.

    Raises:
        TypeError: not a tensor, a wrong dtype, another device.
        ValueError: a wrong shape, stride, layout or range; an unknown backend; an input that requires grad.
        NotImplementedError: the named backend lacks this combination; the text lists what it has.
        RuntimeError: strict mode is on and "auto" would fall back.
        Nothing is touched before an error.

    The same live slot twice in one batch is the caller's error; debug mode (``FUSED_KDA_DEBUG=1``) finds it.
    The formula is that of ``fla.ops.kda`` with the gate, norm and convolution of the Kimi-Linear and Kimi-K3 layers.
    """
    if torch.compiler.is_compiling():
        if out is None:
            out = torch.empty(raw_g.shape, dtype=x.dtype, device=x.device)
        torch.ops.fused_kda.decode(
            x, weight, bias, conv_state, raw_g, raw_beta, A_log, dt_bias, state_indices, state, out,
            lower_bound, output_gate, norm_weight, norm_eps, scale, null_slot, has_initial_state, prefetch, backend,
        )  # fmt: skip
        return out
    tensors = Tensors(
        x, weight, bias, conv_state, raw_g, raw_beta, A_log, dt_bias, state_indices, state, out,  # type: ignore[arg-type]
        output_gate, norm_weight, has_initial_state,
    )  # fmt: skip
    scalars = (lower_bound, norm_eps, scale, null_slot, prefetch, backend)
    plan = _plan(tensors, scalars)
    if out is None:
        out = x.new_empty(plan.out_shape)
        tensors = tensors._replace(out=out)
    launch = plan.launch
    if launch is None:
        return out
    plan.calls += 1
    index = plan.device_index
    if index is None or index == torch.cuda.current_device():
        if plan.debug:
            _check_data(plan.problem, tensors)
        launch(tensors)
    else:
        with torch.cuda.device(index):
            if plan.debug:
                _check_data(plan.problem, tensors)
            launch(tensors)
    return out


def warmup(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    conv_state: torch.Tensor,
    raw_g: torch.Tensor,
    raw_beta: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state_indices: torch.Tensor,
    state: torch.Tensor,
    out: torch.Tensor | None = None,
    *,
    lower_bound: float | None = None,
    output_gate: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    norm_eps: float = 1e-5,
    scale: float | None = None,
    null_slot: int = 0,
    has_initial_state: torch.Tensor | None = None,
    prefetch: bool = False,
    backend: str = "auto",
) -> None:
    """Do now what :func:`fused_kda_decode` does at its first call with such arguments: check, choose, compile.

    Takes the same arguments and raises the same errors; reads and writes no tensor. For an engine to call before it
    serves, or before it captures a CUDA graph. What a backend compiles does not depend on the batch, the pool size,
    pitches or row strides, so one call per layer shape is enough.
    """
    tensors = Tensors(
        x, weight, bias, conv_state, raw_g, raw_beta, A_log, dt_bias, state_indices, state, out,  # type: ignore[arg-type]
        output_gate, norm_weight, has_initial_state,
    )  # fmt: skip
    _plan(tensors, (lower_bound, norm_eps, scale, null_slot, prefetch, backend))


@dataclass(frozen=True, slots=True)
class Explanation:
    """What :func:`explain` found.

    Attributes:
        problem: the checked call.
        verdicts: every backend's gate, fastest first, with the reasons of those that are closed.
        selection: what the call would take, or None where nothing can run it.
    """

    problem: DecodeProblem
    verdicts: tuple[gates.Verdict, ...]
    selection: gates.Selection | None

    def __str__(self) -> str:
        taken = "none" if self.selection is None else f"{self.selection.backend} ({self.selection.reason})"
        return "\n".join([f"backend: {taken}", *map(str, self.verdicts)])


def explain(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    conv_state: torch.Tensor,
    raw_g: torch.Tensor,
    raw_beta: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state_indices: torch.Tensor,
    state: torch.Tensor,
    out: torch.Tensor | None = None,
    *,
    lower_bound: float | None = None,
    output_gate: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    norm_eps: float = 1e-5,
    scale: float | None = None,
    null_slot: int = 0,
    has_initial_state: torch.Tensor | None = None,
    prefetch: bool = False,
    backend: str = "auto",
) -> Explanation:
    """Say which backend :func:`fused_kda_decode` would take for the same arguments, and why. Touches nothing.

    Raises:
        TypeError, ValueError: the call itself is unsound, as in :func:`fused_kda_decode`.
    """
    problem = decode_problem(
        x, weight, bias, conv_state, raw_g, raw_beta, A_log, dt_bias, state_indices, state, out,
        lower_bound=lower_bound, output_gate=output_gate, norm_weight=norm_weight, norm_eps=norm_eps, scale=scale,
        null_slot=null_slot, has_initial_state=has_initial_state, prefetch=prefetch,
    )  # fmt: skip
    selection = None
    with contextlib.suppress(NotImplementedError):
        selection = gates.select(problem, backend)
    return Explanation(problem, gates.explain(problem), selection)


def stats() -> dict[tuple[str, str], int]:
    """Calls so far by ``(backend, reason)``, calls of B = 0 left out.

    The reason is "requested", "auto", the name of the environment switch, or "fallback: " and what closed the faster
    gates.
    """
    total = Counter(_retired)
    for plan in _plans.values():
        if plan.calls:
            total[_stats_key(plan.selection)] += plan.calls
    return dict(total)


def reset() -> None:
    """Forget plans, statistics, given warnings and the environment switches, as if freshly imported."""
    _plans.clear()
    _retired.clear()
    _warned.clear()
    gates.settings.cache_clear()


def _key(t: Tensors, scalars: tuple[object, ...]) -> tuple[object, ...]:
    """All metadata that the contract, the gates and the kernels look at, as one hashable tuple.

    It is built at every call, so it asks each tensor only for what the contract asks of it: a parameter vector for its
    size and contiguity, not for its shape. Types stand beside the scalars, since 0 == 0.0 == False.
    """
    x, weight, bias, conv_state, raw_g, raw_beta, a_log, dt_bias, indices, state, out, gate, norm, initial = t
    return (
        scalars, *map(type, scalars),
        torch.is_grad_enabled() and _any_requires_grad(t),
        x.shape, x.stride(), x.dtype, x.device,
        weight.shape, weight.stride(), weight.dtype, weight.device,
        conv_state.shape, conv_state.stride(), conv_state.dtype, conv_state.device, conv_state.data_ptr() & 15,
        raw_g.shape, raw_g.stride(), raw_g.dtype, raw_g.device,
        raw_beta.shape, raw_beta.stride(), raw_beta.dtype, raw_beta.device,
        a_log.numel(), a_log.is_contiguous(), a_log.dtype, a_log.device,
        dt_bias.numel(), dt_bias.is_contiguous(), dt_bias.dtype, dt_bias.device,
        indices.shape, indices.stride(), indices.dtype, indices.device,
        state.shape, state.stride(), state.dtype, state.device, state.data_ptr() & 15,
        None if bias is None else (bias.numel(), bias.is_contiguous(), bias.dtype, bias.device),
        None if out is None else (out.shape, out.stride(), out.dtype, out.device),
        None if gate is None else (gate.shape, gate.stride(), gate.dtype, gate.device),
        None if norm is None else (norm.numel(), norm.is_contiguous(), norm.dtype, norm.device),
        None if initial is None else (initial.shape, initial.stride(), initial.dtype, initial.device),
    )  # fmt: skip


def _any_requires_grad(tensors: Tensors) -> bool:
    return any([t.requires_grad for t in tensors if t is not None])  # noqa: C419 (a list is faster than a generator)


def _plan(tensors: Tensors, scalars: tuple[object, ...]) -> _Plan:
    """The plan for a call's metadata, made if it is new."""
    key: tuple[object, ...] | None
    try:
        key = _key(tensors, scalars)
        plan = _plans.get(key)
    except (AttributeError, TypeError, RuntimeError):
        # Not a tensor, one without strides or an address, or an unhashable scalar: the contract will name it.
        key = plan = None
    return plan if plan is not None else _make_plan(key, tensors, scalars)


def _make_plan(key: tuple[object, ...] | None, tensors: Tensors, scalars: tuple[object, ...]) -> _Plan:
    lower_bound, norm_eps, scale, null_slot, prefetch, backend = scalars
    x, weight, bias, conv_state, raw_g, raw_beta, a_log, dt_bias, indices, state, out, gate, norm, initial = tensors
    problem = decode_problem(
        x, weight, bias, conv_state, raw_g, raw_beta, a_log, dt_bias, indices, state, out,
        lower_bound=lower_bound, output_gate=gate, norm_weight=norm, norm_eps=norm_eps, scale=scale,  # type: ignore[arg-type]
        null_slot=null_slot, has_initial_state=initial, prefetch=prefetch,  # type: ignore[arg-type]
    )  # fmt: skip
    forced = gates.settings().prefetch
    if forced is not None:
        problem = replace(problem, prefetch=forced)
    selection = gates.select(problem, backend)  # type: ignore[arg-type]
    _configure_logging(gates.settings().log_level)
    if selection.fallback is not None:
        _announce_fallback(selection)
    launch = None
    if problem.batch > 0:
        launch = importlib.import_module(f".kernels.{selection.backend}", __package__).prepare(problem)
        logger.info("decode runs on %s (%s): %s", selection.backend, selection.reason, problem)
    plan = _Plan(problem, selection, launch, raw_g.shape, gates.settings().debug)
    if key is not None:
        if len(_plans) >= MAX_PLANS:
            for old in _plans.values():
                _retired[_stats_key(old.selection)] += old.calls
            _plans.clear()
        _plans[key] = plan
    return plan


def _configure_logging(level: str | None) -> None:
    """Apply ``FUSED_KDA_LOG_LEVEL``; without it the application's own set-up is left alone."""
    if level is None:
        return
    logger.setLevel(level)
    if not logger.hasHandlers():
        logger.addHandler(logging.StreamHandler())


def _announce_fallback(selection: gates.Selection) -> None:
    text = (
        f"fused_kda_decode runs on the slower backend {selection.backend}; faster gates are closed: "
        f"{selection.fallback}"
    )
    if gates.settings().strict:
        raise RuntimeError(f"strict mode: {text}")
    mark = (selection.backend, selection.fallback or "")
    if mark not in _warned:
        _warned.add(mark)
        warnings.warn(text, FallbackWarning, stacklevel=5)


def _stats_key(selection: gates.Selection) -> tuple[str, str]:
    reason = selection.reason if selection.fallback is None else f"fallback: {selection.fallback}"
    return selection.backend, reason


def _check_data(problem: DecodeProblem, tensors: Tensors) -> None:
    """Debug mode: refuse repeated live slots, out-of-range indices and non-finite pools. Synchronises.

    Out of range is what no engine means: beyond the pool, or below -1, although both are null rows to a kernel.
    """
    indices = tensors.state_indices.flatten().tolist()
    beyond = [row for row, slot in enumerate(indices) if not -1 <= slot < problem.slots]
    if beyond:
        raise ValueError(
            f"state_indices: expected -1 <= slot < {problem.slots}, got {[indices[row] for row in beyond]} "
            f"in rows {beyond}"
        )
    owners: dict[int, list[int]] = {}
    for row, slot in enumerate(indices):
        if slot > problem.null_slot:
            owners.setdefault(slot, []).append(row)
    repeated = {slot: rows for slot, rows in owners.items() if len(rows) > 1}
    if repeated:
        raise ValueError(f"state_indices: expected each live slot once, got slot: rows {repeated}")
    started = None if tensors.has_initial_state is None else tensors.has_initial_state.tolist()
    for name, pool in (("conv_state", tensors.conv_state), ("state", tensors.state)):
        bad = [
            (rows[0], slot)
            for slot, rows in owners.items()
            if (started is None or started[rows[0]]) and not bool(pool[slot].isfinite().all())
        ]
        if bad:
            raise ValueError(f"{name}: expected finite values in live slots, got others in (row, slot) {bad}")
