"""vLLM's calls, as its 0.33 source makes them, through the plug-in; and the real vLLM's registration."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fake_backend
from engines.calls import as_vllm, core_of, vllm_call
from fused_kda import engines, gates
from fused_kda.engines import vllm
from fused_kda.testing.battery import Size, Subject
from fused_kda.testing.compare import check_call, check_equal, expected

#: As found in the binary of vLLM 0.33 (and 0.30 to 0.32).
VLLM_SCHEMA = (
    "fused_kda_decode(Tensor x, Tensor weight, Tensor? bias, Tensor! conv_state, Tensor raw_g, Tensor raw_beta, Tensor "
    "A_log, Tensor dt_bias, Tensor state_indices, Tensor! state, Tensor! out, float? lower_bound=None, Tensor? "
    "output_gate=None, Tensor? norm_weight=None, float norm_eps=1e-5) -> ()"
)
HEADS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96)
NATIVE_HEADS = (12, 24, 48, 96)


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    engines.reset()
    monkeypatch.setattr(vllm, "_native_gate", None)
    monkeypatch.setattr(engines, "surfaces", {})


@pytest.fixture
def defined_op() -> Iterator[Any]:
    """``_C::fused_kda_decode``, defined by the plug-in for as long as the test runs."""
    if hasattr(torch.ops._C, "fused_kda_decode"):
        pytest.skip("this process has vLLM's own op")
    vllm.define_op()
    yield torch.ops._C.fused_kda_decode
    vllm._library._destroy()  # type: ignore[union-attr]


@pytest.fixture
def on_subject(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> Subject:
    monkeypatch.setenv("FUSED_KDA_BACKEND", subject.backend)
    return subject


def outcomes() -> dict[str, int]:
    return {outcome: count for (engine, outcome), count in engines.stats().items() if engine == "vllm"}


def test_the_schema_is_vllms() -> None:
    assert vllm.SCHEMA == VLLM_SCHEMA


@pytest.mark.parametrize("layout", ["SD", "DS"])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_kimi_k3s_call_reaches_the_defined_op(
    on_subject: Subject, defined_op: Any, layout: str, state_dtype: torch.dtype
) -> None:
    call = vllm_call(on_subject, full_rank=True, layout=layout, state_dtype=state_dtype, lower_bound=-5.0)
    assert call.arguments["x"].stride(0) % 16 == 0
    wanted, before = expected(call, chain=on_subject.backend == "chain"), call.clone()
    defined_op(*as_vllm(call).values())
    check_call(call, call.arguments["out"], wanted)
    assert call.touched_elsewhere(before) == []
    assert outcomes() == {f"fused ({on_subject.backend})": 1}


def test_the_defined_op_is_sound_for_the_compiler(monkeypatch: pytest.MonkeyPatch, defined_op: Any) -> None:
    monkeypatch.setenv("FUSED_KDA_BACKEND", "reference")
    subject = Subject("reference", torch.device("cpu"), Size())
    call = as_vllm(vllm_call(subject, full_rank=True))
    names = ("lower_bound", "output_gate", "norm_weight", "norm_eps")
    positional = [value for name, value in call.items() if name not in names]
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(
        defined_op.default, positional, {name: call.get(name, 1e-5) for name in names}, test_utils=checks
    )
    defined_op(*positional)  # the trailing defaults


def custom_ops(calls: list[str]) -> Any:
    """``vllm._custom_ops`` of a build that has the op: its own wrapper only says that it was called."""
    module = types.ModuleType("vllm._custom_ops")

    def fused_kda_decode(*args: Any, out: Any = None, **kwargs: Any) -> Any:
        calls.append("vLLM's own")
        return out

    module.fused_kda_decode = fused_kda_decode  # type: ignore[attr-defined]
    return module


def k3_module(dim_first: bool = False) -> Any:
    """Kimi-K3's module, with vLLM's rules for its own op on a GPU of SM90."""
    module = types.ModuleType("vllm.models.kimi_k3.nvidia.kda")

    def is_fused_kda_decode_supported(
        num_heads: int, head_dim: int, conv_width: int, num_spec: int, input_dtype: torch.dtype,
        conv_state_dtype: torch.dtype, recurrent_state_dtype: torch.dtype,
    ) -> bool:  # fmt: skip
        dtypes = (input_dtype, conv_state_dtype, recurrent_state_dtype)
        shapes = num_heads in NATIVE_HEADS and (head_dim, conv_width, num_spec) == (128, 4, 0)
        return shapes and dtypes == (torch.bfloat16, torch.bfloat16, torch.float32)

    module.is_fused_kda_decode_supported = is_fused_kda_decode_supported  # type: ignore[attr-defined]
    module.is_conv_state_dim_first = lambda: dim_first  # type: ignore[attr-defined]
    return module


@pytest.fixture
def native_op(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops._C, "fused_kda_decode", object(), raising=False)


@pytest.mark.usefixtures("native_op")
@pytest.mark.parametrize(("mode", "heads", "taken"), [("fill", 2, True), ("fill", 12, False), ("replace", 12, True)])
def test_where_vllm_has_its_op_the_mode_decides(on_subject: Subject, mode: str, heads: int, taken: bool) -> None:
    calls: list[str] = []
    ops = custom_ops(calls)
    vllm.widen_gate(k3_module())
    vllm.provide_op(ops, mode)
    call = vllm_call(on_subject, full_rank=True, heads=heads, head_dim=128)
    wanted = expected(call, chain=on_subject.backend == "chain")
    out = ops.fused_kda_decode(**as_vllm(call))
    assert out is call.arguments["out"]
    if taken:
        check_call(call, out, wanted)
    assert calls == ([] if taken else ["vLLM's own"])
    assert outcomes() == ({f"fused ({on_subject.backend})": 1} if taken else {})


@pytest.mark.usefixtures("native_op")
def test_what_the_op_refuses_goes_to_vllms_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """With no backend of one launch on this device; nothing is touched before."""
    calls: list[str] = []
    ops = custom_ops(calls)
    vllm.provide_op(ops, "replace")
    call = vllm_call(Subject("reference", torch.device("cpu"), Size()), full_rank=True)
    before = call.clone()
    for _ in range(2):
        ops.fused_kda_decode(**as_vllm(call))
    assert calls == ["vLLM's own"] * 2
    assert all(
        torch.equal(call.arguments[n].nan_to_num(7), before.arguments[n].nan_to_num(7)) for n in ("state", "out")
    )
    assert outcomes() == {"refused: no backend of one launch on cpu": 2}


class TestGate:
    @pytest.mark.parametrize("dim_first", [False, True], ids=["SD", "DS"])
    @pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
    def test_it_says_yes_to_every_head_count_of_the_table(
        self, monkeypatch: pytest.MonkeyPatch, dim_first: bool, state_dtype: torch.dtype
    ) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        fake_backend.install(monkeypatch, head_dims=(128,), conv_widths=(4,))
        module = k3_module(dim_first)
        vllm.widen_gate(module)
        for heads in HEADS:
            assert module.is_fused_kda_decode_supported(
                heads, 128, 4, 0, torch.bfloat16, torch.bfloat16, state_dtype
            ), heads
        assert outcomes() == {}

    @pytest.mark.parametrize(
        ("changed", "reason"),
        [
            ({"head_dim": 64}, "head dim 64 is not in 128"),
            ({"num_spec": 2}, "speculative decoding is configured"),
            ({"input_dtype": torch.float16, "conv_state_dtype": torch.float16}, "activation dtype float16 is not in"),
            ({"conv_state_dtype": torch.float32}, "a conv pool of torch.float32 for activations of torch.bfloat16"),
            ({"recurrent_state_dtype": torch.float16}, "state: expected dtype float32 or bfloat16"),
        ],
        ids=lambda value: value if isinstance(value, str) else "",
    )
    def test_a_no_is_counted_with_its_reason(
        self, monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any], reason: str
    ) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        fake_backend.install(monkeypatch, head_dims=(128,), conv_widths=(4,))
        module = k3_module()
        vllm.widen_gate(module)
        bf16 = torch.bfloat16
        shapes = {"num_heads": 32, "head_dim": 128, "conv_width": 4, "num_spec": 0, "input_dtype": bf16,
                  "conv_state_dtype": bf16, "recurrent_state_dtype": torch.float32, **changed}  # fmt: skip
        assert not module.is_fused_kda_decode_supported(**shapes)
        ((outcome, count),) = outcomes().items()
        assert outcome.startswith("refused: layer of 32 heads: ")
        assert reason in outcome
        assert count == 1

    def test_it_keeps_vllms_own_yes(self) -> None:
        module = k3_module()
        vllm.widen_gate(module)
        assert module.is_fused_kda_decode_supported(12, 128, 4, 0, torch.bfloat16, torch.bfloat16, torch.float32)


@dataclass
class Metadata:
    """The fields of vLLM's GDN metadata that tell one batch from another."""

    num_actual_tokens: int
    num_decodes: int
    num_prefills: int = 0
    spec_sequence_masks: Any = None
    non_spec_state_indices_tensor: Any = None


