"""The regression gate: a run's cells beside those of an earlier results file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .decode import MEASURES

#: What names a cell's provider, in both files.
KEY = ("heads", "batch", "layout", "state_dtype", "prefetch", "provider")


@dataclass(frozen=True, slots=True)
class Ratio:
    """One cell and provider in both runs.

    Attributes:
        key: values of :data:`KEY`.
        old, new: median microseconds per layer; None where it was not timed.
        gated: whether a threshold applies: the limit and the copy tell how the machine fared, not the code.
    """

    key: tuple[Any, ...]
    old: float
    new: float | None
    gated: bool

    @property
    def ratio(self) -> float | None:
        """New over old: above 1 is slower."""
        return None if self.new is None else self.new / self.old

    def worse(self, threshold: float) -> bool:
        """Whether a step is slower than allowed, or is not timed any more."""
        return self.gated and (self.ratio is None or self.ratio > threshold)


def ratios(old: Sequence[Mapping[str, Any]], new: Sequence[Mapping[str, Any]]) -> list[Ratio]:
    """Every record that the old run timed and the new run has, in the new run's order."""
    before = {_key(record): record for record in old if "us" in record}
    found = []
    for record in new:
        key = _key(record)
        if key in before:
            now = record["us"]["median"] if "us" in record else None
            found.append(Ratio(key, before[key]["us"]["median"], now, record["provider"] not in MEASURES))
    return found


def _key(record: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(record[name] for name in KEY)
