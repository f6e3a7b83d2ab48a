"""Engines: thin adapters that let vLLM, SGLang and fla run their KDA decode step through the op.

Every adapter is importable without its engine, raises nothing while it registers, and leaves each step that it does
not take to the engine's own code. What happened is countable: :func:`stats` by engine and outcome, :data:`surfaces` by
place in the engine. A step that an engine could have given to the op but did not is also logged, once per reason.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from .. import gates
from ..api import fused_kda_decode
from ..contract import DecodeProblem, decode_problem

logger = logging.getLogger("fused_kda")


@dataclass
class Surface:
    """One place of an engine that an adapter replaces or adds to.

    Attributes:
        engine, name: which place.
        state: "on"; "waiting" until the engine imports the module; "off" by a switch; "failed".
        detail: what was done there, or why not.
    """

    engine: str
    name: str
    state: str
    detail: str


surfaces: dict[tuple[str, str], Surface] = {}
_outcomes: Counter[tuple[str, str]] = Counter()


def mark(engine: str, name: str, state: str, detail: str) -> None:
    """Say what became of a surface; a failure is logged."""
    surfaces[engine, name] = Surface(engine, name, state, detail)
    logger.log(logging.WARNING if state == "failed" else logging.INFO, "%s: %s is %s: %s", engine, name, state, detail)


def stats() -> dict[tuple[str, str], int]:
    """Steps so far by ``(engine, outcome)``; the outcome is "fused (BACKEND)" or "refused: REASON".

    Steps that a CUDA graph replays are not seen: its capture counts once.
    """
    return dict(_outcomes)


def reset() -> None:
    """Forget the statistics."""
    _outcomes.clear()


def refused(engine: str, reason: str, *, expected: bool = False) -> None:
    """Count a step that is left to the engine; log the reason the first time, unless it is no decode step at all."""
    outcome = (engine, f"refused: {reason}")
    if not expected and outcome not in _outcomes:
        logger.warning("%s: decode steps stay with the engine: %s", engine, reason)
    _outcomes[outcome] += 1


def one_launch(problem: DecodeProblem, device: torch.device, backend: str = "auto") -> tuple[str | None, str]:
    """Choose a backend for an engine, which has slower ways of its own to do a step.

    Args:
        problem: the step, of any device.
        device: where it would run.
        backend: as in :func:`fused_kda.fused_kda_decode`. With "auto" only a backend of one launch will do; a name, in
            the call or the environment, is taken at its word.

    Returns:
        The backend and "", or None and the reason.
    """
    try:
        selection = gates.select(replace(problem, device=device), backend)
    except NotImplementedError as error:
        return None, str(error)
    arch = gates.architecture(device)
    if selection.reason == "auto" and all(row.launches != 1 for row in gates.rows(selection.backend, arch)):
        return None, f"no backend of one launch on {arch}" + (f": {selection.fallback}" if selection.fallback else "")
    return selection.backend, ""


@dataclass
class Route:
    """The way from one place in an engine to the op; which backend is decided once per kind of step."""

    engine: str
    backend: str = "auto"
    verdicts: dict[Hashable, tuple[str | None, str]] = field(default_factory=dict)

    def closed(self, key: Hashable) -> bool:
        """Whether such a step is known to be the engine's; counted if so. Saves making the call's tensors."""
        name, reason = self.verdicts.get(key, ("unknown", ""))
        if name is None:
            refused(self.engine, reason)
        return name is None

    def decode(self, key: Hashable, call: dict[str, Any]) -> torch.Tensor | None:
        """Run one step, or leave it to the engine.

        Args:
            key: all that the verdict depends on and that may differ between this route's steps.
            call: arguments of :func:`fused_kda.fused_kda_decode` but ``backend``.

        Returns:
            The op's output; None, with nothing touched and the reason counted, where the engine has to do the step.
        """
        verdict = self.verdicts.get(key)
        if verdict is None:
            try:
                verdict = one_launch(decode_problem(**call), call["x"].device, self.backend)
            except (TypeError, ValueError) as error:
                verdict = None, str(error)
            self.verdicts[key] = verdict
        name, reason = verdict
        if name is None:
            refused(self.engine, reason)
            return None
        _outcomes[self.engine, f"fused ({name})"] += 1
        return fused_kda_decode(**call, backend=name)


def kind_of(call: dict[str, Any]) -> tuple[object, ...]:
    """The key of a call's verdict: what the gates look at, of the arguments that an engine's layers differ in."""
    x, conv, state = call["x"], call["conv_state"], call["state"]
    bias, norm = call["bias"], call["norm_weight"]
    return (
        x.dtype, x.device, conv.shape, conv.stride(), conv.dtype, state.shape, state.stride(), state.dtype,
        call["weight"].dtype, bias is None or bias.dtype, norm is None or norm.dtype, call["lower_bound"],
    )  # fmt: skip
