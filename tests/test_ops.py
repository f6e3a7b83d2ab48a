"""The op as the dispatcher and the compiler see it: schema, fake, functionalisation, no copy of a pool."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.exc import InvalidCxxCompiler
from torch._inductor.utils import run_and_get_code

from fused_kda import fused_kda_decode, stats
from fused_kda.testing.compare import check_equal
from fused_kda.testing.problems import Call, Draw, draw

POSITIONAL = (
    *("x", "weight", "bias", "conv_state", "raw_g", "raw_beta", "A_log", "dt_bias", "state_indices", "state", "out"),
    *("lower_bound", "output_gate", "norm_weight"),
)
VARIANTS = {
    "plain": Draw(head_dim=8),
    "everything": Draw(
        head_dim=8, layout="DS", spare_taps=1, bias_dtype=torch.float32, mask=True, sliced=True, null_rows=(1,)
    ),
    "paged": Draw(head_dim=8, page_shared=True, lower_bound=None, norm_dtype=None, weight_form="checkpoint"),
}


def op_arguments(call: Call) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The drawn call as the op's own positional and keyword arguments."""
    rest = {name: value for name, value in call.arguments.items() if name not in POSITIONAL}
    return tuple(call.arguments[name] for name in POSITIONAL), rest


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch._dynamo.reset()


@pytest.mark.case(24)
def test_the_schema_declares_what_is_written_and_nothing_else() -> None:
    schema = torch.ops.fused_kda.decode.default._schema
    written = {argument.name for argument in schema.arguments if argument.is_write}
    assert written == {"conv_state", "state", "out"}
    assert schema.returns == []
    names = [argument.name for argument in schema.arguments]
    assert names[:11] == list(POSITIONAL[:11])
    keywords = {name: parameter.default for name, parameter in _keywords(fused_kda_decode).items()}
    assert {a.name: a.default_value for a in schema.arguments[11:]} == keywords


def _keywords(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    parameters = inspect.signature(function).parameters
    return {name: p for name, p in parameters.items() if p.kind is inspect.Parameter.KEYWORD_ONLY}


@pytest.mark.case(24, backend="reference")
@pytest.mark.parametrize("variant", VARIANTS)
def test_opcheck(variant: str) -> None:
    """Schema, fake, autograd registration and AOT dispatch, static and dynamic."""
    call = draw(VARIANTS[variant])
    for name in ("conv_state", "state", "out"):
        call.arguments[name].nan_to_num_(nan=0.25)  # opcheck compares values, and a NaN is not equal to itself
    positional, rest = op_arguments(call)
    checked = torch.library.opcheck(torch.ops.fused_kda.decode.default, positional, rest)
    assert set(checked.values()) == {"SUCCESS"}
    assert len(checked) == 4


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_op_is_the_function(variant: str) -> None:
    direct, dispatched = draw(VARIANTS[variant]), draw(VARIANTS[variant])
    direct.run("auto")
    positional, rest = op_arguments(dispatched)
    assert torch.ops.fused_kda.decode(*positional, **rest) is None
    for name in ("out", "conv_state", "state"):
        check_equal(name, dispatched.arguments[name], direct.arguments[name])


def test_inputs_that_want_a_gradient_are_refused_through_the_dispatcher() -> None:
    call = draw(VARIANTS["plain"])
    before = call.clone()
    positional, rest = op_arguments(call)
    weight = positional[1].clone().requires_grad_()
    with pytest.raises(ValueError, match="weight: expected a tensor without requires_grad"):
        torch.ops.fused_kda.decode(positional[0], weight, *positional[2:], **rest)
    assert call.touched_elsewhere(before) == []


def two_steps(call: Call) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Two chained steps, out allocated by the op, with a read of both pools between them and a use after."""
    a = {**call.arguments, "out": None}
    first = fused_kda_decode(**a)
    slot = a["state_indices"][:1].long()
    between = a["state"].index_select(0, slot).sum() + a["conv_state"].index_select(0, slot).float().sum()
    second = fused_kda_decode(**{**a, "raw_g": first.reshape(a["raw_g"].shape)})
    return first.float() * 2, between, second.float() + a["state"].index_select(0, slot).mean()


@pytest.mark.case(24, backend="reference")
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_two_compiled_steps_equal_two_eager_ones(variant: str, dynamic: bool) -> None:
    eager, compiled = draw(VARIANTS[variant]), draw(VARIANTS[variant])
    before = compiled.clone()
    addresses = {name: compiled.arguments[name].data_ptr() for name in ("conv_state", "state")}
    want = two_steps(eager)
    function = torch.compile(two_steps, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    got = function(compiled)
    for place, (result, expected) in enumerate(zip(got, want, strict=True)):
        check_equal(f"result {place}", result, expected)
    for name in ("conv_state", "state"):
        assert compiled.arguments[name].data_ptr() == addresses[name]
        check_equal(name, compiled.arguments[name], eager.arguments[name])
    assert compiled.touched_elsewhere(before) == []
    assert stats() == {("reference", "auto"): 4}


def has_cpp_compiler() -> bool:
    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return False
    return True


@pytest.mark.case(24, backend="reference")
@pytest.mark.skipif(not has_cpp_compiler(), reason="Inductor compiles for the CPU with a C++ compiler; there is none")
@pytest.mark.parametrize("variant", ["plain", "paged"])
def test_inductor_clones_no_pool(variant: str) -> None:
    """In the generated code, both steps get the graph's own pool inputs, and there is no buffer of their size."""
    eager, compiled = draw(VARIANTS[variant]), draw(VARIANTS[variant])
    want = two_steps(eager)
    fresh = (
        torch._inductor.config.patch(fx_graph_cache=False),
        torch._functorch.config.patch(enable_autograd_cache=False),
    )
    with fresh[0], fresh[1]:
        got, (code,) = run_and_get_code(torch.compile(two_steps, fullgraph=True), compiled)
    for result, expected in zip(got, want, strict=True):
        torch.testing.assert_close(result, expected)  # the reads between the steps may sum in another order
    for name in ("conv_state", "state"):
        check_equal(name, compiled.arguments[name], eager.arguments[name])

    steps = re.findall(r"torch\.ops\.fused_kda\.decode\.default\((.*)\)$", code, re.MULTILINE)
    assert len(steps) == 2
    pools = {tuple(step.split(", ")[place] for place in (3, 9)) for step in steps}
    assert len(pools) == 1
    for pool in pools.pop():
        assert re.fullmatch(r"arg\d+_1", pool), f"a step is given {pool}, which is no input of the graph"
        assert not re.search(rf"\b(clone|copy_|reinterpret_tensor)\(.*\b{pool}\b", code)
    for name in ("conv_state", "state"):
        assert f"empty_strided_cpu({tuple(compiled.arguments[name].shape)}" not in code, f"a buffer the size of {name}"
