"""What the shipped model says on every backend, layout and state dtype, and how far a bf16 state drifts.

Text is compared token by token with that of the reference backend on the SD layout with an fp32 state, on the same
device. Drift is measured with the tokens given, so that both states read the same text all the way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from .. import gates
from ..contract import DecodeProblem, decode_problem
from ..layouts import LAYOUTS, LayoutKind
from ..nn.generation import Decoder, Outcome, evaluate, exact_match
from ..nn.language_model import END, LanguageModel, encode
from ..nn.word_problems import Problem, generate_problems, stream_problems

STATE_DTYPES = (torch.float32, torch.bfloat16)
#: Sequences decoded together in the measurement of drift, and the seed of their texts.
DRIFT_ROWS, DRIFT_SEED = 8, 1


def agreement(
    model: LanguageModel,
    backends: Sequence[str],
    *,
    limit: int,
    slots: int = 64,
    by_name: bool = True,
    progress: Callable[[str], None] = lambda text: None,
) -> list[dict[str, Any]]:
    """Solve problems on every backend, layout and state dtype.

    Args:
        model: in eval mode.
        backends: what is asked; the reference is always run first.
        limit: number of problems of the evaluation split.
        slots: sequences decoded together.
        by_name: whether the backends were asked for by name; else those that ``auto`` would never take are left out.
        progress: called before each run with its name.

    Returns:
        One record per combination: ``exact_match``, ``different`` (answers whose tokens are not all the reference's)
        and ``differences`` (number of the problem, number of the first token that differs), or ``not_run``, why.
    """
    problems = generate_problems("eval", limit)

    def run(backend: str, layout: LayoutKind, dtype: torch.dtype) -> list[Outcome]:
        progress(f"{backend} {layout} {_name(dtype)}")
        decoder = Decoder(model, backend=backend, layout=layout, state_dtype=dtype, slots=min(slots, limit) + 1)
        return evaluate(decoder, problems)

    wanted = run("reference", "SD", torch.float32)
    records = []
    for backend in backends:
        for layout in LAYOUTS:
            for dtype in STATE_DTYPES:
                record = {"backend": backend, "layout": layout, "state_dtype": _name(dtype), "problems": limit}
                reason = refusal(model, backend, layout, dtype, by_name)
                if reason is not None:
                    records.append({**record, "not_run": reason})
                    continue
                same = (backend, layout, dtype) == ("reference", "SD", torch.float32)
                found = wanted if same else run(backend, layout, dtype)
                records.append({**record, "exact_match": exact_match(found), **differences(found, wanted)})
    return records


def differences(found: Sequence[Outcome], wanted: Sequence[Outcome]) -> dict[str, Any]:
    """How many outputs differ from those wanted, and where each first does."""
    places = []
    for number, (mine, theirs) in enumerate(zip(found, wanted, strict=True)):
        if mine.output != theirs.output:
            pairs = zip(mine.output, theirs.output, strict=False)
            shorter = min(len(mine.output), len(theirs.output))
            places.append([number, next((i for i, (a, b) in enumerate(pairs) if a != b), shorter)])
    return {"different": len(places), "differences": places}


def refusal(
    model: LanguageModel, backend: str, layout: LayoutKind, dtype: torch.dtype, by_name: bool = True
) -> str | None:
    """Why a backend cannot run the model's decode steps, or None."""
    verdicts = gates.explain(_problem(model, layout, dtype))
    verdict = next(one for one in verdicts if one.backend == backend)
    if not verdict.open:
        return "; ".join(verdict.reasons)
    return None if verdict.auto or by_name else "only where it is asked for by name"


def _problem(model: LanguageModel, layout: LayoutKind, dtype: torch.dtype) -> DecodeProblem:
    """A decode step of one row of the model."""
    pool = model.new_pool(1, layout=layout, state_dtype=dtype).layer(0)
    heads, dim = pool.state.shape[1], pool.state.shape[3]
    inner, width, device = heads * dim, model.config.conv_width, model.device
    x, param = torch.empty(1, 3 * inner, dtype=model.dtype, device=device), torch.empty(inner, device=device)
    index = torch.empty(1, dtype=torch.int32, device=device)
    return decode_problem(
        x, torch.empty(3 * inner, width, device=device), None, pool.conv_state, x[:, :inner], x[:, :heads],
        param[:heads], param, index, pool.state, lower_bound=model.config.lower_bound, output_gate=x[:, :inner],
        norm_weight=param[:dim], null_slot=pool.null_slot, prefetch=True,
    )  # fmt: skip


@torch.inference_mode()
def drift(model: LanguageModel, steps: int, *, progress: Callable[[int], None] = lambda step: None) -> dict[str, Any]:
    """How far a bf16 state has moved from an fp32 one, step by step, over texts that both read.

    Args:
        model: in eval mode.
        steps: decode steps, each one token for each of :data:`DRIFT_ROWS` rows.
        progress: called with the number of steps done.

    Returns:
        ``backend`` (the one that "auto" takes), ``rows``, ``steps`` (those that are kept), and for each of these:
        ``state``, the norm of the states' difference over the norm of the fp32 state, of the worst layer; ``logits``,
        the largest difference of a logit; ``other_tokens``, the share of rows and steps so far whose most likely token
        is another one.
    """
    rows, backend = DRIFT_ROWS, gates.select(_problem(model, "SD", torch.bfloat16)).backend
    texts = torch.tensor([encode(_text(row, steps)) for row in range(rows)], device=model.device)
    pools = [model.new_pool(rows, state_dtype=dtype) for dtype in STATE_DTYPES]
    slots = torch.tensor(pools[0].allocate(rows), dtype=torch.int32, device=model.device)
    kept = kept_steps(steps)
    other = torch.zeros((), dtype=torch.int64, device=model.device)
    state, logits, others = [], [], []
    for step in range(1, steps + 1):
        wide, narrow = (model.decode(texts[:, step - 1], pool, slots, backend=backend) for pool in pools)
        other += (wide.argmax(-1) != narrow.argmax(-1)).sum()
        if step in kept:
            state.append(
                torch.stack([_distance(*(p.layer(n).state for p in pools)) for n in range(pools[0].layers)]).max()
            )
            logits.append((wide - narrow).abs().max())
            others.append(other / (step * rows))
        progress(step)
    return {
        "backend": backend,
        "rows": rows,
        "steps": sorted(kept),
        "state": torch.stack(state).tolist(),
        "logits": torch.stack(logits).tolist(),
        "other_tokens": torch.stack(others).tolist(),
    }


def kept_steps(steps: int) -> frozenset[int]:
    """Powers of two, and from 64 on four steps between each and the next; the last step always."""
    powers = [2**n for n in range(steps.bit_length())]
    between = [p + p * quarter // 4 for p in powers if p >= 64 for quarter in (1, 2, 3)]
    return frozenset(step for step in [*powers, *between, steps] if 1 <= step <= steps)


def _distance(wide: torch.Tensor, narrow: torch.Tensor) -> torch.Tensor:
    distance: torch.Tensor = torch.dist(wide, narrow.float()) / torch.linalg.vector_norm(wide)
    return distance


def _text(row: int, length: int) -> str:
    """Problems and their solutions, one after the other, cut to a length."""
    text = ""
    problems: Iterator[Problem] = stream_problems("eval", DRIFT_SEED + row)
    while len(text) < length:
        problem = next(problems)
        text += problem.question + END + problem.solution + END
    return text[:length]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
