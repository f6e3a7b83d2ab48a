"""From a specialisation and a launch shape to machine code. No tensors, no launch; no GPU is needed.

NVRTC compiles ``fused_decode.cu`` for one architecture. The result is kept on disk (:func:`cache_directory`), so that a
machine compiles a specialisation once; the key covers source, options, architecture and NVRTC's version.
"""

from __future__ import annotations

import functools
import hashlib
import logging
from pathlib import Path

import torch
from cuda.bindings import nvrtc
from cuda.core import Program, ProgramOptions
from cuda.core.utils import FileStreamProgramCache, InMemoryProgramCache, make_program_cache_key

from ... import gates
from ...contract import Specialization
from .shape import Shape

logger = logging.getLogger("fused_kda")

ENTRY = "fused_kda_decode"
SOURCE = Path(__file__).with_name("fused_decode.cu")

_TYPES = {
    None: "absent",
    torch.float32: "float",
    torch.bfloat16: "bf16",
    torch.int32: "int",
    torch.int64: "i64",
}


def nvrtc_version() -> str:
    """NVRTC's version as "13.0"."""
    result, major, minor = nvrtc.nvrtcVersion()
    if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise RuntimeError(f"NVRTC: expected its version, got {result.name}")
    return f"{major}.{minor}"


def macros(spec: Specialization, shape: Shape, prefetch: bool) -> dict[str, str]:
    """What the source needs defined: the specialisation, then the launch shape."""
    layout = spec.conv_layout
    plane, tap, channel = spec.weight_strides
    values: dict[str, object] = {
        "HEADS": spec.heads,
        "CONV_CHANNEL": layout.channel_stride,
        "CONV_TAP": layout.tap_stride,
        "W_PLANE": plane,
        "W_TAP": tap,
        "W_CHANNEL": channel,
        "WEIGHT": _TYPES[spec.weight_dtype],
        "BIAS": _TYPES[spec.bias_dtype],
        "NORM": _TYPES[spec.norm_dtype],
        "STATE": _TYPES[spec.state_dtype],
        "INDEX": _TYPES[spec.index_dtype],
        "BOUNDED": int(spec.bounded),
        "INITIAL": int(spec.has_initial_state),
        "STATE_ALIGNED": int(spec.state_alignment >= 16),
        "CONV_ALIGNED": int(spec.conv_alignment >= 16),
        "THREADS": shape.threads,
        "SPLIT": shape.split,
        "BULK": int(shape.bulk),
        "CHUNK": shape.chunk,
        "MIN_CTAS": shape.min_ctas,
        "PREFETCH": int(prefetch),
        "HINT": int(shape.hint),
    }
    return {name: str(value) for name, value in values.items()}


def compile_cubin(spec: Specialization, shape: Shape, prefetch: bool, arch: str, *, cached: bool = True) -> bytes:
    """Machine code of one specialisation for one architecture, from the disk cache or from NVRTC.

    Args:
        spec: what the kernel is specialised on.
        shape: how it is launched.
        prefetch: whether it may read ahead of the previous kernel.
        arch: such as "sm_90" or "sm_90a".
        cached: False compiles anew and leaves the cache alone.

    Raises:
        cuda.core's NVRTCError: the source does not compile; the text holds NVRTC's log.
    """
    source = SOURCE.read_text()
    options = ProgramOptions(
        name=SOURCE.name, arch=arch, std="c++17", fma=False, define_macro=list(macros(spec, shape, prefetch).items())
    )
    if not cached:
        return bytes(Program(source, "c++", options).compile("cubin").code)
    key = make_program_cache_key(code=source, code_type="c++", options=options, target_type="cubin")
    cache = _cache(cache_directory())
    entry: bytes | None = cache.get(key)
    if entry is not None:
        digest, code = entry[:_DIGEST_BYTES], entry[_DIGEST_BYTES:]
        if digest == _digest(code):
            return code
        logger.warning("a damaged entry in the kernel cache %s is compiled anew", cache_directory())
    code = bytes(Program(source, "c++", options).compile("cubin").code)
    try:
        cache[key] = _digest(code) + code
    except OSError as error:
        logger.warning("kernel cache %s: %s; this kernel is compiled in every process", cache_directory(), error)
    return code


def cache_directory() -> Path:
    """Where compiled kernels are kept: ``FUSED_KDA_CACHE_DIR``, or ``fused-kda`` in the user's cache directory."""
    return gates.settings().cache_dir


_DIGEST_BYTES = hashlib.sha256().digest_size


def _digest(code: bytes) -> bytes:
    return hashlib.sha256(code).digest()


@functools.cache
def _cache(directory: Path) -> FileStreamProgramCache | InMemoryProgramCache:
    try:
        return FileStreamProgramCache(directory)
    except OSError as error:
        logger.warning("kernel cache %s: %s; kernels are compiled in every process", directory, error)
        return InMemoryProgramCache()
