"""Settings shared by all tests, and the backends that this machine can run, as one fixture."""

from __future__ import annotations

from typing import Any

import hypothesis
import pytest
import torch

from fused_kda import api, gates
from fused_kda.testing.battery import NotRun, Subject, default_size
from fused_kda.testing.problems import Call

pytest_plugins = ("recording",)

# The same examples in every run, here and in CI: a failure can always be repeated.
hypothesis.settings.register_profile("repeatable", deadline=None, derandomize=True, database=None, print_blob=False)
hypothesis.settings.load_profile("repeatable")


def _runnable() -> list[object]:
    """``(backend, device)`` for every backend that some row of the gates' table opens on a device of this machine."""
    devices = [torch.device("cpu")]
    if torch.cuda.is_available():
        devices.append(torch.device("cuda", torch.cuda.current_device()))
    found: list[object] = []
    for device in devices:
        for backend in gates.BACKENDS:
            rows = gates.rows(backend, gates.architecture(device))
            if any(not row.machine_reasons() for row in rows):
                marks = [pytest.mark.gpu] if device.type == "cuda" else []
                found.append(pytest.param((backend, device), id=f"{backend}-{device.type}", marks=marks))
    return found


class SkippingSubject(Subject):
    """A subject whose closed gates skip the test, with the reason."""

    def draw(self, **wanted: Any) -> Call:
        try:
            return super().draw(**wanted)
        except NotRun as missing:
            pytest.skip(str(missing))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    parallel = config.pluginmanager.hasplugin("xdist")
    for item in items:
        if parallel and item.get_closest_marker("large"):
            item.add_marker(pytest.mark.xdist_group("large"))
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        if item.path.stem.endswith("_static") and isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            arch = item.callspec.params.get("arch")
            if arch is not None:
                item.add_marker(pytest.mark.static)
                if parallel:  # one process compiles an architecture's listed kernels, and all tests of them read that
                    item.add_marker(pytest.mark.xdist_group(f"{item.path.stem} {arch}"))


@pytest.fixture(params=_runnable())
def subject(request: pytest.FixtureRequest) -> Subject:
    """One backend on one device, at the size that suits it."""
    backend, device = request.param
    return SkippingSubject(backend, device, default_size(device, backend))


@pytest.fixture(autouse=True)
def fresh_api(monkeypatch: pytest.MonkeyPatch) -> None:
    """No plans, statistics, warnings or environment switches left over from another test."""
    for switch in gates.SWITCHES:
        monkeypatch.delenv(switch.variable, raising=False)
    api.reset()
