"""The backend: a checked problem in, a function that makes the two or three launches out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ... import gates
from ...binaries import Made
from ...contract import DecodeProblem, Specialization, Tensors
from ..jit import Build, Launch, bind, interpreted, scalars, unit
from ..jit import prebuild as prebuild_kernel
from .kernels import convolve_row, normalise, recur


@dataclass(frozen=True, slots=True)
class Shape:
    """The launch shape. Not a function of the batch, so neither are a row's bits.

    Attributes:
        block_v: value rows of one program of the recurrence.
        warps: its warps.
        vector_warps: warps of a program of the other two kernels, which works on D elements.
    """

    block_v: int = 16
    warps: int = 2
    vector_warps: int = 1


SHAPE = Shape()


def prepare(problem: DecodeProblem, shape: Shape = SHAPE) -> Launch:
    """Compile (or find) the kernels for the problem and bind their launches.

    Args:
        problem: a checked call.
        shape: another launch shape, for the sweep that the default rests on.

    Returns:
        A function of the call's tensors that launches on the current stream of the current device. It mutates
        conv_state, state and out. It allocates ``qkv [B, 3P]`` and, with the gated norm, ``o [B, P]`` per call.
    """
    spec, batch = problem.spec, problem.batch
    inner = spec.heads * spec.head_dim
    arch = "" if interpreted(recur) else gates.architecture(problem.device)
    normed = spec.norm_dtype is not None

    def bound(build: Build, programs: int, **more: int) -> Any:
        return bind(build, arch, problem.device, programs, {**scalars(problem, build.kernel), **more})

    o_row = inner if normed else problem.out_row
    convolution = bound(_convolution(spec, shape), batch * 3 * spec.heads)
    recurrence = bound(_recurrence(spec, shape), batch * spec.heads * (spec.head_dim // shape.block_v), o_row=o_row)
    norm = bound(_norm(spec, shape), batch * spec.heads) if normed else None

    def launch(tensors: Tensors) -> None:
        named = tensors._asdict()
        named["qkv"] = torch.empty(batch, 3 * inner, dtype=spec.dtype, device=problem.device)
        convolution(named)
        named["o"] = torch.empty(batch, inner, dtype=spec.dtype, device=problem.device) if normed else tensors.out
        recurrence(named)
        if norm is not None:
            norm(named)

    return launch


def prebuild(spec: Specialization, arch: str, target: str, prefetch: bool) -> list[Made]:
    """The kernels of the specialisation, compiled. Triton takes ``arch`` alone; there is no prefetch here."""
    builds = [_convolution(spec, SHAPE), _recurrence(spec, SHAPE)]
    builds += [_norm(spec, SHAPE)] if spec.norm_dtype is not None else []
    return [prebuild_kernel(build, arch) for build in builds]


def _convolution(spec: Specialization, shape: Shape) -> Build:
    plane, tap, channel = spec.weight_strides
    return Build(
        kernel=convolve_row,
        pointers=(
            ("x", spec.dtype),
            ("weight", spec.weight_dtype),
            ("bias", spec.bias_dtype),
            ("conv_state", spec.dtype),
            ("state_indices", spec.index_dtype),
            ("has_initial_state", torch.bool if spec.has_initial_state else None),
            ("qkv", spec.dtype),
        ),
        constants=(
            ("H", spec.heads),
            ("D", spec.head_dim),
            ("WIDTH", spec.conv_width),
            ("CHANNEL_STRIDE", spec.conv_layout.channel_stride),
            ("TAP_STRIDE", spec.conv_layout.tap_stride),
            ("CONV_UNIT", unit(spec.conv_alignment, spec.dtype)),
            ("WEIGHT_PLANE", plane),
            ("WEIGHT_TAP", tap),
            ("WEIGHT_CHANNEL", channel),
        ),
        aligned=("conv_state", "qkv") if spec.conv_alignment == 16 else ("qkv",),
        options=(("num_warps", shape.vector_warps),),
    )


def _recurrence(spec: Specialization, shape: Shape) -> Build:
    return Build(
        kernel=recur,
        pointers=(
            ("qkv", spec.dtype),
            ("raw_g", spec.dtype),
            ("raw_beta", spec.dtype),
            ("A_log", spec.param_dtype),
            ("dt_bias", spec.param_dtype),
            ("state_indices", spec.index_dtype),
            ("state", spec.state_dtype),
            ("has_initial_state", torch.bool if spec.has_initial_state else None),
            ("o", spec.dtype),
        ),
        constants=(
            ("H", spec.heads),
            ("D", spec.head_dim),
            ("STATE_UNIT", unit(spec.state_alignment, spec.state_dtype)),
            ("BOUNDED", spec.bounded),
            ("BLOCK_V", shape.block_v),
            ("LANE_K", min(spec.head_dim, 256 // spec.state_dtype.itemsize)),
        ),
        aligned=("qkv", "state") if spec.state_alignment == 16 else ("qkv",),
        options=(("num_warps", shape.warps),),
    )


def _norm(spec: Specialization, shape: Shape) -> Build:
    return Build(
        kernel=normalise,
        pointers=(
            ("o", spec.dtype),
            ("output_gate", spec.dtype),
            ("norm_weight", spec.norm_dtype),
            ("state_indices", spec.index_dtype),
            ("out", spec.dtype),
        ),
        constants=(("H", spec.heads), ("D", spec.head_dim)),
        aligned=("o",),
        options=(("num_warps", shape.vector_warps),),
    )
