"""The plug-in in the real SGLang, in a process of its own: ``python sglang_process.py``; prints "done" where all holds.

SGLang loads the plug-in by its entry point; then its own Kimi-K3 class publishes a step's static arguments, and the
functions that its attention backend calls run a decode batch. Needs no GPU: the reference backend does the step there.
"""

# ruff: noqa: E402 (what an import does is what is looked at)

from __future__ import annotations

import os
import sys
import types
from pathlib import Path

os.environ["FUSED_KDA_SGLANG"] = "1"
os.environ.setdefault("FUSED_KDA_BACKEND", "reference")
sys.path.insert(0, str(Path(__file__).parents[1]))

from sglang.srt.plugins import load_plugins

load_plugins()

import torch
from torch import nn

from fused_kda import engines

assert {s.state for s in engines.surfaces.values()} == {"on", "waiting"}, engines.surfaces
assert "sglang.kernels.ops.attention.kda_fused_decode" not in sys.modules

from sglang.kernels.ops.attention import kda_fused_decode
from sglang.srt.models.kimi_k3 import KimiK3DeltaAttention

from engines.calls import sglang_step
from fused_kda.testing.battery import Size, Subject
from fused_kda.testing.compare import check_call, expected

assert {s.state for s in engines.surfaces.values()} == {"on"}, engines.surfaces

call, own = sglang_step(Subject("reference", torch.device("cpu"), Size()), heads=2, head_dim=128)
given = call.arguments
weight = given["weight"].transpose(1, 2).reshape(-1, 1, 4).contiguous()
parameter = nn.Parameter(weight)
attention = types.SimpleNamespace(
    conv_weights=parameter.squeeze(1), bias=None, A_log=nn.Parameter(given["A_log"].view(1, 1, -1, 1)),
    dt_bias=nn.Parameter(given["dt_bias"]), lower_bound=given["lower_bound"],
)  # fmt: skip
norm = types.SimpleNamespace(weight=nn.Parameter(given["norm_weight"]), eps=1e-5)
# __init__ would want a configuration and a device: what it and the loader leave is set here.
block = types.SimpleNamespace(attn=attention, head_dim=128, o_norm=norm, _kda_fused_decode_ready=False)
KimiK3DeltaAttention._prepare_fused_decode(block)
assert block._kda_fused_decode_ready
names = ("mixed_qkv", "a", "b", "conv_states", "ssm_states", "cache_indices", "onorm_g")
wanted = expected(call)
with torch.inference_mode():
    assert kda_fused_decode.covered(*(own[name] for name in names))
    w_q_t, w_k_t, w_v_t, conv_bias, a_log, onorm_w, onorm_eps = attention._k3_fused_decode_args
    out = kda_fused_decode.kda_fused_decode(
        own["mixed_qkv"], own["a"], own["b"], own["conv_states"], w_q_t, w_k_t, w_v_t, conv_bias, a_log,
        attention.dt_bias, own["onorm_g"], onorm_w, own["ssm_states"], own["cache_indices"], scale=128**-0.5,
        onorm_eps=onorm_eps, lower_bound=attention.lower_bound,
    )  # fmt: skip
check_call(call, out, wanted)
assert engines.stats() == {("sglang", "fused (reference)"): 1}
print("done")
