"""The correctness battery, check by check, on every backend that this machine can run."""

from __future__ import annotations

import pytest

from fused_kda.testing.battery import CHECKS, Check, Subject, run_check


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_battery(subject: Subject, check: Check) -> None:
    outcome = run_check(check, Subject(subject.backend, subject.device, subject.size))
    if outcome.status == "not run":
        pytest.skip(outcome.reason)
    assert outcome.status == "pass", outcome.reason
