"""SiLU and the sigmoid with the same bits wherever an element stands.

On CPUs aten computes the last elements of a tensor, those that fill no vector, by another exponential than the rest in
float32. `exp` alone does not depend on the place; the rest of these functions is exactly rounded.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def silu(x: Tensor) -> Tensor:
    """x * sigmoid(x)."""
    return _Silu.apply(x) if _depends_on_place(x) else F.silu(x)


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x))."""
    return _Sigmoid.apply(x) if _depends_on_place(x) else x.sigmoid()


def _depends_on_place(x: Tensor) -> bool:
    """Not bfloat16: its rounding hides the difference (none was found in 10^6 elements)."""
    return x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64)


class _Silu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x / x.neg().exp_().add_(1)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return torch.ops.aten.silu_backward(dy, x)


class _Sigmoid(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.neg().exp_().add_(1).reciprocal_()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return torch.ops.aten.sigmoid_backward(dy, y)


__all__ = ["sigmoid", "silu"]
