"""Train the shipped word-problem model from scratch and measure it.

    PYTHONPATH=src python3 training/train_word_problems.py --minutes 5 --out .

Writes ``word_problems.safetensors`` (bf16, configuration and training figures in its metadata) and
``word_problems.json`` (exact match on 500 held-out problems, with fp32 and with bf16 state) to ``--out``. Everything is
drawn from ``--seed``; the number of steps depends on the machine, because the schedule follows the clock.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import random
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch
from bounded_chunks import bounded_delta_rule
from torch.nn import functional

from fused_kda.nn import kda
from fused_kda.nn.chunked import delta_rule
from fused_kda.nn.generation import Decoder, evaluate, exact_match
from fused_kda.nn.language_model import LanguageModel, ModelConfig, encode, read_model, save_model
from fused_kda.nn.word_problems import ANSWER_MARK, generate_problems, stream_problems

#: Targets of a sequence; one in twenty problems is longer and loses its end. One length, so that a step compiles once.
STEPS = 176
PADDING = 255
IGNORED = -100
#: Weight of a target inside the question (or of a drill's operands); targets of the solution weigh 1.
STORY_WEIGHT = 0.05
#: Share of sequences that are drills: the workings of several problems, one after the other, without their stories.
DRILLS = 0.2


def sequences(seed: int, count: int) -> bytes:
    """``count`` training sequences of ``STEPS + 1`` bytes each: tokens, after them PADDING."""
    rng = random.Random(f"drills {seed}")
    problems = stream_problems("train", seed)
    out = bytearray()
    for _ in range(count):
        if rng.random() < DRILLS:
            workings = (problem.solution.split(ANSWER_MARK)[0] for problem in islice(problems, 8))
            text = "\n" + "".join(workings)
        else:
            problem = next(problems)
            text = f"{problem.question}\n{problem.solution}\n"
        out += bytes(encode(text[: STEPS + 1])).ljust(STEPS + 1, bytes([PADDING]))
    return bytes(out)


def draw_sequences(seed: int, count: int) -> torch.Tensor:
    """``[count, STEPS + 1]`` uint8 by all cores. Forks: to be called before the GPU is touched."""
    workers = os.cpu_count() or 1
    parts = 4 * workers
    tasks = [(1000 * seed + part, count // parts) for part in range(parts)]
    with multiprocessing.get_context("fork").Pool(workers) as pool:
        drawn = pool.starmap(sequences, tasks, chunksize=1)
    return torch.frombuffer(bytearray(b"".join(drawn)), dtype=torch.uint8).view(-1, STEPS + 1)


def batches(data: torch.Tensor, size: int, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """``(inputs, targets)`` without end: ``[size, STEPS]`` int64, targets IGNORED where there is none."""
    generator = torch.Generator(device=data.device).manual_seed(seed)
    while True:
        order = torch.randperm(len(data), generator=generator, device=data.device)
        for index in order[: len(data) // size * size].split(size):
            rows = data[index].long()
            rows = torch.where(rows == PADDING, IGNORED, rows)
            yield rows[:, :-1].clamp(min=0), rows[:, 1:]


def target_weights(inputs: torch.Tensor) -> torch.Tensor:
    """``[B, T]`` fp32: 1 for targets of a solution, and for a result in a drill (which begins with a line break)."""
    end, equals, stop = encode("\n")[0], encode("=")[0], encode(".")[0]
    solving = (inputs == end).cumsum(1) > 0
    in_result = (inputs == equals).cumsum(1) > (inputs == stop).cumsum(1)
    drill = (inputs[:, :1] == end) & ~in_result
    return torch.where(solving & ~drill, 1.0, STORY_WEIGHT)


def check_delta_rule(device: torch.device) -> None:
    """Refuse to train with a delta rule that is not the library's."""
    q, k, v, z = torch.randn(4, 2, 50, 2, 128, device=device)
    q, k = functional.normalize(q, dim=-1), functional.normalize(k, dim=-1)
    arguments = (q, k, v, -5 * z.sigmoid(), v[..., 0].sigmoid())
    for name, ours, theirs in zip(("o", "state"), bounded_delta_rule(*arguments), delta_rule(*arguments), strict=True):
        error = float((ours - theirs).norm() / theirs.norm())
        print(f"delta rule for training against the library's, {name}: relative difference {error:.1e}", flush=True)
        if not error < 1e-4:
            raise RuntimeError(f"{name}: relative difference {error:.1e} is above 1e-4")


