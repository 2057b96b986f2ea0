"""RMSNorm for the local spec: torch's own, with the attributes Megatron-Core's parallelism reads."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class RMSNorm(torch.nn.RMSNorm):
    """torch.nn.RMSNorm whose weight's gradient is summed over tp under sequence parallelism.

    Statistics are computed in float32 (float64 for float64 input). Where the configuration has zero-centred norms the
    input is multiplied with 1 + weight, in the same wide dtype, as transformers' Qwen3-Next and Qwen3.5 do.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.zero_centered = config.layernorm_zero_centered_gamma

    def forward(self, x: Tensor) -> Tensor:
        """Same shape and dtype as ``x``."""
        if not self.zero_centered:
            return super().forward(x)
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        normed = F.rms_norm(x.to(wide), self.normalized_shape, 1.0 + self.weight.to(wide), self.eps)
        return normed.to(x.dtype)
