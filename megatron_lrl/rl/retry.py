"""Attempts at a window: on one rank a failed one starts over in place, from the recorded responses.

Everything up to the reduced gradient may fail and be done again: it changes no parameter. The optimizer step may not: a
failure there ends the run. So does any failure of several ranks: the launcher's restart resumes from the newest
checkpoint and the journal, bit-equal on every backend, where communicators that broke in the middle could not go on.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable

import torch

from megatron_lrl.errors import UserError
from megatron_lrl.lifetimes.contributions import ContributionError
from megatron_lrl.lifetimes.identity import IdentityMismatch
from megatron_lrl.lifetimes.run import Run
from megatron_lrl.lifetimes.window import UpdateWindow

_FINAL = (UserError, ContributionError, IdentityMismatch)
"""Errors that another attempt would only repeat."""


class Retry:
    """Repeats failed attempts of a run's windows, in a world of one rank."""

    def __init__(self, run: Run, attempts: int) -> None:
        """``attempts`` per window, the first included."""
        if attempts < 1:
            raise ValueError(f"attempts = {attempts}; a window needs at least one")
        self.run = run
        self.attempts = attempts if run.runtime.world_size == 1 else 1
        self.restarts = 0  # of the last window
        self.on_restart: list[Callable[[], None]] = []  # called before the window starts over

    def until_reduced[T](self, window: UpdateWindow, attempt: Callable[[], T], what: str) -> T:
        """``attempt()``, again after a failure; it must find what it needs recorded when it is called again.

        Raises:
            UserError: another attempt would not help, or none is left. ``what`` begins the message.
        """
        self.restarts = 0
        while True:
            try:
                return attempt()
            except Exception as error:
                if isinstance(error, UserError):
                    raise UserError(f"{what}: {error}") from error
                if self.restarts + 1 >= self.attempts or isinstance(error, _FINAL):
                    raise
                cause = f"{type(error).__name__}: {error}"
                traceback.print_exception(error, file=sys.stderr)
                # The frames of the failed pass hold its graph.
                traceback.clear_frames(error.__traceback__)
            self.restarts += 1
            print(f"{what}: {cause}; the window starts over", flush=True)
            window.drop_prefixes()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            for action in self.on_restart:
                action()
            window.restart()
