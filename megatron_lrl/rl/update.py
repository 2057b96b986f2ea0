"""One update, whatever it trains on: attempts at the reduced gradient, then the step or none.

UpdateWindow ─ accumulate (again after a failure) ─ reduce ─ measure ─ finite? ─ step
                                                                         └ no: stop, or skip the step
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from megatron_lrl.errors import UserError
from megatron_lrl.lifetimes.replay import NonFiniteLoss
from megatron_lrl.lifetimes.window import UpdateWindow
from megatron_lrl.rl.retry import Retry
from megatron_lrl.rl.stopwatch import Stopwatch


class Update[T](NamedTuple):
    """What an update came to; equal on every rank."""

    accumulated: T
    measured: dict[str, float]  # of the reduced gradient
    fault: str | None  # what is not finite, if the step was skipped
    metrics: dict[str, float]  # what every update shows


def run_update[T](
    retry: Retry,
    number: int,
    watch: Stopwatch,
    accumulate: Callable[[UpdateWindow], T],
    measure: Callable[[T], dict[str, float]] = lambda _: {},
    culprits: Callable[[UpdateWindow, T], str] = lambda *_: "",
) -> Update[T]:
    """The update ``number`` (0-based) at the current model version. Collective over the world.

    Args:
        accumulate: adds the window's whole gradient; repeated after a failure, it finds what it recorded before.
        measure: of the reduced gradient, before the step.
        culprits: names what made the gradient not finite.

    Raises `UserError` on all ranks: attempts are used up (`Retry.until_reduced`); a loss or gradient is not finite and
    train.on_nonfinite is "stop". No parameter has changed then.
    """
    run, what, result = retry.run, f"update {number + 1}", None

    def attempt() -> tuple[T, dict[str, float], str | None]:
        accumulated = accumulate(window)
        with watch.timed("reduce"):
            try:
                window.reduce()
            except NonFiniteLoss as error:  # on all ranks alike
                return accumulated, {}, str(error)
            measured = measure(accumulated)
            finite = window.gradient_finite()
        if finite:
            return accumulated, measured, None
        named = culprits(window, accumulated)
        return accumulated, measured, f"the gradient is not finite{named and ': '}{named}"

    with UpdateWindow(run) as window:
        accumulated, measured, fault = retry.until_reduced(window, attempt, what)
        if fault is None:
            with watch.timed("step"):
                result = window.step()
        elif run.config.train.on_nonfinite == "stop":
            raise UserError(
                f"{what}: {fault}; no parameter was changed "
                '(train.on_nonfinite = "skip" would go on without it)'
            )
        elif run.runtime.is_main:
            print(f"{what} skipped: {fault}; no parameter was changed", flush=True)
    metrics = {
        "update/skipped": float(fault is not None),
        "window/restarts": float(retry.restarts),
        "pipeline/bubble": run.pipeline_use.bubble,
        **run.ledger.metrics(),
    }
    if result is not None:
        metrics |= {"optimizer/grad_norm": result.grad_norm, "optimizer/lr": result.lr}
    return Update(accumulated, measured, fault, metrics)


def speed(tokens: float, seconds: float) -> dict[str, float]:
    """What an update of ``tokens`` took."""
    return {
        "speed/tokens_per_second": tokens / seconds,
        "speed/updates_per_hour": 3600.0 / seconds,
        "seconds/update": seconds,
    }
