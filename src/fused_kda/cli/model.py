"""``fused-kda generate`` and ``fused-kda eval``: the shipped model, solving word problems through the op."""

from __future__ import annotations

import time
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import Progress

from .. import gates
from ..nn.generation import MAX_CHARACTERS, Decoder, evaluate, exact_match, load_model
from ..nn.generation import generate as stream_answer
from ..nn.word_problems import generate_problems
from . import agreement
from .bench import SaveOption
from .terminal import (
    FAILED,
    STATE_DTYPES,
    command_line,
    console,
    errors,
    parse_device,
    print_json,
    small_work,
    stop,
)


class Layout(str, Enum):
    """Conv layouts, as the option takes them."""

    SD = "SD"
    DS = "DS"


class StateDtype(str, Enum):
    """State dtypes, as the option takes them."""

    fp32 = "fp32"
    bf16 = "bf16"


BackendOption = Annotated[str, typer.Option("--backend", help="auto or the name of a backend")]
LayoutOption = Annotated[Layout, typer.Option("--layout", help="conv layout of the pool", case_sensitive=False)]
StateDtypeOption = Annotated[StateDtype, typer.Option("--state-dtype", help="of the recurrent pool")]
DeviceOption = Annotated[
    str | None, typer.Option("--device", help="cpu or cuda[:number]; default: the first GPU, else the CPU")
]


def generate_command(
    prompt: Annotated[str, typer.Argument(help="a grade-school word problem, one line")],
    backend: BackendOption = "auto",
    layout: LayoutOption = Layout.SD,
    state_dtype: StateDtypeOption = StateDtype.fp32,
    device: DeviceOption = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="characters after which the answer is cut")] = MAX_CHARACTERS,
) -> None:
    """Solve one word problem, character by character, then print speed, backend and launches per layer."""
    decoder = _load(backend, layout, state_dtype, device, slots=2)
    first = last = time.perf_counter()
    tokens = 0
    try:
        for character in stream_answer(decoder, prompt, max_characters=max_tokens):
            typer.echo(character, nl=False)
            last = time.perf_counter()
            tokens += 1
            if tokens == 1:
                first = last
    except (ValueError, NotImplementedError) as error:
        if tokens:
            typer.echo()
        stop(str(error))
    typer.echo()
    # The first token comes from prefill: the rate is that of the decode steps behind the others.
    rate = f"{(tokens - 1) / (last - first):.0f} tokens/s" if tokens > 1 else "no decode step"
    console.print(f"{tokens} tokens, {rate}, {_ran_on(decoder)}", style="dim", soft_wrap=True)


def eval_command(
    ctx: typer.Context,
    backend: Annotated[
        str,
        typer.Option("--backend", help="auto, a backend, or all: every backend, layout and state dtype"),
    ] = "auto",
    layout: LayoutOption = Layout.SD,
    state_dtype: StateDtypeOption = StateDtype.fp32,
    limit: Annotated[int, typer.Option(min=1, help="number of problems")] = 500,
    device: DeviceOption = None,
    min_exact_match: Annotated[
        float | None, typer.Option(min=0.0, max=1.0, help="end with code 1 where the share is lower")
    ] = None,
    drift_steps: Annotated[
        int, typer.Option(min=1, help="with --backend all: decode steps over which a bf16 state's drift is measured")
    ] = 4096,
    save: SaveOption = None,
    plot: Annotated[
        Path | None, typer.Option(help="with --backend all: draw the drift into this PNG (needs matplotlib)")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON document")] = False,
) -> None:
    """Solve problems whose number combinations were kept out of training, and print the share of exact matches.

    With --backend all: on every backend, layout and state dtype, against the reference token by token.
    """
    if backend == "all":
        where = parse_device(device)
        small_work(where)
        command = command_line(ctx, ("save", "plot", "as_json"))
        agreement.run(command, where, limit, drift_steps, min_exact_match or 0.0, save, plot, as_json)
        return
    if save is not None or plot is not None:
        stop("--save, --plot: expected with --backend all, got without")
    problems = generate_problems("eval", limit)
    decoder = _load(backend, layout, state_dtype, device, slots=min(64, limit) + 1)
    start = time.perf_counter()
    try:
        with Progress(console=errors, transient=True) as progress:
            bar = progress.add_task("eval", total=limit)
            outcomes = evaluate(decoder, problems, progress=lambda finished: progress.update(bar, completed=finished))
    except NotImplementedError as error:
        stop(str(error))
    seconds = time.perf_counter() - start
    share = exact_match(outcomes)
    correct = sum(outcome.correct for outcome in outcomes)
    rate = sum(len(outcome.output) for outcome in outcomes) / seconds
    if as_json:
        print_json(
            {
                "problems": limit,
                "correct": correct,
                "exact_match": share,
                "seconds": seconds,
                "tokens_per_second": rate,
                "backends": decoder.backends_used,
                "layout": layout.value,
                "state_dtype": state_dtype.value,
                "device": str(decoder.model.device),
                "wrong": [
                    {"question": o.problem.question, "answer": o.problem.answer, "output": o.output}
                    for o in outcomes
                    if not o.correct
                ],
            }
        )
    else:
        console.print(
            f"exact match {share:.1%} ({correct} of {limit}), {seconds:.1f} s, {rate:.0f} tokens/s, "
            f"{_ran_on(decoder)}, layout {layout.value}, {state_dtype.value} state",
            soft_wrap=True,
        )
    if min_exact_match is not None and share < min_exact_match:
        stop(f"exact match {share:.4f} is below {min_exact_match}", FAILED)


def _load(backend: str, layout: Layout, state_dtype: StateDtype, device: str | None, slots: int) -> Decoder:
    if backend != "auto" and backend not in gates.BACKENDS:
        stop(f"--backend: expected auto or one of {', '.join(gates.BACKENDS)}, got {backend!r}")
    where = parse_device(device)
    small_work(where)
    return load_model(
        device=where,
        backend=backend,
        layout=layout.value,
        state_dtype=STATE_DTYPES[state_dtype.value],
        slots=slots,
    )


def _ran_on(decoder: Decoder) -> str:
    """Which backends ran the steps, and in how many launches per layer."""
    arch = gates.architecture(decoder.model.device)
    words = []
    for name in decoder.backends_used:
        launches = gates.rows(name, arch)[0].launches
        words.append(f"backend {name}, {launches or 'no'} kernel launch{'' if launches == 1 else 'es'} per layer")
    return "; ".join(words) or "no backend was asked"
