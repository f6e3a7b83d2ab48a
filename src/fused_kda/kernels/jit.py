"""Compiling one Triton kernel for a named architecture without tensors, and binding it to the numbers of a problem.

Triton's own dispatcher specialises on every argument it sees (a 1, a multiple of 16) and costs tens of microseconds per
call. Here the types and constants are said outright, so the same compilation serves a launch, a static proof for a
machine that is not there, and every batch, slot count and pitch. On NVIDIA a kernel is loaded and launched by the
driver (:mod:`.driver`), on AMD by Triton.
"""

from __future__ import annotations

import functools
import json
import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

from .. import gates
from ..binaries import Made, Prebuilt, identity
from ..contract import DecodeProblem, Tensors
from .obtain import obtain
from .resources import resources
from .triton_cache import compile_kernel

Launch = Callable[[Tensors], None]

#: Arguments that are fp32 scalars; all others that are neither tensors nor constants are 64-bit integers.
FLOATS = ("lower_bound", "norm_eps", "scale")
#: The scalars that a kernel may take by name, with the problem's attribute of that name as their value.
SCALARS = (
    "slots", "null_slot", "x_row", "g_row", "beta_row", "gate_row", "out_row", "index_stride", "initial_stride",
    "norm_eps", "scale",
)  # fmt: skip

_POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.bool: "*i1",
}


def target(arch: str) -> GPUTarget:
    """Triton's target for an architecture as the gates name it ("sm_90", "gfx942").

    Raises:
        ValueError: neither form.
    """
    if match := re.fullmatch(r"sm_(\d+)", arch):
        return GPUTarget("cuda", int(match[1]), 32)
    if re.fullmatch(r"gfx9\w+", arch):
        return GPUTarget("hip", arch, 64)
    raise ValueError(f"arch: expected sm_NN or a wave64 gfx9 name, got {arch!r}")


def interpreted(kernel: Any) -> bool:
    """Whether Triton's interpreter (``TRITON_INTERPRET=1`` at import) runs this kernel."""
    return not isinstance(kernel, triton.JITFunction)


@dataclass(frozen=True, slots=True)
class Build:
    """All that one compilation depends on, hashable.

    Attributes:
        kernel: the ``triton.jit`` function.
        pointers: tensor arguments and their element types; None for one that is absent.
        constants: ``tl.constexpr`` arguments.
        aligned: tensor arguments whose address is a multiple of 16 bytes.
        options: of Triton's compiler (num_warps, maxnreg, launch_pdl ...).
    """

    kernel: Any
    pointers: tuple[tuple[str, torch.dtype | None], ...]
    constants: tuple[tuple[str, int | bool], ...]
    aligned: tuple[str, ...]
    options: tuple[tuple[str, int | bool], ...]

    @property
    def backend(self) -> str:
        """The backend that the kernel belongs to: the name of its package."""
        return str(self.kernel.__module__).split(".")[-2]


def recipe(build: Build, arch: str) -> dict[str, Any]:
    """All that a compilation depends on but source and compiler, as plain JSON."""
    return {
        "kernel": build.kernel.__name__,
        "arch": arch,
        "pointers": build.pointers,
        "constants": build.constants,
        "aligned": build.aligned,
        "options": build.options,
    }


@functools.cache
def compiled(build: Build, arch: str, device: int | None = None) -> CompiledKernel:
    """Compile for an architecture; kept per device, since a binary is loaded into one device's context."""
    options = {"enable_fp_fusion": False, **dict(build.options)}
    return compile_kernel(_source(build), target(arch), options, f"{build.backend} for {arch}, {build}")


