"""The policy loss: pure functions of log-probabilities, advantages and weights fixed in advance.

    weight_N (whole window) ──┐
    advantage_N ──────────────┤
    logprob_N (autograd) ─────┼─> policy_loss ─> loss, a plain sum;  metrics, plain sums and maxima
    old, sampler, reference ──┘

Shapes: N any arrangement of response tokens ([R], [K, R], a cp rank's share ...). A weight of zero marks a
token that is not there (padding): its other values are never read into a result, not even if they are NaN.

Nothing is divided after the fact. Every token carries its final weight, so the sum over replays,
micro-batches and ranks *is* the loss of the window, and its gradient the window's gradient.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_lrl.errors import UserError
from megatron_lrl.rollout.types import Group, Response
from megatron_lrl.settings import LossTable

# Log-ratios are limited to this, so that exp cannot overflow and turn a clipped token's zero gradient into
# NaN. e^20 is 4.9e8: a ratio that large is broken, and the ratio metrics show it.
LOG_RATIO_LIMIT = 20.0


@dataclass(frozen=True)
class WindowTotals:
    """What the weights of a window are normalised by. Add up those of all dp ranks before computing
    weights."""

    responses: int
    tokens: int

    def __add__(self, other: WindowTotals) -> WindowTotals:
        return WindowTotals(self.responses + other.responses, self.tokens + other.tokens)


def window_totals(groups: Iterable[Group]) -> WindowTotals:
    """Count the responses and the scored response tokens of some groups."""
    scored = [response.scored for group in groups for response in group.responses]
    return WindowTotals(responses=len(scored), tokens=sum(scored))


def token_weights(
    groups: Sequence[Group],
    aggregate: str,
    totals: WindowTotals | None = None,
    *,
    dtype: torch.dtype = torch.float64,
) -> list[list[Tensor]]:
    """The weight of every response token: weights[group][response] is a tensor [R] of that response's length.

    aggregate "token": 1 / scored tokens of the window; "sequence": 1 / (responses of the window * scored tokens of
    the response); 0 where a response's mask is 0. `totals` are the whole window's (default: `groups` are the whole
    window); over the whole window the weights sum to 1.
    """
    totals = totals if totals is not None else window_totals(groups)

    def weight(response: Response) -> Tensor:
        if aggregate == "token":
            each = 1.0 / totals.tokens
        elif aggregate == "sequence":
            each = 1.0 / (totals.responses * response.scored)
        else:
            raise ValueError(f"unknown aggregate {aggregate!r}")
        weight_R = torch.full((len(response.ids),), each, dtype=dtype)
        return weight_R if response.mask is None else weight_R * torch.tensor(response.mask, dtype=dtype)

    return [[weight(response) for response in group.responses] for group in groups]


def k3(log_ratio_N: Tensor) -> Tensor:
    """k3 estimate of KL(p || q) per token sampled from p, of log q - log p: exp(x) - x - 1, never negative.

    Source: J. Schulman, "Approximating KL Divergence" (2020).
    """
    return torch.expm1(log_ratio_N) - log_ratio_N


def policy_loss(
    logprob_N: Tensor,
    old_logprob_N: Tensor | None,
    advantage_N: Tensor,
    weight_N: Tensor,
    ref_logprob_N: Tensor | None,
    settings: LossTable,
    sampler_logprob_N: Tensor | None = None,
    response_log_ratio_N: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The surrogate plus k3 KL, summed with the given weights:

        loss = -sum w * c * surrogate  +  kl_coef * sum w * k
        c = min(exp(old - sampler), importance_cap) if importance_cap > 0, else 1; no gradient through c
        k = exp(ref - logprob) - (ref - logprob) - 1

    The surrogate is that of settings.objective, see `surrogate`. All tensors have logprob_N's shape and are brought to
    its dtype and device; only logprob_N gets a gradient. old_logprob_N None stands for the current policy's own (ratio
    1, gradient kept). response_log_ratio_N: at every token, the mean of logprob - old over its response, for "gspo".

    Returns the loss, a scalar of logprob_N's dtype, and detached scalars. Those whose name ends in `_max`
    combine by maximum, all others by addition (`merge_metrics`); `summarise` turns the merged ones into
    means:

    - tokens; loss_sum, policy_loss_sum, kl_sum (weighted by w; kl_sum without kl_coef); kl_tokens_sum
      (unweighted);
    - clip_low_count, clip_high_count, ratio_sum, ratio_deviation_max (of |ratio - 1|), neg_logprob_sum;
    - of logprob against the distribution that sampled (sampler_logprob_N, else old_logprob_N):
      mismatch_bitwise_count (replay's number is the sampler's), mismatch_ratio_max (of |replay / sampler - 1|),
      mismatch_kl_sum (k3), mismatch_weight_sum and mismatch_weight_sq_sum (of the ratios and their squares);
    - importance_sum, importance_capped_count.

    Raises UserError if importance_cap > 0 and there are no sampler's log-probabilities; ValueError for a
    wrong shape or a missing reference.
    """
    if settings.importance_cap > 0 and sampler_logprob_N is None:
        raise UserError(
            f"loss.importance_cap = {settings.importance_cap:g} needs the sampler's log-probabilities; give "
            'every response its "logprobs", or set loss.importance_cap = 0'
        )
    if settings.kl_coef > 0 and ref_logprob_N is None:
        raise ValueError("kl_coef > 0 needs ref_logprob_N")
    live_N = weight_N.to(logprob_N.device) > 0
    zero = logprob_N.new_zeros(())

    def constant(value_N: Tensor) -> Tensor:
        if value_N.shape != logprob_N.shape:
            raise ValueError(f"shape {tuple(value_N.shape)} where logprob_N has {tuple(logprob_N.shape)}")
        return torch.where(live_N, value_N.detach().to(logprob_N), zero)

    weight_N, advantage_N = constant(weight_N), constant(advantage_N)
    logprob_N = torch.where(live_N, logprob_N, zero)
    fixed_N = logprob_N.detach()
    old_N = fixed_N if old_logprob_N is None else constant(old_logprob_N)
    sampler_N = old_N if sampler_logprob_N is None else constant(sampler_logprob_N)

    log_ratio_N = logprob_N - old_N
    if settings.objective == "gspo":
        if response_log_ratio_N is None:
            raise ValueError("gspo needs response_log_ratio_N")
        log_ratio_N = constant(response_log_ratio_N) + (logprob_N - fixed_N)
    ratio_N = _limited(log_ratio_N).exp()
    surrogate_N, low_N, high_N = surrogate(ratio_N, logprob_N, advantage_N, settings)

    importance_N = _limited(old_N - sampler_N).exp()
    capped_N = live_N & (importance_N > settings.importance_cap)
    if settings.importance_cap > 0:
        importance_N = importance_N.clamp(max=settings.importance_cap)
    else:
        importance_N, capped_N = torch.ones_like(importance_N), torch.zeros_like(capped_N)

    policy = -(weight_N * importance_N * surrogate_N).sum()
    kl_N = (
        torch.zeros_like(fixed_N)
        if ref_logprob_N is None
        else k3(_limited(constant(ref_logprob_N) - logprob_N))
    )
    kl = (weight_N * kl_N).sum()
    loss = policy + settings.kl_coef * kl if settings.kl_coef > 0 else policy

    live_weight_N = live_N.to(fixed_N)
    mismatch_N = _limited(fixed_N - sampler_N)
    drift_N = mismatch_N.exp() * live_weight_N
    deviation_N = (ratio_N.detach() - 1).abs() * live_weight_N
    metrics = {
        "tokens": live_weight_N.sum(),
        "loss_sum": loss,
        "policy_loss_sum": policy,
        "kl_sum": kl,
        "kl_tokens_sum": kl_N.sum(),
        "clip_low_count": (low_N & live_N).sum(),
        "clip_high_count": (high_N & live_N).sum(),
        "ratio_sum": (ratio_N * live_weight_N).sum(),
        "ratio_deviation_max": deviation_N.amax() if deviation_N.numel() else zero,
        "neg_logprob_sum": -fixed_N.sum(),
        "mismatch_bitwise_count": (live_N & (fixed_N == sampler_N)).sum(),
        "mismatch_ratio_max": ((mismatch_N.exp() - 1).abs() * live_weight_N).amax()
        if fixed_N.numel()
        else zero,
        "mismatch_kl_sum": k3(mismatch_N).sum(),
        "mismatch_weight_sum": drift_N.sum(),
        "mismatch_weight_sq_sum": drift_N.square().sum(),
        "importance_sum": (importance_N * live_weight_N).sum(),
        "importance_capped_count": capped_N.sum(),
    }
    return loss, {name: value.detach().to(fixed_N) for name, value in metrics.items()}


