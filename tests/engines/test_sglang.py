"""SGLang's calls, as its 0.5.23 source makes them, through the plug-in; and the real SGLang's registration."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fake_backend
from engines.calls import sglang_step
from fused_kda import engines
from fused_kda.engines import sglang
from fused_kda.testing.battery import Size, Subject
from fused_kda.testing.compare import check_call, check_equal, expected

HEADS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96)
CPU = Subject("reference", torch.device("cpu"), Size())
COVERED = ("mixed_qkv", "a", "b", "conv_states", "ssm_states", "cache_indices", "onorm_g")


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    engines.reset()
    monkeypatch.setattr(engines, "surfaces", {})


@pytest.fixture
def on_subject(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> Subject:
    monkeypatch.setenv("FUSED_KDA_BACKEND", subject.backend)
    return subject


def outcomes() -> dict[str, int]:
    return {outcome: count for (engine, outcome), count in engines.stats().items() if engine == "sglang"}


def op_module(calls: list[Any]) -> Any:
    """SGLang's module, replaced: its own op records its arguments, its own gate knows three head counts."""
    module: Any = types.ModuleType("kda_fused_decode")

    def covered(
        mixed_qkv: Any, a: Any, b: Any, conv_states: Any, ssm_states: torch.Tensor, cache_indices: Any, onorm_g: Any
    ) -> bool:
        return ssm_states.shape[-3] in (3, 6, 12)

    def kda_fused_decode(*args: Any) -> Any:
        calls.append(args)
        return "SGLang's own"

    module.covered, module.kda_fused_decode = covered, kda_fused_decode
    sglang.replace_op(module)
    return module


@pytest.mark.case(5)
def test_a_step_over_envelope_pools(on_subject: Subject) -> None:
    """Slot 0 is live, -1 is padding, and the other layers in the envelope stay as they are."""
    calls: list[Any] = []
    module = op_module(calls)
    call, own = sglang_step(on_subject)
    assert 0 in call.slots
    assert call.arguments["state"].stride(0) != call.arguments["conv_state"].stride(0)
    wanted, before = expected(call, chain=on_subject.backend == "chain"), call.clone()
    assert module.covered(*(own[name] for name in COVERED))
    out = module.kda_fused_decode(*own.values())
    assert out.shape == (1, 6, *call.arguments["state"].shape[1:3])
    check_call(call, out, wanted)
    assert call.touched_elsewhere(before) == []
    assert calls == []
    assert outcomes() == {f"fused ({on_subject.backend})": 1}


def test_changed_weights_are_used_at_the_next_step(on_subject: Subject) -> None:
    module = op_module([])
    _, own = sglang_step(on_subject)
    _, again = sglang_step(on_subject)
    first = module.kda_fused_decode(*own.values())
    again["w_k_t"].data.mul_(2)
    assert not torch.equal(module.kda_fused_decode(*again.values())[:, :5], first[:, :5])


def test_weights_staged_before_the_plug_in_go_to_sglangs_own(on_subject: Subject) -> None:
    calls: list[Any] = []
    module = op_module(calls)
    call, own = sglang_step(on_subject)
    before = call.clone()
    for name in ("w_q_t", "w_k_t", "w_v_t"):
        own[name] = own[name].contiguous()
    assert module.kda_fused_decode(*own.values()) == "SGLang's own"
    assert outcomes() == {"refused: conv weights in three copies, made before the plug-in was on": 1}
    check_equal("state", call.arguments["state"], before.arguments["state"])
    assert calls[0][7] is not None  # its kernel wants a bias, zeros if there is none
    assert torch.count_nonzero(calls[0][7]) == 0


def test_only_evenly_spaced_views_of_one_tensor_are_joined() -> None:
    rows = torch.arange(36.0).view(9, 4)
    even = (rows[0:2].t(), rows[3:5].t(), rows[6:8].t())
    joined = sglang.joined(even)
    assert joined is not None
    assert torch.equal(joined, torch.stack(even))
    assert sglang.joined((rows[0:2].t(), rows[3:5].t(), rows[5:7].t())) is None
    assert sglang.joined((rows[0:2].t(), rows[3:5].t(), rows[6:9].t())) is None
    assert sglang.joined((rows[0:2].t(), rows[3:5].t(), rows[6:8].clone().t())) is None


