"""Two processes that share the heads give what one process gives."""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fused_kda.layouts import Shard
from fused_kda.nn import KimiDeltaAttention
from fused_kda.nn.checkpoint import CheckpointError, entry_tensors, layer_entries, load_layer
from fused_kda.nn.language_model import LanguageModel, ModelConfig, read_model, save_model
from fused_kda.nn.parallel import TensorParallel

K3 = ModelConfig(hidden_size=64, num_layers=2, num_heads=4, head_dim=16, mlp_size=96)
LINEAR = ModelConfig(
    hidden_size=64, num_layers=2, num_heads=4, head_dim=16, mlp_size=96, lower_bound=None, full_rank_gate=False
)
TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs a CUDA device for each of two ranks")
PROMPTS = ([5, 17, 40, 8, 61], [33, 2])
STEPS = 12


def generate(model: LanguageModel) -> tuple[list[list[int]], torch.Tensor]:
    """Greedy tokens of both prompts, and the logits of all steps ``[steps, prompts, V]``."""
    pool = model.new_pool(2, layout="DS")
    slots = pool.allocate(2)
    prompt = torch.tensor([token for tokens in PROMPTS for token in tokens], device=model.device)
    logits = [model.prefill(prompt, pool, slots, lengths=[len(tokens) for tokens in PROMPTS])]
    for _ in range(STEPS):
        logits.append(model.decode(logits[-1].argmax(-1), pool, torch.tensor(slots, device=model.device)))
    return torch.stack(logits).argmax(-1).tolist(), torch.stack(logits)


def rank_main(rank: int, folder: Path, cases: Sequence[tuple[str, torch.dtype]], device: str, answers: Any) -> None:
    """One rank of two, on the CPU or a GPU of its own: run every case and report."""
    torch.set_num_threads(1)
    if device == "cuda":
        device = f"cuda:{rank}"
        torch.cuda.set_device(device)
    backend = "gloo" if device == "cpu" else "nccl"
    dist.init_process_group(backend, store=dist.FileStore(str(folder / "store"), 2), rank=rank, world_size=2)
    results = []
    for name, dtype in cases:
        model = read_model(folder / name, dtype=dtype, device=device, parallel=TensorParallel.of())
        tokens, logits = generate(model)
        results.append((model.new_pool(1).layer(0).state.shape[1], tokens, logits.tolist()))
    answers.put((rank, results))
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore::fused_kda.FallbackWarning")  # on a GPU, fp32 runs on the slowest backend
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, TWO_GPUS])])
def test_two_ranks_give_the_answers_of_one(tmp_path: Path, device: str) -> None:
    torch.manual_seed(0)
    save_model(LanguageModel(K3), tmp_path / "k3")
    save_model(LanguageModel(LINEAR), tmp_path / "linear")
    save_model(LanguageModel(replace(K3, head_dim=128)), tmp_path / "wide")
    cases = [("k3", torch.float32), ("linear", torch.float32), ("k3", torch.bfloat16)]
    if device == "cuda":
        cases += [("wide", torch.float32), ("wide", torch.bfloat16)]  # the latter runs the one-launch kernel
    context = multiprocessing.get_context("forkserver")  # one import of torch for both
    context.set_forkserver_preload(["fused_kda.nn.language_model"])
    answers = context.Queue()
    ranks = [context.Process(target=rank_main, args=(rank, tmp_path, cases, device, answers)) for rank in range(2)]
    for process in ranks:
        process.start()
    by_rank = dict(answers.get(timeout=120) for _ in ranks)
    for process in ranks:
        process.join(30)
        assert process.exitcode == 0
    for number, (name, dtype) in enumerate(cases):
        expected_tokens, expected = generate(read_model(tmp_path / name, dtype=dtype, device=device))
        (heads, tokens, logits), (_, other_tokens, other_logits) = (by_rank[rank][number] for rank in range(2))
        assert heads == 2
        assert logits == other_logits  # the same bits on both ranks, or their answers could part
        assert tokens == other_tokens
        if dtype == torch.float32:
            error = (torch.tensor(logits) - expected.cpu()).abs().max() / expected.abs().max().item()
            assert error <= 1e-5
            assert tokens == expected_tokens


@pytest.mark.parametrize("full_rank_gate", [True, False])
def test_ranks_load_their_part_of_every_published_shape(full_rank_gate: bool) -> None:
    torch.manual_seed(1)
    kind: dict[str, Any] = {"lower_bound": -5.0, "full_rank_gate": full_rank_gate, "dtype": torch.float32}
    whole = KimiDeltaAttention(32, 4, 8, **kind)
    tensors = entry_tensors(layer_entries(whole))
    for variant in (tensors, {**tensors, "A_log": torch.cat((whole.A_log.detach(), torch.zeros(124)))}):
        parts = []
        for rank in range(2):
            part = KimiDeltaAttention(32, 4, 8, **kind, parallel=TensorParallel(2, rank))
            with torch.no_grad():
                for parameter in part.parameters():
                    parameter.fill_(torch.nan)
            load_layer(part, variant)
            parts.append(part)
        for name, rows in whole.columns.items():
            own = [part.in_proj.weight[part.columns[name]] for part in parts]
            shared = name in ("f_a", "g_a")
            assert torch.equal(own[0] if shared else torch.cat(own), whole.in_proj.weight[rows])
            assert not shared or torch.equal(own[0], own[1])
        for name in ("A_log", "dt_bias", "f_b_proj.weight", *(() if full_rank_gate else ("g_b_proj.weight",))):
            own = [part.get_parameter(name) for part in parts]
            assert torch.equal(torch.cat(own), whole.get_parameter(name)), name
        assert torch.equal(torch.cat([part.o_proj.weight for part in parts], 1), whole.o_proj.weight)
        for rank, part in enumerate(parts):
            channels = Shard(4, 8, 2, rank).channel_slices
            assert torch.equal(part.conv_weight, torch.cat([whole.conv_weight[rows] for rows in channels]))
            assert torch.equal(part.norm_weight, whole.norm_weight)


def test_heads_that_cannot_be_shared_are_refused() -> None:
    with pytest.raises(ValueError, match="size: expected a divisor of the 12 heads, got 8"):
        KimiDeltaAttention(32, 12, 8, lower_bound=-5.0, full_rank_gate=True, parallel=TensorParallel(8, 0))
    with pytest.raises(ValueError, match="size: expected a divisor of the 4 heads, got 3"):
        LanguageModel(K3, parallel=TensorParallel(3, 0))


def test_a_rank_neither_trains_nor_saves_nor_takes_a_part_for_the_whole() -> None:
    kind: dict[str, Any] = {"lower_bound": -5.0, "full_rank_gate": True, "dtype": torch.float32}
    part = KimiDeltaAttention(32, 4, 8, **kind, parallel=TensorParallel(2, 0))
    with pytest.raises(NotImplementedError, match=r"for inference; call it under torch.no_grad\(\)"):
        part(torch.randn(1, 3, 32))
    with pytest.raises(ValueError, match=r"one tensor-parallel rank's part of q_proj.weight"):
        entry_tensors(layer_entries(part))
    small = KimiDeltaAttention(32, 2, 8, **kind)
    with pytest.raises(CheckpointError, match=r"shape: q_proj.weight: expected \[32, 32\], got \[16, 32\]"):
        load_layer(part, entry_tensors(layer_entries(small)))
