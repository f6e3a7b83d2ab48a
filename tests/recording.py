"""A pytest plugin: ``--record-cases FILE`` writes which public faults (``@pytest.mark.case``) were tested, and how.

``docs/render_reliability.py`` makes its table from that file. A skipped test is recorded as not run, with its reason.
The backend is that of the test's ``subject``, else of its marker or, on a GPU, its ``backend`` parameter; tests of what
no backend decides (transfer, caches, the compiler's view) stand under "none". Fuzz tests say how many problems they
tried with ``record_property("fuzz", [backend, counts])``.
"""

from __future__ import annotations

import os
import shlex
from collections import Counter
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from fused_kda.bench import results

OUTCOMES = ("passed", "failed", "not run")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record-cases", metavar="FILE", help="write the outcome of every public fault's tests as JSON")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "case(*numbers, backend=None): the public faults, by number, that a test is about"
    )
    config.addinivalue_line("markers", "fuzz: whole problems drawn by hypothesis")
    target = config.getoption("--record-cases")
    if target and not hasattr(config, "workerinput"):  # with xdist, the controller sees every report
        config.pluginmanager.register(Recorder(Path(target)), "case-recorder")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[Any]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    numbers = sorted({number for mark in item.iter_markers("case") for number in mark.args})
    if numbers:
        name = item.originalname if isinstance(item, pytest.Function) else item.name
        test = f"{item.path.relative_to(item.config.rootpath).as_posix()}::{name}"
        report.user_properties.append(("case", [numbers, _backend(item), test]))
    return report


def _backend(item: pytest.Item) -> str:
    given = item.callspec.params if hasattr(item, "callspec") else {}
    if "subject" in given:
        backend, device = given["subject"]
        return f"{backend} on {device.type}"
    named = next((mark.kwargs["backend"] for mark in item.iter_markers("case") if mark.kwargs), "none")
    if not item.get_closest_marker("gpu"):
        return f"{named} on cpu"
    return f"{given.get('backend', named)} on cuda"


class Recorder:
    """Collects the reports of one run and writes them at its end, as a results document."""

    def __init__(self, target: Path) -> None:
        self.target = target
        self.outcomes: dict[str, tuple[list[int], str, str, str, str]] = {}
        self.fuzz: dict[str, Counter[str]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        properties = dict(report.user_properties)
        if "fuzz" in properties and report.when == "teardown":
            backend, counts = properties["fuzz"]
            self.fuzz.setdefault(backend, Counter()).update(counts)
        case = properties.get("case")
        if case is None:
            return
        outcome, reason = report.outcome, ""
        if report.skipped:
            outcome = "not run"
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        worst = self.outcomes.get(report.nodeid)
        if worst is None or worst[3] == "passed":  # set-up, call and tear-down report in turn
            self.outcomes[report.nodeid] = (*case, outcome, reason.removeprefix("Skipped: "))

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        cells: dict[tuple[int, str], dict[str, Any]] = {}
        for numbers, backend, test, outcome, reason in self.outcomes.values():
            for number in numbers:
                cell = cells.setdefault((number, backend), {"counts": Counter(), "tests": set(), "reasons": set()})
                cell["counts"][outcome] += 1
                cell["tests"].add(test)
                cell["reasons"] |= {reason} - {""}
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        document = results.document(
            "cases",
            _command(session.config.invocation_params.args),
            device,
            fuzz=[{"backend": backend, **counts} for backend, counts in sorted(self.fuzz.items())],
            cases=[
                {
                    "case": number,
                    "backend": backend,
                    **{outcome: cell["counts"][outcome] for outcome in OUTCOMES},
                    "tests": sorted(cell["tests"]),
                    "reasons": sorted(cell["reasons"]),
                }
                for (number, backend), cell in sorted(cells.items())
            ],
        )
        results.write(document, self.target)


def _command(arguments: Sequence[str]) -> str:
    """The run's command line, with a shell's quotes, and only the name of the file that is written."""
    words = [argument.split("/")[-1] if argument.endswith(".json") else argument for argument in map(str, arguments)]
    interpreter = "TRITON_INTERPRET=1 " if os.environ.get("TRITON_INTERPRET") == "1" else ""
    return interpreter + shlex.join(["pytest", *words])