class TestCovered:
    def test_it_agrees_with_the_op_for_every_head_count(self, monkeypatch: pytest.MonkeyPatch) -> None:
        fake_backend.install(monkeypatch, head_dims=(128,))
        module = op_module([])
        for heads in HEADS:
            call, own = sglang_step(CPU, heads=heads, head_dim=128)
            assert module.covered(*(own[name] for name in COVERED))
            wanted = expected(call)
            check_call(call, module.kda_fused_decode(*own.values()), wanted)
        assert outcomes() == {"fused (fast)": len(HEADS)}

    @pytest.mark.parametrize("heads", [3, 4])
    def test_what_the_gates_refuse_is_left_to_sglangs_gate(self, heads: int) -> None:
        module = op_module([])
        _, own = sglang_step(CPU, heads=heads, head_dim=128)
        assert module.covered(*(own[name] for name in COVERED)) == (heads == 3)
        assert outcomes() == {"refused: no backend of one launch on cpu": 1}

    @pytest.mark.parametrize(
        ("name", "change", "reason"),
        [
            ("mixed_qkv", lambda x: x.float(), "conv_state: expected dtype float32"),
            ("a", lambda a: a[:, ::2], "multiply up to"),
            ("cache_indices", lambda i: i[:2], "state_indices: expected shape"),
            ("conv_states", lambda c: c.transpose(1, 2), "weight: expected shape"),
            ("ssm_states", lambda s: s[0], "a recurrent pool of 3 dimensions"),
            ("ssm_states", lambda s: s.transpose(2, 3), "state: expected strides"),
        ],
        ids=["dtype", "gate", "indices", "conv", "state", "state strides"],
    )
    def test_an_unsound_step_is_refused_in_words(
        self, monkeypatch: pytest.MonkeyPatch, name: str, change: Any, reason: str
    ) -> None:
        fake_backend.install(monkeypatch)
        module = op_module([])
        _, own = sglang_step(CPU)
        own[name] = change(own[name])
        assert not module.covered(*(own[name] for name in COVERED))
        ((outcome, _),) = outcomes().items()
        assert outcome.startswith("refused: ")
        assert reason in outcome


def k3_module(hip: bool = False) -> Any:
    """Kimi-K3's module: its own layer publishes its step for exactly 12 heads, with staged copies."""
    module: Any = types.ModuleType("kimi_k3")
    module._is_hip, module._is_npu = hip, False

    class KimiK3DeltaAttention:
        def __init__(self, heads: int, dim: int = 128) -> None:
            inner = heads * dim
            self.parameter = nn.Parameter(torch.randn(3 * inner, 1, 4))
            self.head_dim, self._kda_fused_decode_ready = dim, False
            self.o_norm = types.SimpleNamespace(weight=nn.Parameter(torch.randn(dim).bfloat16()), eps=1e-5)
            self.attn = types.SimpleNamespace(
                conv_weights=self.parameter.squeeze(1), bias=None, A_log=nn.Parameter(torch.randn(1, 1, heads, 1)),
                dt_bias=nn.Parameter(torch.randn(inner)), lower_bound=-5.0,
            )  # fmt: skip

        def _prepare_fused_decode(self) -> None:
            if self.attn.A_log.numel() == 12:
                self.attn._k3_fused_decode_args = ("staged",) * 7
                self._kda_fused_decode_ready = True

    module.KimiK3DeltaAttention = KimiK3DeltaAttention
    sglang.widen_layer(module)
    return module


class TestLayer:
    @pytest.mark.parametrize("heads", HEADS)
    def test_it_publishes_views_for_every_head_count(self, monkeypatch: pytest.MonkeyPatch, heads: int) -> None:
        fake_backend.install(monkeypatch, head_dims=(128,))
        block = k3_module().KimiK3DeltaAttention(heads)
        block._prepare_fused_decode()
        assert block._kda_fused_decode_ready
        *weights, bias, a_log, norm, eps = block.attn._k3_fused_decode_args
        assert (bias, eps) == (None, 1e-5)
        assert a_log.shape == (heads,)
        assert norm.dtype == torch.float32  # SGLang's speculative kernels take no other
        joined = sglang.joined(tuple(weights))
        assert joined is not None
        assert joined.data_ptr() == block.parameter.data_ptr()
        assert torch.equal(joined.transpose(1, 2).reshape(-1, 4), block.parameter.squeeze(1))

    def test_a_layer_that_the_gates_refuse_keeps_sglangs_answer(self) -> None:
        module = k3_module()
        twelve, four = module.KimiK3DeltaAttention(12), module.KimiK3DeltaAttention(4)
        for block in (twelve, four):
            block._prepare_fused_decode()
        assert twelve.attn._k3_fused_decode_args == ("staged",) * 7
        assert not four._kda_fused_decode_ready
        assert outcomes() == {"refused: Kimi-K3 layer: no backend of one launch on cpu": 2}

    def test_rocm_is_left_alone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        fake_backend.install(monkeypatch)
        block = k3_module(hip=True).KimiK3DeltaAttention(4)
        block._prepare_fused_decode()
        assert not block._kda_fused_decode_ready
        assert outcomes() == {"refused: Kimi-K3 layer: ROCm and NPU have routes of SGLang's own": 1}

    def test_quantised_conv_weights_are_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        fake_backend.install(monkeypatch)
        block = k3_module().KimiK3DeltaAttention(4)
        block.attn.conv_weights = None
        block._prepare_fused_decode()
        assert outcomes() == {"refused: Kimi-K3 layer: conv weights of another shape than [1536, W]": 1}


def test_it_is_off_unless_asked_for() -> None:
    sglang.register()
    assert [(s.name, s.state) for s in engines.surfaces.values()] == [("plug-in", "off")]


def test_a_malformed_switch_is_reported_and_not_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSED_KDA_SGLANG", "please")
    sglang.register()
    (surface,) = engines.surfaces.values()
    assert (surface.state, surface.detail) == ("failed", "FUSED_KDA_SGLANG: expected 0 or 1, got 'please'")


def test_the_real_sglang() -> None:
    """Its entry point, its Kimi-K3 class and what its attention backend calls, in a process of its own."""
    if importlib.util.find_spec("sglang") is None:
        pytest.skip("SGLang is not installed")
    script = Path(__file__).with_name("sglang_process.py")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-1] == "done"
