"""What stands in a rehearsal for the delta rule's scan.

q k v g beta ─ shapes_of_blocks ─► outputs without the scan, where no graph is kept
             ─ PlannedDeltaRule ─► the same; its backward makes one segment's graph, and the others would be like it
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_lrl.layers.gdn.delta_rule import _SEGMENT, _blocks


def shapes_of_blocks(*inputs: Tensor) -> tuple[Tensor, Tensor]:
    """In the place of `delta_rule._blocks`: outputs in the state's dtype, and a state."""
    if torch.is_grad_enabled():
        return _blocks(*inputs)
    v_bthv, state_bhkv = inputs[2], inputs[5]
    return torch.empty_like(v_bthv, dtype=state_bhkv.dtype), torch.empty_like(state_bhkv)


class PlannedDeltaRule(torch.autograd.Function):
    """In the place of `delta_rule._DeltaRule`: it saves the same, and its backward peaks at the same bytes."""

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(*inputs)
        return torch.empty_like(inputs[2]), torch.empty_like(inputs[5])

    @staticmethod
    def backward(ctx: Any, *_gradients: Tensor) -> tuple[Tensor, ...]:
        *tokens, state = ctx.saved_tensors
        several = tokens[0].shape[1] > _SEGMENT
        first = torch.empty_like(state) if several else state  # later segments start from states of their own
        segment = [x[:, :_SEGMENT] for x in tokens]
        with torch.enable_grad():
            _blocks(*(x.detach().requires_grad_() for x in (*segment, first)))
        return tuple(torch.empty_like(x) for x in (*tokens, state))


__all__ = ["PlannedDeltaRule", "shapes_of_blocks"]
