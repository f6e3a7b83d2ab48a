"""From machine code to a launch that only launches: it packs addresses into a prepared buffer and calls the driver."""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
from collections.abc import Callable

import torch
from cuda.bindings import driver
from cuda.core import Device, Kernel, ObjectCode

from ...contract import DecodeProblem, Tensors
from .compile import ENTRY, compile_cubin
from .shape import Shape, major

#: The kernel's ``Params``: 14 addresses in the order of :class:`Tensors`, then strides, then scalars.
_ADDRESSES = struct.Struct("<14Q")
_NUMBERS = struct.Struct("<11q3f")
_PARAMS_BYTES = -(-(_ADDRESSES.size + _NUMBERS.size) // 8) * 8


def make_launch(problem: DecodeProblem, shape: Shape, arch: str) -> Callable[[Tensors], None]:
    """A launch of the problem in the given shape. Compiles and loads now; the launch itself decides nothing.

    The launch goes to the current stream of the problem's device, which must be current; it allocates nothing, does not
    synchronise, may be captured into a graph, and may be called from several threads.
    """
    device = problem.device.index
    kernel = _kernel(problem.spec, shape, problem.prefetch, arch, device)
    state = _Prepared(problem, shape, kernel, major(arch) >= 9)
    pack, current_stream = _ADDRESSES.pack_into, torch._C._cuda_getCurrentRawStream
    launch_kernel, success = driver.cuLaunchKernelEx, driver.CUresult.CUDA_SUCCESS

    def launch(tensors: Tensors) -> None:
        x, weight, bias, conv, raw_g, raw_beta, a_log, dt_bias, index, pool, out, gate, norm, initial = tensors
        pack(
            state.params, 0,
            x.data_ptr(), weight.data_ptr(), 0 if bias is None else bias.data_ptr(), conv.data_ptr(),
            raw_g.data_ptr(), raw_beta.data_ptr(), a_log.data_ptr(), dt_bias.data_ptr(), index.data_ptr(),
            pool.data_ptr(), out.data_ptr(), 0 if gate is None else gate.data_ptr(),
            0 if norm is None else norm.data_ptr(), 0 if initial is None else initial.data_ptr(),
        )  # fmt: skip
        stream = current_stream(device)
        if stream != state.stream:
            state.config.hStream = driver.CUstream(stream)
            state.stream = stream
        (result,) = launch_kernel(state.config, state.function, state.arguments, 0)
        if result != success:
            raise RuntimeError(f"cuda: expected the kernel to launch, got {result.name} for {problem}")

    return launch


class _Prepared(threading.local):
    """One thread's own parameter buffer and launch configuration, made when the thread first launches."""

    def __init__(self, problem: DecodeProblem, shape: Shape, kernel: Kernel, dependent: bool) -> None:
        _make_context_current(problem.device.index)
        spec = problem.spec
        self.params = ctypes.create_string_buffer(_PARAMS_BYTES)
        _NUMBERS.pack_into(
            self.params, _ADDRESSES.size,
            problem.x_row, problem.g_row, problem.beta_row, problem.gate_row, problem.out_row, problem.index_stride,
            problem.initial_stride, problem.conv_pitch, problem.state_pitch, problem.slots, problem.null_slot,
            problem.lower_bound or 0.0, problem.norm_eps, problem.scale,
        )  # fmt: skip
        self._pointers = (ctypes.c_void_p * 1)(ctypes.addressof(self.params))
        self.arguments = ctypes.addressof(self._pointers)
        self.function = driver.CUfunction(int(kernel.handle))
        self.stream = 0
        self.config = driver.CUlaunchConfig()
        self.config.gridDimX = problem.batch * spec.heads * shape.split
        self.config.gridDimY = self.config.gridDimZ = 1
        self.config.blockDimX = shape.threads
        self.config.blockDimY = self.config.blockDimZ = 1
        self.config.sharedMemBytes = shape.shared_bytes(spec)
        self.config.hStream = driver.CUstream(0)
        if dependent:
            attribute = driver.CUlaunchAttribute()
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            self.config.attrs = [attribute]
            self.config.numAttrs = 1


def _make_context_current(device: int) -> None:
    """A thread that has not used CUDA yet has no context; torch makes the primary one current only when it has work."""
    result, context = driver.cuCtxGetCurrent()
    if result != driver.CUresult.CUDA_SUCCESS or int(context) == 0:
        Device(device).set_current()


@functools.cache
def _kernel(spec: object, shape: Shape, prefetch: bool, arch: str, device: int) -> Kernel:
    """The loaded kernel. Kept for the life of the process, like the module that holds it."""
    _make_context_current(device)
    previous = _relax_capture(driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)
    try:
        code = compile_cubin(spec, shape, prefetch, arch)  # type: ignore[arg-type]
        kernel = ObjectCode.from_cubin(code).get_kernel(ENTRY)
        if shape.bulk:
            limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            (result,) = driver.cuKernelSetAttribute(limit, shape.shared_bytes(spec), kernel.handle, device)  # type: ignore[arg-type]
            if result != driver.CUresult.CUDA_SUCCESS:
                raise RuntimeError(f"cuda: expected room for the tile in shared memory, got {result.name}")
        # A module loads lazily; what is loaded now need not be loaded inside a capture.
        driver.cuKernelGetFunction(kernel.handle)
    finally:
        _relax_capture(previous)
    return kernel


def _relax_capture(mode: driver.CUstreamCaptureMode) -> driver.CUstreamCaptureMode:
    """Set this thread's capture mode, so that loading a module does not end a capture; returns the mode before."""
    _, previous = driver.cuThreadExchangeStreamCaptureMode(mode)
    return previous
