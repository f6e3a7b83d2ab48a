"""Changes that wait for an engine's import: made once, right after it, and never in the way of it."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from fused_kda import engines
from fused_kda.engines import imports


@pytest.fixture(autouse=True)
def engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A package ``toy_engine`` with a module ``layers``, importable but not imported."""
    package = tmp_path / "toy_engine"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "layers.py").write_text("answer = 41\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(engines, "surfaces", {})
    monkeypatch.setattr(imports, "surfaces", engines.surfaces)
    monkeypatch.setattr(imports, "_watcher", imports._Watcher())
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    yield
    for name in ("toy_engine", "toy_engine.layers"):
        sys.modules.pop(name, None)


def change(module: ModuleType) -> str:
    module.answer += 1  # type: ignore[attr-defined]
    return "one more"


def watch(wanted: imports.Change = change, module: str = "toy_engine.layers") -> engines.Surface:
    imports.after_import("toy", "layers", module, wanted)
    return engines.surfaces["toy", "layers"]


def test_it_is_made_right_after_the_import_and_not_before() -> None:
    assert watch().state == "waiting"
    assert "toy_engine" not in sys.modules
    assert importlib.util.find_spec("toy_engine.layers") is not None  # a look is no import
    assert engines.surfaces["toy", "layers"].state == "waiting"
    assert importlib.import_module("toy_engine.layers").answer == 42
    assert (engines.surfaces["toy", "layers"].state, engines.surfaces["toy", "layers"].detail) == ("on", "one more")


def test_registering_again_changes_nothing() -> None:
    for _ in range(3):
        watch()
    assert importlib.import_module("toy_engine.layers").answer == 42
    watch()
    assert sys.modules["toy_engine.layers"].answer == 42
    assert importlib.reload(sys.modules["toy_engine.layers"]).answer == 41  # once means once


def test_a_module_that_is_imported_already_is_changed_now() -> None:
    module = importlib.import_module("toy_engine.layers")
    assert watch().state == "on"
    assert module.answer == 42


def test_a_failure_is_logged_and_the_import_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    def another_version(module: ModuleType) -> str:
        raise AttributeError("no such layer")

    watch(another_version)
    with caplog.at_level(logging.WARNING, "fused_kda"):
        assert importlib.import_module("toy_engine.layers").answer == 41
    surface = engines.surfaces["toy", "layers"]
    assert (surface.state, surface.detail) == ("failed", "AttributeError: no such layer")
    assert "toy: layers is failed: AttributeError: no such layer" in caplog.text


def test_a_module_that_does_not_exist_is_missing_as_before() -> None:
    watch(module="toy_engine.absent")
    with pytest.raises(ModuleNotFoundError, match=r"toy_engine\.absent"):
        importlib.import_module("toy_engine.absent")
    assert engines.surfaces["toy", "layers"].state == "waiting"
