"""The decode kernel's compilation: from a specialisation to a build, without tensors and without a GPU."""

from __future__ import annotations

import torch

from ...binaries import Made
from ...contract import Specialization
from ..jit import Build, unit
from ..jit import prebuild as prebuild_kernel
from .kernel import decode
from .shape import Shape, has_pdl, shapes


def decode_build(spec: Specialization, arch: str, shape: Shape, prefetch: bool) -> Build:
    """What to compile for a specialisation in a launch shape.

    Args:
        spec: of the problem.
        arch: "sm_90", "gfx942" ...
        shape: from :func:`fused_kda.kernels.triton.shape.choose`.
        prefetch: read weights, pools and indices before the wait for the kernel ahead; without effect where there is no
            such wait.
    """
    layout = spec.conv_layout
    plane, tap, channel = spec.weight_strides
    pdl = has_pdl(arch)
    options: dict[str, int | bool] = {"num_warps": shape.warps, "num_stages": 1}
    if pdl:
        options["launch_pdl"] = True
    if arch.startswith("gfx"):
        # Two waves per SIMD at least: 256 registers.
        options["waves_per_eu"] = 2
    if shape.registers is not None:
        options["maxnreg"] = shape.registers
    return Build(
        kernel=decode,
        pointers=(
            ("x", spec.dtype),
            ("weight", spec.weight_dtype),
            ("bias", spec.bias_dtype),
            ("conv_state", spec.dtype),
            ("raw_g", spec.dtype),
            ("raw_beta", spec.dtype),
            ("A_log", spec.param_dtype),
            ("dt_bias", spec.param_dtype),
            ("state_indices", spec.index_dtype),
            ("state", spec.state_dtype),
            ("out", spec.dtype),
            ("output_gate", spec.dtype if spec.norm_dtype is not None else None),
            ("norm_weight", spec.norm_dtype),
            ("has_initial_state", torch.bool if spec.has_initial_state else None),
        ),
        constants=(
            ("H", spec.heads),
            ("D", spec.head_dim),
            ("WIDTH", spec.conv_width),
            ("CHANNEL_STRIDE", layout.channel_stride),
            ("TAP_STRIDE", layout.tap_stride),
            ("CONV_UNIT", unit(spec.conv_alignment, spec.dtype)),
            ("STATE_UNIT", unit(spec.state_alignment, spec.state_dtype)),
            ("WEIGHT_PLANE", plane),
            ("WEIGHT_TAP", tap),
            ("WEIGHT_CHANNEL", channel),
            ("BOUNDED", spec.bounded),
            ("PDL", pdl),
            ("PREFETCH", pdl and prefetch),
            ("BLOCK_V", shape.block_v),
            ("LANE_K", shape.lane_k),
            ("AHEAD", shape.ahead),
            ("FENCED", shape.fenced),
        ),
        aligned=tuple(
            name
            for name, alignment in (("conv_state", spec.conv_alignment), ("state", spec.state_alignment))
            if alignment == 16
        ),
        options=tuple(options.items()),
    )


def prebuild(spec: Specialization, arch: str, target: str, prefetch: bool) -> list[Made]:
    """Every kernel that a batch of the specialisation may be launched with. Triton takes ``arch`` alone."""
    return [
        prebuild_kernel(decode_build(spec, arch, shape, prefetch), arch) for _, shape in shapes(spec, arch, prefetch)
    ]
