"""Seeded grade-school word problems of two or three steps, their working and their split.

A problem is a question ("Ann has 12 apples. She buys 7 more and gives 4 to Bob. How many apples does Ann have?") and a
solution ("12+7=19. 19-4=15. #### 15"). Whether a problem may be trained on is decided by its numbers alone:
:func:`held_out` hashes their sorted tuple, so no combination of numbers is on both sides, in whatever story or order.
"""

from __future__ import annotations

import functools
import hashlib
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from .word_templates import BOXES, FOOD, HE, PHRASES, SAME, SHE, SINGULAR, TEMPLATES, THINGS, TIMES, Template

Split = Literal["train", "eval"]

#: One in so many combinations of numbers is kept for evaluation.
HELD_OUT_ONE_IN = 8
#: Results in a working stay in 1 .. MAX_RESULT.
MAX_RESULT = 300
ANSWER_MARK = "#### "

_ALTERNATIVES = re.compile(r"\(([^()]*)\)")
_PHRASE = re.compile(r"\{(\w+):(\w)\}")
_STEP = re.compile(r"(\w)([-+*/])(\w)=(\w)")
_ARTICLE = re.compile(r"\b([Aa])(?= [aeiou])")
_ANSWER = re.compile(r"####\s*(-?\d+)")


@dataclass(frozen=True, slots=True)
class Problem:
    """A word problem.

    Attributes:
        question: the text, one line.
        solution: the working and, after ``####``, the answer, one line.
        answer: the answer.
        numbers: the numbers that the story gives, in the order of its template.
        template: name of the template.
    """

    question: str
    solution: str
    answer: int
    numbers: tuple[int, ...]
    template: str


def held_out(numbers: Sequence[int]) -> bool:
    """Whether this combination of numbers, in any order, is kept for evaluation and never trained on."""
    key = " ".join(map(str, sorted(numbers))).encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=4).digest(), "big") % HELD_OUT_ONE_IN == 0


def parse_answer(text: str) -> int | None:
    """The number after ``####`` in a solution, or None where there is none."""
    match = _ANSWER.search(text)
    return int(match.group(1)) if match else None


def stream_problems(split: Split, seed: int) -> Iterator[Problem]:
    """Problems without end, each template equally often, the same for the same split and seed.

    Raises:
        ValueError: an unknown split.
    """
    if split not in ("train", "eval"):
        raise ValueError(f"split: expected train or eval, got {split!r}")
    rng = random.Random(f"{split} {seed}")
    while True:
        yield _draw(rng, rng.choice(TEMPLATES), wanted=split == "eval")


def generate_problems(split: Split, count: int, seed: int = 0) -> list[Problem]:
    """The first ``count`` problems of :func:`stream_problems` that differ in their question."""
    seen: dict[str, Problem] = {}
    for problem in stream_problems(split, seed):
        if len(seen) == count:
            break
        seen.setdefault(problem.question, problem)
    return list(seen.values())


def _draw(rng: random.Random, template: Template, wanted: bool) -> Problem:
    while True:
        numbers = {name: rng.randint(low, high) for name, (low, high) in template.ranges.items()}
        results = _work(template.steps, numbers)
        if results is None:
            continue
        used = tuple(value for name, value in numbers.items() if name in template.steps)
        if held_out(used) is wanted:
            break
    working, answer = results
    question = _tell(rng, template.text, numbers)
    return Problem(question, f"{working}{ANSWER_MARK}{answer}", answer, used, template.name)


def _work(steps: str, numbers: Mapping[str, int]) -> tuple[str, int] | None:
    """The working and the last result, or None where a result is not a whole number in 1 .. MAX_RESULT."""
    known = dict(numbers)
    written = []
    result = 0
    for left, sign, right, name in _STEP.findall(steps):
        x, y = known[left], known[right]
        if sign == "/" and x % y:
            return None
        result = _OPERATIONS[sign](x, y)
        if not 1 <= result <= MAX_RESULT:
            return None
        known[name] = result
        written.append(f"{x}{sign}{y}={result}. ")
    return "".join(written), result


_OPERATIONS: Mapping[str, Callable[[int, int], int]] = {
    "+": lambda x, y: x + y,
    "-": lambda x, y: x - y,
    "*": lambda x, y: x * y,
    "/": lambda x, y: x // y,
}


def _tell(rng: random.Random, text: str, numbers: Mapping[str, int]) -> str:
    """One wording of a template's text."""
    text = _with_phrases(text)
    while (match := _ALTERNATIVES.search(text)) is not None:
        text = text[: match.start()] + rng.choice(match.group(1).split("|")) + text[match.end() :]
    people = rng.sample(SHE + HE, 3)
    she, her = ("she", "her") if people[0] in SHE else ("he", "his")
    things, others = rng.sample(THINGS, 2)
    boxes = rng.choice(BOXES)
    words: dict[str, object] = dict(numbers)
    words.update(zip("ABC", people, strict=True))
    words.update(she=she, She=she.capitalize(), her=her)
    words.update(things=things, thing=_singular(things), others=others, other=_singular(others))
    words.update(zip(("eats", "ate"), ("eats", "ate") if things in FOOD else ("uses", "used"), strict=True))
    words.update(boxes=boxes, box=_singular(boxes))
    for names, choices in SAME.items():
        words.update(zip(names, rng.choice(choices), strict=True))
    if "k" in numbers:
        words["k"] = TIMES[numbers["k"]]
    return _ARTICLE.sub(r"\1n", text.format_map(words))


@functools.cache
def _with_phrases(text: str) -> str:
    return _PHRASE.sub(lambda match: "(" + PHRASES[match.group(1)].replace("#", f"{{{match.group(2)}}}") + ")", text)


def _singular(plural: str) -> str:
    return SINGULAR.get(plural, plural[:-1])
