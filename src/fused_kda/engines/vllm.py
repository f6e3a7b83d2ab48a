"""vLLM: the op behind ``fused_kda_decode``, for every head count, and in the Kimi-Linear layer, which lacks it.

:func:`register` is the entry point ``fused_kda`` of ``vllm.general_plugins``. ``FUSED_KDA_VLLM`` says what it does:

* ``fill`` (default): define ``_C::fused_kda_decode`` where the build lacks it; where it is there, take the shapes that
  it does not; widen Kimi-K3's gate function by what this package's gates' table has;
* ``replace``: the same, and take the shapes that vLLM's own op covers, too;
* ``off``: nothing.

Either way the Kimi-Linear layer gets a subclass whose plain decode batches are one launch. Batches with prefill or
speculation keep vLLM's path. No weight is staged here: the op reads the layers' own parameters.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from .. import debug, gates
from ..api import fused_kda_decode
from ..layouts import LayoutKind
from ..shapes import shape_problem
from . import Route, kind_of, mark, one_launch, refused
from .imports import after_import

#: vLLM's own text, the same in the binaries of 0.30 to 0.33.
SCHEMA = (
    "fused_kda_decode(Tensor x, Tensor weight, Tensor? bias, Tensor! conv_state, Tensor raw_g, Tensor raw_beta, "
    "Tensor A_log, Tensor dt_bias, Tensor state_indices, Tensor! state, Tensor! out, float? lower_bound=None, "
    "Tensor? output_gate=None, Tensor? norm_weight=None, float norm_eps=1e-5) -> ()"
)
#: Surface: the module that it is in.
MODULES = {
    "decode op": "vllm._custom_ops",
    "Kimi-K3 gate": f"vllm.models.kimi_k3.{'amd.ops.kda_decode' if torch.version.hip else 'nvidia.kda'}",
    "Kimi-Linear layer": "vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn",
}
#: What the shared layer's class is registered as, in vLLM's registry of replaced layers.
LAYER = "KimiGatedDeltaNetAttention"

_library: torch.library.Library | None = None
_native_gate: Any = None


def register() -> None:
    """Prepare every surface. May be called any number of times, imports nothing of vLLM, raises nothing."""
    try:
        mode = gates.settings().vllm
    except ValueError as error:
        mark("vllm", "plug-in", "failed", str(error))
        return
    if mode == "off":
        mark("vllm", "plug-in", "off", "FUSED_KDA_VLLM=off")
        return
    mark("vllm", "plug-in", "on", f"FUSED_KDA_VLLM={mode}")
    changes = (lambda module: provide_op(module, mode), widen_gate, replace_layer)
    for (name, module), change in zip(MODULES.items(), changes, strict=True):
        after_import("vllm", name, module, change)


def provide_op(custom_ops: Any, mode: str) -> str:
    """Make ``torch.ops._C.fused_kda_decode`` and vLLM's wrapper of it reach this package's op.

    Args:
        custom_ops: ``vllm._custom_ops``, which has loaded vLLM's own operators.
        mode: "fill" or "replace".
    """
    if not hasattr(torch.ops._C, "fused_kda_decode"):
        define_op()
        return "defined _C::fused_kda_decode, which this build lacks"
    own = custom_ops.fused_kda_decode
    route = Route("vllm")
    ours: dict[object, bool] = {}

    def fused_kda_decode(
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        conv_state: torch.Tensor,
        raw_g: torch.Tensor,
        raw_beta: torch.Tensor,
        A_log: torch.Tensor,
        dt_bias: torch.Tensor,
        state_indices: torch.Tensor,
        state: torch.Tensor,
        out: torch.Tensor | None = None,
        lower_bound: float | None = None,
        output_gate: torch.Tensor | None = None,
        norm_weight: torch.Tensor | None = None,
        norm_eps: float = 1e-5,
    ) -> torch.Tensor:
        call = {
            "x": x, "weight": weight, "bias": bias, "conv_state": conv_state, "raw_g": raw_g, "raw_beta": raw_beta,
            "A_log": A_log, "dt_bias": dt_bias, "state_indices": state_indices, "state": state, "out": out,
            "lower_bound": lower_bound, "output_gate": output_gate, "norm_weight": norm_weight, "norm_eps": norm_eps,
        }  # fmt: skip
        kind = kind_of(call)
        if kind not in ours:
            ours[kind] = mode == "replace" or not _native_covers(x, conv_state, state)
        done = route.decode(kind, call) if ours[kind] else None
        result: torch.Tensor = own(**call) if done is None else done
        return result

    custom_ops.fused_kda_decode = fused_kda_decode
    taken = "every shape" if mode == "replace" else "the shapes that vLLM's own op lacks"
    return f"vllm._custom_ops.fused_kda_decode takes {taken}"


def define_op() -> None:
    """Define ``_C::fused_kda_decode`` with vLLM's schema, and its fake. The process must not have it yet."""
    global _library
    route = Route("vllm")
    names = ("x", "weight", "bias", "conv_state", "raw_g", "raw_beta", "A_log", "dt_bias", "state_indices", "state",
             "out", "lower_bound", "output_gate", "norm_weight", "norm_eps")  # fmt: skip

    def run(*values: Any) -> None:
        call = dict(zip(names, values, strict=True))
        if route.decode(kind_of(call), call) is None:
            fused_kda_decode(**call)  # nothing of vLLM's is there to fall back on; this warns and names the gates

    def fake(*values: Any) -> None:
        """Nothing to compute: the op only mutates."""

    library: Any = torch.library.Library("_C", "FRAGMENT")  # type: ignore[no-untyped-call]
    library.define(SCHEMA)
    library.impl("fused_kda_decode", _padded(run), "CompositeExplicitAutograd")
    torch.library.register_fake("_C::fused_kda_decode", fake, lib=library)
    _library = library


