"""Answers against the reference's, and the drift of a bf16 state, on the shipped model."""

from __future__ import annotations

import pytest
import torch

import fake_backend
from fused_kda.bench.agreement import agreement, differences, drift, kept_steps, refusal
from fused_kda.nn.generation import Outcome
from fused_kda.nn.language_model import LanguageModel, read_model
from fused_kda.nn.word_problems import Problem


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return read_model(device="cpu")


def outcome(output: str) -> Outcome:
    return Outcome(Problem("q", "s", 1, (1,), "t"), output)


def test_differences_name_the_first_token() -> None:
    wanted = [outcome(text) for text in ("1+1=2", "2", "30")]
    found = [outcome(text) for text in ("1+1=3", "2", "3")]
    assert differences(found, wanted) == {"different": 2, "differences": [[0, 4], [2, 1]]}
    assert differences(wanted, wanted) == {"different": 0, "differences": []}


def test_every_combination_has_a_record(model: LanguageModel) -> None:
    found = agreement(model, ("cuda", "reference"), limit=2)
    assert [(r["backend"], r["layout"], r["state_dtype"]) for r in found] == [
        (backend, layout, dtype)
        for backend in ("cuda", "reference")
        for layout in ("SD", "DS")
        for dtype in ("float32", "bfloat16")
    ]
    for record in found:
        if record["backend"] == "cuda":
            assert "architecture cpu is not in" in record["not_run"]
        else:
            assert record["exact_match"] == 1
            assert record["different"] == 0


def test_a_backend_that_answers_otherwise_is_found(model: LanguageModel, wrong_backend: str) -> None:
    record = agreement(model, (wrong_backend,), limit=2)[0]
    assert record["different"] == 2
    assert record["exact_match"] == 0


def test_what_auto_never_takes_is_run_only_by_name(model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_backend.install(monkeypatch, auto=False)
    assert refusal(model, "fast", "SD", torch.float32, by_name=False) == "only where it is asked for by name"
    assert refusal(model, "fast", "SD", torch.float32) is None


def test_drift_is_that_of_the_state_alone(model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    found = drift(model, 12)
    assert found["steps"] == [1, 2, 4, 8, 12]
    assert all(0 < distance < 0.05 for distance in found["state"])
    assert found["logits"][0] == 0  # the first token's answer is computed before the state is rounded
    assert max(found["logits"]) > 0
    # Were both states kept in the same type, there would be none.
    monkeypatch.setattr("fused_kda.bench.agreement.STATE_DTYPES", (torch.float32, torch.float32))
    assert set(drift(model, 4)["state"]) == {0.0}


def test_kept_steps_are_dense_where_a_logarithm_is() -> None:
    assert sorted(kept_steps(100)) == [1, 2, 4, 8, 16, 32, 64, 80, 96, 100]
    assert max(kept_steps(4096)) == 4096
    assert len(kept_steps(4096)) < 40
