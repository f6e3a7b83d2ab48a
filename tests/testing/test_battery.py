"""The battery passes on the reference, and each of its promises fails on a backend that breaks it."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from fused_kda import gates
from fused_kda.contract import DecodeProblem, Tensors
from fused_kda.kernels import reference
from fused_kda.testing.battery import CHECKS, Check, Size, Subject, run_battery, run_check

BY_NAME = {check.name: check for check in CHECKS}
CPU = torch.device("cpu")
SUBJECT = Subject("reference", CPU, Size(repeats=3, steps=2))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_the_reference_passes(check: Check) -> None:
    outcome = run_check(check, SUBJECT)
    assert outcome.status == ("not run" if check.name == "graph replay" else "pass"), outcome.reason


def test_names_are_unique_and_outcomes_come_in_order() -> None:
    assert len(BY_NAME) == len(CHECKS)
    some = [BY_NAME["DS"], BY_NAME["SD"]]
    assert [outcome.check for outcome in run_battery(SUBJECT, some)] == ["DS", "SD"]


def test_a_closed_gate_is_not_run_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    narrow = replace(gates.rows("reference")[0], head_dims=(64,))
    monkeypatch.setattr(gates, "TABLE", (narrow,))
    outcome = run_check(BY_NAME["SD"], SUBJECT)
    assert (outcome.status, outcome.reason) == ("not run", "head dim 128 is not in 64")


def test_graphs_are_not_captured_on_a_cpu() -> None:
    outcome = run_check(BY_NAME["graph replay"], SUBJECT)
    assert outcome.status == "not run"
    assert "cpu" in outcome.reason


Fault = Callable[[DecodeProblem, Tensors], None]


def _slots(problem: DecodeProblem, tensors: Tensors) -> list[int]:
    return [s for s in tensors.state_indices.flatten().tolist() if problem.null_slot < s < problem.slots]


def _imprecise_output(problem: DecodeProblem, tensors: Tensors) -> None:
    tensors.out.mul_(1.02)


def _imprecise_state(problem: DecodeProblem, tensors: Tensors) -> None:
    tensors.state[_slots(problem, tensors)] *= 1.0 + 1e-4


def _window_order(problem: DecodeProblem, tensors: Tensors) -> None:
    if problem.layout == "DS":
        slots = _slots(problem, tensors)
        tensors.conv_state[slots] = tensors.conv_state[slots].flip(-1)


def _poisoned_output(problem: DecodeProblem, tensors: Tensors) -> None:
    null = [not problem.null_slot < s < problem.slots for s in tensors.state_indices.flatten().tolist()]
    tensors.out.view(problem.batch, -1)[null] = float("nan")


def _null_slot_written(problem: DecodeProblem, tensors: Tensors) -> None:
    if len(_slots(problem, tensors)) < problem.batch:
        tensors.state[0] = 0.0


def _guard_written(problem: DecodeProblem, tensors: Tensors) -> None:
    beyond = tensors.state.storage_offset() + problem.spec.heads * problem.spec.head_dim**2
    tensors.state.as_strided((1,), (1,), beyond).zero_()


def _weight_written(problem: DecodeProblem, tensors: Tensors) -> None:
    tensors.weight.add_(1.0)


def _batch_dependent(problem: DecodeProblem, tensors: Tensors) -> None:
    if problem.batch % 2:
        slots = _slots(problem, tensors)
        tensors.state[slots] = torch.nextafter(tensors.state[slots], torch.tensor(torch.inf))


def _position_dependent(problem: DecodeProblem, tensors: Tensors) -> None:
    tensors.out.view(problem.batch, -1)[0].view(torch.int16).bitwise_xor_(1)


def _layout_dependent(problem: DecodeProblem, tensors: Tensors) -> None:
    if problem.layout == "DS":
        tensors.out.view(torch.int16).bitwise_xor_(1)


def _noise(problem: DecodeProblem, tensors: Tensors) -> None:
    tensors.out.view(torch.int16).bitwise_xor_(torch.randint(0, 2, tensors.out.shape, dtype=torch.int16))


def _infinite(problem: DecodeProblem, tensors: Tensors) -> None:
    if bool((tensors.A_log == 3.0).all()):
        tensors.out.fill_(float("inf"))


@pytest.mark.parametrize(
    ("fault", "caught_by"),
    [
        (_imprecise_output, ("SD", "DS", "softplus gate", "bf16 state", "steps")),
        (_imprecise_state, ("SD", "shared pages", "weight forms")),
        (_window_order, ("DS", "DS, spare taps", "shared pages", "SD = DS")),
        (_poisoned_output, ("null rows",)),
        (_null_slot_written, ("null rows",)),
        (_guard_written, ("SD", "unaligned pools", "shared pages")),
        (_weight_written, ("SD", "bias")),
        (_batch_dependent, ("batch invariance",)),
        (_position_dependent, ("batch invariance",)),
        (_layout_dependent, ("SD = DS",)),
        (_noise, ("repeats",)),
        (_infinite, ("extreme gates",)),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_a_broken_backend_is_caught(fault: Fault, caught_by: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    sound = reference.decode_step

    def broken(problem: DecodeProblem, tensors: Tensors) -> None:
        sound(problem, tensors)
        fault(problem, tensors)

    monkeypatch.setattr(reference, "decode_step", broken)
    for name in caught_by:
        outcome = run_check(BY_NAME[name], SUBJECT)
        assert outcome.status == "fail", f"{name} did not notice"
        assert "Error:" not in outcome.reason, outcome.reason


def test_rows_without_a_start_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = reference.decode_step
    monkeypatch.setattr(
        reference, "decode_step", lambda problem, tensors: sound(problem, tensors._replace(has_initial_state=None))
    )
    assert run_check(BY_NAME["initial state"], SUBJECT).status == "fail"


def test_a_backend_that_raises_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(problem: DecodeProblem, tensors: Tensors) -> None:
        raise RuntimeError("no kernel image")

    monkeypatch.setattr(reference, "decode_step", broken)
    outcome = run_check(BY_NAME["SD"], SUBJECT)
    assert (outcome.status, outcome.reason) == ("fail", "RuntimeError: no kernel image")
