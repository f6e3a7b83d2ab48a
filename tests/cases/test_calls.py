"""What callers pass: indices, strided pools, slices of one projection, head counts, gates at their ends."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch

from fused_kda import FallbackWarning, api, fused_kda_decode, gates, stats
from fused_kda.testing.battery import Subject
from fused_kda.testing.compare import check_call, check_equal, expected
from fused_kda.testing.problems import Call, Draw, draw

BF16, FP32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize("a_log", [3.0, -5.0])
@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_decay_at_its_ends_is_finite(subject: Subject, lower_bound: float | None, a_log: float) -> None:
    """z to 120, beyond 88 where exp overflows: with A_log = 3 all is forgotten there, with -5 only half of it is."""
    call = subject.draw(lower_bound=lower_bound)
    raw_g = call.arguments["raw_g"]
    raw_g.copy_(torch.linspace(-120.0, 120.0, raw_g.numel()).view_as(raw_g))
    call.arguments["dt_bias"].zero_()
    call.arguments["A_log"].fill_(a_log)
    other = call.clone()
    subject.agree(call)
    assert call.arguments["out"].isfinite().all()
    assert call.arguments["state"][list(call.slots)].isfinite().all()
    other.arguments["lower_bound"] = -5.0 if lower_bound is None else None
    other.run(subject.backend)
    slots = list(call.slots)
    assert not torch.equal(other.arguments["state"][slots], call.arguments["state"][slots])


@pytest.mark.parametrize("bound", [0.0, 5.0, float("nan"), float("-inf")])
def test_bad_bounds_raise(subject: Subject, bound: float) -> None:
    call = subject.draw()
    before = call.clone()
    with pytest.raises(ValueError, match=r"^lower_bound: expected a (negative|finite) number, got "):
        call.run(subject.backend, lower_bound=bound)
    assert call.touched_elsewhere(before) == []


@pytest.mark.parametrize("form", ["column of a table", "[B,1]", "int64", "reversed pairs"])
def test_indices_are_read_where_they_are(subject: Subject, form: str) -> None:
    plain = subject.draw()
    odd = plain.clone()
    indices = plain.arguments["state_indices"]
    batch = indices.shape[0]
    if form == "column of a table":
        table = torch.full((batch, 16), 10**6, dtype=torch.int32, device=subject.device)
        table[:, 5] = indices
        odd.arguments["state_indices"] = table[:, 5]
    elif form == "[B,1]":
        odd.arguments["state_indices"] = indices.view(batch, 1)
    elif form == "int64":
        odd.arguments["state_indices"] = indices.long()
    else:
        pairs = torch.full((batch, 2), -7, dtype=torch.int64, device=subject.device)
        pairs[:, 1] = indices
        odd.arguments["state_indices"] = pairs[:, 1:]
    check_equal("out", odd.run(subject.backend), plain.run(subject.backend))
    for name in ("conv_state", "state"):
        slots = list(plain.slots)
        check_equal(name, odd.arguments[name][slots], plain.arguments[name][slots])


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (lambda indices: indices[:-1], ValueError, "expected shape"),
        (lambda indices: torch.cat((indices, indices[:1])), ValueError, "expected shape"),
        (lambda indices: indices.float(), TypeError, "expected dtype int32 or int64, got float32"),
        (lambda indices: indices.to("meta"), TypeError, "expected device"),
    ],
    ids=["short", "long", "float", "elsewhere"],
)
def test_other_indices_are_named(subject: Subject, change: Any, error: type[Exception], text: str) -> None:
    call = subject.draw()
    before = call.clone()
    with pytest.raises(error, match=f"^state_indices: {text}"):
        call.run(subject.backend, state_indices=change(call.arguments["state_indices"]))
    assert call.touched_elsewhere(before) == []


@pytest.mark.gpu
def test_indices_on_the_host_are_refused_by_a_device_call() -> None:
    call = draw(Draw(), "cuda")
    with pytest.raises(TypeError, match=r"^state_indices: expected device cuda:0 .x's., got cpu$"):
        call.run("auto", state_indices=call.arguments["state_indices"].cpu())


STRIDED = {
    "every second page": {"guard": 0, "every": 2},
    "tail padding": {"guard": 64},
    "pitch of 4 bytes": {"guard": 1},
    "pitch of 2 bytes": {"guard": 1, "state_dtype": BF16},
    "pages": {"page_shared": True},
    "every second shared page": {"page_shared": True, "every": 2, "guard": 1},
}


@pytest.mark.parametrize("layout", ["SD", "DS"])
@pytest.mark.parametrize("kind", STRIDED)
def test_the_callers_own_storage_changes(subject: Subject, kind: str, layout: str) -> None:
    """Strided pools are updated where they lie, or the call is refused: never a copy."""
    wanted = dict(STRIDED[kind])
    every = wanted.pop("every", 1)
    call = draw(Draw(batch=3, head_dim=subject.size.head_dim, layout=layout, slots=8, **wanted), subject.device)
    if every > 1:
        for name in ("conv_state", "state"):
            call.arguments[name] = call.arguments[name].nan_to_num_(nan=0.25)[::every]
        call.arguments["state_indices"].copy_(torch.tensor([3, 1, 2]))
        call = Call(call.arguments, (0, 1, 2), (3, 1, 2))
    verdict = next(v for v in gates.explain(call.problem) if v.backend == subject.backend)
    if verdict.open:
        subject.agree(call)
    else:
        before = call.clone()
        with pytest.raises(NotImplementedError, match=r"slots are aligned to"):
            call.run(subject.backend)
        assert call.touched_elsewhere(before) == []


def test_strides_of_an_earlier_call_are_not_reused(subject: Subject) -> None:
    """Layouts A, B, A in one process."""
    variants = ({"layout": "SD"}, {"layout": "DS"}, {"layout": "DS", "spare_taps": 2}, {"page_shared": True})
    for wanted in (*variants, *reversed(variants)):
        subject.agree(subject.draw(**wanted))
    forms = ("planes", "checkpoint", "planes", "checkpoint_3d", "planes")
    for form in forms:
        subject.agree(subject.draw(weight_form=form))


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("first", [0, 1, 3], ids=lambda first: f"from element {first}")
def test_slices_of_one_projection_are_read_in_place(subject: Subject, batch: int, first: int) -> None:
    """One buffer ``[B, 4P + D + H + pad]``: x, the output gate, f_a, then beta, at whatever elements they fall on."""
    plain = subject.draw(batch=batch)
    given = plain.arguments
    inner = given["x"].shape[1] // 3
    heads, dim = plain.problem.spec.heads, plain.problem.spec.head_dim
    wide = torch.full((batch, first + 4 * inner + dim + heads + 5), float("nan"), dtype=BF16, device=subject.device)
    gate, beta = first + 3 * inner, first + 4 * inner + dim
    wide[:, first:gate] = given["x"]
    wide[:, gate : gate + inner] = given["output_gate"].reshape(batch, inner)
    wide[:, beta : beta + heads] = given["raw_beta"]
    sliced = plain.clone()
    sliced.arguments.update(
        x=wide[:, first:gate],
        output_gate=wide[:, gate : gate + inner].view(batch, heads, dim),
        raw_beta=wide[:, beta : beta + heads],
    )
    assert sliced.problem.x_row == (wide.stride(0) if batch > 1 else 0)
    before = wide.clone()
    check_equal("out", sliced.run(subject.backend), plain.run(subject.backend))
    for name in ("conv_state", "state"):
        slots = list(plain.slots)
        check_equal(name, sliced.arguments[name][slots], plain.arguments[name][slots])
    check_equal("the projection", wide, before)


HEADS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96)


@pytest.mark.parametrize("heads", HEADS)
def test_gate_and_kernel_agree_for_every_head_count(subject: Subject, heads: int) -> None:
    """What the gate says is what the call does, with every form of A_log, bf16 conv weights and a bias."""
    if subject.device.type == "cpu" and subject.backend != "reference" and heads > 3:
        pytest.skip("an interpreter takes a second per head")
    wanted = {"heads": heads, "batch": 1, "weight_dtype": BF16, "bias_dtype": FP32}
    plain = draw(Draw(head_dim=subject.size.head_dim, **wanted), subject.device)
    verdict = next(v for v in gates.explain(plain.problem) if v.backend == subject.backend)
    if not verdict.open:
        with pytest.raises(NotImplementedError) as refused:
            plain.run(subject.backend)
        assert all(reason in str(refused.value) for reason in verdict.reasons)
        return
    shapes = [(heads,), (1, 1, heads, 1), (1, heads)]
    outs = []
    for shape in shapes:
        call = plain.clone()
        call.arguments["A_log"] = call.arguments["A_log"].view(shape)
        outs.append(call.run(subject.backend))
    subject.agree(plain)
    for out in outs:
        check_equal("out", out, plain.arguments["out"])


def test_a_wide_head_count_costs_no_fallback(subject: Subject) -> None:
    """The gate's answer does not depend on H: no shape is off for being unlisted."""
    answers = {
        heads: gates.supported(draw(Draw(heads=heads, head_dim=128, batch=1), subject.device).problem)
        for heads in (1, 5, 7, 96)
    }
    assert len(set(answers.values())) == 1, answers


