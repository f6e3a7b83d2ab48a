"""Greedy decoding with continuous batching: prompts join and leave the batch between steps.

Every prompt gets a slot of one :class:`fused_kda.pool.StatePool`; a prompt that ends gives its slot to the next one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ..api import stats
from ..layouts import LayoutKind
from .language_model import END, VOCABULARY, LanguageModel, encode, read_model
from .word_problems import Problem, parse_answer

#: Characters after which an output is cut; the longest solution of the word problems has 44.
MAX_CHARACTERS = 96


@dataclass(slots=True)
class _Row:
    """A sequence in flight."""

    number: int
    prompt: list[int]
    slot: int
    token: int = 0
    count: int = 0


class Decoder:
    """A model, the pool that its sequences live in, and the backend that advances them.

    Args:
        model: the model, in eval mode.
        backend: of :func:`fused_kda.fused_kda_decode`.
        layout: of the conv pool.
        state_dtype: of the recurrent pool.
        slots: sequences that are decoded together.
    """

    def __init__(
        self,
        model: LanguageModel,
        *,
        backend: str = "auto",
        layout: LayoutKind = "SD",
        state_dtype: torch.dtype = torch.float32,
        slots: int = 64,
    ) -> None:
        self.model = model
        self.backend = backend
        self.pool = model.new_pool(slots, layout=layout, state_dtype=state_dtype)
        self._before = stats()

    @property
    def backends_used(self) -> tuple[str, ...]:
        """Backends that have run decode steps in this process since the decoder was made."""
        return tuple(sorted({key[0] for key, calls in stats().items() if calls > self._before.get(key, 0)}))

    def stream(
        self, prompts: Iterable[str], *, max_characters: int = MAX_CHARACTERS
    ) -> Iterator[tuple[int, str | None]]:
        """Continue every prompt greedily until a line break or ``max_characters``.

        Yields:
            ``(number of the prompt, next character)`` as they come, and ``(number, None)`` when that prompt is done.

        Raises:
            ValueError: a prompt has a character outside the vocabulary. Prompts are all read before the first step.
        """
        waiting = deque((number, encode(prompt + END)) for number, prompt in enumerate(prompts))
        running: list[_Row] = []
        try:
            while waiting or running:
                joining = min(len(waiting), self.pool.free_slots)
                # Joining one by one would cost a prefill each: wait until a quarter of the slots is free.
                if joining and (not running or joining == len(waiting) or 4 * joining >= self.pool.capacity):
                    advanced = [_Row(*waiting.popleft(), self.pool.allocate()) for _ in range(joining)]
                    running += advanced
                    logits = self._prefill(advanced)
                else:
                    advanced = list(running)
                    logits = self._step(advanced)
                for row, token in zip(advanced, logits.argmax(-1).tolist(), strict=True):
                    row.token = token
                    row.count += 1
                    character = VOCABULARY[token]
                    if character != END:
                        yield row.number, character
                    if character == END or row.count == max_characters:
                        running.remove(row)
                        self.pool.free(row.slot)
                        yield row.number, None
        finally:
            for row in running:
                self.pool.free(row.slot)

    def _prefill(self, rows: Sequence[_Row]) -> torch.Tensor:
        tokens = torch.tensor([token for row in rows for token in row.prompt], device=self.model.device)
        lengths = [len(row.prompt) for row in rows]
        return self.model.prefill(tokens, self.pool, [row.slot for row in rows], lengths=lengths)

    def _step(self, rows: Sequence[_Row]) -> torch.Tensor:
        device = self.model.device
        tokens = torch.tensor([row.token for row in rows], device=device)
        slots = torch.tensor([row.slot for row in rows], dtype=torch.int32, device=device)
        return self.model.decode(tokens, self.pool, slots, backend=self.backend)


def load_model(
    path: Path | None = None,
    *,
    device: torch.device | str | None = None,
    backend: str = "auto",
    layout: LayoutKind = "SD",
    state_dtype: torch.dtype = torch.float32,
    slots: int = 64,
) -> Decoder:
    """Read a model (None: the shipped one) and make it ready to decode.

    Args:
        path: safetensors file of :func:`fused_kda.nn.language_model.save_model`.
        device: None is the GPU where there is one, else the CPU.
        backend, layout, state_dtype, slots: as for :class:`Decoder`.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    model = read_model(path, device=device)
    return Decoder(model, backend=backend, layout=layout, state_dtype=state_dtype, slots=slots)


def generate(decoder: Decoder, prompt: str, *, max_characters: int = MAX_CHARACTERS) -> Iterator[str]:
    """The solution of one problem, character by character."""
    for _, character in decoder.stream([prompt], max_characters=max_characters):
        if character is not None:
            yield character


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a model made of a problem."""

    problem: Problem
    output: str

    @property
    def answer(self) -> int | None:
        """The number that the output gives after ``####``."""
        return parse_answer(self.output)

    @property
    def correct(self) -> bool:
        """Exact match of the answer."""
        return self.answer == self.problem.answer


def evaluate(
    decoder: Decoder, problems: Sequence[Problem], *, progress: Callable[[int], None] | None = None
) -> list[Outcome]:
    """Let the model solve problems, as many together as the decoder has slots.

    Args:
        decoder: the model.
        problems: e.g. ``generate_problems("eval", 500)``.
        progress: called with the number of finished problems whenever one finishes.

    Returns:
        One outcome per problem, in order.
    """
    outputs = [""] * len(problems)
    finished = 0
    for number, character in decoder.stream([problem.question for problem in problems]):
        if character is not None:
            outputs[number] += character
            continue
        finished += 1
        if progress is not None:
            progress(finished)
    return [Outcome(problem, output) for problem, output in zip(problems, outputs, strict=True)]


def exact_match(outcomes: Sequence[Outcome]) -> float:
    """Share of correct answers, 0 to 1."""
    return sum(outcome.correct for outcome in outcomes) / len(outcomes)
