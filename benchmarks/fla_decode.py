"""fla's KDAForCausalLM, its KDA layers patched against its own: the same tokens, then the time of a decode step.

    python benchmarks/fla_decode.py --json FILE [--batches 1,8] [--tokens 256]

Random weights, 4 layers of 16 heads of 128, prompts of different lengths padded on the left. Needs a CUDA device,
fla-core and flash-linear-attention 0.6, and transformers. What is asked before anything is timed:

* in fp32, with the reference backend, logits agree within 1e-4 of the largest, and ``generate`` gives the same tokens
  patched and unpatched but for ties within that difference;
* in bf16, along the unpatched model's tokens, the patched logits are no further from the fp32 model's than fla's own
  are, and where ``generate`` first differs, the two tokens' logits are within twice fla's own rounding error;
* ``generate`` after ``unpatch`` gives the tokens from before ``patch``.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from fused_kda import engines
from fused_kda.engines import fla

PROMPT = 24


def make_model(dtype: torch.dtype, device: torch.device, **changes: Any) -> Any:
    """Random weights from a fixed seed, in eval mode."""
    from fla.models import KDAConfig, KDAForCausalLM

    torch.manual_seed(0)
    config = KDAConfig(
        **{"hidden_size": 2048, "num_heads": 16, "num_hidden_layers": 4, "vocab_size": 4096, "head_dim": 128, **changes}
    )
    model = KDAForCausalLM(config)
    model.generation_config.eos_token_id = None  # every row runs to the end
    model.generation_config.pad_token_id = 0
    return model.to(device, dtype).eval()


def prompts(batch: int, vocabulary: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and mask ``[B, PROMPT]``; row b is padded on the left by 2b tokens."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, vocabulary, (batch, PROMPT), generator=generator)
    mask = torch.ones_like(ids)
    for row in range(batch):
        mask[row, : 2 * row] = 0
    return (ids * mask).to(device), mask.to(device)


def generate(model: Any, ids: torch.Tensor, mask: torch.Tensor, count: int) -> torch.Tensor:
    """Greedy tokens ``[B, count]``."""
    torch.manual_seed(2)
    out = model.generate(ids, attention_mask=mask, max_new_tokens=count, min_new_tokens=count, do_sample=False)
    new: torch.Tensor = out[:, ids.shape[1] :]
    return new


@torch.no_grad()
def along(model: Any, ids: torch.Tensor, mask: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, list[float]]:
    """Logits ``[B, T, V]`` in fp32 that predict ``tokens`` ``[B, T]``, fed one by one; microseconds of each step."""
    out = model(input_ids=ids, attention_mask=mask, use_cache=True)
    logits, times = [out.logits[:, -1].float()], []
    for t in range(tokens.shape[1] - 1):
        mask = torch.cat((mask, mask.new_ones(len(mask), 1)), dim=1)
        _wait(ids)
        start = time.perf_counter()
        out = model(
            input_ids=tokens[:, t : t + 1], attention_mask=mask, past_key_values=out.past_key_values, use_cache=True
        )
        _wait(ids)
        times.append((time.perf_counter() - start) * 1e6)
        logits.append(out.logits[:, -1].float())
    return torch.stack(logits, dim=1), times


def _wait(tensor: torch.Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)


def compare(model: Any, batch: int, count: int, backend: str = "auto") -> dict[str, Any]:
    """Everything that the module's text asks, and the step times.

    Raises:
        AssertionError: naming what does not hold.
    """
    device = model.device
    ids, mask = prompts(batch, model.config.vocab_size, device)
    tokens = generate(model, ids, mask, count)
    own, _ = along(model, ids, mask, tokens)

    wide = copy.deepcopy(model).float()
    best, _ = along(wide, ids, mask, tokens)
    wide_tokens = generate(wide, ids, mask, count)
    wide_own, _ = along(wide, ids, mask, wide_tokens)
    fla.patch(wide, backend="reference")
    wide_fused, _ = along(wide, ids, mask, wide_tokens)
    wide_worst = float((wide_fused - wide_own).abs().max())
    assert wide_worst <= 1e-4 * float(wide_own.abs().max()), f"fp32: logits differ by {wide_worst}"
    wide_ties = _first_differences(wide_tokens, generate(wide, ids, mask, count), wide_own, 2 * wide_worst)
    del wide

    fla.patch(model, backend=backend)
    engines.reset()
    fused_tokens = generate(model, ids, mask, count)
    outcomes = {outcome: calls for (_, outcome), calls in engines.stats().items()}
    steps = sum(calls for outcome, calls in outcomes.items() if outcome.startswith("fused"))
    assert steps == (count - 1) * model.config.num_hidden_layers, f"steps through the op: {outcomes}"
    fused, _ = along(model, ids, mask, tokens)
    own_error, fused_error = (float((logits - best).square().mean().sqrt()) for logits in (own, fused))
    assert fused_error <= 1.1 * own_error, f"bf16: patched logits are off by {fused_error}, fla's by {own_error}"
    worst = float((own - best).abs().max())
    ties = _first_differences(tokens, fused_tokens, own, 2 * worst)

    # Turn by turn, so that a drift of the clocks touches both alike.
    times: dict[str, list[float]] = {"own": [], "fused": []}
    launches: dict[str, int | None] = {}
    for _ in range(3):
        times["fused"] += along(model, ids, mask, tokens[:, :64])[1]
        launches["fused"] = _launches(model, ids, mask, tokens)
        fla.unpatch(model)
        times["own"] += along(model, ids, mask, tokens[:, :64])[1]
        launches["own"] = _launches(model, ids, mask, tokens)
        fla.patch(model, backend=backend)
    fla.unpatch(model)
    assert torch.equal(generate(model, ids, mask, count), tokens), "other tokens after unpatch"
    medians = {name: statistics.median(values) for name, values in times.items()}
    return {
        "batch": batch, "tokens": count, "outcomes": outcomes,
        "first_differences_fp32": wide_ties, "largest_difference_fp32": wide_worst,
        "first_differences": ties, "largest_own_error": worst,
        "rms_error_own": own_error, "rms_error_fused": fused_error,
        "step_us_own": medians["own"], "step_us_fused": medians["fused"],
        "speed_up": medians["own"] / medians["fused"],
        "kernels_per_step_own": launches["own"], "kernels_per_step_fused": launches["fused"],
    }  # fmt: skip


def _first_differences(
    tokens: torch.Tensor, other: torch.Tensor, logits: torch.Tensor, allowed: float
) -> list[dict[str, Any]]:
    """Of each row that differs, the first token that does and how close the two tokens' logits were.

    Up to there both models have read the same. ``logits`` are those that gave ``tokens``.

    Raises:
        AssertionError: they were not within ``allowed``: that was no tie.
    """
    found = []
    for row in range(len(tokens)):
        differing = (tokens[row] != other[row]).nonzero()
        if len(differing):
            t = int(differing[0])
            gap = float(logits[row, t, tokens[row, t]] - logits[row, t, other[row, t]])
            assert gap <= allowed, f"row {row} differs at token {t}, with logits {gap} apart; {allowed} would be a tie"
            found.append({"row": row, "token": t, "gap": gap})
    return found


@torch.no_grad()
def _launches(model: Any, ids: torch.Tensor, mask: torch.Tensor, tokens: torch.Tensor) -> int | None:
    """Kernels and copies on the device in one decode step of the whole model."""
    if not ids.is_cuda:
        return None
    cache = model(input_ids=ids, attention_mask=mask, use_cache=True).past_key_values
    mask = torch.cat((mask, mask.new_ones(len(mask), 2)), dim=1)
    for t in range(2):  # the first step joins the caches
        _wait(ids)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            model(
                input_ids=tokens[:, t : t + 1], attention_mask=mask[:, : PROMPT + t + 1], past_key_values=cache,
                use_cache=True,
            )  # fmt: skip
            _wait(ids)
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profile.events())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--backend", default="auto")
    options = parser.parse_args()
    from fused_kda.bench.results import machine

    torch.backends.cuda.matmul.allow_tf32 = False
    device = torch.device("cuda", torch.cuda.current_device())
    model = make_model(torch.bfloat16, device)
    found = [compare(model, int(batch), options.tokens, options.backend) for batch in options.batches.split(",")]
    options.json.write_text(json.dumps({"machine": machine(device), "cells": found}, indent=1))
    for cell in found:
        print(
            f"batch {cell['batch']}: decode step {cell['step_us_own']:.0f} us with fla's own code, "
            f"{cell['step_us_fused']:.0f} us patched ({cell['speed_up']:.2f} x); "
            f"kernels {cell['kernels_per_step_own']} and {cell['kernels_per_step_fused']}; "
            f"rms error of logits {cell['rms_error_own']:.2e} and {cell['rms_error_fused']:.2e}; "
            f"first differences {cell['first_differences']} (fp32 {cell['first_differences_fp32']}); {cell['outcomes']}"
        )


if __name__ == "__main__":
    main()
