"""What the training script computes: its delta rule, its sequences and its weights."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.nn import functional

from fused_kda.nn.chunked import delta_rule
from fused_kda.nn.language_model import VOCABULARY, encode
from fused_kda.nn.word_problems import held_out
from fused_kda.nn.word_templates import TIMES

TRAINING = Path(__file__).resolve().parents[2] / "training"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(TRAINING))
    return importlib.import_module("train_word_problems")


@pytest.mark.parametrize("steps", [1, 16, 45])
@pytest.mark.parametrize("strength", [0.01, 1.0, 5.0])
def test_its_delta_rule_is_the_librarys_forward_and_backward(script: ModuleType, steps: int, strength: float) -> None:
    torch.manual_seed(steps)
    q, k, v, z = torch.randn(4, 2, steps, 2, 32, dtype=torch.float64)
    drawn = (
        functional.normalize(q, dim=-1),
        functional.normalize(k, dim=-1),
        v,
        -strength * z.sigmoid() ** 0.1,  # close to the strongest decay, where overflow would show
        v[..., 0].sigmoid(),
        torch.randn(2, 2, 32, 32, dtype=torch.float64),
    )
    results = []
    for rule, dtype in ((script.bounded_delta_rule, torch.float32), (delta_rule, torch.float64)):
        arguments = [tensor.to(dtype).requires_grad_() for tensor in drawn]
        o, state = rule(*arguments)
        (o.sin().sum() + state.cos().sum()).backward()
        results.append([o.detach(), state.detach(), *(argument.grad for argument in arguments)])
    for got, expected in zip(*results, strict=True):
        assert float((got - expected).norm() / expected.norm()) < 1e-4


def test_its_sequences_are_seeded_and_hold_no_number_combination_of_the_evaluation(script: ModuleType) -> None:
    width = script.STEPS + 1
    data = script.sequences(5, 400)
    assert len(data) == 400 * width
    assert data == script.sequences(5, 400)
    texts = []
    for start in range(0, len(data), width):
        row = bytes(byte for byte in data[start : start + width] if byte != script.PADDING)
        texts.append("".join(VOCABULARY[token] for token in row))
    drills = [text for text in texts if text.startswith("\n")]
    assert 0.1 < len(drills) / len(texts) < 0.3
    words = {word: number for number, word in TIMES.items()} | {"half": 2}
    for text in texts:
        question, _, _ = text.partition("\n")
        if text in drills:
            continue
        numbers = [int(digits) for digits in re.findall(r"\d+", question)]
        numbers += [number for word, number in words.items() if re.search(rf"\b{word}\b", question)]
        assert not held_out(numbers), text


@pytest.mark.parametrize(
    ("text", "weighed"),
    [("Ann has 2.\n2+3=5. #### 5\n", "2+3=5. #### 5\n"), ("\n2+3=5. 10-4=6. ", "5.6.")],
    ids=["problem", "drill"],
)
def test_what_weighs_is_the_solution_or_a_drills_results(script: ModuleType, text: str, weighed: str) -> None:
    tokens = torch.tensor([encode(text)])
    weights = script.target_weights(tokens[:, :-1])[0].tolist()
    assert "".join(c for c, weight in zip(text[1:], weights, strict=True) if weight == 1) == weighed
    assert all(weight == pytest.approx(script.STORY_WEIGHT) for weight in weights if weight != 1)


def test_targets_are_the_next_tokens_and_padding_has_none(script: ModuleType) -> None:
    data = torch.full((4, script.STEPS + 1), script.PADDING, dtype=torch.uint8)
    data[:, :3] = torch.tensor([7, 8, 9], dtype=torch.uint8)
    inputs, targets = next(script.batches(data, 2, seed=0))
    assert inputs.shape == targets.shape == (2, script.STEPS)
    assert targets[:, :2].tolist() == [[8, 9]] * 2
    assert (targets[:, 2:] == script.IGNORED).all()
    assert inputs[:, :3].tolist() == [[7, 8, 9]] * 2
    assert int(inputs.min()) == 0
