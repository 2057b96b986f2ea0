"""RMSNorm for the local spec: torch's own, with the attributes Megatron-Core's parallelism reads."""

from __future__ import annotations

from typing import Any

import torch


class RMSNorm(torch.nn.RMSNorm):
    """torch.nn.RMSNorm whose weight's gradient is summed over tp under sequence parallelism.

    Statistics are computed in float32 (float64 for float64 input).
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
