"""The window's objective, one response at a time: advantages, weights, clipped surrogate, k3 KL."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from oracle.trajectories import Group


@dataclass(frozen=True)
class Objective:
    """Settings of the loss, with the program's defaults."""

    advantage: str = "grpo"  # grpo | dr_grpo | rloo, used where a response records no advantage
    clip_low: float = 0.2
    clip_high: float = 0.2
    aggregate: str = "token"  # token | sequence
    temperature: float = 1.0
    kl_coef: float = 0.0


def advantages(group: Group, kind: str) -> list[Any]:
    """One advantage a response (or a recorded list, one a token): the recorded ones if all responses have them, else
    from the rewards."""
    recorded = [response.get("advantage") for response in group["responses"]]
    if all(value is not None for value in recorded):
        return recorded
    rewards = [response["reward"] for response in group["responses"]]
    count, mean = len(rewards), sum(rewards) / len(rewards)
    if kind == "grpo":
        std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / count)
        return [(r - mean) / (std + 1e-6) for r in rewards]
    if kind == "dr_grpo":
        return [r - mean for r in rewards]
    if kind == "rloo":
        return [r - (sum(rewards) - r) / (count - 1) for r in rewards]
    raise ValueError(f"unknown advantage {kind!r}")


def scored(response: Mapping[str, Any]) -> list[int]:
    """Places of the tokens that the policy chose: all, or those where the mask is 1."""
    return [i for i, one in enumerate(response.get("mask") or [1] * len(response["ids"])) if one]


def token_weight(groups: Sequence[Group], length: int, aggregate: str) -> float:
    """The weight of each scored token of a response with `length` of them in the window's sum."""
    lengths = [len(scored(response)) for group in groups for response in group["responses"]]
    if aggregate == "token":
        return 1.0 / sum(lengths)
    if aggregate == "sequence":
        return 1.0 / (length * len(lengths))
    raise ValueError(f"unknown aggregate {aggregate!r}")


def response_loss(
    logprobs_R: torch.Tensor,
    advantage: float | torch.Tensor,
    weight: float,
    objective: Objective,
    old_R: Sequence[float] | None = None,
    reference_R: Sequence[float] | None = None,
) -> torch.Tensor:
    """One response's part of the window loss, a scalar in the dtype of `logprobs_R`.

    `Σ_t weight · (−min(ρ_t A, clip(ρ_t, 1 − low, 1 + high) A) + kl_coef · (e^d − d − 1))`, with
    ρ_t = exp(logprob − old) and d = reference − logprob. Without old log-probabilities the current ones,
    held constant, stand in: ρ = 1.
    """
    old = logprobs_R.detach() if old_R is None else torch.tensor(old_R, dtype=logprobs_R.dtype)
    ratio = torch.exp(logprobs_R - old)
    clipped = ratio.clamp(1.0 - objective.clip_low, 1.0 + objective.clip_high)
    loss = -torch.minimum(ratio * advantage, clipped * advantage)
    if objective.kl_coef:
        if reference_R is None:
            raise ValueError("kl_coef needs reference log-probabilities")
        difference = torch.tensor(reference_R, dtype=logprobs_R.dtype) - logprobs_R
        loss = loss + objective.kl_coef * (torch.exp(difference) - difference - 1.0)
    return weight * loss.sum()


def window_term(
    logprobs_R: torch.Tensor,
    groups: Sequence[Group],
    response: Mapping[str, Any],
    advantage: float | Sequence[float],
    objective: Objective,
    reference_R: Sequence[float] | None = None,
) -> torch.Tensor:
    """`response_loss` of the tokens of a response that the policy chose, with their weight in the window `groups`."""
    kept = scored(response)

    def at(values: Sequence[float] | None) -> list[float] | None:
        return None if values is None else [values[i] for i in kept]

    if not isinstance(advantage, (int, float)):
        advantage = torch.tensor(at(advantage), dtype=logprobs_R.dtype)
    weight = token_weight(groups, len(kept), objective.aggregate)
    return response_loss(
        logprobs_R[kept], advantage, weight, objective, at(response.get("logprobs")), at(reference_R)
    )
