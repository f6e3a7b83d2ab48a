"""Loading and launching machine code on NVIDIA through the driver alone: no compiler, no runtime library, no disk.

:func:`load` puts a cubin into a device's primary context, and :class:`Prepared` holds what a launch needs, so that it
only writes addresses into a buffer and calls the driver. Both kinds of kernel go this way: the CUDA kernel, whose one
parameter is a struct, and Triton's, whose parameters are single values.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from cuda.bindings import driver

from .. import gates

_OK = driver.CUresult.CUDA_SUCCESS


@dataclass(frozen=True, slots=True)
class Loaded:
    """A kernel in a device's context. Kept for the life of the process, like the module that holds it."""

    function: int
    parameter_bytes: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class Configuration:
    """How a kernel is launched: device number, CTAs, threads and dynamic shared bytes of a CTA, whether it may start
    before the kernel ahead on the stream has ended."""

    device: int
    grid: int
    threads: int
    shared: int
    dependent: bool


def load(code: bytes, name: str, device: int, shared: int) -> Loaded:
    """Load a kernel for a device; works inside a graph capture.

    Args:
        code: a cubin.
        name: of the function.
        device: its number.
        shared: dynamic shared memory of its launches, bytes.

    Raises:
        gates.Unloadable: the driver refuses the code, such as for another architecture; nothing is left loaded.
    """
    make_context_current(device)
    with torch.cuda.device(device), _relaxed_capture():
        library = _ask("the code to load", driver.cuLibraryLoadData(code, [], [], 0, [], [], 0))
        try:
            kernel = _ask(f"a kernel {name}", driver.cuLibraryGetKernel(library, name.encode()))
            if shared > 48 * 1024:
                limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                answer = driver.cuKernelSetAttribute(limit, shared, kernel, driver.CUdevice(device))
                _ask(f"{shared} bytes of shared memory", answer)
            # A module loads lazily; what is loaded now need not be loaded inside a capture.
            _ask(f"code of {name} for this device", driver.cuKernelGetFunction(kernel))
        except gates.Unloadable:
            driver.cuLibraryUnload(library)
            raise
    return Loaded(int(kernel), _parameter_bytes(kernel))


class Prepared(threading.local):
    """One thread's own parameter buffer and launch configuration, made when the thread first launches.

    A launch packs addresses into ``params`` and calls :meth:`launch`.
    """

    def __init__(
        self, configuration: Configuration, loaded: Loaded, numbers: bytes, addresses: int, offsets: tuple[int, ...]
    ) -> None:
        """Prepare.

        Args:
            configuration, loaded: what is launched, and how.
            numbers: what stands in the parameter buffer behind the addresses.
            addresses: how many there are, 8 bytes each.
            offsets: where in the buffer each of the kernel's parameters begins.
        """
        make_context_current(configuration.device)
        content = bytes(8 * addresses) + numbers
        self.params = ctypes.create_string_buffer(content, -(-len(content) // 8) * 8)
        base = ctypes.addressof(self.params)
        self._pointers = (ctypes.c_void_p * len(offsets))(*(base + offset for offset in offsets))
        self.arguments = ctypes.addressof(self._pointers)
        self.function = driver.CUfunction(loaded.function)
        self.stream = 0
        self.config = driver.CUlaunchConfig()
        self.config.gridDimX = configuration.grid
        self.config.gridDimY = self.config.gridDimZ = 1
        self.config.blockDimX = configuration.threads
        self.config.blockDimY = self.config.blockDimZ = 1
        self.config.sharedMemBytes = configuration.shared
        self.config.hStream = driver.CUstream(0)
        if configuration.dependent:
            attribute = driver.CUlaunchAttribute()
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            self.config.attrs = [attribute]
            self.config.numAttrs = 1

    def launch(self, stream: int) -> None:
        """Launch with what ``params`` holds now.

        Raises:
            RuntimeError: the driver refuses the launch.
        """
        if stream != self.stream:
            self.config.hStream = driver.CUstream(stream)
            self.stream = stream
        (result,) = driver.cuLaunchKernelEx(self.config, self.function, self.arguments, 0)
        if result != _OK:
            raise RuntimeError(f"expected the kernel to launch, got {result.name}")


def make_context_current(device: int) -> None:
    """A thread that has not used CUDA yet has no context; torch makes the primary one current only when it has work."""
    context = _ask("the current context", driver.cuCtxGetCurrent())
    if int(context) == 0:
        primary = _ask("the primary context", driver.cuDevicePrimaryCtxRetain(driver.CUdevice(device)))
        _ask("the primary context to become current", driver.cuCtxSetCurrent(primary))


def _parameter_bytes(kernel: driver.CUkernel) -> tuple[int, ...] | None:
    """Sizes of the kernel's parameters in order; None where the driver is too old to tell."""
    sizes: list[int] = []
    try:
        while True:
            result, _, size = driver.cuKernelGetParamInfo(kernel, len(sizes))
            if result != _OK:
                return tuple(sizes)
            sizes.append(int(size))
    except RuntimeError:  # the bindings' word for an entry point that the driver lacks
        return None


@contextlib.contextmanager
def _relaxed_capture() -> Iterator[None]:
    """Loading a module inside does not end a capture of this thread."""
    relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    _, previous = driver.cuThreadExchangeStreamCaptureMode(relaxed)
    try:
        yield
    finally:
        driver.cuThreadExchangeStreamCaptureMode(previous)


def _ask(wanted: str, answer: tuple[Any, ...]) -> Any:
    """The value of a driver call's answer."""
    result = answer[0]
    if result != _OK:
        raise gates.Unloadable(f"the driver was asked for {wanted}, and answered {getattr(result, 'name', result)}")
    return answer[1] if len(answer) > 1 else None
