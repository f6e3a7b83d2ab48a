"""Decoding with continuous batching, and the shipped model's answers through the op."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fused_kda.layouts import LAYOUTS, LayoutKind
from fused_kda.nn.generation import Decoder, Outcome, evaluate, exact_match, generate, load_model
from fused_kda.nn.language_model import LanguageModel, ModelConfig, read_model
from fused_kda.nn.word_problems import generate_problems, held_out

ANN = "Ann has 12 apples. She buys 7 more and gives 4 to Bob. How many apples does Ann have?"


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return read_model()


@pytest.fixture
def model_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """``(prefill or decode, rows)`` of every call of the model."""
    calls: list[tuple[str, int]] = []
    prefill, decode = LanguageModel.prefill, LanguageModel.decode

    def spy_prefill(self: LanguageModel, *args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(("prefill", len(kwargs["lengths"])))
        return prefill(self, *args, **kwargs)

    def spy_decode(self: LanguageModel, tokens: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(("decode", len(tokens)))
        return decode(self, tokens, *args, **kwargs)

    monkeypatch.setattr(LanguageModel, "prefill", spy_prefill)
    monkeypatch.setattr(LanguageModel, "decode", spy_decode)
    return calls


@pytest.mark.parametrize(
    ("question", "numbers", "solution"),
    [
        (ANN, (12, 7, 4), "12+7=19. 19-4=15. #### 15"),
        (
            "Tom has 50 dollars. He buys 3 books for 11 dollars each. How much money does he have left?",
            (50, 3, 11),
            "3*11=33. 50-33=17. #### 17",
        ),
        (
            "Mia has 48 cookies and gets 6 more. She shares them equally among 3 friends. "
            "How many cookies does each friend get?",
            (48, 6, 3),
            "48+6=54. 54/3=18. #### 18",
        ),
    ],
)
def test_numbers_that_were_not_trained_on(
    model: LanguageModel, question: str, numbers: tuple[int, ...], solution: str
) -> None:
    assert held_out(numbers)
    assert "".join(generate(Decoder(model, slots=1), question)) == solution


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_held_out_problems_in_every_pool(model: LanguageModel, layout: LayoutKind, state_dtype: torch.dtype) -> None:
    decoder = Decoder(model, backend="reference", layout=layout, state_dtype=state_dtype, slots=24)
    outcomes = evaluate(decoder, generate_problems("eval", 24, seed=1))
    assert exact_match(outcomes) >= 0.9
    assert decoder.backends_used == ("reference",)


def test_prompts_join_and_leave_and_get_what_they_get_alone(
    model: LanguageModel, model_calls: list[tuple[str, int]]
) -> None:
    questions = [problem.question for problem in generate_problems("eval", 9, seed=2)]
    alone = ["".join(generate(Decoder(model, slots=1), question)) for question in questions]
    model_calls.clear()
    decoder = Decoder(model, slots=4)
    together = [""] * len(questions)
    done = []
    for number, character in decoder.stream(questions):
        assert number not in done
        if character is None:
            done.append(number)
        else:
            together[number] += character
    assert together == alone
    assert sorted(done) == list(range(9))
    assert sum(rows for kind, rows in model_calls if kind == "prefill") == 9
    assert model_calls[0] == ("prefill", 4)
    assert all(rows <= 4 for _, rows in model_calls)
    assert decoder.pool.free_slots == decoder.pool.capacity == 4


def test_slots_come_back_when_the_reader_stops_early(model: LanguageModel) -> None:
    decoder = Decoder(model, slots=2)
    answers = decoder.stream([ANN, ANN, ANN])
    next(answers)
    assert decoder.pool.free_slots == 0
    answers.close()  # type: ignore[attr-defined]
    assert decoder.pool.free_slots == 2


def test_an_answer_is_cut(model: LanguageModel) -> None:
    assert "".join(generate(Decoder(model, slots=1), ANN, max_characters=7)) == "12+7=19"


def test_a_strange_character_is_named_before_any_step(model: LanguageModel, model_calls: list[tuple[str, int]]) -> None:
    with pytest.raises(ValueError, match="text: expected printable ASCII, got '\u20ac'"):
        list(Decoder(model, slots=1).stream([ANN, "Ann has 12 \u20ac."]))
    assert model_calls == []


def test_progress_counts_and_outcomes_are_in_order(model: LanguageModel) -> None:
    problems = generate_problems("eval", 5, seed=4)
    seen: list[int] = []
    outcomes = evaluate(Decoder(model, slots=2), problems, progress=seen.append)
    assert seen == [1, 2, 3, 4, 5]
    assert [outcome.problem for outcome in outcomes] == problems


def test_exact_match_is_the_share_of_right_answers() -> None:
    problem = generate_problems("eval", 1)[0]
    outcomes = [Outcome(problem, output) for output in (problem.solution, "no mark", f"#### {problem.answer + 1}", "")]
    assert [outcome.correct for outcome in outcomes] == [True, False, False, False]
    assert exact_match(outcomes) == 0.25


def test_an_untrained_model_scores_nothing() -> None:
    torch.manual_seed(0)
    untrained = LanguageModel(ModelConfig(hidden_size=32, num_layers=1, num_heads=1, head_dim=16, mlp_size=32))
    assert exact_match(evaluate(Decoder(untrained.eval(), slots=8), generate_problems("eval", 8))) == 0.0


def test_the_backend_that_was_asked_for_runs() -> None:
    decoder = load_model(device="cpu", backend="reference", slots=1)
    assert decoder.backends_used == ()
    assert "".join(generate(decoder, ANN)).endswith("#### 15")
    assert decoder.backends_used == ("reference",)
