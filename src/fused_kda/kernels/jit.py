"""Compiling one Triton kernel for a named architecture without tensors, and binding it to the numbers of a problem.

Triton's own dispatcher specialises on every argument it sees (a 1, a multiple of 16) and costs tens of microseconds per
call. Here the types and constants are said outright, so the same compilation serves a launch, a static proof for a
machine that is not there, and every batch, slot count and pitch. Triton's disk cache keeps what was compiled.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

from ..contract import DecodeProblem, Tensors

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


@functools.cache
def compiled(build: Build, arch: str, device: int | None = None) -> CompiledKernel:
    """Compile for an architecture; kept per device, since a binary is loaded into one device's context."""
    names = build.kernel.arg_names
    pointers, constants = dict(build.pointers), dict[str, int | bool | None](build.constants)
    signature = {}
    for name in names:
        dtype = pointers.get(name)
        if dtype is not None:
            signature[name] = _POINTERS[dtype]
        elif name in pointers or name in constants:
            signature[name] = "constexpr"
            constants.setdefault(name, None)
        else:
            signature[name] = "fp32" if name in FLOATS else "i64"
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in build.aligned}
    source = ASTSource(fn=build.kernel, signature=signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=target(arch), options={"enable_fp_fusion": False, **dict(build.options)})


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

    with torch.cuda.device(device):
        runner = compiled(build, arch, device.index)[(programs, 1, 1)]
    pointers = dict(build.pointers)
    slots = tuple((place, name) for place, name in enumerate(kernel.arg_names) if pointers.get(name) is not None)
    template = [None if name in pointers else (constants | dict(numbers))[name] for name in kernel.arg_names]

    def launch(tensors: Mapping[str, Any]) -> None:
        arguments = template.copy()
        for place, name in slots:
            arguments[place] = tensors[name]
        runner(*arguments)

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
