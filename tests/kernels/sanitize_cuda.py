"""A small set of calls for compute-sanitizer: every launch shape, both layouts, null and fresh rows, unaligned pools.

``make sanitize`` runs it under memcheck, racecheck, synccheck and initcheck. Not a test: pytest does not collect it.
"""

from __future__ import annotations

import dataclasses

import torch

from fused_kda import gates
from fused_kda.contract import Tensors
from fused_kda.kernels.cuda.launch import make_launch
from fused_kda.kernels.cuda.shape import EIGHTHS, HALVES, QUARTERS, REGISTERS, WHOLE
from fused_kda.testing.problems import Draw, draw

DRAWS = (
    Draw(batch=4, heads=2, layout="SD", null_rows=(1,), mask=True),
    Draw(batch=3, heads=2, layout="DS", state_dtype=torch.bfloat16, lower_bound=None, null_rows=(2,)),
    Draw(batch=2, heads=3, layout="DS", spare_taps=2, bias_dtype=torch.bfloat16, sliced=True),
)
UNALIGNED = Draw(batch=2, heads=2, layout="DS", guard=1, state_dtype=torch.bfloat16, norm_dtype=None)


def main() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    arch = gates.architecture(device)
    shapes = (REGISTERS, EIGHTHS, QUARTERS, HALVES, WHOLE) if int(arch[3:-1]) in (9, 10) else (REGISTERS,)
    count = 0
    for wanted in (*DRAWS, UNALIGNED):
        for shape in shapes if wanted is not UNALIGNED else (REGISTERS,):
            for prefetch in (True, False):
                call = draw(wanted, device)
                problem = dataclasses.replace(call.problem, prefetch=prefetch)
                launch = make_launch(problem, dataclasses.replace(shape, hint=not prefetch), arch)
                launch(Tensors(*(call.arguments[name] for name in Tensors._fields)))
                torch.cuda.synchronize()
                count += 1
    print(f"{count} launches")


if __name__ == "__main__":
    main()
