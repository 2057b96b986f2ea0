"""What verbs without a `train.on_nonfinite` say to NaN and infinity: one message that names response and model.

A model may hold NaN weights, or overflow its dtype; no file with such numbers is written.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from megatron_lrl.errors import UserError
from megatron_lrl.lifetimes.replay import NonFiniteLoss
from megatron_lrl.lifetimes.window import UpdateWindow
from megatron_lrl.settings import Config


def require_finite(config: Config, group: str, logprobs: Sequence[Sequence[float | None]]) -> None:
    """Raise `UserError` naming the first response of ``group`` whose log-probabilities are NaN or infinite."""
    for index, values in enumerate(logprobs):
        for token, value in enumerate(values):
            if value is not None and not math.isfinite(value):
                raise UserError(
                    f"the log-probability of token {token} of response {index} of group {group!r} is {value}; "
                    f"{_cause(config)}"
                )


def reduce_finite(window: UpdateWindow) -> None:
    """`UpdateWindow.reduce`; raises `UserError` on all ranks alike for a loss or gradient that is not finite."""
    config = window.run.config
    try:
        window.reduce()
    except NonFiniteLoss as error:  # on all ranks alike
        raise UserError(f"{error}; {_cause(config)}") from error
    if not window.gradient_finite():
        raise UserError(f"the gradient is not finite, though the loss is; {_cause(config)}")


def _cause(config: Config) -> str:
    return (
        f"the weights of {config.model.hf or config.model.checkpoint} are not finite, or model.dtype = "
        f"{config.model.dtype} overflows (rollout.temperature = {config.rollout.temperature:g})"
    )
