"""ONE table of what is supported: backend x architecture x ranges.

The build, the run-time choice, the tests, the docs and ``fused-kda doctor`` read :data:`TABLE`; nothing else in the
project decides what a backend can do. A row exists only for a backend that exists.

:func:`explain` says for one problem, backend by backend, whether its gate is open and if not why, in words: by the
row's ranges, by what the machine has (modules, shared memory, a compiler), and, where nothing can be compiled, by what
the prebuilt directories hold. :func:`select` chooses. :data:`SWITCHES` lists the environment switches, read once, by
:func:`settings`.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path

import torch

from . import binaries, switches
from .binaries import PrebuiltSet
from .contract import ACTIVATION_DTYPES, CONV_WIDTHS, DecodeProblem, Specialization
from .layouts import LAYOUTS, LayoutKind
from .machine import EXTRAS as EXTRAS
from .machine import architecture as architecture
from .machine import importable as importable
from .machine import (
    interpreter_off,
    missing,
    no_c_compiler,
    no_launcher,
    nvrtc_problem,
    triton_problem,
)
from .machine import shared_memory_limit as shared_memory_limit
from .switches import SWITCHES as SWITCHES
from .switches import Settings as Settings

logger = logging.getLogger("fused_kda")


@functools.cache
def settings() -> Settings:
    """The environment switches. Read at the first call and kept; ``settings.cache_clear()`` forgets them.

    Raises:
        ValueError: a switch has a value that it does not take; the text names the variable.
    """
    return switches.read(BACKENDS)


@dataclass(frozen=True, slots=True)
class Row:
    """What one backend covers on a set of architectures. ``None`` in a range means any.

    Attributes:
        backend: name of the backend.
        archs: architectures as :func:`architecture` names them; ``"*"`` is every device.
        launches: kernel launches per decode step (0: not a kernel).
        head_dims, conv_widths, layouts: ranges of D, W and the conv layout.
        dtypes, state_dtypes, weight_dtypes, norm_dtypes, bias_dtypes: element types.
        state_alignment: bytes to which every slot of the recurrent pool must be aligned.
        modules: what must be importable.
        shared_memory: bytes of shared memory (LDS) that one program may need.
        auto: whether ``backend="auto"`` may choose it.
        condition: a further test of the machine that returns the reason why the gate is closed, or None.
        compiler: a test that returns why a kernel cannot be compiled here, or None; only asked where no prebuilt
            directory holds it. None where there is nothing to compile.
        note: what a reader of the table should know.
    """

    backend: str
    archs: tuple[str, ...]
    launches: int
    head_dims: tuple[int, ...] | None = None
    conv_widths: tuple[int, ...] = CONV_WIDTHS
    layouts: tuple[LayoutKind, ...] = LAYOUTS
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16,)
    state_dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)
    weight_dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)
    norm_dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)
    bias_dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)
    state_alignment: int = 1
    modules: tuple[str, ...] = ()
    shared_memory: int = 0
    auto: bool = True
    condition: Callable[[], str | None] | None = None
    compiler: Callable[[], str | None] | None = None
    note: str = ""

    def range_reasons(self, problem: DecodeProblem) -> list[str]:
        """Why the problem is outside the row's ranges whatever the machine; empty where it is inside."""
        return self.spec_reasons(problem.spec)

    def spec_reasons(self, spec: Specialization) -> list[str]:
        """The same for a specialisation."""
        found = [
            f"{name} {_word(got)} is not in {', '.join(_word(value) for value in allowed)}"
            for name, got, allowed in (
                ("head dim", spec.head_dim, self.head_dims),
                ("conv width", spec.conv_width, self.conv_widths),
                ("conv layout", spec.conv_layout.kind, self.layouts),
                ("activation dtype", spec.dtype, self.dtypes),
                ("state dtype", spec.state_dtype, self.state_dtypes),
                ("conv weight dtype", spec.weight_dtype, self.weight_dtypes),
                ("conv bias dtype", spec.bias_dtype, self.bias_dtypes),
                ("norm weight dtype", spec.norm_dtype, self.norm_dtypes),
            )
            if allowed is not None and got is not None and got not in allowed
        ]
        if spec.state_alignment < self.state_alignment:
            found.append(
                f"state slots are aligned to {spec.state_alignment} bytes, not to {self.state_alignment} "
                "(base address or slot pitch)"
            )
        return found

    def launch_reasons(self, device: torch.device | None = None) -> list[str]:
        """Why this machine, or the device, cannot launch the row's kernels even if they are there."""
        found = [missing(name) for name in self.modules if not importable(name)]
        if not found and self.condition is not None:
            reason = self.condition()
            found += [reason] if reason else []
        limit = shared_memory_limit(device) if self.shared_memory and device is not None else None
        if limit is not None and limit < self.shared_memory:
            found.append(f"the device has {limit} bytes of shared memory per program, {self.shared_memory} are needed")
        return found

    def compile_reason(self) -> str | None:
        """Why nothing can be compiled for the row here, or None."""
        if self.compiler is None:
            return None
        if settings().compile == "never":
            return "compiling is switched off (FUSED_KDA_COMPILE=never)"
        return self.compiler()

    def machine_reasons(self, device: torch.device | None = None) -> list[str]:
        """Why this machine cannot use the row whatever the problem; empty where it can."""
        found = self.launch_reasons(device)
        reason = None if found else self.compile_reason()
        if reason is not None and not any(one.held(self.backend, a) for one in prebuilt_sets() for a in self.archs):
            found.append(reason)
        return found


