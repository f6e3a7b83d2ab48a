"""The backend: a checked problem in, a launch out. All decisions are made here, once; the launch makes none."""

from __future__ import annotations

from ... import gates
from ...contract import DecodeProblem, Tensors
from ..jit import Launch, bind, interpreted, load_kernel, scalars
from .compile import decode_build
from .kernel import decode
from .shape import Shape, choose, shapes

#: What the interpreter on a CPU runs: the launch shape and code paths of this architecture.
INTERPRETED_ARCH = "sm_80"


def prepare(problem: DecodeProblem, shape: Shape | None = None) -> Launch:
    """Compile (or find) the kernel for the problem and bind the launch.

    Args:
        problem: a checked call.
        shape: a launch shape to use instead of the chosen one, for the sweep that the choice rests on.

    Returns:
        A function of the call's tensors that launches once on the current stream of the current device. It mutates
        conv_state, state and out; it allocates nothing, copies nothing and waits for nothing.
    """
    spec = problem.spec
    arch = INTERPRETED_ARCH if interpreted(decode) else gates.architecture(problem.device)
    if shape is None:
        shape = choose(spec, arch, problem.batch, problem.prefetch)
        warm(problem)  # all shapes now, so that no other batch size has to compile later
    build = decode_build(spec, arch, shape, problem.prefetch)
    run = bind(build, arch, problem.device, problem.batch * spec.heads, scalars(problem, decode))

    def launch(tensors: Tensors) -> None:
        run(tensors._asdict())

    return launch


def warm(problem: DecodeProblem) -> None:
    """Find or compile, and load, the kernels that any batch of the problem's specialisation may be launched with."""
    if interpreted(decode):
        return
    arch = gates.architecture(problem.device)
    for _, shape in shapes(problem.spec, arch, problem.prefetch):
        load_kernel(decode_build(problem.spec, arch, shape, problem.prefetch), arch, problem.device.index)
