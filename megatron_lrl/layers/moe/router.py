"""The router of a mixture-of-experts layer: which experts a token takes, and with which weights.

The arithmetic is that of transformers' routers, which is part of the policy: a softmax router takes its logits in the
activation dtype, a softmax over all experts in float32 and the best k; a sigmoid router takes float32 logits,
chooses by score plus bias within the best groups, and weighs by the score alone. A float64 model routes in float64.

    hidden_nH -> logits_nE -> scores_nE -> chosen expert_nk (order kept) -> weight_nk -> Megatron-Core's dense pair

Legend: n slots of this rank (padding included), H hidden size, E experts, k experts of a token, g groups.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from megatron.core.transformer.moe.router import Router
from torch import Tensor

from megatron_lrl.layers.architecture import MoESpec
from megatron_lrl.precision import accumulate_dtype


class RoutingHook(Protocol):
    """Sees, and may replace, what a router decides during one pass over the model (recorded routing)."""

    def chosen(self, layer_number: int, expert_nk: Tensor) -> Tensor:
        """Experts to take, given the router's own choice. int64, same shape."""

    def weighed(self, layer_number: int, scores_nE: Tensor, expert_nk: Tensor, weight_nk: Tensor) -> Tensor:
        """Weights to use, given those of the experts taken. Same shape and dtype."""


class PolicyRouter(Router):
    """Routes every slot to exactly k experts; none is dropped.

    The weight is [E, H] in the model's dtype, or float32 where the family keeps it wide; ``expert_bias`` is a float32
    buffer [E], or None. Both are replicated over tp.
    """

    def __init__(
        self, config: Any, pg_collection: Any = None, is_mtp_layer: bool = False, *, spec: MoESpec
    ) -> None:
        self.spec = spec
        super().__init__(config, pg_collection, is_mtp_layer)
        self.hook: RoutingHook | None = None  # set by the layer for the length of a pass
        self.sigmoid: Callable[[Tensor], Tensor] = torch.sigmoid
        device = torch.cuda.current_device()
        bias = torch.zeros(spec.num_experts, dtype=torch.float32, device=device) if spec.bias else None
        self.register_buffer("expert_bias", bias)

    def reset_parameters(self) -> None:
        """Dtype and parallel attributes; values come from a checkpoint."""
        dtype = self.config.params_dtype
        if self.spec.wide_router and dtype == torch.bfloat16:
            dtype = torch.float32
        self.weight.data = self.weight.data.to(dtype=dtype, device=torch.cuda.current_device())
        self.weight.sequence_parallel = self.config.sequence_parallel

    def forward(self, input: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """[..., H] -> weights [n, E], 0 where not chosen, and the choice [n, E] as bool."""
        return self.routing(self.gating(input))

    def gating(self, input: Tensor) -> Tensor:
        """[..., H] -> logits [n, E] in the activation dtype, wide where the family keeps the router wide."""
        hidden_nH = input.reshape(-1, input.shape[-1])
        dtype = accumulate_dtype(hidden_nH.dtype) if self.spec.wide_router else hidden_nH.dtype
        return F.linear(hidden_nH.to(dtype), self.weight.to(dtype))

    def routing(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [n, E] -> weights [n, E] and choice [n, E]."""
        scores_nE = self.scores(logits)
        expert_nk = self.choose(scores_nE)
        if self.hook is not None:
            expert_nk = self.hook.chosen(self.layer_number, expert_nk)
        weight_nk = self.weigh(scores_nE, expert_nk)
        if self.spec.score == "softmax":
            weight_nk = weight_nk.to(logits.dtype)
        if self.hook is not None:
            weight_nk = self.hook.weighed(self.layer_number, scores_nE, expert_nk, weight_nk)
        probs_nE = torch.zeros_like(logits, dtype=weight_nk.dtype).scatter(1, expert_nk, weight_nk)
        map_nE = torch.zeros_like(logits, dtype=torch.bool).scatter(1, expert_nk, True)
        return probs_nE, map_nE

    def scores(self, logits_nE: Tensor) -> Tensor:
        """Each expert's score for each token, wide."""
        if self.spec.score == "softmax":
            return logits_nE.softmax(-1, dtype=accumulate_dtype(logits_nE.dtype))
        return self.sigmoid(logits_nE)

    def choose(self, scores_nE: Tensor) -> Tensor:
        """The k experts of each token [n, k] int64, in the order torch.topk gives them; no gradient."""
        spec = self.spec
        with torch.no_grad():
            choice_nE = scores_nE if self.expert_bias is None else scores_nE + self.expert_bias
            if spec.groups > 1:
                choice_ngx = choice_nE.unflatten(-1, (spec.groups, -1))
                best_ng = choice_ngx.topk(2, dim=-1)[0].sum(-1)
                group_nt = best_ng.topk(spec.top_groups, dim=-1)[1]
                closed_ng = torch.ones_like(best_ng, dtype=torch.bool).scatter(1, group_nt, False)
                choice_nE = choice_ngx.masked_fill(closed_ng.unsqueeze(-1), float("-inf")).flatten(1)
            return choice_nE.topk(spec.top_k, dim=-1)[1]

    def weigh(self, scores_nE: Tensor, expert_nk: Tensor) -> Tensor:
        """Weights [n, k] of the experts taken, wide; the bias has no part in them."""
        weight_nk = scores_nE.gather(1, expert_nk)
        if self.spec.normalise:
            total_n1 = weight_nk.sum(-1, keepdim=True)
            weight_nk = weight_nk / (total_n1 if self.spec.score == "softmax" else total_n1 + 1e-20)
        return weight_nk if self.spec.scale == 1.0 else weight_nk * self.spec.scale
