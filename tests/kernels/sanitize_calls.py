"""Launch one backend's covering set (or one faulty kernel), each launch checked against float64.

``sanitize_run.py`` runs it under each tool of compute-sanitizer; it is no test of its own.

Memory is as hostile as a tool can use: ``PYTORCH_NO_CUDA_MEMORY_CACHING=1`` gives every tensor an allocation of exactly
its size, and what a launch must not read (``out``, slots that no row names or that have no usable state, the guards
between slots) is never written, so that reading it is an error to initcheck. All else is copied from the host, not by
kernels of torch's, which the tools are told to leave alone.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence

import torch
from sanitize_matrix import BACKENDS, FAULTS, FAULTY, Case, cases

from fused_kda import gates
from fused_kda.contract import Tensors
from fused_kda.kernels.reference import Launch
from fused_kda.testing.compare import Mismatch, check_call, expected
from fused_kda.testing.problems import Call, draw


def on_device(call: Call, spare_taps: int, device: torch.device) -> Call:
    """The call's tensors on the device, with what a launch must not read left as it was allocated."""
    initial = call.arguments["has_initial_state"]
    live = zip(call.live, call.slots, strict=True)
    started = [slot for row, slot in live if initial is None or bool(initial[row])]
    # Spare taps lie between the windows of neighbouring channels: such a slot is copied whole, and read back whole.
    read = {"conv_state": list(call.slots) if spare_taps else started, "state": started, "out": []}
    storages: dict[int, torch.Tensor] = {}
    moved = dict(call.arguments)
    for name, value in call.arguments.items():
        if not isinstance(value, torch.Tensor):
            continue
        source = _bytes(value)
        target = storages.setdefault(source.data_ptr(), torch.empty(source.numel(), dtype=torch.uint8, device=device))
        for span in [slice(None)] if name not in read else [_span(value[slot]) for slot in read[name]]:
            target[span].copy_(source[span])
        fresh = torch.empty(0, dtype=value.dtype, device=device)
        fresh.set_(target.untyped_storage(), value.storage_offset(), value.shape, value.stride())
        moved[name] = fresh
    return dataclasses.replace(call, arguments=moved)


def back_home(placed: Call, call: Call) -> Call:
    """A copy of the host's call with what the launch has written: live slots and ``out``."""
    home = call.clone()
    for name in ("conv_state", "state", "out"):
        target, source = _bytes(home.arguments[name]), _bytes(placed.arguments[name])
        spans = [slice(None)] if name == "out" else [_span(call.arguments[name][slot]) for slot in call.slots]
        for span in spans:
            target[span].copy_(source[span])
    return home


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def _span(tensor: torch.Tensor) -> slice:
    """The bytes of its storage from a tensor's first element to its last."""
    extent = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    start = tensor.storage_offset() * tensor.itemsize
    return slice(start, start + extent * tensor.itemsize)


def prepared(case: Case, call: Call) -> Launch:
    """The case's launch for a call that is on its device."""
    arch = gates.architecture(call.problem.device)
    problem = dataclasses.replace(call.problem, prefetch=case.prefetch)
    if case.backend == "cuda":
        from fused_kda.kernels.cuda import shape
        from fused_kda.kernels.cuda.launch import make_launch

        chosen = getattr(shape, str(case.shape)) if shape.has_copy_engine(arch) else shape.REGISTERS
        return make_launch(problem, dataclasses.replace(chosen, hint=case.hint), arch)
    if case.backend == "triton":
        from fused_kda.kernels.triton import prepare
        from fused_kda.kernels.triton.shape import shapes

        known = shapes(problem.spec, arch, case.prefetch)
        return prepare(problem, known[min(int(case.shape or 0), len(known) - 1)][1])
    from fused_kda.kernels import chain

    return chain.prepare(problem)


def run(case: Case, device: torch.device) -> None:
    """Launch the case once and check what it leaves behind."""
    call = draw(case.draw)
    wanted = expected(call, chain=case.backend == "chain")
    placed = on_device(call, case.draw.spare_taps, device)
    launch(case, placed)
    home = back_home(placed, call)
    check_call(home, home.arguments["out"], wanted)


def launch(case: Case, placed: Call) -> None:
    """Launch the case and wait for it."""
    prepared(case, placed)(Tensors(*(placed.arguments[name] for name in Tensors._fields)))
    if placed.problem.device.type == "cuda":
        torch.cuda.synchronize()


def run_fault(tool: str, device: torch.device) -> None:
    """Launch the kernel with the tool's fault built in. What it computes is of no interest, nor how it ends."""
    from fused_kda.kernels.cuda import compile as compiling

    sound = compiling.macros
    compiling.macros = lambda *given: {**sound(*given), "FUSED_KDA_FAULT": FAULTS[tool][1]}
    try:
        launch(FAULTY, on_device(draw(FAULTY.draw), 0, device))
    except RuntimeError as error:
        print(f"the faulty kernel ended with: {error}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=BACKENDS, default="cuda")
    parser.add_argument("--part", default="1/1", help="which share of the backend's cases, such as 2/5")
    parser.add_argument("--fault", choices=FAULTS, help="launch this tool's faulty kernel instead")
    options = parser.parse_args(arguments)
    device = torch.device("cuda", torch.cuda.current_device())
    if options.fault:
        run_fault(options.fault, device)
        print("1 launch")
        return 0
    number, count = map(int, options.part.split("/"))
    mine = cases(options.backend)[number - 1 :: count]
    wrong = 0
    for case in mine:
        try:
            run(case, device)
        except Mismatch as mismatch:
            print(f"{case}: {mismatch}")
            wrong += 1
    print(f"{len(mine)} launches")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
