"""Even use of experts, where settings ask for it: an auxiliary loss and a router bias that follows the load.

    replay of the window's responses ─ TakenExperts ─┬─ with_loss   gradient of the auxiliary loss (moe.aux_loss_coef)
                                                     └─ load ─ sum over ranks ─ update_router_bias, with the step

Both change the policy that later updates sample from, so both are off by default. The model version of every identity
moves with the step, and with it whatever was captured under the old bias dies.

Legend: n rows of a router on this rank, r of them response tokens, E experts, k experts of a token, b branches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lrl.lifetimes.run import Run


@dataclass(frozen=True)
class TakenExperts:
    """What one router did with the response tokens among its rows."""

    run: Run
    row_r: Tensor
    branch_r: Tensor
    scores_nE: Tensor
    expert_nk: Tensor

    def load(self) -> Tensor:
        """[E] float64: response tokens of this rank that take each expert."""
        taken = self.expert_nk[self.row_r].flatten()
        one = torch.ones((), dtype=torch.float64, device=taken.device).expand(taken.shape)
        # bincount would wait for the device, to look for the largest index.
        return one.new_zeros(self.scores_nE.shape[-1]).index_add(0, taken, one)

    def with_loss(self, weight_nk: Tensor, lengths: Sequence[int], coefficient: float) -> Tensor:
        """``weight_nk``, whose backward also adds the gradient of the sequence-wise auxiliary loss.

        Per response: E / k * sum over experts of (share of its tokens that take the expert) * (its mean normalised
        score), as in DeepSeek-V3 (arXiv 2412.19437, equations 17 to 20), times ``coefficient``. Shares are constants,
        so the loss is a sum over tokens and no cut of them changes it; under LastKV it has a term for each round of a
        response. ``lengths``: tokens of each response. Collective over the ranks that hold its other tokens.
        """
        scores_rE = self.scores_nE[self.row_r]
        experts, top_k = scores_rE.shape[-1], self.expert_nk.shape[-1]
        taken_rE = torch.zeros_like(scores_rE).scatter(1, self.expert_nk[self.row_r], 1.0)
        count_bE = scores_rE.new_zeros(len(lengths), experts).index_add(0, self.branch_r, taken_rE.detach())
        for group in (*_token_groups(self.run), self.run.runtime.groups.cp):
            if group.size() > 1:
                dist.all_reduce(count_bE, group=group)
        length_b = torch.tensor(lengths, dtype=count_bE.dtype).to(count_bE.device, non_blocking=True)
        factor_bE = count_bE / length_b.square().unsqueeze(-1) * (coefficient * experts / top_k)
        p_rE = scores_rE / scores_rE.sum(-1, keepdim=True)
        return _WithLoss.apply(weight_nk, (p_rE * factor_bE[self.branch_r]).sum())


class _WithLoss(torch.autograd.Function):
    """Identity on its first argument; the second is a loss of its own, whose gradient is 1."""

    @staticmethod
    def forward(ctx: Any, weight_nk: Tensor, loss: Tensor) -> Tensor:
        ctx.kind = loss.dtype, loss.device
        return weight_nk.view_as(weight_nk)

    @staticmethod
    def backward(ctx: Any, dweight_nk: Tensor) -> tuple[Tensor, Tensor]:
        dtype, device = ctx.kind
        return dweight_nk, torch.ones((), dtype=dtype, device=device)


@torch.no_grad()
def update_router_bias(run: Run) -> None:
    """Raise the bias of experts that took less than the mean load of the window's response tokens, lower the others.

    By moe.router_bias_update_rate, as in arXiv 2408.15664. Collective over the ranks of a stage; at rate 0 nothing
    happens. Part of the optimizer step: the model version moves with it.
    """
    rate = run.config.moe.router_bias_update_rate
    if not rate:
        return
    for layer in run.core(run.model).decoder.layers:
        if not layer.is_moe_layer:
            continue
        bias_E = layer.mlp.router.expert_bias
        load_E = run.routing.load_E.get(layer.layer_number - 1)
        load_E = torch.zeros_like(bias_E, dtype=torch.float64) if load_E is None else load_E.clone()
        for group in (*_token_groups(run), run.runtime.groups.dp_cp):
            if group.size() > 1:
                dist.all_reduce(load_E, group=group)
        bias_E += (rate * (load_E.mean() - load_E).sign()).to(bias_E.dtype)


def _token_groups(run: Run) -> Iterator[Any]:
    """Groups other than cp whose ranks route different tokens of a replica: tp, under sequence parallelism."""
    if run.core(run.model).config.sequence_parallel:
        yield run.runtime.groups.tp
