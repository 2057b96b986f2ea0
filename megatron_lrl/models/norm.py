"""RMSNorm for the local spec: torch's own, with the attributes Megatron-Core's parallelism reads."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class RMSNorm(torch.nn.RMSNorm):
    """torch.nn.RMSNorm whose weight's gradient is summed over tp under sequence parallelism.

    Statistics are computed in float32 (float64 for float64 input). Where the configuration has zero-centred norms the
    input is multiplied with 1 + weight, in the same wide dtype, as transformers' Qwen3-Next and Qwen3.5 do. A float32
    residual stream enters a bfloat16 model's layers here: it is rounded once, after the norm.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.zero_centered = config.layernorm_zero_centered_gamma

    def forward(self, x: Tensor) -> Tensor:
        """The shape of ``x``, the weight's dtype (``x`` may be wider)."""
        if not self.zero_centered and x.dtype == self.weight.dtype:
            return super().forward(x)
        wide = torch.promote_types(x.dtype, torch.float32)
        weight = self.weight.to(wide)
        if self.zero_centered:
            weight = 1.0 + weight
        return F.rms_norm(x.to(wide), self.normalized_shape, weight, self.eps).to(self.weight.dtype)
