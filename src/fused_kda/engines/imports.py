"""Changing an engine's module when the engine imports it, and not before.

A plug-in is called early, often in a process that will fork: importing an engine's model code there could touch the
device. So a change waits for its module.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

from . import mark, surfaces

#: Makes the change and says what was done; may raise, which marks the surface as failed.
Change = Callable[[ModuleType], str]


class _Watcher(importlib.abc.MetaPathFinder):
    """Lets the other finders find a watched module, and has its loader call back once the module has run."""

    def __init__(self) -> None:
        self.changes: dict[str, Callable[[ModuleType], None]] = {}
        self._busy: set[str] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        change = self.changes.get(fullname)
        if change is None or fullname in self._busy:
            return None
        self._busy.add(fullname)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._busy.discard(fullname)
        loader = None if spec is None else spec.loader
        if loader is not None:
            execute = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                change(module)

            loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


_watcher = _Watcher()


def after_import(engine: str, name: str, module: str, change: Change) -> None:
    """Make a change to a module now if it is imported, else right after its import. Never raises.

    Args:
        engine, name: the surface whose state tells what became of it. One that is no longer "waiting" is left alone,
            so that a plug-in may register any number of times.
        module: full name.
        change: called with the module, once.
    """

    def apply(loaded: ModuleType) -> None:
        if surfaces[engine, name].state != "waiting":
            return
        try:
            mark(engine, name, "on", change(loaded))
        except Exception as error:  # whatever another version of the engine makes of it: the engine goes on without us
            mark(engine, name, "failed", f"{type(error).__name__}: {error}")

    if (engine, name) in surfaces:
        return
    mark(engine, name, "waiting", f"for the import of {module}")
    if module in sys.modules:
        apply(sys.modules[module])
        return
    _watcher.changes[module] = apply
    if _watcher not in sys.meta_path:
        sys.meta_path.insert(0, _watcher)