@pytest.mark.parametrize("wanted", [{}, {"spare_taps": 1}, {"page_shared": True}, {"state_dtype": BF16}])
def test_ds_is_sd_to_the_bit_in_as_many_launches(subject: Subject, wanted: dict[str, Any]) -> None:
    sd = subject.draw(layout="SD", **{name: value for name, value in wanted.items() if name != "spare_taps"})
    ds = subject.draw(layout="DS", **wanted)
    check_equal("out", ds.run(subject.backend), sd.run(subject.backend))
    for name in ("conv_state", "state"):
        slots = list(sd.slots)
        check_equal(name, ds.arguments[name][slots], sd.arguments[name][slots])
    arch = gates.architecture(subject.device)
    launches = {
        layout: {row.launches for row in gates.rows(subject.backend, arch) if layout in row.layouts}
        for layout in ("SD", "DS")
    }
    assert launches["SD"] == launches["DS"]


@pytest.mark.parametrize("gate", [0.0, 30.0, -30.0])
@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_every_route_is_the_same_function(subject: Subject, lower_bound: float | None, gate: float) -> None:
    """Each backend, asked for by name, meets one float64 truth: a fallback changes no token's meaning."""
    call = subject.draw(lower_bound=lower_bound)
    call.arguments["output_gate"].fill_(gate)
    truth = expected(call)
    others = [backend for backend in gates.supported(call.problem) if backend != subject.backend]
    for backend in (subject.backend, *others):
        again = call.clone()
        wanted = expected(call, chain=True) if backend == "chain" else truth
        check_call(again, again.run(backend), wanted)


