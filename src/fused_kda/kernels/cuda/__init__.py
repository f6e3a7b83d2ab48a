"""One launch on NVIDIA GPUs from SM80 on: the whole decode step in ``fused_decode.cu``.

``shape`` says how a call is laid over the machine, ``compile`` makes the machine code, ``launch`` launches it, and
``inspect`` shows what the compiler made of it, without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ... import gates
from ...contract import DecodeProblem, Tensors
from .compile import prebuild as prebuild
from .launch import loaded_kernel, make_launch
from .shape import choose, shapes


def prepare(problem: DecodeProblem) -> Callable[[Tensors], None]:
    """A launch for the problem: takes the call's tensors, mutates conv_state, state and out."""
    arch = gates.architecture(problem.device)
    sms = torch.cuda.get_device_properties(problem.device).multi_processor_count
    return make_launch(problem, choose(problem, arch, sms), arch)


def warm(problem: DecodeProblem) -> None:
    """Find or compile, and load, the kernels that any batch of the problem's specialisation may be launched with."""
    arch = gates.architecture(problem.device)
    for shape in shapes(problem.spec, arch, problem.prefetch):
        loaded_kernel(problem.spec, shape, problem.prefetch, arch, problem.device.index)
