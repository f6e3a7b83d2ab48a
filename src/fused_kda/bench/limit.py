"""The measured limit: the fastest in-place read-multiply-write of a step's state bytes that we could write.

Many small CTAs, two plain 16-byte loads and stores per thread, one kernel per layer, launched as the op is (dependent
launch, waiting for the previous kernel before anything is read). The factor is 1, so the pools keep their values.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np
import torch
from cuda.core import Device, Kernel, LaunchConfig, Program, ProgramOptions, Stream, launch

from ..testing.problems import Call

THREADS = 128
_VECTORS = 2
_SOURCE = """
extern "C" __global__ void __launch_bounds__(THREADS) limit(
    char* pool, const int* index, long long pitch, int per_row, float factor) {
  asm volatile("griddepcontrol.wait;" ::: "memory");
  char* row = pool + index[blockIdx.x / per_row] * pitch;
  float4* at = reinterpret_cast<float4*>(row) + (blockIdx.x % per_row) * THREADS * VECTORS + threadIdx.x;
  float4 held[VECTORS];
#pragma unroll
  for (int i = 0; i < VECTORS; ++i) held[i] = at[i * THREADS];
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#pragma unroll
  for (int i = 0; i < VECTORS; ++i)
    at[i * THREADS] = make_float4(held[i].x * factor, held[i].y * factor, held[i].z * factor, held[i].w * factor);
}
"""


def limit_steps(layers: Sequence[Call], threads: int = THREADS) -> list[Callable[[], None]]:
    """One callable per layer that streams the layer's named slots in place (SM90 or later)."""
    return [_step(layer, threads) for layer in layers]


def _step(layer: Call, threads: int) -> Callable[[], None]:
    state: torch.Tensor = layer.arguments["state"]
    index: torch.Tensor = layer.arguments["state_indices"]
    row_bytes = state[0].nbytes
    per_row = row_bytes // (threads * _VECTORS * 16)
    config = LaunchConfig(grid=len(index) * per_row, block=threads, programmatic_stream_serialization=True)
    kernel = _kernel(threads, Device(state.device.index).arch)

    def step() -> None:
        stream = Stream.from_handle(torch.cuda.current_stream(state.device).cuda_stream)
        pitch = np.int64(state.stride(0) * state.itemsize)
        launch(stream, config, kernel, state.data_ptr(), index.data_ptr(), pitch, np.int32(per_row), np.float32(1.0))

    return step


@functools.cache
def _kernel(threads: int, arch: str) -> Kernel:
    macros = [("THREADS", str(threads)), ("VECTORS", str(_VECTORS))]
    options = ProgramOptions(name="limit.cu", arch=f"sm_{arch}", std="c++17", define_macro=macros)
    return Program(_SOURCE, "c++", options).compile("cubin").get_kernel("limit")