def surrogate(
    ratio_N: Tensor, logprob_N: Tensor, advantage_N: Tensor, settings: LossTable
) -> tuple[Tensor, Tensor, Tensor]:
    """What the objective maximises at each token, and where the ratio was clipped, below and above.

    - "clipped" (PPO, arXiv 1707.06347; separate clips: DAPO, arXiv 2503.14476):
      min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A);
    - "gspo" (arXiv 2507.18071, its token form): the same; the ratio has the value exp(mean of logprob - old over the
      response) and the gradient of the token's own log-probability;
    - "cispo" (MiniMax-M1, arXiv 2506.13585): clip(ratio, 1 - clip_low, 1 + clip_high) * A * logprob, the clipped ratio
      held constant, so that no token loses its gradient; clip_low = 1 leaves the upper clip alone.
    """
    low, high = 1 - settings.clip_low, 1 + settings.clip_high
    if settings.objective == "cispo":
        fixed_N = ratio_N.detach()
        return fixed_N.clamp(low, high) * advantage_N * logprob_N, fixed_N < low, fixed_N > high
    low_N = (advantage_N < 0) & (ratio_N < low)
    high_N = (advantage_N > 0) & (ratio_N > high)
    # Where the clipped term is the smaller one it is a constant: no gradient.
    bounded_N = torch.where(low_N, low, torch.where(high_N, high, ratio_N))
    return bounded_N * advantage_N, low_N, high_N


