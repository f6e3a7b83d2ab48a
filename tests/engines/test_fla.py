"""fla's KDA layer, patched: the results and the cache of its own code, and a reason wherever it is not taken."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from engines.fla_layer import Cache, KimiDeltaAttention
from fused_kda import engines
from fused_kda.engines import fla
from fused_kda.testing.battery import Size, Subject

STEPS = 4
CPU = Subject("reference", torch.device("cpu"), Size())


@pytest.fixture(autouse=True)
def fresh_statistics() -> None:
    engines.reset()


def layer_on(subject: Subject, **options: Any) -> KimiDeltaAttention:
    torch.manual_seed(0)
    layer = KimiDeltaAttention(**options).eval()
    # As from_pretrained leaves a model that was asked for in bfloat16: A_log and dt_bias too.
    return layer.to(subject.device, torch.bfloat16)


def tokens(layer: nn.Module, batch: int, steps: int, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    parameter = next(layer.parameters())
    drawn = torch.randn(batch, steps, 64, generator=generator, dtype=torch.float64)
    return drawn.to(torch.bfloat16).to(parameter.device, parameter.dtype)


def run(layer: nn.Module, hidden: torch.Tensor, cache: Cache, mask: torch.Tensor | None = None) -> torch.Tensor:
    with torch.no_grad():
        out: torch.Tensor = layer(hidden, attention_mask=mask, past_key_values=cache, use_cache=True)[0]
    return out


def prompted(layer: nn.Module, batch: int = 3) -> Cache:
    cache = Cache()
    run(layer, tokens(layer, batch, 6, seed=2), cache)
    return cache


def agree(fused: torch.Tensor, own: torch.Tensor, exact: torch.Tensor) -> None:
    """No further from float64 than fla's own chain is, which rounds more often; plus one rounding of the output."""
    allowed = (own.double() - exact).abs().max() + 2.0**-8 * exact.abs().max()
    assert (fused.double() - exact).abs().max() <= allowed


def assert_windows_equal(cache: Cache, other: Cache) -> None:
    for part, own in zip(cache[0]["conv_state"], other[0]["conv_state"], strict=True):
        assert torch.equal(part[..., 1:], own[..., 1:].to(part.dtype))


def outcomes() -> dict[str, int]:
    return {outcome: count for (engine, outcome), count in engines.stats().items() if engine == "fla"}


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("options", [{}, {"lower_bound": -5.0, "conv_bias": True}], ids=["softplus", "bounded, bias"])
def test_steps_agree_with_the_layers_own(subject: Subject, options: dict[str, Any], batch: int) -> None:
    layer = layer_on(subject, **options)
    exact = copy.deepcopy(layer).double()
    hidden = tokens(layer, batch, STEPS)
    caches = {name: prompted(model, batch) for name, model in (("own", layer), ("exact", exact), ("fused", layer))}
    want = [run(layer, hidden[:, t : t + 1], caches["own"]) for t in range(STEPS)]
    best = [run(exact, hidden[:, t : t + 1].double(), caches["exact"]) for t in range(STEPS)]
    assert fla.patch(layer, backend=subject.backend) == 1
    addresses = set()
    for t in range(STEPS):
        agree(run(layer, hidden[:, t : t + 1], caches["fused"]), want[t], best[t])
        addresses.add(caches["fused"][0]["conv_state"].joined.data_ptr())
    assert len(addresses) == 1  # joined once, then advanced in place
    states = {name: cache[0]["recurrent_state"] for name, cache in caches.items()}
    assert states["fused"].dtype == torch.float32
    agree(states["fused"], states["own"], states["exact"])
    assert_windows_equal(caches["fused"], caches["own"])
    assert caches["fused"].seen == caches["own"].seen == 6 + STEPS
    assert outcomes() == {f"fused ({subject.backend})": STEPS}


@pytest.mark.parametrize("steps", [1, 3])
def test_fla_goes_on_from_a_cache_that_the_op_advanced(subject: Subject, steps: int) -> None:
    """An unpatched step, or a later piece of prompt."""
    layer = layer_on(subject)
    hidden = tokens(layer, 3, 2)
    fused, own = prompted(layer), prompted(layer)
    for t in range(2):
        run(layer, hidden[:, t : t + 1], own)
    fla.patch(layer, backend=subject.backend)
    for t in range(2):
        run(layer, hidden[:, t : t + 1], fused)
    fla.unpatch(layer)
    assert_windows_equal(fused, own)
    fused[0]["recurrent_state"].copy_(own[0]["recurrent_state"])  # they differ by roundings: only the windows are asked
    more = tokens(layer, 3, steps, seed=3)
    assert torch.equal(run(layer, more, fused), run(layer, more, own))
    assert_windows_equal(fused, own)