def prebuild(build: Build, arch: str) -> Made:
    """Compile for a prebuilt directory: machine code without line numbers, and Triton's metadata."""
    with triton.knobs.compilation.scope():
        triton.knobs.compilation.disable_line_info = True
        kernel = compiled.__wrapped__(build, arch)
    metadata = {**kernel.metadata._asdict(), "extern_libs": [], "target": vars(kernel.metadata.target)}
    text = json.dumps(metadata, sort_keys=True, default=list).encode()
    key, name = identity(recipe(build, arch)), str(metadata["name"])
    if arch.startswith("gfx"):
        assembly = kernel.asm["amdgcn"]

        def figure(of: str) -> int:
            return int(re.findall(rf"^\s+\.{of}:\s+(\d+)", assembly, re.MULTILINE)[0])

        spills = figure("vgpr_spill_count") + figure("sgpr_spill_count")
        return Made(key, name, {"hsaco": kernel.kernel, "json": text}, figure("vgpr_count"), spills, metadata["shared"])
    registers, spilt, _ = resources(kernel.kernel) or (None, None, None)
    return Made(key, name, {"cubin": kernel.kernel, "json": text}, registers, spilt, metadata["shared"])


def _source(build: Build) -> ASTSource:
    pointers, constants = dict(build.pointers), dict[str, int | bool | None](build.constants)
    for name in build.kernel.arg_names:
        if pointers.get(name) is None and name in pointers:
            constants[name] = None
    attributes = {(build.kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in build.aligned}
    return ASTSource(fn=build.kernel, signature=_signature(build), constexprs=constants, attrs=attributes)


def _signature(build: Build) -> dict[str, str]:
    """The type of every argument in order; "constexpr" for those that the binary does not take."""
    pointers, constants = dict(build.pointers), dict(build.constants)
    signature = {}
    for name in build.kernel.arg_names:
        dtype = pointers.get(name)
        if dtype is not None:
            signature[name] = _POINTERS[dtype]
        elif name in pointers or name in constants:
            signature[name] = "constexpr"
        else:
            signature[name] = "fp32" if name in FLOATS else "i64"
    return signature


def load_kernel(build: Build, arch: str, device: int) -> None:
    """Find or compile a kernel and load it into a device's context, ahead of :func:`bind`.

    Raises:
        gates.Unloadable: the device refuses the code.
    """
    if _by_driver(arch) and _loaded(build, arch, device) is not None:
        return
    _triton_loaded(build, arch, device)


def bind(
    build: Build, arch: str, device: torch.device, programs: int, numbers: Mapping[str, int | float]
) -> Callable[[Mapping[str, Any]], None]:
    """A launch of ``programs`` programs on the current stream: takes the tensors by argument name.

    Args:
        build, arch: what to compile; ignored under the interpreter, which takes any device.
        device: where the tensors live.
        programs: size of the one-dimensional grid.
        numbers: the run-time scalars by argument name, all of them.
    """
    kernel = build.kernel
    constants = dict(build.constants)
    if interpreted(kernel):

        def interpret(tensors: Mapping[str, Any]) -> None:
            given = {name: tensors[name] for name, _ in build.pointers}
            kernel[(programs,)](**given, **numbers, **constants)

        return interpret

    if _by_driver(arch):
        launcher = _driver_launch(build, arch, device.index, programs, numbers)
        if launcher is not None:
            return launcher
    with torch.cuda.device(device):
        runner = _triton_loaded(build, arch, device.index)[(programs, 1, 1)]
    pointers = dict(build.pointers)
    slots = tuple((place, name) for place, name in enumerate(kernel.arg_names) if pointers.get(name) is not None)
    template = [None if name in pointers else (constants | dict(numbers))[name] for name in kernel.arg_names]

    def launch(tensors: Mapping[str, Any]) -> None:
        arguments = template.copy()
        for place, name in slots:
            arguments[place] = tensors[name]
        runner(*arguments)

    return launch


@functools.cache
def _triton_loaded(build: Build, arch: str, device: int) -> CompiledKernel:
    """The kernel for Triton's own loader and launcher, which a C compiler builds at their first use."""

    def prebuilt(found: Prebuilt) -> CompiledKernel:
        (suffix,) = set(found.files) - {"json"}
        group = {f"{build.kernel.__name__}.{kind}": str(path) for kind, path in found.paths.items()}
        kernel = CompiledKernel(_source(build), group, found.key)
        if kernel.kernel != found.files[suffix]:
            raise gates.Unloadable(f"{found.paths[suffix]} changed while it was read")
        return kernel

    return obtain(build.backend, identity(recipe(build, arch)), prebuilt, lambda: compiled(build, arch, device))


def _by_driver(arch: str) -> bool:
    """Whether kernels are loaded and launched through the CUDA driver, which takes no C compiler and no disk."""
    return arch.startswith("sm_") and gates.importable("cuda.bindings")


@functools.cache
def _loaded(build: Build, arch: str, device: int) -> tuple[Any, Mapping[str, Any]] | None:
    """The kernel in the device's context, and Triton's metadata; None where its parameters are not those known here."""
    from . import driver

    def load(code: bytes, metadata: Mapping[str, Any]) -> tuple[Any, Mapping[str, Any]] | None:
        if metadata["num_ctas"] != 1 or metadata["global_scratch_size"] or metadata["profile_scratch_size"]:
            return None
        loaded = driver.load(code, metadata["name"], device, metadata["shared"])
        wanted = [4 if kind == "fp32" else 8 for kind in _signature(build).values() if kind != "constexpr"]
        # Triton adds the addresses of two scratch buffers, here of size 0.
        return (loaded, metadata) if loaded.parameter_bytes == (*wanted, 8, 8) else None

    def fresh() -> tuple[Any, Mapping[str, Any]] | None:
        kernel = compiled(build, arch, device)
        return load(kernel.kernel, kernel.metadata._asdict())

    return obtain(
        build.backend,
        identity(recipe(build, arch)),
        lambda found: load(found.files["cubin"], json.loads(found.files["json"])),
        fresh,
    )


def _driver_launch(
    build: Build, arch: str, device: int, programs: int, numbers: Mapping[str, int | float]
) -> Callable[[Mapping[str, Any]], None] | None:
    from . import driver

    found = _loaded(build, arch, device)
    if found is None:
        return None
    loaded, metadata = found
    signature = {name: kind for name, kind in _signature(build).items() if kind != "constexpr"}
    tensors_of = tuple(name for name, kind in signature.items() if kind.startswith("*"))
    # Addresses first, then 8 bytes for each number, then 8 zero bytes for what Triton adds.
    scalars_of = [name for name in signature if name not in tensors_of]
    places = {name: 8 * place for place, name in enumerate((*tensors_of, *scalars_of))}
    packed = b"".join(struct.pack("<f4x" if signature[n] == "fp32" else "<q", numbers[n]) for n in scalars_of)
    scratch = 8 * len(places)
    offsets = (*(places[name] for name in signature), scratch, scratch)
    configuration = driver.Configuration(
        device=device,
        grid=programs,
        threads=32 * metadata["num_warps"],
        shared=metadata["shared"],
        dependent=bool(metadata["launch_pdl"]),
    )
    state = driver.Prepared(configuration, loaded, packed + bytes(8), len(tensors_of), offsets)
    pack, current_stream = struct.Struct(f"<{len(tensors_of)}Q").pack_into, torch._C._cuda_getCurrentRawStream

    def launch(tensors: Mapping[str, Any]) -> None:
        pack(state.params, 0, *[tensors[name].data_ptr() for name in tensors_of])
        state.launch(current_stream(device))

    return launch


def scalars(problem: DecodeProblem, kernel: Any) -> dict[str, int | float]:
    """The run-time numbers of a problem that a kernel takes, by argument name."""
    spec = problem.spec
    values: dict[str, int | float] = {name: getattr(problem, name) for name in SCALARS}
    values["lower_bound"] = 0.0 if problem.lower_bound is None else problem.lower_bound
    values["conv_pitch"] = problem.conv_pitch // unit(spec.conv_alignment, spec.dtype)
    values["state_pitch"] = problem.state_pitch // unit(spec.state_alignment, spec.state_dtype)
    return {name: value for name, value in values.items() if name in kernel.arg_names}


def unit(alignment: int, dtype: torch.dtype) -> int:
    """Elements of the unit in which a pool's pitch is passed, so that a kernel sees the pool's alignment."""
    return max(1, alignment // dtype.itemsize)
