"""Seconds by phase, and those that a process has left."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil


class Stopwatch:
    """Seconds by phase of one update."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._start = time.perf_counter()
        self._inner = 0.0  # seconds of phases inside the present one

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """A phase inside another one is not counted in that."""
        start, outer, self._inner = time.perf_counter(), self._inner, 0.0
        try:
            yield
        finally:
            seconds = time.perf_counter() - start
            self.seconds[name] = self.seconds.get(name, 0.0) + seconds - self._inner
            self._inner = outer + seconds

    @property
    def total(self) -> float:
        return time.perf_counter() - self._start


class WallTime:
    """Whether another update fits into the seconds that a process may take, its start included."""

    def __init__(self, limit: float) -> None:
        """``limit``: 0 = none."""
        self._limit = limit
        self._start = psutil.Process().create_time()
        self._longest = self._saving = 0.0

    @contextmanager
    def update(self) -> Iterator[None]:
        """An update, with what is measured and logged after it."""
        started = time.monotonic()
        yield
        self._longest = max(self._longest, time.monotonic() - started)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """A checkpoint."""
        started = time.monotonic()
        yield
        self._saving = max(self._saving, time.monotonic() - started)

    @property
    def spent(self) -> bool:
        """True when the longest update and checkpoint so far, with a tenth to spare, would pass the limit."""
        needed = 1.1 * (self._longest + max(self._saving, 0.1 * self._longest))
        return bool(self._limit) and time.time() - self._start + needed > self._limit


__all__ = ["Stopwatch", "WallTime"]
