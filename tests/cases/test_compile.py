"""The op under ``torch.compile``: in-place updates are declared, and no pool is cloned. Public fault 24."""

from __future__ import annotations

import pytest
import torch

from fused_kda import fused_kda_decode
from fused_kda.testing.battery import Subject, default_size
from fused_kda.testing.compare import check_equal
from fused_kda.testing.problems import Call

pytestmark = pytest.mark.case(24)
POOLS = ("conv_state", "state")


def finite(call: Call) -> Call:
    """The call with finite values in slots that no row names: opcheck compares values, and no NaN equals itself."""
    for name in (*POOLS, "out"):
        call.arguments[name].nan_to_num_(nan=0.25)
    return call


def test_opcheck(subject: Subject) -> None:
    """Schema, fake, autograd registration and AOT dispatch, on this backend."""
    call = finite(subject.draw(null_rows=(1,), mask=True, layout="DS"))
    names = [argument.name for argument in torch.ops.fused_kda.decode.default._schema.arguments]
    given = {"norm_eps": 1e-5, "scale": None, "prefetch": False, "backend": subject.backend, **call.arguments}
    checked = torch.library.opcheck(torch.ops.fused_kda.decode.default, tuple(given[name] for name in names))
    assert set(checked.values()) == {"SUCCESS"}
    assert len(checked) == 4


def steps(call: Call, backend: str) -> torch.Tensor:
    """Two chained steps with a read of the state between them, on which the second step depends.

    What is read there and used only after the second step costs a copy of the pool: Inductor moves such a read to its
    use (``reorder_for_locality``), and then has to keep what was read.
    """
    first = fused_kda_decode(**{**call.arguments, "out": None}, backend=backend)
    rows = call.arguments["state_indices"].long()
    between = call.arguments["state"].index_select(0, rows).amax()
    raw_g = torch.where(between > 0, first.reshape(call.arguments["raw_g"].shape), 0.0)
    return fused_kda_decode(**{**call.arguments, "raw_g": raw_g, "out": None}, backend=backend)


def test_two_compiled_steps_equal_two_eager_ones(subject: Subject) -> None:
    torch._dynamo.reset()
    eager, compiled = subject.draw(), subject.draw()
    want = steps(eager, subject.backend)
    got = torch.compile(steps, fullgraph=True, backend="aot_eager")(compiled, subject.backend)
    check_equal("result", got, want)
    for name in POOLS:
        check_equal(name, compiled.arguments[name], eager.arguments[name])


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["cuda", "triton", "chain"])
def test_inductor_clones_no_pool(backend: str) -> None:
    """Two compiled steps take less memory than one pool, and equal two eager ones."""
    torch._dynamo.reset()
    device = torch.device("cuda", torch.cuda.current_device())
    subject = Subject(backend, device, default_size(device, backend))
    eager, compiled = (subject.draw(batch=4, heads=16, slots=64) for _ in range(2))
    want = steps(eager, backend)
    function = torch.compile(steps, fullgraph=True)
    function(finite(subject.draw(batch=4, heads=16, slots=64)), backend)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    got = function(compiled, backend)
    torch.cuda.synchronize()
    state = compiled.arguments["state"]
    assert torch.cuda.max_memory_allocated() - before < state.numel() * state.itemsize / 2
    check_equal("result", got, want)
    for name in POOLS:
        check_equal(name, compiled.arguments[name], eager.arguments[name])