def _padded(run: Any) -> Any:
    """The dispatcher leaves out trailing arguments that have their defaults."""
    defaults = (None, None, None, 1e-5)

    def op(*values: Any) -> None:
        run(*values, *defaults[len(values) - 11 :])

    return op


def _native_covers(x: torch.Tensor, conv_state: torch.Tensor, state: torch.Tensor) -> bool:
    """Whether vLLM's own op takes the shapes, by vLLM's own gate; True where its gate was not seen."""
    _, heads, dim, _ = state.shape
    shapes = (heads, dim, conv_state.shape[2] + 1, 0, x.dtype, conv_state.dtype, state.dtype)
    return _native_gate is None or bool(_native_gate(*shapes))


def widen_gate(module: ModuleType) -> str:
    """Let Kimi-K3's gate function say yes wherever the gates' table has a backend of one launch."""
    global _native_gate
    own = _native_gate = module.is_fused_kda_decode_supported

    def is_fused_kda_decode_supported(
        num_heads: int,
        head_dim: int,
        conv_width: int,
        num_spec: int,
        input_dtype: torch.dtype,
        conv_state_dtype: torch.dtype,
        recurrent_state_dtype: torch.dtype,
    ) -> bool:
        shapes = (num_heads, head_dim, conv_width, num_spec, input_dtype, conv_state_dtype, recurrent_state_dtype)
        if own(*shapes):
            return True
        reason = layer_refusal(*shapes, layout="DS" if module.is_conv_state_dim_first() else "SD")
        if reason is not None:
            refused("vllm", f"layer of {num_heads} heads: {reason}")
        return reason is None

    module.is_fused_kda_decode_supported = is_fused_kda_decode_supported  # type: ignore[attr-defined]
    return "is_fused_kda_decode_supported also says yes to what the gates' table has"