_TRITON_NVIDIA = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120")
_TRITON_AMD = ("gfx942", "gfx950")

#: Backends from fastest to slowest: the order in which ``auto`` asks them.
BACKENDS: tuple[str, ...] = ("cuda", "triton", "chain", "reference")

TABLE: tuple[Row, ...] = (
    *(
        Row(
            backend="cuda",
            archs=archs,
            launches=1,
            head_dims=(128,),
            conv_widths=(4,),
            modules=("cuda.bindings",),
            shared_memory=shared_memory,
            compiler=nvrtc_problem,
            note=f"one launch, any number of heads{note}; pools that are not aligned to 16 bytes take narrower, slower "
            "accesses",
        )
        for archs, shared_memory, note in (
            (("sm_80", "sm_86", "sm_89", "sm_120"), 6 * 1024, ""),
            (("sm_90", "sm_100", "sm_103"), 70 * 1024, ", tiles by the copy engine"),
        )
    ),
    *(
        Row(
            backend=backend,
            archs=archs,
            launches=launches,
            head_dims=(64, 128, 256),
            modules=("triton",),
            shared_memory=shared_memory,
            auto=compiler is not None,
            condition=condition,
            compiler=compiler,
            note=note,
        )
        for backend, launches, what in (
            ("triton", 1, "one launch, the same source on NVIDIA and AMD"),
            ("chain", 3, "conv update, recurrence and gated norm as launches of their own (two without the norm)"),
        )
        for archs, shared_memory, condition, compiler, note in (
            (_TRITON_NVIDIA, 1024, no_launcher, triton_problem, what),
            (
                _TRITON_AMD,
                4096,
                no_c_compiler,
                triton_problem,
                f"{what}; compiled for and interpreted, not yet run on hardware",
            ),
            (("cpu",), 0, interpreter_off, None, "for tests: Triton's interpreter, asked for by name"),
        )
    ),
    Row(
        backend="reference",
        archs=("*",),
        launches=0,
        dtypes=ACTIVATION_DTYPES,
        state_dtypes=(torch.float32, torch.bfloat16, torch.float64),
        weight_dtypes=ACTIVATION_DTYPES,
        norm_dtypes=ACTIVATION_DTYPES,
        bias_dtypes=ACTIVATION_DTYPES,
        note="PyTorch, any device: the oracle, and the default on a machine without a GPU; synchronises a GPU",
    ),
)


