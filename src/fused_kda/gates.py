"""ONE table of what is supported: backend x architecture x ranges.

The build, the run-time choice, the tests, the docs and ``fused-kda doctor`` read :data:`TABLE`; nothing else in the
project decides what a backend can do. A row exists only for a backend that exists.

:func:`explain` says for one problem, backend by backend, whether its gate is open and if not why, in words.
:func:`select` chooses. Environment switches are listed in :data:`SWITCHES` and read once, by :func:`settings`.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from .contract import ACTIVATION_DTYPES, CONV_WIDTHS, DecodeProblem
from .layouts import LAYOUTS, LayoutKind


@dataclass(frozen=True, slots=True)
class Switch:
    """One environment variable: its name, the values it takes, its default, and what it does."""

    variable: str
    values: str
    default: str
    meaning: str


SWITCHES: tuple[Switch, ...] = (
    Switch("FUSED_KDA_BACKEND", "auto or a backend name", "auto", "backend used where a call says `auto`"),
    Switch("FUSED_KDA_STRICT", "0, 1", "0", "an `auto` call that would fall back to a slower backend raises instead"),
    Switch(
        "FUSED_KDA_DEBUG",
        "0, 1",
        "0",
        "check tensor data before each step (duplicate live slots, out-of-range indices, non-finite pools); "
        "synchronises the device",
    ),
    Switch(
        "FUSED_KDA_LOG_LEVEL",
        "DEBUG, INFO, WARNING, ERROR",
        "",
        "level of the `fused_kda` logger, which then also prints to stderr if no handler is set up; "
        "unset leaves it to the application",
    ),
    Switch(
        "FUSED_KDA_PREFETCH",
        "call, 0, 1",
        "call",
        "whether GPU kernels read weights, pools and indices ahead of the previous kernel: as each call says, never, "
        "always",
    ),
    Switch(
        "FUSED_KDA_CACHE_DIR",
        "a directory",
        "",
        "where compiled CUDA kernels are kept; unset means `fused-kda` in `XDG_CACHE_HOME` or `~/.cache`",
    ),
    Switch(
        "FUSED_KDA_VLLM",
        "off, fill, replace",
        "fill",
        "what the vLLM plug-in does: nothing; run what vLLM's own fused op lacks; run everything",
    ),
    Switch("FUSED_KDA_SGLANG", "0, 1", "0", "whether the SGLang plug-in replaces SGLang's fused decode"),
)


@dataclass(frozen=True, slots=True)
class Settings:
    """The environment switches, parsed.

    ``log_level`` is None where the application's own logging set-up stands, ``prefetch`` where each call's word does.
    """

    backend: str
    strict: bool
    debug: bool
    log_level: str | None
    prefetch: bool | None
    cache_dir: Path
    vllm: str
    sglang: bool


@functools.cache
def settings() -> Settings:
    """The environment switches. Read at the first call and kept; ``settings.cache_clear()`` forgets them.

    Raises:
        ValueError: a switch has a value that it does not take; the text names the variable.
    """
    raw = {switch.variable: os.environ.get(switch.variable, switch.default) for switch in SWITCHES}
    backend = raw["FUSED_KDA_BACKEND"]
    if backend != "auto" and backend not in BACKENDS:
        raise ValueError(f"FUSED_KDA_BACKEND: expected auto or one of {', '.join(BACKENDS)}, got {backend!r}")
    level = raw["FUSED_KDA_LOG_LEVEL"].upper()
    if level not in ("", "DEBUG", "INFO", "WARNING", "ERROR"):
        raise ValueError(f"FUSED_KDA_LOG_LEVEL: expected DEBUG, INFO, WARNING or ERROR, got {level!r}")
    if raw["FUSED_KDA_VLLM"] not in ("off", "fill", "replace"):
        raise ValueError(f"FUSED_KDA_VLLM: expected off, fill or replace, got {raw['FUSED_KDA_VLLM']!r}")
    return Settings(
        backend=backend,
        strict=_flag("FUSED_KDA_STRICT", raw["FUSED_KDA_STRICT"]),
        debug=_flag("FUSED_KDA_DEBUG", raw["FUSED_KDA_DEBUG"]),
        log_level=level or None,
        prefetch=None
        if raw["FUSED_KDA_PREFETCH"] == "call"
        else _flag("FUSED_KDA_PREFETCH", raw["FUSED_KDA_PREFETCH"]),
        cache_dir=Path(raw["FUSED_KDA_CACHE_DIR"] or _user_cache() / "fused-kda"),
        vllm=raw["FUSED_KDA_VLLM"],
        sglang=_flag("FUSED_KDA_SGLANG", raw["FUSED_KDA_SGLANG"]),
    )


def _user_cache() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(tempfile.gettempdir() if cache.startswith("~") else cache)  # a user without a home directory


def _flag(variable: str, value: str) -> bool:
    if value not in ("0", "1"):
        raise ValueError(f"{variable}: expected 0 or 1, got {value!r}")
    return value == "1"


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
        auto: whether ``backend="auto"`` may choose it.
        condition: a further test of the machine that returns the reason why the gate is closed, or None.
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
    auto: bool = True
    condition: Callable[[], str | None] | None = None
    note: str = ""

    def reasons(self, problem: DecodeProblem) -> list[str]:
        """Why this row cannot run the problem, in words; empty where it can. The architecture is not asked."""
        return self.range_reasons(problem) + self.machine_reasons()

    def range_reasons(self, problem: DecodeProblem) -> list[str]:
        """Why the problem is outside the row's ranges whatever the machine; empty where it is inside."""
        spec = problem.spec
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

    def machine_reasons(self) -> list[str]:
        """Why this machine cannot use the row whatever the problem; empty where it can."""
        found = [_missing(name) for name in self.modules if not _importable(name)]
        if not found and self.condition is not None:
            reason = self.condition()
            found += [reason] if reason else []
        return found


