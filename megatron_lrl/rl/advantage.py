"""Advantages of a group's responses, from their rewards.

Shapes: G responses of one prompt. Everything is float64 on the CPU: a few numbers a window, and no rounding
of rewards before they are compared.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_lrl.errors import UserError
from megatron_lrl.rollout.types import Group, Response

GRPO_EPSILON = 1e-6


def advantages(reward_G: Tensor, kind: str) -> Tensor:
    """Advantages [G] float64 of rewards [G].

    - "grpo" (DeepSeekMath, arXiv 2402.03300): (r - mean) / (std + 1e-6), population standard deviation;
    - "dr_grpo" (arXiv 2503.20783): r - mean;
    - "rloo" (arXiv 2402.14740): r - mean of the other G - 1 rewards, which is (r - mean) G / (G - 1).

    Equal rewards give exact zeros. Raises UserError for rloo with one response, ValueError for an unknown
    kind.
    """
    reward_G = reward_G.to(torch.float64)
    count = reward_G.numel()
    if kind not in ("grpo", "dr_grpo", "rloo"):
        raise ValueError(f"unknown advantage {kind!r}")
    if kind == "rloo" and count < 2:
        raise UserError('loss.advantage = "rloo" needs at least 2 responses in every group, found 1')
    if bool((reward_G == reward_G[0]).all()):
        # The rounding of the mean must not become an advantage: grpo would divide it by 1e-6.
        return torch.zeros_like(reward_G)
    centred_G = reward_G - reward_G.mean()
    if kind == "grpo":
        return centred_G / (reward_G.std(correction=0) + GRPO_EPSILON)
    if kind == "rloo":
        return centred_G * (count / (count - 1))
    return centred_G


def group_advantages(group: Group, kind: str) -> list[Tensor]:
    """Advantages [R] float64 of each response of a group: the recorded ones if it has them, else computed from its
    rewards and the same for all tokens; 0 where a response's mask is 0.

    Raises UserError naming the group if only some responses have an advantage, or if there is none and a
    reward is missing.
    """
    recorded = [response.advantage for response in group.responses]
    known = [value for value in recorded if value is not None]
    if len(known) == len(recorded):
        return [_per_token(r, torch.tensor(r.advantage, dtype=torch.float64)) for r in group.responses]
    if known:
        raise UserError(
            f"group {group.id!r}: {len(known)} of {len(recorded)} responses have an advantage; give all or "
            "none"
        )
    rewards = [response.reward for response in group.responses if response.reward is not None]
    if len(rewards) < len(recorded):
        raise UserError(
            f"group {group.id!r}: {len(rewards)} of {len(recorded)} responses have a reward; an advantage "
            'needs all of them, or an "advantage" for every response'
        )
    try:
        advantage_G = advantages(torch.tensor(rewards, dtype=torch.float64), kind)
    except UserError as error:
        raise UserError(f"group {group.id!r}: {error}") from None
    return [
        _per_token(response, advantage)
        for response, advantage in zip(group.responses, advantage_G, strict=True)
    ]


def _per_token(response: Response, advantage: Tensor) -> Tensor:
    """One advantage, or one a token -> [R]."""
    advantage_R = advantage.expand(len(response.ids))
    return advantage_R if response.mask is None else advantage_R * torch.tensor(response.mask)
