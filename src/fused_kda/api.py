"""The op as people call it: contract, then gate, then backend.

The hot path is one dict lookup on the call's metadata: a call whose shapes, strides, dtypes and scalars were seen
before goes straight to its backend's launch. Checks, the choice of a backend and compilation happen once per key.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from . import _ops, binaries, debug, gates
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
        _ops.ops.decode(
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
            debug.check(plan.problem, tensors)
        launch(tensors)
    else:
        with torch.cuda.device(index):
            if plan.debug:
                debug.check(plan.problem, tensors)
            launch(tensors)
    return out


class HasDecodeProblems(Protocol):
    """What :func:`warmup` takes for a layer."""

    def decode_problems(self, pool: Any) -> Iterable[DecodeProblem]: ...


def warmup(
    work: HasDecodeProblems | DecodeProblem | Mapping[str, Any] | Iterable[DecodeProblem | Mapping[str, Any]],
    pool: Any = None,
    *,
    backend: str = "auto",
    prebuilt: str | os.PathLike[str] | None = None,
) -> dict[str, int]:
    """Get ready, and into the device, every kernel that the given calls may need, whatever their batch.

    For an engine to call before it serves, or before it captures a CUDA graph. Reads and writes no tensor. What a
    kernel is specialised on does not depend on the batch, the pool size, pitches or row strides, so one call per layer
    shape is enough; alignment to 16 bytes and ``prefetch`` do matter.

    Args:
        work: a layer (its ``decode_problems(pool)`` says what it will call), a call's arguments by name as
            :func:`fused_kda_decode` takes them, a :class:`DecodeProblem`, or several of the last two.
        pool: the layer's pool.
        backend: as in :func:`fused_kda_decode`.
        prebuilt: a directory that ``fused-kda build`` wrote; from now on it is asked before the environment's and the
            wheel's.

    Returns:
        Kernels by where they came from, in this call alone: "prebuilt", "cache" (compiled earlier) and "compiled".
        Kernels that the device had already are not counted. :func:`kernel_counts` tells the process's totals.

    Raises:
        As :func:`fused_kda_decode`, and ValueError where ``prebuilt`` is no such directory.
    """
    if prebuilt is not None:
        gates.use_prebuilt(prebuilt)
    before = kernel_counts()
    mark = gates.warming.set(True)
    try:
        for one in _pieces(work, pool):
            problem = one if isinstance(one, DecodeProblem) else _plan_call(one, backend).problem
            _select(_forced(problem), backend, "warm")
    finally:
        gates.warming.reset(mark)
    return {origin: count - before[origin] for origin, count in kernel_counts().items()}


def kernel_counts() -> dict[str, int]:
    """Kernels that this process has got so far, by where from: "prebuilt", "cache" and "compiled".

    After :func:`warmup`, steps that "compiled" does not grow with have compiled nothing.
    """
    return {origin: binaries.counts[origin] for origin in ("prebuilt", "cache", "compiled")}


def _pieces(work: Any, pool: Any) -> Iterator[DecodeProblem | Mapping[str, Any]]:
    if isinstance(work, DecodeProblem | Mapping):
        yield work
    elif hasattr(work, "decode_problems"):
        yield from work.decode_problems(pool)
    elif isinstance(work, Iterable):
        for one in work:
            yield from _pieces(one, pool)
    else:
        raise TypeError(f"work: expected a layer, calls or problems, got {type(work).__name__}")


_SCALARS: dict[str, Any] = {
    "lower_bound": None, "norm_eps": 1e-5, "scale": None, "null_slot": 0, "prefetch": False, "backend": "auto",
}  # fmt: skip


def _plan_call(call: Mapping[str, Any], backend: str) -> _Plan:
    """The plan for a call's arguments by name, as the call itself would make it."""
    unknown = set(call) - set(Tensors._fields) - set(_SCALARS)
    if unknown:
        raise TypeError(f"work: expected arguments of fused_kda_decode, got {', '.join(sorted(unknown))}")
    tensors = Tensors(*(call.get(name) for name in Tensors._fields))  # type: ignore[arg-type]
    scalars = {**_SCALARS, "backend": backend, **call}
    return _plan(tensors, tuple(scalars[name] for name in _SCALARS))


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
    problem = _forced(problem)
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
    for plan in list(_plans.values()):
        if plan.calls:
            total[_stats_key(plan.selection)] += plan.calls
    return dict(total)


def reset() -> None:
    """Forget plans, statistics, given warnings and the environment switches, as if freshly imported."""
    _plans.clear()
    _retired.clear()
    _warned.clear()
    gates.reset()


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
    selection, launch = _select(_forced(problem), backend, "prepare")  # type: ignore[arg-type]
    plan = _Plan(problem, selection, launch, raw_g.shape, gates.settings().debug)
    if key is not None:
        if len(_plans) >= MAX_PLANS:
            for old in list(_plans.values()):  # one step, whatever other threads do meanwhile
                _retired[_stats_key(old.selection)] += old.calls
            _plans.clear()
        plan = _plans.setdefault(key, plan)  # another thread may have been quicker
    return plan


def _forced(problem: DecodeProblem) -> DecodeProblem:
    """The problem with the environment's word about ``prefetch``, if it has one."""
    forced = gates.settings().prefetch
    return problem if forced is None else replace(problem, prefetch=forced)


def _select(
    problem: DecodeProblem, backend: str, step: str
) -> tuple[gates.Selection, Callable[[Tensors], None] | None]:
    """Choose a backend and let it ``prepare`` (to launch) or ``warm`` the problem.

    Code that the device refuses closes the gate it came through, and the choice is made anew.
    """
    while True:
        selection = gates.select(problem, backend)
        _configure_logging(gates.settings().log_level)
        if selection.fallback is not None:
            _announce_fallback(selection)
        if problem.batch == 0:
            return selection, None
        module = importlib.import_module(f".kernels.{selection.backend}", __package__)
        try:
            launch = getattr(module, step, module.prepare)(problem)  # without ``warm``, preparing is all there is
        except gates.Unloadable as error:
            logger.warning("%s cannot be loaded on %s: %s", selection.backend, problem.device, error)
            if not error.prebuilt:
                gates.shut(selection.backend, gates.architecture(problem.device), str(error))
            continue
        logger.info("decode runs on %s (%s): %s", selection.backend, selection.reason, problem)
        return selection, launch


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
        warnings.warn(text, FallbackWarning, stacklevel=6)


def _stats_key(selection: gates.Selection) -> tuple[str, str]:
    reason = selection.reason if selection.fallback is None else f"fallback: {selection.fallback}"
    return selection.backend, reason
