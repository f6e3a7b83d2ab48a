"""From machine code to a launch that only launches: it packs addresses into a prepared buffer and calls the driver."""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable

import torch
from cuda.bindings import driver

from ...binaries import identity
from ...contract import DecodeProblem, Specialization, Tensors
from ..driver import Configuration, Loaded, Prepared, load
from ..obtain import obtain
from .compile import ENTRY, compile_cubin, recipe
from .shape import Shape, major

#: The kernel's ``Params``: 14 addresses in the order of :class:`Tensors`, then strides, then scalars.
_ADDRESSES = struct.Struct("<14Q")
_NUMBERS = struct.Struct("<11q3f")


def make_launch(problem: DecodeProblem, shape: Shape, arch: str) -> Callable[[Tensors], None]:
    """A launch of the problem in the given shape. Finds and loads the code now; the launch itself decides nothing.

    The launch goes to the current stream of the problem's device, which must be current; it allocates nothing, does not
    synchronise, may be captured into a graph, and may be called from several threads.
    """
    device, spec = problem.device.index, problem.spec
    configuration = Configuration(
        device=device,
        grid=problem.batch * spec.heads * shape.split,
        threads=shape.threads,
        shared=shape.shared_bytes(spec),
        dependent=major(arch) >= 9,
    )
    numbers = _NUMBERS.pack(
        problem.x_row, problem.g_row, problem.beta_row, problem.gate_row, problem.out_row, problem.index_stride,
        problem.initial_stride, problem.conv_pitch, problem.state_pitch, problem.slots, problem.null_slot,
        problem.lower_bound or 0.0, problem.norm_eps, problem.scale,
    )  # fmt: skip
    loaded = loaded_kernel(spec, shape, problem.prefetch, arch, device)
    state = Prepared(configuration, loaded, numbers, len(Tensors._fields), (0,))
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


@functools.cache
def loaded_kernel(spec: Specialization, shape: Shape, prefetch: bool, arch: str, device: int) -> Loaded:
    """The kernel in the device's context, loaded at the first request.

    Raises:
        gates.Unloadable: the driver refuses its code.
    """

    def loaded(code: bytes) -> Loaded:
        return load(code, ENTRY, device, shape.shared_bytes(spec))

    return obtain(
        "cuda",
        identity(recipe(spec, shape, prefetch, arch)),
        lambda found: loaded(found.files["cubin"]),
        lambda: loaded(compile_cubin(spec, shape, prefetch, arch)),
    )
