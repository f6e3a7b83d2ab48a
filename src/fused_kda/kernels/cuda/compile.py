"""From a specialisation and a launch shape to machine code. No tensors, no launch; no GPU is needed.

NVRTC compiles ``fused_decode.cu`` for one architecture. The result is kept on disk (:mod:`..cache`), so that a machine
compiles a specialisation once; the key covers source, options, architecture and NVRTC's version. NVRTC is imported
when something is compiled: what is prebuilt runs without it.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import threading
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

import torch

from ... import binaries, gates
from ...binaries import Made
from ...contract import Specialization
from ..cache import private_directory, unusable
from ..resources import resources
from .shape import Shape, shapes

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
    from cuda.bindings import nvrtc

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


_importing = threading.Lock()


def _cuda_core() -> Any:
    """The module, by one thread at a time: a second one that comes while it is imported finds half of it."""
    with _importing:
        import cuda.core.utils

        return cuda.core


def recipe(spec: Specialization, shape: Shape, prefetch: bool, arch: str) -> dict[str, Any]:
    """All that a compilation depends on but source and compiler, as plain JSON."""
    return {"kernel": ENTRY, "arch": arch, "macros": macros(spec, shape, prefetch)}


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
        RuntimeError: the environment forbids to compile now, and the cache does not have it.
    """
    cuda = _cuda_core()
    source = SOURCE.read_text()
    options = cuda.ProgramOptions(
        name=SOURCE.name, arch=arch, std="c++17", fma=False, define_macro=list(macros(spec, shape, prefetch).items())
    )
    if not cached:
        return _compile(source, options)
    key = cuda.utils.make_program_cache_key(code=source, code_type="c++", options=options, target_type="cubin")
    root = gates.settings().cache_dir
    for cache in _caches(root):
        entry = cache.get(key)
        if entry is None:
            continue
        digest, code = entry[:_DIGEST_BYTES], entry[_DIGEST_BYTES:]
        if digest == _digest(key, code):
            binaries.counts["cache"] += 1
            return code
        logger.warning("a damaged entry in the kernel cache %s is compiled anew", root)
    gates.before_compile(f"cuda for {arch}, {spec}, {shape}")
    code = _compile(source, options)
    for cache in _caches(root):
        try:
            cache[key] = _digest(key, code) + code
            break
        except OSError as error:
            unusable(root, error)
    return code


def prebuild(spec: Specialization, arch: str, target: str, prefetch: bool) -> list[Made]:
    """Every kernel that a batch of the specialisation may be launched with, compiled for ``target`` (of ``arch``)."""
    made = []
    for shape in shapes(spec, arch, prefetch):
        code = compile_cubin(spec, shape, prefetch, target, cached=False)
        registers, spills, shared = resources(code) or (None, None, None)
        dynamic = shape.shared_bytes(spec)
        key = binaries.identity(recipe(spec, shape, prefetch, arch))
        made.append(Made(key, ENTRY, {"cubin": code}, registers, spills, None if shared is None else shared + dynamic))
    return made


def _compile(source: str, options: Any) -> bytes:
    return bytes(_cuda_core().Program(source, "c++", options).compile("cubin").code)


_DIGEST_BYTES = hashlib.sha256().digest_size


def _digest(key: bytes, code: bytes) -> bytes:
    """Before an entry's code: that it is whole, and the code of this key."""
    return hashlib.sha256(key + code).digest()


@functools.cache
def _caches(root: Path) -> tuple[MutableMapping[bytes, bytes], ...]:
    """Where to look, and to write until it works: the disk if it can be used, then this process's memory."""
    utils = _cuda_core().utils
    directory = private_directory(root, "cuda")
    if directory is not None:
        try:
            return utils.FileStreamProgramCache(directory), utils.InMemoryProgramCache()
        except OSError as error:
            unusable(root, error)
    return (utils.InMemoryProgramCache(),)
