"""The real KDAForCausalLM of flash-linear-attention 0.6, where it is installed.

On a CPU its Triton kernels do not run: there the stand-in's arithmetic takes their place under fla's own layer, model
and cache.
"""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

from engines import fla_layer
from fused_kda import engines, gates
from fused_kda.engines import fla
from fused_kda.testing.battery import Subject

BENCHMARK = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "fla_decode.py"))
#: The benchmark itself compares 256.
TOKENS = 48


@pytest.fixture
def cpu_model(monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip("fla.models", reason="flash-linear-attention is not installed")
    import fla.layers.kda as layers
    import fla.modules.mlp as mlp

    monkeypatch.setattr(layers, "fused_recurrent_kda", fla_layer.recurrent_kda)
    monkeypatch.setattr(mlp, "swiglu", lambda gate, up: torch.nn.functional.silu(gate) * up)
    monkeypatch.setattr(layers.ShortConvolution, "forward", fla_layer.ShortConvolution.forward)
    monkeypatch.setattr(layers.FusedRMSNormGated, "forward", fla_layer.FusedRMSNormGated.forward)
    return BENCHMARK["make_model"](
        torch.bfloat16, torch.device("cpu"), hidden_size=64, num_heads=2, num_hidden_layers=2, vocab_size=128,
        fuse_norm=False, fuse_swiglu=False, initializer_range=0.2,
    )  # fmt: skip


@torch.no_grad()
def greedy(model: Any, ids: torch.Tensor, count: int, cache: Any = None) -> tuple[torch.Tensor, Any]:
    """Tokens ``[B, count]`` and the cache. Without a mask: fla's packed prefill is not part of the stand-in."""
    tokens = []
    for _ in range(count):
        out = model(input_ids=ids, past_key_values=cache, use_cache=True)
        ids, cache = out.logits[:, -1:].float().argmax(-1), out.past_key_values
        tokens.append(ids)
    return torch.cat(tokens, dim=1), cache


def test_the_real_layer_cache_and_model_on_a_cpu(cpu_model: Any) -> None:
    ids = torch.randint(3, 128, (3, 9), generator=torch.Generator().manual_seed(0))
    model = cpu_model.float()
    own, own_cache = greedy(model, ids, 12)
    assert fla.patch(model, backend="reference") == 2
    engines.reset()
    fused, cache = greedy(model, ids, 12)
    assert engines.stats()["fla", "fused (reference)"] == 2 * 11
    assert torch.equal(fused, own)
    assert cache.get_seq_length() == own_cache.get_seq_length()
    fla.unpatch(model)
    more = torch.randint(3, 128, (3, 5), generator=torch.Generator().manual_seed(1))
    assert torch.equal(greedy(model, more, 6, cache)[0], greedy(model, more, 6, own_cache)[0])
    for layer in range(2):
        for part, other in zip(cache[layer]["conv_state"], own_cache[layer]["conv_state"], strict=True):
            torch.testing.assert_close(part, other, rtol=1e-4, atol=1e-5)


def test_the_real_cache_is_reordered_between_steps(cpu_model: Any) -> None:
    ids = torch.randint(3, 128, (3, 9), generator=torch.Generator().manual_seed(0))
    model, rows = cpu_model.float(), torch.tensor([2, 0, 0])
    tokens, cache = greedy(model, ids, 2)
    cache.reorder_cache(rows)
    own, _ = greedy(model, tokens[rows][:, -1:], 6, cache)
    fla.patch(model, backend="reference")
    tokens, cache = greedy(model, ids, 2)
    cache.reorder_cache(rows)
    assert torch.equal(greedy(model, tokens[rows][:, -1:], 6, cache)[0], own)


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 8])
def test_generation_on_a_gpu(subject: Subject, batch: int) -> None:
    pytest.importorskip("fla.models", reason="flash-linear-attention is not installed")
    rows = gates.rows(subject.backend, gates.architecture(subject.device))
    if subject.device.type != "cuda" or rows[0].launches != 1:
        pytest.skip("fla's kernels need a GPU, and only a backend of one launch would be chosen there")
    model = BENCHMARK["make_model"](torch.bfloat16, subject.device)
    found = BENCHMARK["compare"](model, batch, TOKENS, subject.backend)
    print(f"{subject.backend}: {found['step_us_own']:.0f} us, patched {found['step_us_fused']:.0f} us")