def merge_metrics(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Combine the metrics of two disjoint sets of tokens: names ending in `_max` by maximum, others by
    addition."""
    if first.keys() != second.keys():
        raise ValueError(f"metrics differ in {sorted(first.keys() ^ second.keys())}")
    return {
        name: torch.maximum(first[name], second[name])
        if name.endswith("_max")
        else first[name] + second[name]
        for name in first
    }


def summarise(metrics: Mapping[str, Tensor]) -> dict[str, float]:
    """Means over the window from its merged metrics; 0 where there was no token.

    loss, policy_loss, kl (of the objective); kl_per_token; clip_fraction and its two sides; ratio_mean;
    ratio_deviation_max; entropy_estimate (mean of -log p of the sampled tokens, nats); sampler_kl (k3 of
    replay against sampler, nats per token); bitwise (share of tokens with the sampler's very number);
    sampler_ratio_max (largest |replay / sampler - 1|); effective_sample_size (share in (0, 1], 1 = no mismatch);
    importance_mean; importance_capped (share of tokens).
    """
    value = {name: float(tensor) for name, tensor in metrics.items()}
    tokens = max(value["tokens"], 1.0)
    squares = value["mismatch_weight_sq_sum"]
    return {
        "loss": value["loss_sum"],
        "policy_loss": value["policy_loss_sum"],
        "kl": value["kl_sum"],
        "kl_per_token": value["kl_tokens_sum"] / tokens,
        "clip_fraction": (value["clip_low_count"] + value["clip_high_count"]) / tokens,
        "clip_fraction_low": value["clip_low_count"] / tokens,
        "clip_fraction_high": value["clip_high_count"] / tokens,
        "ratio_mean": value["ratio_sum"] / tokens,
        "ratio_deviation_max": value["ratio_deviation_max"],
        "entropy_estimate": value["neg_logprob_sum"] / tokens,
        "sampler_kl": value["mismatch_kl_sum"] / tokens,
        "bitwise": value["mismatch_bitwise_count"] / tokens,
        "sampler_ratio_max": value["mismatch_ratio_max"],
        "effective_sample_size": value["mismatch_weight_sum"] ** 2 / (tokens * squares) if squares else 0.0,
        "importance_mean": value["importance_sum"] / tokens,
        "importance_capped": value["importance_capped_count"] / tokens,
    }


def _limited(log_ratio_N: Tensor) -> Tensor:
    return log_ratio_N.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
