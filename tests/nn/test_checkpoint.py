"""Loading and saving by the published names, from small synthetic safetensors."""

import pytest
import torch
from safetensors.torch import save_file

from fused_kda.nn import KimiDeltaAttention
from fused_kda.nn.checkpoint import (
    CheckpointError,
    entry_tensors,
    layer_entries,
    load_entries,
    load_layer,
    read_tensors,
)

HIDDEN, HEADS, DIM = 32, 3, 16
INNER = HEADS * DIM
K3, LINEAR = "language_model.model.layers.1.self_attn.", "model.layers.0.self_attn."


def make_layer(prefix, dtype=torch.float32):
    k3 = prefix == K3
    bound = -5.0 if k3 else None
    return KimiDeltaAttention(HIDDEN, HEADS, DIM, lower_bound=bound, full_rank_gate=k3, dtype=dtype)


def published(prefix, seed=0, a_log_shape=None, conv_2d=False):
    """A layer's tensors as its checkpoint holds them: names, shapes and dtypes are written out here by hand."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "q_proj.weight": (INNER, HIDDEN),
        "k_proj.weight": (INNER, HIDDEN),
        "v_proj.weight": (INNER, HIDDEN),
        "q_conv1d.weight": (INNER, 1, 4),
        "k_conv1d.weight": (INNER, 1, 4),
        "v_conv1d.weight": (INNER, 1, 4),
        "f_a_proj.weight": (DIM, HIDDEN),
        "f_b_proj.weight": (INNER, DIM),
        "b_proj.weight": (HEADS, HIDDEN),
        "A_log": (HEADS,) if prefix == K3 else (1, 1, HEADS, 1),
        "dt_bias": (INNER,),
        "o_norm.weight": (DIM,),
        "o_proj.weight": (HIDDEN, INNER),
    }
    if prefix == K3:
        shapes["g_proj.weight"] = (INNER, HIDDEN)
    else:
        shapes |= {"g_a_proj.weight": (DIM, HIDDEN), "g_b_proj.weight": (INNER, DIM)}
    tensors = {prefix + name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    if conv_2d:
        for name in ("q", "k", "v"):
            tensors[f"{prefix}{name}_conv1d.weight"].squeeze_(1)
    if a_log_shape is not None:
        values = torch.zeros(a_log_shape)
        values.view(-1)[:HEADS] = tensors[prefix + "A_log"].flatten()
        tensors[prefix + "A_log"] = values
    return tensors


families = pytest.mark.parametrize("prefix", [K3, LINEAR], ids=["k3", "linear"])


@families
@pytest.mark.parametrize("a_log_shape", [None, (HEADS,), (1, 1, HEADS, 1), (128,)], ids=str)
@pytest.mark.parametrize("conv_2d", [False, True])
def test_every_tensor_arrives_where_it_belongs(prefix, a_log_shape, conv_2d, tmp_path):
    tensors = published(prefix, a_log_shape=a_log_shape, conv_2d=conv_2d)
    other = {"model.embed_tokens.weight": torch.zeros(4, HIDDEN), "model.layers.9.self_attn.A_log": torch.zeros(1)}
    names = sorted(tensors)
    shards = [tmp_path / "model-00001-of-00002.safetensors", tmp_path / "model-00002-of-00002.safetensors"]
    save_file({name: tensors[name] for name in names[:7]} | other, shards[0])
    save_file({name: tensors[name] for name in names[7:]}, shards[1])

    layer = make_layer(prefix)
    load_layer(layer, read_tensors(shards), prefix)
    weights = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    hidden = torch.randn(5, HIDDEN)
    projected = layer.in_proj(hidden)
    for name, columns in layer.columns.items():
        torch.testing.assert_close(projected[:, columns], hidden @ weights[f"{name}_proj.weight"].t())
    for plane, name in enumerate("qkv"):
        rows = layer.conv_weight[plane * INNER : (plane + 1) * INNER]
        assert torch.equal(rows, weights[f"{name}_conv1d.weight"].view(INNER, 4))
    assert torch.equal(layer.A_log, weights["A_log"].flatten()[:HEADS])
    assert torch.equal(layer.dt_bias, weights["dt_bias"])
    assert torch.equal(layer.norm_weight, weights["o_norm.weight"])
    assert torch.equal(layer.f_b_proj.weight, weights["f_b_proj.weight"])
    assert torch.equal(layer.o_proj.weight, weights["o_proj.weight"])
    if prefix == LINEAR:
        assert torch.equal(layer.g_b_proj.weight, weights["g_b_proj.weight"])


@families
def test_saving_gives_the_published_names_and_shapes_back(prefix, tmp_path):
    tensors = published(prefix)
    layer = make_layer(prefix)
    load_layer(layer, tensors, prefix)
    path = tmp_path / "layer.safetensors"
    save_file(entry_tensors(layer_entries(layer, prefix)), path)
    saved = read_tensors([path], prefix)
    assert saved.keys() == tensors.keys()
    assert all(torch.equal(saved[name], tensors[name]) for name in tensors)


def test_bf16_layers_keep_small_parameters_in_fp32():
    tensors = {name: tensor.double() for name, tensor in published(K3).items()}
    layer = make_layer(K3, torch.bfloat16)
    load_layer(layer, tensors, K3)
    assert torch.equal(layer.in_proj.weight[:INNER], tensors[K3 + "q_proj.weight"].bfloat16())
    assert torch.equal(layer.dt_bias, tensors[K3 + "dt_bias"].float())


def test_only_the_prefix_is_read(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file(published(LINEAR) | {"model.norm.weight": torch.ones(3)}, path)
    assert set(read_tensors([path], LINEAR)) == set(published(LINEAR))


def test_one_error_names_everything_and_nothing_is_loaded():
    layer = make_layer(K3)
    before = {name: parameter.clone() for name, parameter in layer.named_parameters()}
    tensors = published(K3)
    del tensors[K3 + "b_proj.weight"]
    del tensors[K3 + "A_log"]
    tensors[K3 + "g_a_proj.weight"] = torch.zeros(DIM, HIDDEN)
    tensors[K3 + "q_conv1d.weight"] = torch.zeros(INNER, 4, 1)
    tensors[K3 + "o_norm.weight"] = torch.zeros(DIM, dtype=torch.int8)
    with pytest.raises(CheckpointError) as caught:
        load_layer(layer, tensors, K3)
    assert str(caught.value).splitlines() == [
        "checkpoint does not fit:",
        f"  missing: {K3}b_proj.weight [3, 32]",
        f"  missing: {K3}A_log [3] or [1, 1, 3, 1] or [128]",
        f"  unexpected: {K3}g_a_proj.weight [16, 32]",
        f"  shape: {K3}q_conv1d.weight: expected [48, 1, 4] or [48, 4], got [48, 4, 1]",
        f"  dtype: {K3}o_norm.weight: expected torch.bfloat16 or torch.float16 or torch.float32 or torch.float64, "
        "got torch.int8",
    ]
    assert all(torch.equal(before[name], parameter) for name, parameter in layer.named_parameters())


def test_quantised_weights_are_refused():
    tensors = published(K3)
    tensors[K3 + "q_proj.weight"] = tensors[K3 + "q_proj.weight"].to(torch.float8_e4m3fn)
    with pytest.raises(CheckpointError, match=r"dtype: .*q_proj.weight: expected .*, got torch.float8_e4m3fn"):
        load_layer(make_layer(K3), tensors, K3)


def test_a_padded_a_log_must_be_padded_with_zeros():
    tensors = published(K3, a_log_shape=(128,))
    tensors[K3 + "A_log"][100] = 1.0
    with pytest.raises(CheckpointError, match=r"padding: .*A_log: expected zeros after the first 3 elements"):
        load_layer(make_layer(K3), tensors, K3)


def test_the_other_familys_gate_is_named():
    with pytest.raises(CheckpointError) as caught:
        load_layer(make_layer(LINEAR), published(K3), K3)
    text = str(caught.value)
    assert f"missing: {K3}g_a_proj.weight" in text
    assert f"missing: {K3}g_b_proj.weight" in text
    assert f"unexpected: {K3}g_proj.weight" in text


def test_a_name_in_two_shards_is_an_error(tmp_path):
    paths = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    for path in paths:
        save_file({"A_log": torch.zeros(3)}, path)
    with pytest.raises(CheckpointError, match=r"A_log: in a\.safetensors and again in b\.safetensors"):
        read_tensors(paths)


def test_several_layers_load_under_one_error():
    layers = [make_layer(LINEAR), make_layer(LINEAR)]
    entries = {}
    for index, layer in enumerate(layers):
        entries |= layer_entries(layer, f"model.layers.{index}.self_attn.")
    tensors = {name: entry.target.new_full(entry.shapes[0], 0.25) for name, entry in entries.items()}
    load_entries(entries, tensors)
    for layer in layers:
        used = max(columns.stop for columns in layer.columns.values())
        assert (layer.in_proj.weight[:used] == 0.25).all()
        assert (layer.in_proj.weight[used:] == 0).all()
        assert (layer.A_log == 0.25).all()
    for name in ("model.layers.0.self_attn.dt_bias", "model.layers.1.self_attn.dt_bias"):
        del tensors[name]
    with pytest.raises(CheckpointError, match=r"(?s)layers\.0\.self_attn\.dt_bias.*layers\.1\.self_attn\.dt_bias"):
        load_entries(entries, tensors)
