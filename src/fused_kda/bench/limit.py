"""The measured limit: the fastest in-place read-multiply-write of a step's state bytes that we could write; and a copy.

NVIDIA, SM90 or later: many small CTAs, plain 16-byte accesses, a warp's own bytes contiguous, one kernel per layer,
launched as the op is (dependent launch, waiting for the previous kernel before anything is read). No single shape is
fastest everywhere, so the limit of a cell is the least of :data:`SHAPES`. Elsewhere it is PyTorch's ``mul_``. The
factor is 1, so the pools keep their values.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from .. import gates
from ..testing.problems import Call
from .timing import Step, can_use_driver

#: (threads, 16-byte vectors per thread): the fastest for many rows, for the most rows, for a few.
SHAPES = ((128, 2), (256, 1), (512, 4))
_SOURCE = """
extern "C" __global__ void __launch_bounds__(THREADS) limit(
    char* pool, const int* index, long long pitch, float factor) {
  asm volatile("griddepcontrol.wait;" ::: "memory");
  float4* at = reinterpret_cast<float4*>(pool + index[blockIdx.y] * pitch) + blockIdx.x * (THREADS * VECTORS) +
               threadIdx.x / 32 * (32 * VECTORS) + threadIdx.x % 32;
  float4 held[VECTORS];
#pragma unroll
  for (int i = 0; i < VECTORS; ++i) held[i] = at[i * 32];
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#pragma unroll
  for (int i = 0; i < VECTORS; ++i)
    at[i * 32] = make_float4(held[i].x * factor, held[i].y * factor, held[i].z * factor, held[i].w * factor);
}
"""


def limit_steps(layers: Sequence[Call]) -> Mapping[str, Sequence[Step]]:
    """Every way to stream the layers' named slots in place, one callable per layer: the fastest is the limit."""
    device = layers[0].arguments["state"].device
    if can_use_driver(device) and int(gates.architecture(device).removeprefix("sm_")) >= 90:
        return {f"limit {t}x{v}": [_stream(layer, t, v) for layer in layers] for t, v in SHAPES}
    return {"limit mul_": [_multiply(layer) for layer in layers]}


def copy_steps(layers: Sequence[Call]) -> Sequence[Step]:
    """Per layer, a copy into its named slots from a layer half of all layers away: as many bytes as a step moves."""
    half = len(layers) // 2
    return [_copy(layer, layers[(number + half) % len(layers)]) for number, layer in enumerate(layers)]


def _multiply(layer: Call) -> Step:
    state = _live(layer)
    return lambda: state.mul_(1.0)


def _copy(layer: Call, source: Call) -> Step:
    into, out_of = _live(layer), _live(source)
    return lambda: into.copy_(out_of)


def _live(layer: Call) -> torch.Tensor:
    """The slots that the layer's rows name: all but the reserved one, so one dense range."""
    state: torch.Tensor = layer.arguments["state"][min(layer.slots) : max(layer.slots) + 1]
    if len(state) != len(layer.slots):
        raise ValueError(f"layer: expected rows that name a range of slots, got {layer.slots}")
    return state


def _stream(layer: Call, threads: int, vectors: int) -> Step:
    from cuda.core import Device, LaunchConfig, Stream, launch

    state: torch.Tensor = layer.arguments["state"]
    index: torch.Tensor = layer.arguments["state_indices"]
    per_row = state[0].nbytes // (threads * vectors * 16)
    config = LaunchConfig(grid=(per_row, len(index)), block=threads, programmatic_stream_serialization=True)
    kernel = _kernel(threads, vectors, Device(state.device.index).arch)
    pitch = np.int64(state.stride(0) * state.itemsize)

    def step() -> None:
        stream = Stream.from_handle(torch.cuda.current_stream(state.device).cuda_stream)
        launch(stream, config, kernel, state.data_ptr(), index.data_ptr(), pitch, np.float32(1.0))

    return step


@functools.cache
def _kernel(threads: int, vectors: int, arch: str) -> Any:
    from cuda.core import Program, ProgramOptions

    macros = [("THREADS", str(threads)), ("VECTORS", str(vectors))]
    options = ProgramOptions(name="limit.cu", arch=f"sm_{arch}", std="c++17", define_macro=macros)
    return Program(_SOURCE, "c++", options).compile("cubin").get_kernel("limit")
