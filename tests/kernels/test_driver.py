"""Loading and launching through the CUDA driver, with a driver that only answers: what is asked, in which order."""

from __future__ import annotations

import contextlib
import ctypes
import struct
import threading
from typing import Any

import pytest
import torch

from fused_kda import gates

pytest.importorskip("cuda.bindings")

from cuda.bindings import driver as cuda

from fused_kda.kernels import driver

OK = cuda.CUresult.CUDA_SUCCESS
RELAXED = cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
BEFORE = cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL


class Driver:
    """Answers as a driver would for a kernel with parameters of 8, 4 and 8 bytes; notes the questions."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.answers: dict[str, tuple[Any, ...]] = {}
        self.launched: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        def answer(*arguments: Any) -> tuple[Any, ...]:
            self.asked.append((name, *arguments))
            if name in self.answers:
                return self.answers[name]
            if name == "cuKernelGetParamInfo":
                place = arguments[1]
                return (
                    (OK, 8 * place, (8, 4, 8)[place]) if place < 3 else (cuda.CUresult.CUDA_ERROR_INVALID_VALUE, 0, 0)
                )
            if name == "cuThreadExchangeStreamCaptureMode":
                return OK, BEFORE
            return OK, {"cuLibraryLoadData": 11, "cuLibraryGetKernel": 12, "cuCtxGetCurrent": 1}.get(name, 0)

        return answer

    def names(self) -> list[str]:
        return [question[0] for question in self.asked]


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Driver:
    fake = Driver()
    for name in (
        *("cuCtxGetCurrent", "cuDevicePrimaryCtxRetain", "cuCtxSetCurrent", "cuLibraryLoadData", "cuLibraryUnload"),
        *("cuLibraryGetKernel", "cuKernelSetAttribute", "cuKernelGetFunction", "cuKernelGetParamInfo"),
        *("cuThreadExchangeStreamCaptureMode", "cuLaunchKernelEx"),
    ):
        monkeypatch.setattr(cuda, name, getattr(fake, name))
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    return fake


def test_a_kernel_is_loaded_whole_before_a_capture_could_notice(answers: Driver) -> None:
    loaded = driver.load(b"code", "decode", 0, 1024)
    assert loaded == driver.Loaded(12, (8, 4, 8))
    names = answers.names()
    first, last = (place for place, name in enumerate(names) if name == "cuThreadExchangeStreamCaptureMode")
    assert answers.asked[first][1] == RELAXED
    assert answers.asked[last][1] == BEFORE
    assert names[first + 1 : last] == ["cuLibraryLoadData", "cuLibraryGetKernel", "cuKernelGetFunction"]
    assert answers.asked[first + 1][1] == b"code"
    assert answers.asked[first + 2][2] == b"decode"


def test_more_than_48_kib_of_shared_memory_is_asked_for(answers: Driver) -> None:
    driver.load(b"code", "decode", 3, 64 * 1024)
    ((_, limit, size, kernel, device),) = [one for one in answers.asked if one[0] == "cuKernelSetAttribute"]
    assert limit == cuda.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    assert (size, kernel, int(device)) == (64 * 1024, 12, 3)


@pytest.mark.parametrize("question", ["cuLibraryLoadData", "cuLibraryGetKernel", "cuKernelGetFunction"])
def test_a_refusal_is_told_and_leaves_nothing_behind(answers: Driver, question: str) -> None:
    answers.answers[question] = (cuda.CUresult.CUDA_ERROR_NO_BINARY_FOR_GPU, None)
    with pytest.raises(
        gates.Unloadable, match=r"^the driver was asked for .*, and answered CUDA_ERROR_NO_BINARY_FOR_GPU$"
    ):
        driver.load(b"code", "decode", 0, 0)
    assert ("cuLibraryUnload" in answers.names()) == (question != "cuLibraryLoadData")
    assert answers.asked[-1] == ("cuThreadExchangeStreamCaptureMode", BEFORE)


def test_a_thread_without_a_context_gets_the_devices_own(answers: Driver) -> None:
    answers.answers["cuCtxGetCurrent"] = (OK, 0)
    driver.make_context_current(2)
    assert answers.names() == ["cuCtxGetCurrent", "cuDevicePrimaryCtxRetain", "cuCtxSetCurrent"]
    assert int(answers.asked[1][1]) == 2


def test_a_launch_passes_addresses_numbers_and_stream(answers: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two addresses, an int and a float, taken by three parameters that lie elsewhere than in their own order."""
    seen: list[tuple[Any, ...]] = []

    def launch(config: Any, function: Any, arguments: int, extra: int) -> tuple[Any]:
        pointers = (ctypes.c_uint64 * 3).from_address(arguments)
        content = [ctypes.string_at(pointer, 8) for pointer in pointers]
        grid = config.gridDimX, config.blockDimX, config.sharedMemBytes, config.numAttrs
        seen.append((int(config.hStream), int(function), *grid, content))
        return (OK,)

    monkeypatch.setattr(cuda, "cuLaunchKernelEx", launch)
    configuration = driver.Configuration(device=0, grid=24, threads=128, shared=512, dependent=True)
    numbers = struct.pack("<qf4x", -7, 1.5)
    prepared = driver.Prepared(configuration, driver.Loaded(12, None), numbers, 2, (8, 16, 24))

    def work(stream: int) -> None:
        struct.pack_into("<2Q", prepared.params, 0, 1000 + stream, 2000 + stream)
        prepared.launch(stream)

    for stream in (5, 5, 6):
        work(stream)
    other = threading.Thread(target=work, args=(9,))
    other.start()
    other.join()
    assert [one[:6] for one in seen] == [(stream, 12, 24, 128, 512, 1) for stream in (5, 5, 6, 9)]
    for stream, *_, content in seen:
        assert struct.unpack("<Q", content[0]) == (2000 + stream,)
        assert struct.unpack("<q", content[1]) == (-7,)
        assert struct.unpack_from("<f", content[2]) == (1.5,)
    assert struct.unpack_from("<2Q", prepared.params) == (1006, 2006), "each thread has a buffer of its own"
    monkeypatch.setattr(cuda, "cuLaunchKernelEx", lambda *_: (cuda.CUresult.CUDA_ERROR_LAUNCH_FAILED,))
    with pytest.raises(RuntimeError, match="expected the kernel to launch, got CUDA_ERROR_LAUNCH_FAILED"):
        prepared.launch(5)