def layer_refusal(
    num_heads: int,
    head_dim: int,
    conv_width: int,
    num_spec: int,
    input_dtype: torch.dtype,
    conv_state_dtype: torch.dtype,
    recurrent_state_dtype: torch.dtype,
    *,
    layout: LayoutKind,
) -> str | None:
    """Why a layer of such shapes has to keep vLLM's path on this process's device; None where the op can serve it."""
    if num_spec:
        return "speculative decoding is configured"
    if conv_state_dtype != input_dtype:
        return f"a conv pool of {conv_state_dtype} for activations of {input_dtype}"
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    try:
        problem = shape_problem(
            heads=num_heads, head_dim=head_dim, conv_width=conv_width, layout=layout, dtype=input_dtype,
            state_dtype=recurrent_state_dtype,
        )  # fmt: skip
    except (TypeError, ValueError) as error:
        return str(error)
    name, reason = one_launch(problem, device)
    return reason if name is None else None


def replace_layer(module: ModuleType) -> str:
    """Register a subclass of the layer of Kimi-Linear, whose own code never calls a fused op."""
    base: Any = module.KimiGatedDeltaNetAttention
    route = Route("vllm")

    class FusedKimiGatedDeltaNetAttention(base):  # type: ignore[misc]
        """The layer, its plain decode batches in one launch, read from the layer's own parameters."""

        @module.eager_break_during_capture  # type: ignore[untyped-decorator]
        def _forward(
            self,
            mixed_qkv: torch.Tensor,
            g1: torch.Tensor,
            g2: torch.Tensor,
            beta: torch.Tensor,
            core_attn_out: torch.Tensor,
        ) -> None:
            """Write ``core_attn_out`` ``[1, N, H, D]``, normalised and gated; both pools advance in place."""
            call = _decode_call(module, self, mixed_qkv, g1, g2, beta, core_attn_out)
            if call is None or route.decode(kind_of(call), call) is None:
                super()._forward(mixed_qkv=mixed_qkv, g1=g1, g2=g2, beta=beta, core_attn_out=core_attn_out)

    module.PluggableLayer.register_oot(FusedKimiGatedDeltaNetAttention, name=LAYER)
    return f"{LAYER} is made as a subclass that runs plain decode batches through the op"


def _decode_call(
    module: ModuleType,
    layer: Any,
    mixed_qkv: torch.Tensor,
    g1: torch.Tensor,
    g2: torch.Tensor,
    beta: torch.Tensor,
    core_attn_out: torch.Tensor,
) -> dict[str, Any] | None:
    """The op's arguments for a batch of plain decode steps; None where the batch is another one."""
    metadata = module.get_forward_context().attn_metadata
    batch = metadata.get(layer.prefix) if isinstance(metadata, dict) else None
    if batch is None:
        return None  # a dry run for profiling: there are no pools yet
    if layer.num_spec or batch.spec_sequence_masks is not None:
        refused("vllm", "speculative decoding is configured")
        return None
    if batch.num_prefills > 0 or batch.num_decodes == 0:
        refused("vllm", "not a plain decode batch (prefill in it)", expected=True)
        return None
    count = batch.num_actual_tokens
    conv_state, state = layer.kv_cache
    if gates.settings().debug:
        debug.label(state, layer.prefix)
    return {
        "x": mixed_qkv[:count],
        "weight": layer.conv1d.weight,
        "bias": layer.conv1d.bias,
        "conv_state": conv_state if module.is_conv_state_dim_first() else conv_state.transpose(-1, -2),
        "raw_g": g1[:, :count],
        "raw_beta": beta[:, :count],
        "A_log": layer.A_log,
        "dt_bias": layer.dt_bias,
        "state_indices": batch.non_spec_state_indices_tensor[:count],
        "state": state,
        "out": core_attn_out[:, :count],
        "lower_bound": layer.gate_lower_bound,
        "output_gate": g2[:count],
        "norm_weight": layer.o_norm.weight,
        "norm_eps": layer.o_norm.eps,
    }