_argument: Path | None = None
_shut: dict[tuple[str, str], str] = {}
#: Whether this thread is inside ``warmup()``.
warming: ContextVar[bool] = ContextVar("warming", default=False)


def use_prebuilt(directory: str | os.PathLike[str] | None) -> None:
    """Ask this prebuilt directory before the one in the environment and the one in the wheel; None takes that back.

    Raises:
        ValueError: ``fused-kda build`` has not written it.
    """
    global _argument
    if directory is not None:
        PrebuiltSet(Path(directory))
    _argument = None if directory is None else Path(directory)
    prebuilt_sets.cache_clear()


@functools.cache
def prebuilt_sets() -> tuple[PrebuiltSet, ...]:
    """The prebuilt directories in the order in which they are asked: argument, environment, inside the wheel.

    Raises:
        ValueError: one of them is not a prebuilt directory.
    """
    inside = binaries.INSIDE if (binaries.INSIDE / binaries.MANIFEST).exists() else None
    wanted = dict.fromkeys(one for one in (_argument, settings().prebuilt, inside) if one is not None)
    return tuple(map(PrebuiltSet, wanted))


def before_compile(what: str) -> None:
    """Count a compilation that is about to happen, or refuse it.

    Raises:
        RuntimeError: the environment forbids it now.
    """
    mode = settings().compile
    if mode == "never" or (mode == "warmup" and not warming.get()):
        raise RuntimeError(
            f"FUSED_KDA_COMPILE={mode}: expected every kernel to be there, got one that must be compiled: {what}. "
            "Prebuild it (fused-kda build), or call fused_kda.warmup(...) for it before serving"
        )
    binaries.counts["compiled"] += 1
    logger.info("compiling %s", what)


class Unloadable(RuntimeError):
    """The device would not load a backend's machine code; the text says why. ``prebuilt``: it came from a directory."""

    def __init__(self, reason: str, prebuilt: bool = False) -> None:
        super().__init__(reason)
        self.prebuilt = prebuilt


def shut(backend: str, arch: str, reason: str) -> None:
    """Close a backend's gate on an architecture for the rest of the process: its code cannot be loaded here."""
    _shut[backend, arch] = reason


def reset() -> None:
    """Forget the switches, the prebuilt directories, what was shut and what was counted."""
    use_prebuilt(None)
    settings.cache_clear()
    _shut.clear()
    binaries.counts.clear()


@dataclass(frozen=True, slots=True)
class Verdict:
    """One backend's gate for one problem: open, or closed with the reasons.

    ``prebuilt`` is the directory that holds the problem's kernels; "" where they are compiled, or there are none.
    """

    backend: str
    open: bool
    reasons: tuple[str, ...]
    auto: bool
    prebuilt: str = ""

    def __str__(self) -> str:
        if self.open:
            return f"{self.backend}: open" + (f" (prebuilt in {self.prebuilt})" if self.prebuilt else "")
        return f"{self.backend}: closed: {'; '.join(self.reasons)}"


def rows(backend: str, arch: str | None = None) -> tuple[Row, ...]:
    """The table's rows of one backend, optionally only those for one architecture."""
    return tuple(
        row for row in TABLE if row.backend == backend and (arch is None or arch in row.archs or "*" in row.archs)
    )


def supported(problem: DecodeProblem, device: torch.device | str | None = None) -> tuple[str, ...]:
    """Backends whose gate is open for the problem, fastest first. ``device`` defaults to the problem's own."""
    return tuple(verdict.backend for verdict in explain(problem, device) if verdict.open)