@pytest.mark.case(5)
def test_a_row_whose_token_is_padding_stays_as_it_is(subject: Subject) -> None:
    layer = layer_on(subject)
    fla.patch(layer, backend=subject.backend)
    cache, alone = prompted(layer), prompted(layer)
    hidden = tokens(layer, 3, 1)
    before = copy.deepcopy(cache)
    mask = torch.tensor([[0, 1, 1], [1, 1, 0], [1, 1, 1]], device=subject.device)
    out = run(layer, hidden, cache, mask)
    assert torch.count_nonzero(out[1]) == 0
    assert torch.equal(cache[0]["recurrent_state"][1], before[0]["recurrent_state"][1])
    for part, old in zip(cache[0]["conv_state"], before[0]["conv_state"], strict=True):
        assert torch.equal(part[1], old[1])
    full = run(layer, hidden, alone)
    assert torch.equal(out[[0, 2]], full[[0, 2]])
    fla.unpatch(layer)
    assert torch.count_nonzero(run(layer, hidden, before, mask)[1]) == 0  # fla's own rule


def test_a_beam_search_reorders_the_cache(subject: Subject) -> None:
    layer = layer_on(subject)
    fla.patch(layer, backend=subject.backend)
    cache = prompted(layer)
    run(layer, tokens(layer, 3, 1), cache)
    reordered, rows = copy.deepcopy(cache), torch.tensor([2, 0, 0], device=subject.device)
    reordered.reorder_cache(rows)
    hidden = tokens(layer, 3, 1, seed=4)
    first = run(layer, hidden, reordered)
    cache.reorder_cache(rows)
    assert torch.equal(first, run(layer, hidden, cache))
    fla.unpatch(layer)
    other = prompted(layer)
    run(layer, tokens(layer, 3, 1), other)
    other.reorder_cache(rows)
    run(layer, hidden, other)
    assert_windows_equal(cache, other)


def test_a_copied_cache_is_a_branch(subject: Subject) -> None:
    layer = layer_on(subject)
    fla.patch(layer, backend=subject.backend)
    cache = prompted(layer)
    run(layer, tokens(layer, 3, 1), cache)
    branch = copy.deepcopy(cache)
    kept = copy.deepcopy(cache)
    run(layer, tokens(layer, 3, 1, seed=5), branch)
    assert torch.equal(cache[0]["recurrent_state"], kept[0]["recurrent_state"])
    for part, old in zip(cache[0]["conv_state"], kept[0]["conv_state"], strict=True):
        assert torch.equal(part, old)
    hidden = tokens(layer, 3, 1, seed=6)
    assert torch.equal(run(layer, hidden, cache), run(layer, hidden, kept))


def test_changed_weights_are_used_at_the_next_step(subject: Subject) -> None:
    """However they are changed: ``.data`` leaves no trace that a staged copy could look for."""
    layer = layer_on(subject, conv_bias=True)
    fla.patch(layer, backend=subject.backend)
    hidden, cache = tokens(layer, 3, 1), prompted(layer)
    first = run(layer, hidden, copy.deepcopy(cache))
    for parameter in (layer.q_conv1d.weight, layer.v_conv1d.bias, layer.A_log, layer.dt_bias, layer.o_norm.weight):
        parameter.data.mul_(1.5)
        changed = run(layer, hidden, copy.deepcopy(cache))
        assert not torch.equal(first, changed)
        first = changed


def refuse_training(layer: Any) -> dict[str, Any]:
    layer.train()
    return {}


def refuse_lora_convolution(layer: Any) -> dict[str, Any]:
    class Wrapped(nn.Module):
        activation = "silu"

        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner, self.weight = inner, inner.weight + 0

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return self.inner(*args, **kwargs)

    layer.k_conv1d = Wrapped(layer.k_conv1d)
    return {}


def refuse_parametrised(layer: Any) -> dict[str, Any]:
    torch.nn.utils.parametrizations.weight_norm(layer.q_conv1d)
    return {}


def refuse_hooks(layer: Any) -> dict[str, Any]:
    layer.o_norm.register_forward_hook(lambda *_: None)
    return {}


def refuse_swish_norm(layer: Any) -> dict[str, Any]:
    layer.o_norm.activation = "swish"
    return {}