def test_each_closed_gate_in_turn_still_ends_in_the_truth(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fastest gates closed one after the other: ``auto`` says so, and the answer stays within tolerance."""
    call = subject.draw()
    arch = gates.architecture(subject.device)
    table = gates.TABLE
    for closed in range(len(gates.BACKENDS)):
        shut = gates.BACKENDS[:closed]
        rows = (replace(row, condition=lambda: "shut by a test") if row.backend in shut else row for row in table)
        monkeypatch.setattr(gates, "TABLE", tuple(rows))
        api.reset()
        again = call.clone()
        selection = gates.select(again.problem)
        assert selection.backend not in shut
        wanted = expected(again, chain=selection.backend == "chain")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            out = fused_kda_decode(**again.arguments)
        check_call(again, out, wanted)
        passed_over = [name for name in shut if any(row.auto for row in gates.rows(name, arch))]
        fallbacks = [warning for warning in caught if warning.category is FallbackWarning]
        assert len(fallbacks) == bool(passed_over)
        assert [backend for backend, _ in stats()] == [selection.backend]


def steps(call: Call, backend: str) -> torch.Tensor:
    """Two chained steps with a read of the state between them."""
    first = fused_kda_decode(**{**call.arguments, "out": None}, backend=backend)
    rows = call.arguments["state_indices"].long()
    between = call.arguments["state"].index_select(0, rows).amax()
    arguments = {**call.arguments, "raw_g": first.reshape(call.arguments["raw_g"].shape), "out": None}
    return fused_kda_decode(**arguments, backend=backend).float() + between


def test_two_compiled_steps_equal_two_eager_ones(subject: Subject) -> None:
    torch._dynamo.reset()
    eager, compiled = subject.draw(), subject.draw()
    want = steps(eager, subject.backend)
    got = torch.compile(steps, fullgraph=True, backend="aot_eager")(compiled, subject.backend)
    check_equal("result", got, want)
    for name in ("conv_state", "state"):
        check_equal(name, compiled.arguments[name], eager.arguments[name])
