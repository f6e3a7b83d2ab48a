"""The environment switches: their table, and their values parsed."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path


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
        "where compiled kernels are kept; unset means `fused-kda` in `XDG_CACHE_HOME` or `~/.cache`",
    ),
    Switch(
        "FUSED_KDA_PREBUILT",
        "a directory",
        "",
        "kernels that `fused-kda build` wrote, used instead of compiling; asked before those inside the wheel",
    ),
    Switch(
        "FUSED_KDA_COMPILE",
        "allow, warmup, never",
        "allow",
        "when kernels may be compiled: at any call; inside `warmup()` alone, an error later; never, which closes the "
        "gates of what is not prebuilt",
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
    prebuilt: Path | None
    compile: str
    vllm: str
    sglang: bool


def read(backends: tuple[str, ...]) -> Settings:
    """The switches as the environment has them now. ``backends``: the names that ``FUSED_KDA_BACKEND`` may have.

    Raises:
        ValueError: a switch has a value that it does not take; the text names the variable.
    """
    raw = {switch.variable: os.environ.get(switch.variable, switch.default) for switch in SWITCHES}
    backend = raw["FUSED_KDA_BACKEND"]
    if backend != "auto" and backend not in backends:
        raise ValueError(f"FUSED_KDA_BACKEND: expected auto or one of {', '.join(backends)}, got {backend!r}")
    level = raw["FUSED_KDA_LOG_LEVEL"].upper()
    if level not in ("", "DEBUG", "INFO", "WARNING", "ERROR"):
        raise ValueError(f"FUSED_KDA_LOG_LEVEL: expected DEBUG, INFO, WARNING or ERROR, got {level!r}")
    if raw["FUSED_KDA_COMPILE"] not in ("allow", "warmup", "never"):
        raise ValueError(f"FUSED_KDA_COMPILE: expected allow, warmup or never, got {raw['FUSED_KDA_COMPILE']!r}")
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
        prebuilt=Path(raw["FUSED_KDA_PREBUILT"]) if raw["FUSED_KDA_PREBUILT"] else None,
        compile=raw["FUSED_KDA_COMPILE"],
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
