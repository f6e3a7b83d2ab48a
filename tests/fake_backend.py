"""A faster backend that exists only in a test: it runs the reference, and says so."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from fused_kda import gates
from fused_kda.contract import DecodeProblem, Tensors
from fused_kda.kernels import reference


@dataclass
class FakeBackend:
    """What the backend was asked for: the problems it prepared, and how often it was launched."""

    prepared: list[DecodeProblem] = field(default_factory=list)
    launches: int = 0

    def prepare(self, problem: DecodeProblem) -> Callable[[Tensors], None]:
        self.prepared.append(problem)
        run = reference.prepare(problem)

        def launch(tensors: Tensors) -> None:
            self.launches += 1
            run(tensors)

        return launch


def install(monkeypatch: pytest.MonkeyPatch, **row: Any) -> FakeBackend:
    """Put a backend "fast" ahead of the reference, on the CPU, with the given ranges, and nothing else."""
    backend = FakeBackend()
    module = types.ModuleType("fused_kda.kernels.fast")
    module.prepare = backend.prepare  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fused_kda.kernels.fast", module)
    fast = gates.Row(**{"backend": "fast", "archs": ("cpu",), "launches": 1, **row})
    monkeypatch.setattr(gates, "BACKENDS", ("fast", "reference"))
    monkeypatch.setattr(gates, "TABLE", (fast, *gates.rows("reference")))
    return backend
