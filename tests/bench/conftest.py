"""A backend that is wrong, for the tests that must notice it."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import torch

import fake_backend
from fused_kda.contract import DecodeProblem, Tensors


@pytest.fixture
def wrong_backend(monkeypatch: pytest.MonkeyPatch) -> str:
    """Its name; it has SD and fp32 states, is ahead of the reference and negates the reference's outputs."""
    honest = fake_backend.install(monkeypatch, layouts=("SD",), state_dtypes=(torch.float32,)).prepare

    def prepare(problem: DecodeProblem) -> Callable[[Tensors], None]:
        run = honest(problem)

        def launch(tensors: Tensors) -> None:
            run(tensors)
            tensors.out.neg_()

        return launch

    monkeypatch.setattr(sys.modules["fused_kda.kernels.fast"], "prepare", prepare)
    return "fast"