def explain(problem: DecodeProblem, device: torch.device | str | None = None) -> tuple[Verdict, ...]:
    """Every backend's gate for the problem, fastest first, with the reasons of those that are closed."""
    where = torch.device(device) if device is not None else problem.device
    return tuple(_verdict(backend, where, problem) for backend in BACKENDS)


def _verdict(backend: str, device: torch.device, problem: DecodeProblem) -> Verdict:
    arch = architecture(device)
    candidates = rows(backend, arch)
    if not candidates:
        known = sorted({name for row in rows(backend) for name in row.archs})
        return Verdict(backend, False, (f"architecture {arch} is not in {', '.join(known)}",), False)
    closed: list[str] = []
    if (backend, arch) in _shut:
        return Verdict(backend, False, (_shut[backend, arch],), any(row.auto for row in candidates))
    for row in candidates:
        reasons = row.range_reasons(problem) + row.launch_reasons(device)
        prebuilt = ""
        if not reasons and row.compiler is not None:
            prebuilt, lacking = _prebuilt_for(backend, arch, problem)
            reason = None if prebuilt else row.compile_reason()
            reasons = [reason, *lacking] if reason else []
        if not reasons:
            return Verdict(backend, True, (), row.auto, prebuilt)
        closed += [reason for reason in reasons if reason not in closed]
    return Verdict(backend, False, tuple(closed), any(row.auto for row in candidates))


def _prebuilt_for(backend: str, arch: str, problem: DecodeProblem) -> tuple[str, list[str]]:
    """The first prebuilt directory that holds the problem's kernels, or "" and why each of them does not."""
    lacking = []
    for one in prebuilt_sets():
        reason = one.lacks(backend, arch, problem.spec, problem.prefetch)
        if reason is None:
            return str(one.directory), []
        lacking.append(reason)
    return "", lacking


@dataclass(frozen=True, slots=True)
class Selection:
    """The backend for a call, why it was chosen, and, where that is a fallback, what closed the faster gates."""

    backend: str
    reason: str
    fallback: str | None


def select(problem: DecodeProblem, backend: str = "auto") -> Selection:
    """Choose a backend for a sound problem.

    Args:
        problem: from :func:`fused_kda.contract.decode_problem`.
        backend: a name, or "auto": the environment's choice, else the fastest backend whose gate is open.

    Returns:
        The selection. Its ``fallback`` is set where "auto" passed over a faster backend that has rows for this
        architecture: the caller warns, or raises in strict mode.

    Raises:
        TypeError, ValueError: ``backend`` is not a string; no backend has that name.
        NotImplementedError: the named backend lacks the problem; the text lists why, and which backends have it.
    """
    if not isinstance(backend, str):
        raise TypeError(f"backend: expected a string, got {type(backend).__name__}")
    reason = "requested"
    if backend == "auto" and settings().backend != "auto":
        backend, reason = settings().backend, "FUSED_KDA_BACKEND"
    if backend != "auto" and backend not in BACKENDS:
        raise ValueError(f"backend: expected auto or one of {', '.join(BACKENDS)}, got {backend!r}")
    verdicts = explain(problem)
    usable = [verdict.backend for verdict in verdicts if verdict.open]
    if backend != "auto":
        verdict = next(verdict for verdict in verdicts if verdict.backend == backend)
        if not verdict.open:
            raise NotImplementedError(
                f"backend: expected one that can run this problem ({', '.join(usable) or 'none can'}), got {backend} "
                f"({reason}): {'; '.join(verdict.reasons)}"
            )
        return Selection(backend, reason, None)
    passed_over: list[str] = []
    for verdict in verdicts:
        if not verdict.auto:
            continue
        if verdict.open:
            return Selection(verdict.backend, "auto", "; ".join(passed_over) or None)
        passed_over.append(str(verdict))
    raise NotImplementedError(
        f"backend: expected one that can run this problem (none can), got auto: {'; '.join(map(str, verdicts))}"
    )


def _word(value: object) -> str:
    return str(value).removeprefix("torch.")