def measure(path: Path, device: torch.device, count: int) -> dict[str, float]:
    """Exact match of the written model on held-out problems, by state dtype."""
    problems = generate_problems("eval", count)
    model = read_model(path, device=device)
    figures = {}
    for state_dtype in (torch.float32, torch.bfloat16):
        decoder = Decoder(model, backend="reference", state_dtype=state_dtype, slots=256)
        outcomes = evaluate(decoder, problems)
        figures[f"exact match, {state_dtype} state"] = exact_match(outcomes)
        for outcome in [outcome for outcome in outcomes if not outcome.correct][:10]:
            print(f"  {outcome.problem.question} | {outcome.problem.solution} | {outcome.output}")
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0, help="of training; the schedule spans them")
    parser.add_argument("--out", type=Path, default=Path("."), help="folder for the results")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--rate", type=float, default=2e-3, help="peak learning rate")
    parser.add_argument("--sequences", type=int, default=2_000_000, help="drawn before training, then repeated")
    parser.add_argument("--problems", type=int, default=500, help="held-out problems to measure")
    parser.add_argument("--layers", type=int, default=ModelConfig().num_layers)
    parser.add_argument("--hidden", type=int, default=ModelConfig().hidden_size)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compile", action="store_true", help="compile the blocks")
    args = parser.parse_args()

    start = time.monotonic()
    data = draw_sequences(args.seed, args.sequences)
    print(f"{len(data)} sequences in {time.monotonic() - start:.0f} s", flush=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    data = data.to(device)
    torch.manual_seed(args.seed)
    check_delta_rule(device)
    kda.delta_rule = bounded_delta_rule
    torch.set_float32_matmul_precision("high")

    config = ModelConfig(num_layers=args.layers, hidden_size=args.hidden)
    model = LanguageModel(config, dtype=torch.float32, device=device)
    if args.compile:
        for block in model.blocks:
            block.compile(dynamic=False)
    vectors = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    matrices = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        betas=(0.9, 0.98),
        fused=True,
    )
    path = args.out / "word_problems.safetensors"
    start = last = time.monotonic()
    for step, (inputs, targets) in enumerate(batches(data, args.batch, args.seed), 1):
        elapsed = (time.monotonic() - start) / (60 * args.minutes)
        if elapsed >= 1:
            break
        for group in optimizer.param_groups:
            group["lr"] = args.rate * min(1.0, step / 300) * 0.5 * (1 + math.cos(math.pi * elapsed))
        with torch.autocast(device.type, dtype=torch.bfloat16):
            logits = model(inputs)
        losses = functional.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), reduction="none", ignore_index=IGNORED
        ).view_as(targets)
        weights = target_weights(inputs)
        loss = (losses * weights).sum() / weights[targets >= 0].sum()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if time.monotonic() - last > 10 or step == 1:
            last = time.monotonic()
            solved = (weights == 1) & (targets >= 0)
            right = (logits.argmax(-1) == targets)[solved].float().mean()
            print(
                f"{last - start:5.0f} s  step {step:6}  loss {loss:.4f}  solution loss {losses[solved].mean():.4f}  "
                f"solution characters right {right:.4f}",
                flush=True,
            )
            with torch.no_grad():
                save_model(model, path)
    notes = {"steps": str(step), "batch": str(args.batch), "seed": str(args.seed), "minutes": str(args.minutes)}
    with torch.no_grad():
        save_model(model, path, notes)
    figures = {**notes, "problems": args.problems, **measure(path, device, args.problems)}
    print(json.dumps(figures, indent=2))
    path.with_suffix(".json").write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