REFUSALS = {
    "not a decode step": ({}, refuse_training),
    "packed sequences": ({}, lambda _: {"cu_seqlens": torch.tensor([0, 1])}),
    "use_cache is off": ({}, lambda _: {"use_cache": False}),
    "no state of earlier tokens": ({}, lambda _: {"past_key_values": Cache()}),
    "more or wider value heads": ({"value_heads": 4}, lambda _: {}),
    "allow_neg_eigval": ({"allow_neg_eigval": True}, lambda _: {}),
    "wrapped, parametrised": ({}, refuse_parametrised),
    "wrapped, parametrised, sharded": ({}, refuse_lora_convolution),
    "hooks": ({}, refuse_hooks),
    "another activation": ({}, refuse_swish_norm),
}


@pytest.mark.parametrize("reason", REFUSALS)
def test_a_refused_step_is_the_layers_own_and_counted(reason: str) -> None:
    subject = CPU  # the reason is found before any backend
    options, change = REFUSALS[reason]
    layer = layer_on(subject, **options)
    cache = prompted(layer, 1)
    arguments = {"past_key_values": cache, "use_cache": True, **change(layer)}
    hidden = tokens(layer, 1, 1)
    with torch.no_grad():
        want = layer(hidden, **copy.deepcopy(arguments))[0]
        fla.patch(layer, backend="reference")
        assert torch.equal(layer(hidden, **arguments)[0], want)
    ((outcome, count),) = outcomes().items()
    assert outcome.startswith(f"refused: {reason}")
    assert count == 1


def test_what_the_gates_refuse_is_counted_with_their_reason() -> None:
    layer = layer_on(CPU)
    cache = prompted(layer)
    fla.patch(layer)
    own = copy.deepcopy(cache)
    hidden = tokens(layer, 3, 1)
    for _ in range(2):
        out = run(layer, hidden, cache)
    assert outcomes() == {"refused: no backend of one launch on cpu": 2}
    fla.unpatch(layer)
    run(layer, hidden, own)
    assert torch.equal(out, run(layer, hidden, own))


def test_a_wrapped_projection_is_called_as_a_module(subject: Subject) -> None:
    """LoRA, quantised or hooked projections: the op is handed what they give."""

    class Doubled(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) * 2

    layer = layer_on(subject)
    fla.patch(layer, backend=subject.backend)
    cache, hidden = prompted(layer), tokens(layer, 3, 1)
    plain = run(layer, hidden, copy.deepcopy(cache))
    layer.v_proj = Doubled(layer.v_proj)
    assert not torch.equal(run(layer, hidden, cache), plain)
    assert outcomes() == {f"fused ({subject.backend})": 2, **{k: v for k, v in outcomes().items() if "not a" in k}}


def test_unpatch_leaves_nothing_behind() -> None:
    layer = layer_on(CPU)
    model = nn.ModuleList([layer, nn.Linear(2, 2)])
    hidden = tokens(layer, 3, 1)
    want = run(layer, hidden, prompted(layer))
    before = dict(vars(layer))
    assert fla.patch(model, backend="reference") == 1
    assert fla.patch(model, backend="reference") == 0  # twice is once
    assert fla.unpatch(model) == 1
    assert fla.unpatch(model) == 0
    assert vars(layer) == before
    assert torch.equal(run(layer, hidden, prompted(layer)), want)


def test_a_wrapper_that_stood_there_is_called_and_put_back() -> None:
    layer = layer_on(CPU)
    calls = []
    own = layer.forward

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return own(*args, **kwargs)

    layer.forward = wrapper  # type: ignore[method-assign]
    fla.patch(layer, backend="reference")
    prompted(layer)
    assert calls == [1]
    fla.unpatch(layer)
    assert layer.forward is wrapper


def test_a_copied_model_is_patched_by_itself() -> None:
    layer = layer_on(CPU)
    fla.patch(layer, backend="reference")
    twin = copy.deepcopy(layer)
    fla.unpatch(layer)
    hidden = tokens(layer, 3, 1)
    engines.reset()
    run(twin, hidden, prompted(twin))
    assert outcomes()["fused (reference)"] == 1
    twin.o_proj.weight.data.zero_()
    assert torch.count_nonzero(run(twin, hidden, prompted(twin))) == 0


def test_a_model_without_such_layers_is_named() -> None:
    with pytest.raises(ValueError, match=r"^model: expected at least one fla KDA layer, got none$"):
        fla.patch(nn.Linear(2, 2))
