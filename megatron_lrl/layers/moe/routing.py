"""The rule by which tokens find their experts, and what a rank saw of its routing.

Legend: n rows of a router on this rank, E experts, k experts of a token.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lrl.errors import UserError
from megatron_lrl.layers.architecture import Architecture
from megatron_lrl.settings import Config


def expert_layers(arch: Architecture) -> tuple[int, ...]:
    """0-based numbers of the layers with experts."""
    return tuple(number for number, sparse in enumerate(arch.moe_layers) if sparse)


def routing_policy(arch: Architecture, config: Config) -> str:
    """The rule by which tokens find their experts, for identities."""
    moe = arch.moe
    if moe is None:
        return "dense"
    groups = f" of the best {moe.top_groups} of {moe.groups} groups" if moe.groups > 1 else ""
    recorded = ", recorded" if config.replay.use_recorded_routing else ""
    return (
        f"{moe.score}{'+bias' if moe.bias else ''} top {moe.top_k} of {moe.num_experts}{groups}"
        f"{', normalised' if moe.normalise else ''}, scale {moe.scale:g}{recorded}"
    )


def check_routing(config: Config, arch: Architecture) -> None:
    """Raise `UserError` for settings of experts that the model does not have."""
    if arch.moe is None:
        for key, value in (
            ("rollout.record_routing", config.rollout.record_routing),
            ("replay.use_recorded_routing", config.replay.use_recorded_routing),
            ("moe.aux_loss_coef", config.moe.aux_loss_coef),
        ):
            if value:
                raise UserError(f"{key} = {str(value).lower()}, but the model is dense and has no experts")
    rate = config.moe.router_bias_update_rate
    if rate and not (arch.moe is not None and arch.moe.bias):
        raise UserError(
            f"moe.router_bias_update_rate = {rate:g}, but the model's routers have no bias; valid: 0"
        )


class RoutingTotals:
    """What this rank saw of its rows: mismatch against records, and the experts' load. Sums over ranks are exact."""

    def __init__(self) -> None:
        self.load_E: dict[int, Tensor] = {}  # 0-based layer -> tokens of each expert
        self.pairs = 0  # (token, layer) with a record
        # On the device, so that no layer waits for it: pairs with another set of experts, and the largest difference
        # of a weight, where the sets agree.
        self.differing: Tensor | int = 0
        self.largest: Tensor | float = 0.0

    def clear(self) -> None:
        """Forget everything: a window begins, or starts over."""
        self.pairs, self.differing, self.largest = 0, 0, 0.0
        self.load_E.clear()

    def mismatch(self, device: torch.device) -> dict[str, Tensor]:
        """Metric sums over all ranks; collective over the world."""
        sums = torch.tensor([int(self.differing), self.pairs], dtype=torch.float64, device=device)
        largest = torch.tensor(float(self.largest), dtype=torch.float64, device=device)
        dist.all_reduce(sums)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return {
            "routing_differing_sum": sums[0],
            "routing_pairs_sum": sums[1],
            "routing_weight_difference_max": largest,
        }

    def add_load(self, layer_number: int, load_E: Tensor) -> None:
        """Add tokens of each expert of a layer (1-based, as Megatron-Core counts)."""
        before_E = self.load_E.get(layer_number - 1)
        self.load_E[layer_number - 1] = load_E if before_E is None else before_E + load_E

    def compare(self, own_nk: Tensor, recorded_nk: Tensor) -> Tensor:
        """Count rows whose set of experts differs. Returns which rows agree."""
        same_n = (own_nk.sort(-1)[0] == recorded_nk.sort(-1)[0]).all(-1)
        self.pairs += same_n.numel()
        self.differing = self.differing + (~same_n).sum()
        return same_n

    def compare_weights(self, gap_nk: Tensor, same_n: Tensor) -> None:
        """Note the largest difference of a weight among the rows that agree."""
        if same_n.numel():
            gap = torch.where(same_n.unsqueeze(-1), gap_nk.abs(), 0).max()
            self.largest = (
                gap if isinstance(self.largest, float) else torch.maximum(self.largest, gap.to(self.largest))
            )
