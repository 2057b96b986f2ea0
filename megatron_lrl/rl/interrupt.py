"""Signals of a run: the first one asks it to stop in order, a later one ends it at once.

torchrun passes a terminal's Ctrl-C on to ranks that the terminal has signalled already: what comes within `_ONE` of
the first signal is the same wish.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_ONE = 1.0  # seconds


class Interrupt:
    """SIGINT and SIGTERM ask the run to stop after the current update, with a checkpoint."""

    def __init__(self, speaks: bool) -> None:
        self._speaks, self._first = speaks, 0.0

    @property
    def asked(self) -> bool:
        return self._first > 0

    def __call__(self, number: int, _frame: Any) -> None:
        name = signal.Signals(number).name
        if not self._first:
            self._first = time.monotonic()
            self._say(f"{name}: stops after the current update, with a checkpoint; once more ends it now")
        elif time.monotonic() - self._first > _ONE:
            self._say(f"{name} again: ends now; the same command resumes from the newest checkpoint")
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    def _say(self, line: str) -> None:
        if self._speaks:  # not print: the signal may have come in the middle of one
            os.write(2, f"\n{line}\n".encode())


@contextmanager
def interruptible(speaks: bool) -> Iterator[Interrupt]:
    """Both signals go to the yielded `Interrupt` within the block; the rank with ``speaks`` says what it does."""
    interrupt = Interrupt(speaks)
    before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield interrupt
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
