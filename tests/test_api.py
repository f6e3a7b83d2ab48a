"""The op as people call it: outputs, plans, statistics, debug mode, the device guard."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

import fake_backend
import fused_kda
from fused_kda import api, explain, fused_kda_decode, gates, stats, warmup
from fused_kda.testing.battery import take
from fused_kda.testing.compare import check_equal
from fused_kda.testing.problems import Draw, draw

BF16 = torch.bfloat16
SMALL = Draw(head_dim=8)
FORMS = [(1, 3, 2, 8), (3, 2, 8), (3, 16)]


def test_the_public_names() -> None:
    assert set(fused_kda.__all__) == {
        "Explanation",
        "FallbackWarning",
        "__version__",
        "explain",
        "fused_kda_decode",
        "kernel_counts",
        "stats",
        "warmup",
    }
    assert all(hasattr(fused_kda, name) for name in fused_kda.__all__)


def test_the_first_eleven_arguments_go_by_position() -> None:
    """Their order is the one that engines already call."""
    order = (
        *("x", "weight", "bias", "conv_state", "raw_g", "raw_beta", "A_log", "dt_bias"),
        *("state_indices", "state", "out"),
    )
    named, placed = draw(SMALL), draw(SMALL)
    want = named.run("reference")
    options = {name: value for name, value in placed.arguments.items() if name not in order}
    out = fused_kda_decode(*(placed.arguments[name] for name in order), **options)
    check_equal("out", out, want)
    with pytest.raises(TypeError, match="positional"):
        fused_kda_decode(*placed.arguments.values(), -5.0)


@pytest.mark.parametrize("shape", FORMS)
def test_out_is_allocated_in_the_shape_of_raw_g(shape: tuple[int, ...]) -> None:
    call = draw(SMALL)
    want = call.clone().run("reference")
    call.arguments.update(out=None, raw_g=call.arguments["raw_g"].reshape(shape))
    out = call.run("reference")
    assert (out.shape, out.dtype) == (shape, BF16)
    assert out.is_contiguous()
    check_equal("out", out.reshape(want.shape), want)


@pytest.mark.parametrize("shape", FORMS)
def test_out_is_returned_as_given(shape: tuple[int, ...]) -> None:
    call = draw(SMALL)
    want = call.clone().run("reference")
    buffer = torch.full((3, 40), float("nan"), dtype=BF16)
    given = buffer[:, 5:21].view(shape)
    call.arguments["out"] = given
    out = call.run("reference")
    assert out is given
    check_equal("out", buffer[:, 5:21].reshape(want.shape), want)
    assert buffer[:, :5].isnan().all()
    assert buffer[:, 21:].isnan().all()


@pytest.mark.parametrize("given", [True, False])
def test_an_empty_batch_returns_an_empty_output_and_launches_nothing(
    given: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = fake_backend.install(monkeypatch)
    call = draw(Draw(batch=0, head_dim=8, slots=4, mask=True))
    before = call.clone()
    if not given:
        call.arguments["out"] = None
    out = call.run("auto")
    assert out.shape == ((0, 2, 8) if given else (1, 0, 2, 8))
    assert out.dtype == BF16
    assert (backend.prepared, backend.launches) == ([], 0)
    assert call.touched_elsewhere(before) == []
    assert stats() == {}


def test_a_plan_is_made_once_per_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = fake_backend.install(monkeypatch)
    call = draw(SMALL)
    for _ in range(5):
        call.run("auto")
    other_values = draw(Draw(head_dim=8, seed=1))
    other_values.run("auto")
    assert (len(backend.prepared), backend.launches) == (1, 6)
    assert backend.prepared[0] == call.problem


@pytest.mark.parametrize(
    "change",
    [
        {"lower_bound": -4.0},
        {"lower_bound": None},
        {"norm_eps": 1e-6},
        {"scale": 0.5},
        {"null_slot": -1},
        {"prefetch": True},
        {"bias": torch.zeros(48)},
        {"output_gate": None, "norm_weight": None},
        {"has_initial_state": torch.ones(3, dtype=torch.bool)},
        {"x": torch.zeros(3, 96, dtype=BF16)[:, :48]},
        {"weight": torch.zeros(48, 4)},
        {"weight": torch.zeros(3, 4, 16, dtype=BF16)},
        {"state_indices": torch.tensor([1, 2, 3])},
        {"state_indices": torch.ones(3, 4, dtype=torch.int32)[:, :1]},
        {"state": torch.zeros(6, 2, 8, 8, dtype=BF16)},
        {"state": torch.zeros(12, 2, 8, 8)[::2]},
        {"conv_state": torch.zeros(6, 48, 3, dtype=BF16)},
        {"conv_state": torch.zeros(6, 48, 5, dtype=BF16)[..., :3]},
        {"raw_g": torch.zeros(3, 20, dtype=BF16)[:, :16]},
        {"raw_beta": torch.zeros(3, 5, dtype=BF16)[:, 1:3]},
        {"norm_weight": torch.zeros(8, dtype=BF16)},
        {"out": None},
        {"out": torch.zeros(3, 32, dtype=BF16)[:, :16]},
    ],
    ids=lambda change: "-".join(change),
)
def test_other_metadata_is_another_plan(monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]) -> None:
    """Layouts A, B, A in one process: what was prepared for other strides or scalars is never reused."""
    backend = fake_backend.install(monkeypatch, dtypes=gates.ACTIVATION_DTYPES)
    call = draw(Draw(head_dim=8, guard=0))
    plain = call.problem
    call.run("auto")
    call.run("auto", **change)
    call.run("auto")
    assert (len(backend.prepared), backend.launches) == (2, 3)
    assert backend.prepared[0] == plain
    if change != {"out": None}:
        assert backend.prepared[1] != plain


@pytest.mark.parametrize("name", ["state", "conv_state"])
def test_a_pool_at_another_alignment_is_another_plan(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    backend = fake_backend.install(monkeypatch)
    call = draw(Draw(head_dim=8, guard=0, layout="DS"))
    pool = call.arguments[name]
    moved = torch.zeros(pool.numel() + 1, dtype=pool.dtype)[1:].view(pool.shape)
    call.run("auto")
    call.run("auto", **{name: moved})
    specs = [problem.spec for problem in backend.prepared]
    found = [spec.state_alignment if name == "state" else spec.conv_alignment for spec in specs]
    assert found == [16, pool.itemsize]


def test_a_refused_call_leaves_no_plan_behind() -> None:
    call = draw(SMALL)
    call.run("reference")
    weight = call.arguments["weight"]
    call.arguments["weight"] = weight.clone().requires_grad_()
    with pytest.raises(ValueError, match="requires_grad"):
        call.run("reference")
    with torch.no_grad():
        call.run("reference")
    with pytest.raises(ValueError, match="requires_grad"):
        call.run("reference")
    assert stats() == {("reference", "requested"): 2}


def test_plans_are_bounded_and_statistics_survive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "MAX_PLANS", 4)
    for batch in range(1, 11):
        draw(Draw(head_dim=8, batch=batch)).run("reference")
    assert len(api._plans) <= 4
    assert stats() == {("reference", "requested"): 10}


def test_statistics_are_a_copy() -> None:
    draw(SMALL).run("reference")
    stats().clear()
    assert stats() == {("reference", "requested"): 1}


def test_warmup_prepares_and_touches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = fake_backend.install(monkeypatch)
    call = draw(SMALL)
    before = call.clone()
    warmup(call.arguments)
    assert call.touched_elsewhere(before) == []
    assert call.arguments["out"].isnan().all()
    prepared = len(backend.prepared)
    assert (prepared > 0, backend.launches, stats()) == (True, 0, {})
    call.run("auto")
    assert (len(backend.prepared), backend.launches, stats()) == (prepared, 1, {("fast", "auto"): 1})


def test_warmup_takes_problems_calls_and_several_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = fake_backend.install(monkeypatch)
    one, other = draw(SMALL), draw(Draw(batch=2, heads=3, head_dim=8))
    warmup(one.problem)
    assert backend.prepared == [one.problem]
    warmup([one.problem, other.arguments], backend="fast")
    assert backend.prepared[-1] == other.problem
    assert backend.launches == 0
    with pytest.raises(TypeError, match=r"^work: expected a layer, calls or problems, got int$"):
        warmup(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^work: expected arguments of fused_kda_decode, got slots$"):
        warmup({**one.arguments, "slots": 3})
    with pytest.raises(ValueError, match=r"^x: expected shape"):
        warmup({**one.arguments, "x": one.arguments["x"][:, 1:]})
    monkeypatch.setattr(gates, "BACKENDS", ("cuda", *gates.BACKENDS))
    with pytest.raises(NotImplementedError, match="got cuda"):
        warmup(one.problem, backend="cuda")


def test_explain_touches_nothing_and_says_what_the_call_would_take(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_backend.install(monkeypatch, head_dims=(128,))
    call = draw(SMALL)
    before = call.clone()
    found = explain(**{**call.arguments, "prefetch": True})
    assert call.touched_elsewhere(before) == []
    assert stats() == {}
    assert found.problem.prefetch
    assert found.selection is not None
    assert found.selection.backend == "reference"
    assert str(found) == "backend: reference (auto)\nfast: closed: head dim 8 is not in 128\nreference: open"
    assert explain(**call.arguments, backend="fast").selection is None


def test_the_prefetch_switch_overrides_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = fake_backend.install(monkeypatch)
    for value, asked, expected in (("0", True, False), ("1", False, True), ("call", True, True)):
        api.reset()
        monkeypatch.setenv("FUSED_KDA_PREFETCH", value)
        draw(SMALL).run("auto", prefetch=asked)
        assert backend.prepared[-1].prefetch is expected


def test_reset_forgets_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    draw(SMALL).run("reference")
    monkeypatch.setenv("FUSED_KDA_DEBUG", "1")
    api.reset()
    assert stats() == {}
    assert gates.settings().debug


def test_the_devices_own_context_is_entered_and_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call whose tensors live on another GPU runs inside that device's context and restores the caller's."""
    entered: list[object] = []

    class Guard:
        def __init__(self, index: int) -> None:
            self.index = index

        def __enter__(self) -> None:
            entered.append(self.index)

        def __exit__(self, *error: object) -> None:
            entered.append("left")

    backend = fake_backend.install(monkeypatch)
    monkeypatch.setattr(torch.cuda, "device", Guard)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    call = draw(SMALL)
    warmup(call.arguments)
    (plan,) = api._plans.values()
    for index, expected in ((None, []), (0, []), (1, [1, "left"])):
        entered.clear()
        plan.device_index = index
        call.run("auto")
        assert entered == expected
    assert backend.launches == 3


