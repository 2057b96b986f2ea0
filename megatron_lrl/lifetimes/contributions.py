"""Exactly-once accounting of a window's branches."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class BranchKey:
    """A response: its group's id and its index in the group."""

    group: str
    index: int

    def __str__(self) -> str:
        return f"{self.group}[{self.index}]"


class ContributionError(RuntimeError):
    """A branch was counted twice, was not in the window, or is missing at its end."""


class Contributions:
    """The branches a window expects and those it has counted."""

    def __init__(self, expected: Iterable[BranchKey]) -> None:
        """Raises `ContributionError` if a branch is listed twice."""
        self._expected: dict[BranchKey, bool] = {}
        for key in expected:
            if key in self._expected:
                raise ContributionError(f"branch {key} is listed twice in the window")
            self._expected[key] = False

    def check(self, keys: Iterable[BranchKey]) -> None:
        """Raise unless every key is expected, not yet counted and named once. Counts nothing."""
        seen: set[BranchKey] = set()
        for key in keys:
            if key not in self._expected:
                raise ContributionError(f"branch {key} does not belong to this window")
            if self._expected[key] or key in seen:
                raise ContributionError(f"branch {key} was already counted in this window")
            seen.add(key)

    def count(self, keys: Iterable[BranchKey]) -> None:
        """Count branches whose gradient has been added. Raises as `check`."""
        keys = list(keys)
        self.check(keys)
        for key in keys:
            self._expected[key] = True

    @property
    def missing(self) -> list[BranchKey]:
        return [key for key, counted in self._expected.items() if not counted]

    def require_complete(self) -> None:
        """Raise `ContributionError` naming the branches that were never counted."""
        if missing := self.missing:
            shown = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
            raise ContributionError(f"{len(missing)} branches of the window were not replayed: {shown}")

    def restart(self) -> None:
        """Forget what was counted: the accumulation starts over."""
        for key in self._expected:
            self._expected[key] = False
