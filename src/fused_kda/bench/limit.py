"""The measured limit: the fastest in-place read-multiply-write of a step's state bytes that we could write.

Many small CTAs, plain 16-byte accesses, a warp's own bytes contiguous, one kernel per layer, launched as the op is
(dependent launch, waiting for the previous kernel before anything is read). The factor is 1, so the pools keep their
values. No single shape is fastest everywhere, so the limit of a cell is the least of :data:`SHAPES`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np
import torch
from cuda.core import Device, Kernel, LaunchConfig, Program, ProgramOptions, Stream, launch

from ..testing.problems import Call

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


def limit_steps(layers: Sequence[Call], threads: int, vectors: int) -> list[Callable[[], None]]:
    """One callable per layer that streams the layer's named slots in place (SM90 or later)."""
    return [_step(layer, threads, vectors) for layer in layers]


def _step(layer: Call, threads: int, vectors: int) -> Callable[[], None]:
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
def _kernel(threads: int, vectors: int, arch: str) -> Kernel:
    macros = [("THREADS", str(threads)), ("VECTORS", str(vectors))]
    options = ProgramOptions(name="limit.cu", arch=f"sm_{arch}", std="c++17", define_macro=macros)
    return Program(_SOURCE, "c++", options).compile("cubin").get_kernel("limit")