@dataclass
class Registry:
    """``PluggableLayer``'s registry of replaced classes."""

    replaced: dict[str, type] = field(default_factory=dict)

    def register_oot(self, layer: type, name: str) -> type:
        assert name not in self.replaced, f"Duplicate layer name: {name}"
        self.replaced[name] = layer
        return layer


def linear_module(dim_first: bool) -> Any:
    """The module of Kimi-Linear's layer: its own ``_forward`` fills the output with 7."""
    module: Any = types.ModuleType("kimi_gdn_linear_attn")

    class KimiGatedDeltaNetAttention(nn.Module):
        prefix, num_spec = "layers.0", 0

        def _forward(self, mixed_qkv: Any, g1: Any, g2: Any, beta: Any, core_attn_out: Any) -> None:
            core_attn_out.fill_(7)

    module.KimiGatedDeltaNetAttention = KimiGatedDeltaNetAttention
    module.PluggableLayer = Registry()
    module.eager_break_during_capture = lambda function: function
    module.is_conv_state_dim_first = lambda: dim_first
    module.context = types.SimpleNamespace(attn_metadata=None)
    module.get_forward_context = lambda: module.context
    return module


def linear_layer(layer: Any, call: Any, dim_first: bool) -> Any:
    """A Kimi-Linear layer around a drawn call's parameters and pools, as vLLM's loader and cache binding leave them."""
    given = call.arguments
    inner = given["dt_bias"].numel()
    flat = given["weight"].transpose(1, 2).reshape(3 * inner, 1, -1).contiguous()
    layer.conv1d = types.SimpleNamespace(weight=nn.Parameter(flat), bias=None)
    layer.A_log, layer.dt_bias = nn.Parameter(given["A_log"]), nn.Parameter(given["dt_bias"])
    layer.o_norm = types.SimpleNamespace(weight=nn.Parameter(given["norm_weight"].bfloat16()), eps=1e-5)
    layer.gate_lower_bound = given["lower_bound"]
    conv = given["conv_state"]
    layer.kv_cache = (conv if dim_first else conv.transpose(-1, -2), given["state"])
    return layer