@pytest.mark.gpu
def test_the_callers_device_is_restored() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    call = draw(Draw(), "cuda:1")
    torch.cuda.set_device(0)
    call.run("auto")
    assert torch.cuda.current_device() == 0


def test_the_log_level_switch_is_applied(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("fused_kda")
    monkeypatch.setattr(logger, "level", logging.NOTSET)
    draw(SMALL).run("reference")
    assert logger.level == logging.NOTSET
    assert not caplog.records
    api.reset()
    monkeypatch.setenv("FUSED_KDA_LOG_LEVEL", "info")
    draw(SMALL).run("reference")
    assert logger.level == logging.INFO
    assert [record.getMessage().split(":")[0] for record in caplog.records] == ["decode runs on reference (requested)"]
    draw(SMALL).run("reference")
    assert len(caplog.records) == 1


DEBUG_CASES = [
    ([1, 2, 1], {}, r"^state_indices: expected each live slot once, got slot: rows \{1: \[0, 2\]\}$"),
    ([3, 3, 3], {}, r"^state_indices: expected each live slot once, got slot: rows \{3: \[0, 1, 2\]\}$"),
    ([1, 6, 2], {}, r"^state_indices: expected -1 <= slot < 6, got \[6\] in rows \[1\]$"),
    ([-2, 1, 99], {}, r"^state_indices: expected -1 <= slot < 6, got \[-2, 99\] in rows \[0, 2\]$"),
    ([1, 2, 3], {"state": (2, float("nan"))}, r"^state: expected finite values in live slots, .* \[\(1, 2\)\]$"),
    ([3, 2, 1], {"conv_state": (3, float("inf"))}, r"^conv_state: expected finite values .* \[\(0, 3\)\]$"),
]


@pytest.mark.parametrize(("indices", "poison", "text"), DEBUG_CASES)
def test_debug_mode_names_the_rows_and_touches_nothing(
    monkeypatch: pytest.MonkeyPatch, indices: list[int], poison: dict[str, tuple[int, float]], text: str
) -> None:
    monkeypatch.setenv("FUSED_KDA_DEBUG", "1")
    call = draw(SMALL)
    for name in ("conv_state", "state"):
        call.arguments[name].nan_to_num_(nan=0.5)
    call.arguments["state_indices"].copy_(torch.tensor(indices))
    for name, (slot, value) in poison.items():
        call.arguments[name][slot][1, 1] = value
    before = call.clone()
    with pytest.raises(ValueError, match=text):
        call.run("reference")
    assert call.touched_elsewhere(before) == []
    assert call.arguments["out"].isnan().all()


def test_debug_mode_lets_sound_calls_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Null rows may repeat, unnamed slots and slots without a usable state may hold anything."""
    monkeypatch.setenv("FUSED_KDA_DEBUG", "1")
    call = draw(Draw(batch=5, head_dim=8, mask=True))
    rows = call.arguments["state_indices"]
    rows[torch.tensor([1, 3])] = torch.tensor([0, -1], dtype=torch.int32)
    call.arguments["has_initial_state"][torch.tensor([0, 2, 4])] = False
    out = call.run("reference")
    assert out.isfinite().all()


def test_without_debug_mode_nothing_is_checked() -> None:
    call = draw(SMALL)
    call.arguments["state_indices"].copy_(torch.tensor([6, -7, 1]))
    assert torch.count_nonzero(call.run("reference")[:2]) == 0


def test_rows_of_one_call_equal_calls_of_one_row() -> None:
    call = draw(SMALL)
    single = call.clone()
    want = call.run("reference")
    for row in range(3):
        check_equal(f"row {row}", take(single, [row]).run("reference")[0], want[row])
