"""What the run's contract leaves out of the gradient, measured on request (prefix.measure_omitted_every).

    recorded window ─ accumulate under exact ─ snapshot ─┐
                    └ accumulate under the contract ─────┴─ relative L2, cosine ─ the contract's gradient steps

The exact gradient comes first and is dropped from the buffers, so what steps is what would step without a measurement.
"""

from __future__ import annotations

from torch import Tensor

from megatron_lrl.lifetimes.run import Run
from megatron_lrl.lifetimes.window import UpdateWindow
from megatron_lrl.rl.accumulate import WindowPlan, accumulate
from megatron_lrl.rl.gradients import compare_gradients, snapshot
from megatron_lrl.rl.stopwatch import Stopwatch
from megatron_lrl.settings import Config


def measures_omitted(config: Config, update: int) -> bool:
    """Whether the (0-based) update compares its gradient with the exact one: the first of every n does."""
    every = config.prefix.measure_omitted_every
    return every > 0 and update % every == 0 and config.prefix.contract in ("response_only", "truncated")


def exact_gradient(run: Run, plan: WindowPlan, watch: Stopwatch) -> dict[str, Tensor]:
    """The window's reduced gradient under exact: this rank's part, by parameter. Leaves the buffers clear.

    Call before anything is accumulated. Takes as many bytes as this rank's part of the gradient; the ledger's peaks
    leave the extra window out.
    """
    peaks = dict(run.ledger.peak)
    with watch.timed("omitted"), UpdateWindow(run) as window:
        accumulate(window, plan, contract="exact", reference=run.reference)
        window.reduce()
        gradient = snapshot(run.model)
    run.zero_grad()
    run.ledger.peak = peaks
    return gradient


def omitted_metrics(run: Run, exact: dict[str, Tensor]) -> dict[str, float]:
    """|exact - reduced| / |exact| and the cosine, over all parameters and by kind, for TensorBoard."""
    metrics = {}
    for kind, found in compare_gradients(run.model, exact, run.runtime).items():
        place = kind.replace(" ", "_")
        metrics[f"omitted/relative_l2_{place}"] = found.relative_l2
        metrics[f"omitted/cosine_{place}"] = found.cosine
    return metrics
