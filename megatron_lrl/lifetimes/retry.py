"""Attempts at a window: after a failure it starts over from the recorded responses, on all ranks or on none.

Everything up to the reduced gradient may fail and be done again: it changes no parameter. The optimizer step may not:
a failure there ends the run, and the launcher's restart resumes from the last checkpoint.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import torch

from megatron_lrl.errors import RankFailure, UserError
from megatron_lrl.lifetimes.contributions import ContributionError
from megatron_lrl.lifetimes.identity import IdentityMismatch
from megatron_lrl.lifetimes.retry_connections import Connections, Report
from megatron_lrl.lifetimes.retry_reopen import reopen
from megatron_lrl.lifetimes.window import UpdateWindow
from megatron_lrl.runtime import lost_connection

if TYPE_CHECKING:
    from megatron_lrl.lifetimes.run import Run

T = TypeVar("T")

_FINAL = (UserError, ContributionError, IdentityMismatch)
"""Errors that another attempt would only repeat."""


class Retry:
    """Repeats failed attempts of a run's windows."""

    def __init__(
        self,
        run: Run,
        attempts: int,
        connections: Connections | None = None,
        abandon: Callable[[], bool] = lambda: False,
    ) -> None:
        """``attempts`` per window, the first included. ``abandon()`` true: wait no longer for absent ranks.

        ``connections``: without them a world of several ranks cannot start over; a failure then ends the process.
        """
        if attempts < 1:
            raise ValueError(f"attempts = {attempts}; a window needs at least one")
        self.run, self.attempts = run, attempts
        self.restarts = 0  # of the last window
        self._connections, self._abandon = connections, abandon
        self.on_restart: list[Callable[[], None]] = []  # called on every rank before the window starts over

    def until_reduced(self, window: UpdateWindow, attempt: Callable[[], T], what: str) -> T:
        """``attempt()``, again after a failure of any rank; every rank calls this alike.

        ``attempt`` must end in a collective over the world, so that no rank leaves before all have succeeded
        (`UpdateWindow.gradient_finite` is one), and must find what it needs recorded when it is called again.

        Raises:
            UserError: on all ranks, with the first failing rank's message, if attempts are used up or cannot help.
                ``what`` begins the message.
        """
        self.restarts = 0
        while True:
            try:
                if self.restarts:
                    self._reopen(window)
                return attempt()
            except Exception as error:
                if self._connections is None and self.run.runtime.world_size > 1:
                    raise
                message, final = _describe(error), _is_final(error)
                trace = "" if isinstance(error, UserError) else "".join(traceback.format_exception(error))
                # The frames of the failed pass hold its graph.
                traceback.clear_frames(error.__traceback__)
            self._agree(window, message, final, trace, what)
            self.restarts += 1

    def _agree(self, window: UpdateWindow, message: str, final: bool, trace: str, what: str) -> None:
        """Meet the other ranks and decide with them; returns if the window starts over."""
        window.drop_prefixes()
        runtime = self.run.runtime
        reports = [Report(runtime.rank, 1, message, final)]
        if self._connections is not None:
            reports = self._connections.meet(message, final, self._abandon)
        cause = next((report for report in reports if report.fatal), reports[0])
        if cause.rank == runtime.rank and trace:
            print(trace, file=sys.stderr, flush=True)
        where = f"rank {cause.rank} failed: " if runtime.world_size > 1 and not cause.fatal else ""
        if cause.fatal:
            raise UserError(f"{what}: {cause.message}")
        if self.restarts + 1 >= self.attempts:
            raise UserError(f"{what}: {where}{cause.message} (attempt {self.attempts} of {self.attempts})")
        if runtime.is_main:
            print(f"{what}: {where}{cause.message}; the window starts over", flush=True)

    def _reopen(self, window: UpdateWindow) -> None:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        if self._connections is not None:
            self._connections.reconnect()
            reopen(self.run)
        for action in self.on_restart:
            action()
        window.restart()


def _is_final(error: Exception) -> bool:
    return isinstance(error, _FINAL) and not isinstance(error, RankFailure)


def _describe(error: Exception) -> str:
    text = str(error)
    if isinstance(error, UserError):
        return text
    return lost_connection(error) or f"{type(error).__name__}: {text}"
