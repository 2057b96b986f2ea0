"""Seconds by phase."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


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
