"""The plug-in in the real vLLM, in a process of its own: ``python vllm_process.py``; prints "done" where all holds.

vLLM loads the plug-in by its entry point; then its own Kimi-Linear class, made by its own registry, runs a plain decode
batch from its own metadata and forward context. Needs no GPU: the reference backend does the step there.
"""

# ruff: noqa: E402 (what an import does is what is looked at)

from __future__ import annotations

import inspect
import os
import sys
from pathlib import Path

os.environ.setdefault("FUSED_KDA_BACKEND", "reference")
os.environ.setdefault("VLLM_SSM_CONV_STATE_LAYOUT", "DS")
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from torch import nn
from vllm.plugins import load_general_plugins

load_general_plugins()

from fused_kda import engines

assert {s.state for s in engines.surfaces.values()} == {"on", "waiting"}, engines.surfaces
assert "vllm._custom_ops" not in sys.modules
assert not torch.cuda.is_initialized()

import vllm._custom_ops  # noqa: F401
from vllm.forward_context import ForwardContext, override_forward_context
from vllm.model_executor.layers.mamba.gdn import kimi_gdn_linear_attn as linear
from vllm.models.kimi_k3.nvidia import kda
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadata

from engines.calls import core_of, vllm_call
from fused_kda.engines import vllm as plugin
from fused_kda.testing.battery import Size, Subject
from fused_kda.testing.compare import check_call, expected

for name in ("decode op", "Kimi-K3 gate", "Kimi-Linear layer"):
    assert engines.surfaces["vllm", name].state == "on", engines.surfaces["vllm", name]
schema = torch._C.parse_schema(f"_C::{plugin.SCHEMA}")
assert str(torch.ops._C.fused_kda_decode.default._schema) == str(schema)
bf16 = torch.bfloat16
assert kda.resolve_kda_decode_backend("auto", 32, 128, 4, 0, bf16, bf16, torch.float32) == "native"
plugin.register()  # once more

call = vllm_call(
    Subject("reference", torch.device("cpu"), Size()), full_rank=False, layout=os.environ["VLLM_SSM_CONV_STATE_LAYOUT"],
    lower_bound=None, norm_dtype=bf16,
)  # fmt: skip
given = call.arguments
inner, dim = given["dt_bias"].numel(), given["norm_weight"].numel()
# __init__ would want a model's configuration and a device: what it and the loader leave is set here.
layer = linear.KimiGatedDeltaNetAttention.__new__(linear.KimiGatedDeltaNetAttention)
assert type(layer) is not linear.KimiGatedDeltaNetAttention
nn.Module.__init__(layer)
layer.prefix, layer.num_spec, layer.gate_lower_bound = "model.layers.0.self_attn", 0, None
layer.conv1d, layer.o_norm = nn.Module(), linear.FusedRMSNormGated.__new__(linear.FusedRMSNormGated)
nn.Module.__init__(layer.o_norm)
layer.conv1d.weight = nn.Parameter(given["weight"].transpose(1, 2).reshape(3 * inner, 1, -1).contiguous())
layer.conv1d.bias = None
layer.o_norm.weight = nn.Parameter(given["norm_weight"])
layer.o_norm.eps = inspect.signature(linear.FusedRMSNormGated.__init__).parameters["eps"].default
layer.A_log, layer.dt_bias = nn.Parameter(given["A_log"]), nn.Parameter(given["dt_bias"])
conv = given["conv_state"]
layer.kv_cache = (conv if linear.is_conv_state_dim_first() else conv.transpose(-1, -2), given["state"])
metadata = GDNAttentionMetadata(
    num_prefills=0, num_prefill_tokens=0, num_decodes=8, num_decode_tokens=8, num_spec_decodes=0,
    num_spec_decode_tokens=0, num_actual_tokens=8, non_spec_state_indices_tensor=given["state_indices"],
)  # fmt: skip
context = object.__new__(ForwardContext)
context.attn_metadata = {layer.prefix: metadata}
wanted, core = expected(call), core_of(call)
with override_forward_context(context), torch.inference_mode():
    layer._forward(
        mixed_qkv=given["x"], g1=given["raw_g"], g2=given["output_gate"], beta=given["raw_beta"], core_attn_out=core
    )
check_call(call, core[:, :8], wanted)
assert engines.stats() == {("vllm", "fused (reference)"): 1}
print("done")