def _nvrtc_problem() -> str | None:
    """Why NVRTC cannot compile here, or None. Asked only where cuda.bindings is installed."""
    try:
        nvrtc = importlib.import_module("cuda.bindings.nvrtc")
        result, major, minor = nvrtc.nvrtcVersion()
    except Exception as error:  # whatever a missing or broken library raises closes the gate, and the reason names it
        return f"NVRTC cannot be loaded ({type(error).__name__}: {error})"
    if int(result) != 0 or (major, minor) < (12, 9):
        return f"NVRTC {major}.{minor} is older than 12.9"
    return None


def _interpreter_off() -> str | None:
    if os.environ.get("TRITON_INTERPRET") == "1":
        return None
    return "Triton runs on a CPU only in its interpreter (TRITON_INTERPRET=1, set before the first import)"


_TRITON_NVIDIA = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120")
_TRITON_AMD = ("gfx942", "gfx950")

#: Optional dependencies of the package that bring what backends need, named like the module they bring.
EXTRAS: tuple[str, ...] = ("cuda", "triton")

#: Backends from fastest to slowest: the order in which ``auto`` asks them.
BACKENDS: tuple[str, ...] = ("cuda", "triton", "chain", "reference")

TABLE: tuple[Row, ...] = (
    Row(
        backend="cuda",
        archs=("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120"),
        launches=1,
        head_dims=(128,),
        conv_widths=(4,),
        modules=("cuda.core", "cuda.bindings"),
        condition=_nvrtc_problem,
        note="one launch, any number of heads; pools that are not aligned to 16 bytes take narrower, slower accesses",
    ),
    *(
        Row(
            backend=backend,
            archs=archs,
            launches=launches,
            head_dims=(64, 128, 256),
            modules=("triton",),
            auto=condition is None,
            condition=condition,
            note=note,
        )
        for backend, launches, what in (
            ("triton", 1, "one launch, the same source on NVIDIA and AMD"),
            ("chain", 3, "conv update, recurrence and gated norm as launches of their own (two without the norm)"),
        )
        for archs, condition, note in (
            (_TRITON_NVIDIA, None, what),
            (_TRITON_AMD, None, f"{what}; compiled for and interpreted, not yet run on hardware"),
            (("cpu",), _interpreter_off, "for tests: Triton's interpreter, asked for by name"),
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


@functools.cache
def architecture(device: torch.device) -> str:
    """The device's architecture as the table names it: "cpu", "sm_90", "gfx942", or the device type."""
    if device.type != "cuda":
        return device.type
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        return str(properties.gcnArchName).split(":")[0]
    return f"sm_{properties.major}{properties.minor}"


@dataclass(frozen=True, slots=True)
class Verdict:
    """One backend's gate for one problem: open, or closed with the reasons."""

    backend: str
    open: bool
    reasons: tuple[str, ...]
    auto: bool

    def __str__(self) -> str:
        return f"{self.backend}: open" if self.open else f"{self.backend}: closed: {'; '.join(self.reasons)}"


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
    arch = architecture(torch.device(device) if device is not None else problem.device)
    return tuple(_verdict(backend, arch, problem) for backend in BACKENDS)


def _verdict(backend: str, arch: str, problem: DecodeProblem) -> Verdict:
    candidates = rows(backend, arch)
    if not candidates:
        known = sorted({name for row in rows(backend) for name in row.archs})
        return Verdict(backend, False, (f"architecture {arch} is not in {', '.join(known)}",), False)
    closed: list[str] = []
    for row in candidates:
        reasons = row.reasons(problem)
        if not reasons:
            return Verdict(backend, True, (), row.auto)
        closed += [reason for reason in reasons if reason not in closed]
    return Verdict(backend, False, tuple(closed), any(row.auto for row in candidates))


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


def _missing(module: str) -> str:
    extra = module.split(".")[0]
    remedy = f" (pip install 'fused-kda[{extra}]')" if extra in EXTRAS else ""
    return f"module {module} is not installed{remedy}"


@functools.cache
def _importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _word(value: object) -> str:
    return str(value).removeprefix("torch.")
