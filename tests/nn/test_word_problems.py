"""The word problems: their arithmetic, their wording, and the split by numbers."""

from __future__ import annotations

import re
from collections import Counter
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fused_kda.nn.language_model import encode
from fused_kda.nn.word_problems import (
    HELD_OUT_ONE_IN,
    MAX_RESULT,
    Problem,
    generate_problems,
    held_out,
    parse_answer,
    stream_problems,
)
from fused_kda.nn.word_templates import TEMPLATES, TIMES

STEP = re.compile(r"(\d+)([-+*/])(\d+)=(\d+)\. ")


@pytest.fixture(scope="module")
def drawn() -> dict[str, list[Problem]]:
    return {split: generate_problems(split, 4000, seed=3) for split in ("train", "eval")}


def test_same_seed_same_problems_and_a_longer_list_starts_with_the_shorter() -> None:
    assert generate_problems("eval", 40) == generate_problems("eval", 60)[:40]
    assert generate_problems("eval", 40, seed=1) != generate_problems("eval", 40, seed=2)


def test_no_combination_of_numbers_is_on_both_sides(drawn: dict[str, list[Problem]]) -> None:
    combinations = {
        split: {tuple(sorted(problem.numbers)) for problem in problems} for split, problems in drawn.items()
    }
    assert len(combinations["train"]) > 2000
    assert len(combinations["eval"]) > 2000
    assert not combinations["train"] & combinations["eval"]
    assert all(held_out(numbers) for numbers in combinations["eval"])
    assert not any(held_out(numbers) for numbers in combinations["train"])


@given(
    st.lists(st.integers(2, 200), min_size=2, max_size=4).flatmap(lambda n: st.tuples(st.just(n), st.permutations(n)))
)
def test_the_order_of_the_numbers_does_not_decide_the_side(pair: tuple[list[int], list[int]]) -> None:
    assert held_out(pair[0]) == held_out(pair[1])


def test_the_hash_keeps_about_the_share_that_it_names() -> None:
    kept = sum(held_out((a, b, c)) for a in range(30, 50) for b in range(10, 30) for c in range(2, 10))
    assert kept / 3200 == pytest.approx(1 / HELD_OUT_ONE_IN, rel=0.1)


def test_every_working_is_true_and_uses_the_numbers_that_are_told(drawn: dict[str, list[Problem]]) -> None:
    for problem in drawn["train"] + drawn["eval"]:
        steps = STEP.findall(problem.solution)
        assert "".join(f"{x}{sign}{y}={z}. " for x, sign, y, z in steps) + f"#### {problem.answer}" == problem.solution
        assert 2 <= len(steps) <= 3
        known = set(problem.numbers)
        for x, sign, y, z in steps:
            left, right, result = int(x), int(y), int(z)
            true = {"+": left + right, "-": left - right, "*": left * right, "/": left / right}[sign]
            assert result == true
            assert 1 <= result <= MAX_RESULT
            assert {left, right} <= known
            known.add(result)
        assert int(steps[-1][-1]) == problem.answer == parse_answer(problem.solution)


def test_every_question_tells_its_numbers_and_is_plain_text(drawn: dict[str, list[Problem]]) -> None:
    words = {word: number for number, word in TIMES.items()} | {"half": 2}
    for problem in drawn["train"] + drawn["eval"]:
        told = [int(digits) for digits in re.findall(r"\d+", problem.question)]
        told += [number for word, number in words.items() if re.search(rf"\b{word}\b", problem.question)]
        assert Counter(told) == Counter(problem.numbers), problem
        assert not set(problem.question) & set("{}()|#\n"), problem
        assert "  " not in problem.question, problem
        assert problem.question.endswith("?")
        assert not re.search(r"\ba [aeiou]", problem.question), problem
        encode(problem.question + problem.solution)


def test_both_sides_have_every_story(drawn: dict[str, list[Problem]]) -> None:
    names = {template.name for template in TEMPLATES}
    assert len(names) == len(TEMPLATES) >= 20
    for problems in drawn.values():
        assert {problem.template for problem in problems} == names


def test_questions_do_not_repeat() -> None:
    problems = generate_problems("eval", 500)
    assert len({problem.question for problem in problems}) == len(problems) == 500


@pytest.mark.parametrize(
    ("text", "answer"),
    [("1+2=3. #### 3", 3), ("#### -4\n", -4), ("####5 and 6", 5), ("12+7=19.", None), ("#### x", None), ("", None)],
)
def test_the_answer_is_the_number_after_the_mark(text: str, answer: int | None) -> None:
    assert parse_answer(text) == answer


def test_an_unknown_split_is_refused() -> None:
    with pytest.raises(ValueError, match="split: expected train or eval, got 'test'"):
        next(islice(stream_problems("test", 0), 1))  # type: ignore[arg-type]
