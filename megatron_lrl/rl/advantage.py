"""Advantages of a group's responses, from their rewards.

Shapes: G responses of one prompt. Everything is float64 on the CPU: a few numbers a window, and no rounding
of rewards before they are compared.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron_lrl.errors import UserError
from megatron_lrl.rollout.types import Group, Response

GRPO_EPSILON = 1e-6
LARGEST = 1e30  # of an advantage: the loss is float32


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
    largest = float(reward_G.abs().max())
    # A power of two, so that scaling rounds nothing: squares of rewards above 1e154 overflow, sums above 1e308.
    scale = 2.0 ** (math.frexp(largest)[1] - 1) if largest > 1e100 else 1.0
    reward_G = reward_G / scale
    centred_G = reward_G - reward_G.mean()
    if kind == "grpo":
        return centred_G / (reward_G.std(correction=0) + GRPO_EPSILON / scale)
    if kind == "rloo":
        return centred_G * (count / (count - 1)) * scale
    return centred_G * scale


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
    if not bool((advantage_G.abs() < LARGEST).all()):
        raise UserError(
            f'group {group.id!r}: loss.advantage = "{kind}" gives an advantage of '
            f'{float(advantage_G.abs().max()):g}; valid: up to {LARGEST:g}; scale the rewards, or use "grpo"'
        )
    return [
        _per_token(response, advantage)
        for response, advantage in zip(group.responses, advantage_G, strict=True)
    ]


def _per_token(response: Response, advantage: Tensor) -> Tensor:
    """One advantage, or one a token -> [R]."""
    advantage_R = advantage.expand(len(response.ids))
    return advantage_R if response.mask is None else advantage_R * torch.tensor(response.mask)
