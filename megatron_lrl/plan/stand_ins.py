"""What stands in a rehearsal for steps that depend on values, or take long for shapes alone: where tokens find their
experts, the delta rule's scan, attention's backward.

    router's choice ─ even_dispatch ─► every rank sends and receives its m top_k rows, the same number for each expert
    q k v g beta ─ shapes_of_blocks ─► outputs without the scan, where no graph is kept
                 ─ PlannedDeltaRule ─► the same; its backward makes one segment's graph, and the others would be like it
    do q k v ─ shapes_of_attention_backward ─► dq dk dv, without a loop over tiles
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_lrl.layers.gdn.delta_rule import _SEGMENT, _blocks


def even_dispatch(self: Any, routing_map: Tensor) -> np.ndarray:
    """In the place of `MoEAlltoAllTokenDispatcher.preprocess`: counts of a balanced, dropless dispatch.

    Of the m top_k rows that a rank sends (and receives from each tp rank) every expert gets an equal share, to one row.
    Returns rows of each local expert. Plain arrays: a planned tensor has no values.
    """
    rows, experts = routing_map.shape[0] * self.config.moe_router_topk, self.num_local_experts
    self.num_out_tokens = rows
    received = _even(rows, self.ep_size)
    if self.ep_size > 1 or self.tp_size > 1:
        self.input_splits, self.output_splits = received, received
        self.output_splits_tp = np.full(self.tp_size, rows)
        self._maybe_update_cuda_sync_point("before_ep_alltoall")
    else:
        self._maybe_update_cuda_sync_point("before_finish")
    # By sender (tp, then ep) and local expert.
    counts = np.tile(np.stack([_even(int(n), experts) for n in received]), (self.tp_size, 1))
    if experts > 1:
        self.num_global_tokens_per_local_expert = counts
        order = np.arange(counts.size)
        self.sort_input_by_local_experts = order.reshape(-1, experts).T.ravel()
        self.restore_output_by_local_experts = order.reshape(experts, -1).T.ravel()
        self._maybe_update_cuda_sync_point("before_permutation_2")
    return counts.sum(axis=0)


def _even(total: int, parts: int) -> np.ndarray:
    """``total`` as ``parts`` numbers that differ by one at most."""
    return np.full(parts, total // parts) + (np.arange(parts) < total % parts)


def shapes_of_blocks(*inputs: Tensor) -> tuple[Tensor, Tensor]:
    """In the place of `delta_rule._blocks`: outputs in the state's dtype, and a state."""
    if torch.is_grad_enabled():
        return _blocks(*inputs)
    v_bthv, state_bhkv = inputs[2], inputs[5]
    return torch.empty_like(v_bthv, dtype=state_bhkv.dtype), torch.empty_like(state_bhkv)


def shapes_of_attention_backward(
    _do: Tensor, q_nqsd: Tensor, k_nqtd: Tensor, v_nqtd: Tensor, *_rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """In the place of `kernels.attend_backward`, which goes tile by tile where there is no fused kernel."""
    return torch.empty_like(q_nqsd), torch.empty_like(k_nqtd), torch.empty_like(v_nqtd)


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


__all__ = ["PlannedDeltaRule", "even_dispatch", "shapes_of_attention_backward", "shapes_of_blocks"]
