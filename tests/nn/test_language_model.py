"""The language model: one forward, three ways to run it, and its file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from fused_kda.layouts import LAYOUTS, LayoutKind
from fused_kda.nn.checkpoint import CheckpointError
from fused_kda.nn.language_model import (
    VOCABULARY,
    LanguageModel,
    ModelConfig,
    encode,
    read_model,
    save_model,
)

SMALL = ModelConfig(hidden_size=24, num_layers=2, num_heads=2, head_dim=16, mlp_size=40)


def small_model(dtype: torch.dtype, config: ModelConfig = SMALL) -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(config, dtype=dtype).requires_grad_(False)


def test_characters_and_tokens() -> None:
    assert encode("\n ~") == [0, 1, 95]
    assert "".join(VOCABULARY[token] for token in encode("2 + 3 = 5.\n")) == "2 + 3 = 5.\n"
    with pytest.raises(ValueError, match="text: expected printable ASCII, got '\\\\t', 'é'"):
        encode("caf\u00e9\t")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_prefill_then_decode_gives_the_logits_of_forward(layout: LayoutKind) -> None:
    model = small_model(torch.float32)
    tokens = torch.randint(len(VOCABULARY), (3, 40), generator=torch.Generator().manual_seed(1))
    expected = model(tokens)
    pool = model.new_pool(5, layout=layout)
    slots = [4, 1, 5]
    lengths = [7, 31, 1]
    prompts = torch.cat([tokens[row, :length] for row, length in enumerate(lengths)])
    got = model.prefill(prompts, pool, slots, lengths=lengths)
    for row, length in enumerate(lengths):
        torch.testing.assert_close(got[row], expected[row, length - 1], rtol=1e-4, atol=1e-4)
    for step in range(9):
        newest = torch.stack([tokens[row, length + step] for row, length in enumerate(lengths)])
        got = model.decode(newest, pool, torch.tensor(slots))
        for row, length in enumerate(lengths):
            torch.testing.assert_close(got[row], expected[row, length + step], rtol=1e-4, atol=1e-4)


def test_training_reaches_every_parameter() -> None:
    model = small_model(torch.float32).requires_grad_(True)
    tokens = torch.randint(len(VOCABULARY), (2, 30), generator=torch.Generator().manual_seed(1))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(tokens)
    assert logits.dtype == torch.float32
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.any(), name


def test_a_written_model_reads_back_to_the_same_logits(tmp_path: Path) -> None:
    model = small_model(torch.bfloat16)
    save_model(model, tmp_path / "model.safetensors", {"note": "x"})
    again = read_model(tmp_path / "model.safetensors")
    assert again.config == SMALL
    tokens = torch.randint(len(VOCABULARY), (2, 30), generator=torch.Generator().manual_seed(1))
    model.embedding.copy_(model.embedding.bfloat16())  # the file is bf16, the parameter fp32
    assert torch.equal(again(tokens), model(tokens))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), r"missing: model\.layers\.1\.mlp\.up_proj\.weight"),
        (lambda t: t.update({"model.extra": torch.zeros(2)}), r"unexpected: model\.extra \[2\]"),
        (
            lambda t: t.update({"model.norm.weight": torch.zeros(3)}),
            r"shape: model\.norm\.weight: expected \[24\], got \[3\]",
        ),
    ],
)
def test_a_file_that_does_not_fit_is_named(
    tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], object], text: str
) -> None:
    path = tmp_path / "model.safetensors"
    save_model(small_model(torch.bfloat16), path)
    metadata = {"config": '{"hidden_size": 24, "num_layers": 2, "num_heads": 2, "head_dim": 16, "mlp_size": 40}'}
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata)
    with pytest.raises(CheckpointError, match=text):
        read_model(path)


def test_a_file_without_configuration_is_refused(tmp_path: Path) -> None:
    save_file({"x": torch.zeros(1)}, tmp_path / "other.safetensors")
    with pytest.raises(CheckpointError, match=r"other\.safetensors: expected the model's configuration"):
        read_model(tmp_path / "other.safetensors")


def test_the_shipped_model_is_small_and_of_the_served_kind() -> None:
    model = read_model()
    config = model.config
    assert (config.head_dim, config.conv_width, config.lower_bound, config.full_rank_gate) == (128, 4, -5.0, True)
    from fused_kda.nn import language_model

    assert (Path(language_model.__file__).parent / language_model.SHIPPED).stat().st_size <= 8_000_000
