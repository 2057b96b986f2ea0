"""What a micro-batch's tokens are trained on: a term for each response through a token, with its final weight."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_lrl.lifetimes.contributions import BranchKey
from megatron_lrl.lifetimes.work import Branch, TokenLoss
from megatron_lrl.rl.loss import merge_metrics, policy_loss
from megatron_lrl.settings import LossTable


@dataclass(frozen=True)
class BranchTerms:
    """Everything the loss needs of a response, fixed when the window opens. All float64 [R] on the CPU, or None."""

    weight_R: Tensor
    advantage_R: Tensor
    sampler_R: Tensor | None  # the sampler's log-probabilities


class _Layer(NamedTuple):
    """For each of a micro-batch's N tokens, what one of the responses through it has there; weight 0: none has."""

    weight_N: Tensor
    advantage_N: Tensor
    sampler_N: Tensor | None
    old_N: Tensor | None
    ref_N: Tensor | None
    response_N: Tensor | None  # the log-ratio of the whole response, for "gspo"


def token_loss(
    batch: Sequence[Branch],
    terms: Mapping[BranchKey, BranchTerms],
    settings: LossTable,
    device: torch.device,
    reference: Mapping[BranchKey, Tensor] | None = None,
    current: Mapping[BranchKey, Tensor] | None = None,
) -> TokenLoss:
    """The loss of a micro-batch as a function of its log-probabilities: a term for each response through a token.

    ``reference``: the reference model's log-probabilities; ``current``: the policy's own, by replay. With
    loss.importance_cap they are the old ones, and those of the sampler only weigh the tokens; "gspo" takes the ratio of
    a response from them.
    """
    recomputed = current is not None and settings.importance_cap > 0
    policy = {} if current is None or recomputed else current

    def joined(layer: int, value_R: Callable[[BranchKey], Tensor | None]) -> Tensor | None:
        """[N] of each branch's response number ``layer``; None if one has no such value."""
        parts = []
        for branch in batch:
            part_N = torch.zeros(len(branch.ids), dtype=torch.float64)
            if layer < len(branch.owners):
                key, tokens = branch.owners[layer]
                if (values := value_R(key)) is None:
                    return None
                part_N[:tokens] = values[branch.start : branch.start + tokens]
            parts.append(part_N)
        return torch.cat(parts).to(device, non_blocking=True)

    def layer_of(number: int) -> _Layer:
        weight_N = joined(number, lambda key: terms[key].weight_R)
        advantage_N = joined(number, lambda key: terms[key].advantage_R)
        assert weight_N is not None and advantage_N is not None
        old_N = sampler_N = joined(number, lambda key: terms[key].sampler_R)
        ref_N = response_N = None
        if current is not None and recomputed:
            old_N = joined(number, lambda key: current[key])
        if reference is not None:
            ref_N = joined(number, lambda key: reference[key])
        if settings.objective == "gspo":
            response_N = joined(number, lambda key: _response_log_ratio(terms[key], policy.get(key)))
        return _Layer(weight_N, advantage_N, sampler_N, old_N, ref_N, response_N)

    layers = [layer_of(number) for number in range(max(len(branch.owners) for branch in batch))]

    def loss(logprob_S: Tensor, entropy_S: Tensor, index_S: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        def term(layer: _Layer) -> tuple[Tensor, dict[str, Tensor]]:
            at = _Layer(*(None if x_N is None else x_N[index_S] for x_N in layer))  # type: ignore[arg-type]
            part, metrics = policy_loss(
                logprob_S,
                at.old_N,
                at.advantage_N,
                at.weight_N,
                at.ref_N,
                settings,
                at.sampler_N,
                at.response_N,
            )
            return part, {**metrics, **measured(logprob_S, entropy_S, at.sampler_N, at.weight_N)}

        total, metrics = term(layers[0])
        for layer in layers[1:]:
            part, more = term(layer)
            total, metrics = total + part, merge_metrics(metrics, more)
        return total, metrics

    return loss


def _response_log_ratio(terms: BranchTerms, current_R: Tensor | None) -> Tensor:
    """[R]: at every token the mean log-ratio of the response's scored tokens.

    0 without old log-probabilities, and without ``current_R``: the old ones are the policy's own then.
    """
    if terms.sampler_R is None or current_R is None:
        return torch.zeros_like(terms.weight_R)
    scored_R = terms.weight_R > 0
    mean = torch.where(scored_R, current_R - terms.sampler_R, 0).sum() / scored_R.sum()
    return mean.expand_as(terms.weight_R)


def measured(
    logprob_S: Tensor, entropy_S: Tensor, sampler_S: Tensor | None, weight_S: Tensor
) -> dict[str, Tensor]:
    """Metrics of a pass that are no part of the loss: entropy, and the worst log-probability against the sampler's."""
    own_S, worst = weight_S > 0, entropy_S.new_zeros(())
    if sampler_S is not None and sampler_S.numel():
        difference_S = (logprob_S.detach() - sampler_S.to(logprob_S)).abs()
        worst = torch.where(own_S, difference_S, 0).max()
    return {"entropy_sum": torch.where(own_S, entropy_S, 0).sum(), "logprob_difference_max": worst}
