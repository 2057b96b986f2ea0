"""A mixture of experts in the place of a layer's MLP: its part of a layer kind (an MLP has no resident state)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from megatron_lrl.errors import UserError
from megatron_lrl.layers.architecture import Architecture, MoESpec
from megatron_lrl.layers.kind import Operations, StandIn
from megatron_lrl.runtime import Layout


def install(submodules: Any, spec: MoESpec) -> None:
    """Our router in a layer's submodules; a partial around Megatron-Core's MoELayer has the rest."""
    from megatron_lrl.layers.moe.router import PolicyRouter

    submodules.mlp.keywords["submodules"].router = partial(PolicyRouter, spec=spec)


def settings(arch: Architecture, layout: Layout, grouped_gemm: bool) -> dict[str, Any]:
    """What Megatron-Core's layers read of the experts; the routing itself is `PolicyRouter`'s."""
    moe = arch.moe
    if moe is None:
        return {}
    return {
        "num_moe_experts": moe.num_experts,
        "moe_layer_freq": [int(sparse) for sparse in arch.moe_layers],
        "moe_ffn_hidden_size": moe.ffn_hidden_size,
        "moe_router_topk": moe.top_k,
        "moe_router_score_function": moe.score,
        "moe_router_pre_softmax": True,  # the softmax is over all experts
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_shared_expert_intermediate_size": moe.shared_ffn_hidden_size or None,
        "moe_shared_expert_gate": moe.shared_gate,
        "moe_grouped_gemm": grouped_gemm,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.tp,
    }


def widths(moe: MoESpec) -> dict[str, int]:
    """Experts are split over tp as a dense MLP is."""
    shared = {"shared expert width": moe.shared_ffn_hidden_size} if moe.shared_ffn_hidden_size else {}
    return {"expert width": moe.ffn_hidden_size, **shared}


def check_layout(arch: Architecture, layout: Layout) -> None:
    """Raise `UserError` for an ep that does not divide the experts."""
    if arch.moe is None:
        if layout.ep != 1:
            raise UserError(f"parallel.ep = {layout.ep}, but the model is dense and has no experts; valid: 1")
    elif (count := arch.moe.num_experts) % layout.ep:
        valid = ", ".join(str(n) for n in range(1, count + 1) if count % n == 0)
        raise UserError(
            f"parallel.ep = {layout.ep} must divide the model's experts ({count}); valid with this model: {valid}"
        )


def operations(arch: Architecture) -> Operations:
    """The top k experts, the shared one, and the router."""
    assert arch.moe is not None
    moe = arch.moe
    width = moe.top_k * moe.ffn_hidden_size + moe.shared_ffn_hidden_size
    weights = 2.0 * arch.hidden_size * (3 * width + moe.num_experts + moe.shared_gate)
    return Operations(weights, rest=weights)


def stand_ins() -> Sequence[StandIn]:
    """A balanced dispatch: where tokens find their experts depends on values."""
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    return [StandIn(MoEAlltoAllTokenDispatcher, "preprocess", even_dispatch)]


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
