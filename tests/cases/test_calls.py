"""What callers pass: index tensors, strided pools, slices of one projection. Public faults 13, 14 and 15."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fused_kda import gates
from fused_kda.testing.battery import Subject
from fused_kda.testing.compare import check_equal
from fused_kda.testing.problems import Call, Draw, draw

BF16, FP32 = torch.bfloat16, torch.float32


@pytest.mark.case(13)
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


@pytest.mark.case(13)
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


@pytest.mark.case(13)
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


@pytest.mark.case(14)
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


@pytest.mark.case(14)
def test_strides_of_an_earlier_call_are_not_reused(subject: Subject) -> None:
    """Layouts A, B, A in one process."""
    variants = ({"layout": "SD"}, {"layout": "DS"}, {"layout": "DS", "spare_taps": 2}, {"page_shared": True})
    for wanted in (*variants, *reversed(variants)):
        subject.agree(subject.draw(**wanted))
    forms = ("planes", "checkpoint", "planes", "checkpoint_3d", "planes")
    for form in forms:
        subject.agree(subject.draw(weight_form=form))


@pytest.mark.case(15)
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
