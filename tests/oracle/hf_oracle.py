"""The fp32 oracle: transformers' own model classes with plain autograd, one response at a time.

    conventional    prompt + response[:-1] in one forward, the full graph
    response_only   prompt[:-1] into a cache under no_grad, then prompt[-1:] + response[:-1] with the graph
    truncated       all but the newest T tokens of prompt[:-1] into a cache under no_grad, the rest with the graph

Each runs anew for every response; nothing is shared, so nothing can leak from one branch to another.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel
from transformers.utils import logging

from oracle.objective import Objective, advantages, response_loss, token_weight
from oracle.trajectories import Group

logging.disable_progress_bar()

Reference = Sequence[Sequence[Sequence[float]]]


def load(hf_dir: Path | str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The model in evaluation mode with eager attention, the plainest of transformers' implementations."""
    return AutoModelForCausalLM.from_pretrained(hf_dir, dtype=dtype, attn_implementation="eager").eval()


def logprobs_of(logits_RV: torch.Tensor, ids: Sequence[int], temperature: float) -> torch.Tensor:
    """log softmax(logits / temperature) at the given tokens, [R]."""
    table_RV = torch.log_softmax(logits_RV.float() / temperature, dim=-1)
    return table_RV[torch.arange(len(ids)), torch.tensor(ids)]


def full_logprobs(
    model: PreTrainedModel, prompt: Sequence[int], response: Sequence[int], temperature: float
) -> torch.Tensor:
    """Log-probabilities [R] of the response from one forward over the full sequence, with its graph."""
    fed = torch.tensor([[*prompt, *response[:-1]]])
    logits_RV = model(fed, use_cache=False).logits[0, len(prompt) - 1 :]
    return logprobs_of(logits_RV, response, temperature)


def replayed_logprobs(
    model: PreTrainedModel, prompt: Sequence[int], response: Sequence[int], temperature: float, live: int = 0
) -> torch.Tensor:
    """Log-probabilities [R] of the response against a constant cache of the prompt without its last token.

    Args:
        live: so many of the newest tokens of that prefix stay out of the cache and in the graph.
    """
    cache = DynamicCache(config=model.config)
    constant = max(0, len(prompt) - 1 - live)
    if constant:
        with torch.no_grad():
            model(torch.tensor([prompt[:constant]]), past_key_values=cache, use_cache=True)
    fed = torch.tensor([[*prompt[constant:], *response[:-1]]])
    positions = torch.arange(constant, constant + fed.shape[1])[None]
    logits_SV = model(fed, past_key_values=cache, use_cache=True, position_ids=positions).logits[0]
    return logprobs_of(logits_SV[-len(response) :], response, temperature)


def score(hf_dir: Path | str, groups: Sequence[Group], temperature: float = 1.0) -> list[list[list[float]]]:
    """Log-probabilities by group, response and token."""
    model = load(hf_dir)
    with torch.no_grad():
        return [
            [full_logprobs(model, g["prompt_ids"], r["ids"], temperature).tolist() for r in g["responses"]]
            for g in groups
        ]


def window_grad(
    hf_dir: Path | str,
    groups: Sequence[Group],
    objective: Objective,
    logprobs: Callable[[PreTrainedModel, Sequence[int], Sequence[int], float], torch.Tensor],
    reference: Reference | None = None,
) -> dict[str, torch.Tensor]:
    """The fp32 gradient of the window loss by parameter name; a tied lm_head counts under the embedding."""
    model = load(hf_dir)
    for number, group in enumerate(groups):
        for branch, (response, advantage) in enumerate(
            zip(group["responses"], advantages(group, objective.advantage), strict=True)
        ):
            logprobs_R = logprobs(model, group["prompt_ids"], response["ids"], objective.temperature)
            weight = token_weight(groups, len(response["ids"]), objective.aggregate)
            reference_R = None if reference is None else reference[number][branch]
            old_R = response.get("logprobs")
            response_loss(logprobs_R, advantage, weight, objective, old_R, reference_R).backward()
    return {
        name: torch.zeros_like(p) if p.grad is None else copy.deepcopy(p.grad)
        for name, p in model.named_parameters()
    }


def grad_conventional(
    hf_dir: Path | str,
    groups: Sequence[Group],
    objective: Objective | None = None,
    reference: Reference | None = None,
) -> dict[str, torch.Tensor]:
    """The full gradient: prompt and response live. Also what the `exact` contract must equal."""
    return window_grad(hf_dir, groups, objective or Objective(), full_logprobs, reference)


def grad_response_only(
    hf_dir: Path | str,
    groups: Sequence[Group],
    objective: Objective | None = None,
    reference: Reference | None = None,
) -> dict[str, torch.Tensor]:
    """The gradient with the prefix's keys and values constant."""
    return window_grad(hf_dir, groups, objective or Objective(), replayed_logprobs, reference)


def grad_truncated(
    hf_dir: Path | str,
    groups: Sequence[Group],
    live: int,
    objective: Objective | None = None,
    reference: Reference | None = None,
) -> dict[str, torch.Tensor]:
    """The gradient with the keys and values of all but the newest `live` prefix tokens constant."""
    logprobs = partial(replayed_logprobs, live=live)
    return window_grad(hf_dir, groups, objective or Objective(), logprobs, reference)


grad_exact = grad_conventional
