"""The previous chunk as a layer sees it: (1 - alpha) own-layer + alpha last-layer keys and values.

Legend: b branches, h KV heads of this tp rank, t tokens, d head dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_lrl.layers.softmax.segment import Adjoint, Block
from megatron_lrl.precision import accumulate_dtype


class _Blend(torch.autograd.Function):
    """x = (1 - alpha) own + alpha last; constants get no gradient, resident ones add it to their adjoint."""

    @staticmethod
    def forward(
        ctx: Any, alpha_h: Tensor, own_bhtd: Tensor, last_bhtd: Tensor, own_sink: Any, last_sink: Any
    ) -> Tensor:
        # Live tensors belong to the graph; resident ones are referenced, and outlive it.
        live = own_bhtd.requires_grad or last_bhtd.requires_grad
        ctx.save_for_backward(alpha_h, *((own_bhtd, last_bhtd) if live else ()))
        ctx.resident = None if live else (own_bhtd, last_bhtd)
        ctx.sinks = (own_sink, last_sink)
        return torch.lerp(own_bhtd, last_bhtd, alpha_h.view(1, -1, 1, 1).to(own_bhtd.dtype))

    @staticmethod
    def backward(ctx: Any, dx_bhtd: Tensor) -> tuple[Any, ...]:
        alpha_h, *saved = ctx.saved_tensors
        own, last = ctx.resident or saved
        wide = accumulate_dtype(dx_bhtd.dtype)
        dx, alpha = dx_bhtd.to(wide), alpha_h.view(1, -1, 1, 1).to(wide)
        dalpha_h = (dx * (last.to(wide) - own.to(wide))).sum((0, 2, 3)).to(alpha_h.dtype)
        dlast = dx * alpha
        down = dx - dlast
        for sink, gradient in zip(ctx.sinks, (down, dlast), strict=True):
            if sink is not None:
                sink.add_(gradient)
        own = down.to(own.dtype) if ctx.needs_input_grad[1] else None
        last = dlast.to(last.dtype) if ctx.needs_input_grad[2] else None
        return dalpha_h, own, last, None, None


def blend(own: Block, last: Block, alpha_h: Tensor) -> Block:
    """The blended block of two blocks with the same tokens. Under autograd it is live: alpha always learns."""

    def sink(adjoint: Adjoint | None, name: str) -> Tensor | None:
        return None if adjoint is None else getattr(adjoint, name)

    k, v = (
        _Blend.apply(
            alpha_h,
            getattr(own, x),
            getattr(last, x),
            sink(own.adjoint, f"d{x}"),
            sink(last.adjoint, f"d{x}"),
        )
        for x in ("k_bhtd", "v_bhtd")
    )
    return Block(k, v, own.shared, own.branch)