def forward(layer: Any, call: Any) -> torch.Tensor:
    """What the layer's ``forward`` hands to ``_forward``: every token of the bucket, and a longer output."""
    given = call.arguments
    core = core_of(call)
    with torch.inference_mode():
        layer._forward(
            mixed_qkv=given["x"], g1=given["raw_g"], g2=given["output_gate"], beta=given["raw_beta"], core_attn_out=core
        )
    return core


@pytest.mark.parametrize("dim_first", [False, True], ids=["SD", "DS"])
class TestKimiLinear:
    def prepare(self, subject: Subject, dim_first: bool) -> tuple[Any, Any, Any]:
        module = linear_module(dim_first)
        vllm.replace_layer(module)
        call = vllm_call(
            subject, full_rank=False, layout="DS" if dim_first else "SD", lower_bound=None, norm_dtype=torch.bfloat16
        )
        layer = linear_layer(module.PluggableLayer.replaced["KimiGatedDeltaNetAttention"](), call, dim_first)
        module.context.attn_metadata = {
            "layers.0": Metadata(8, 8, non_spec_state_indices_tensor=call.arguments["state_indices"])
        }
        return module, layer, call

    def test_a_plain_decode_batch_is_one_call(self, on_subject: Subject, dim_first: bool) -> None:
        _, layer, call = self.prepare(on_subject, dim_first)
        wanted, before = expected(call, chain=on_subject.backend == "chain"), call.clone()
        core = forward(layer, call)
        check_call(call, core[:, :8], wanted)
        assert core[:, 8:].isnan().all()  # beyond the batch it is the caller's
        assert call.touched_elsewhere(before) == []
        assert outcomes() == {f"fused ({on_subject.backend})": 1}

    @pytest.mark.parametrize(
        ("changed", "reason"),
        [
            ({"num_prefills": 1}, "not a plain decode batch"),
            ({"num_decodes": 0}, "not a plain decode batch"),
            ({"spec_sequence_masks": True}, "speculative decoding"),
        ],
    )
    def test_another_batch_keeps_vllms_path(
        self, on_subject: Subject, dim_first: bool, changed: dict[str, Any], reason: str
    ) -> None:
        module, layer, call = self.prepare(on_subject, dim_first)
        for name, value in changed.items():
            setattr(module.context.attn_metadata["layers.0"], name, value)
        before = call.clone()
        assert torch.equal(forward(layer, call), torch.full_like(core_of(call), 7))
        for name in ("conv_state", "state"):
            check_equal(name, call.arguments[name], before.arguments[name])
        ((outcome, _),) = outcomes().items()
        assert reason in outcome

    def test_debug_mode_names_the_layer(
        self, on_subject: Subject, dim_first: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("FUSED_KDA_DEBUG", "1")
        gates.settings.cache_clear()
        _, layer, call = self.prepare(on_subject, dim_first)
        indices = call.arguments["state_indices"]
        indices[0] = indices[1]
        with pytest.raises(ValueError, match=r"^state_indices: expected each live slot once, .* \(layers\.0\)$"):
            forward(layer, call)

    def test_a_dry_run_without_pools_is_vllms(self, on_subject: Subject, dim_first: bool) -> None:
        module, layer, call = self.prepare(on_subject, dim_first)
        for metadata in (None, {}, {"layers.1": None}):
            module.context.attn_metadata = metadata
            layer.kv_cache = None
            assert (forward(layer, call) == 7).all()
        assert outcomes() == {}

    def test_reloaded_weights_are_used_at_the_next_step(self, on_subject: Subject, dim_first: bool) -> None:
        _, layer, call = self.prepare(on_subject, dim_first)
        again = call.clone()
        first = forward(layer, call).clone()
        for parameter in (layer.conv1d.weight, layer.o_norm.weight):
            parameter.data.mul_(2)  # as vLLM's loaders write
        conv = again.arguments["conv_state"]
        layer.kv_cache = (conv if dim_first else conv.transpose(-1, -2), again.arguments["state"])
        assert not torch.equal(forward(layer, again)[:, :5], first[:, :5])

    def test_a_shorter_batch_replayed_touches_no_stale_slot(self, on_subject: Subject, dim_first: bool) -> None:
        """vLLM rewrites the whole index buffer each step; rows past the batch name the null block."""
        _, layer, call = self.prepare(on_subject, dim_first)
        forward(layer, call)
        call.arguments["state_indices"][2:].zero_()
        before = call.clone()
        core = forward(layer, call)
        assert torch.count_nonzero(core[:, 2:8]) == 0
        for name in ("conv_state", "state"):
            check_equal(name, call.arguments[name][list(call.slots[2:])], before.arguments[name][list(call.slots[2:])])


def test_nothing_is_registered_when_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSED_KDA_VLLM", "off")
    vllm.register()
    assert [(s.name, s.state) for s in engines.surfaces.values()] == [("plug-in", "off")]


def test_a_malformed_switch_is_reported_and_not_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSED_KDA_VLLM", "please")
    vllm.register()
    (surface,) = engines.surfaces.values()
    assert (surface.state, surface.detail) == ("failed", "FUSED_KDA_VLLM: expected off, fill or replace, got 'please'")


@pytest.mark.parametrize("layout", ["SD", "DS"])
def test_the_real_vllm(layout: str) -> None:
    """Its entry points, its registry of layers and its Kimi-Linear class, in a process that imports all of vLLM."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    script = Path(__file__).with_name("vllm_process.py")
    environment = {**os.environ, "VLLM_SSM_CONV_STATE_LAYOUT": layout}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-1] == "done"
