"""The fp32 oracle: transformers' own model classes with plain autograd, one response at a time.

    conventional    prompt + response[:-1] in one forward, the full graph
    response_only   prompt[:-1] into a cache under no_grad, then prompt[-1:] + response[:-1] with the graph
    truncated       all but the newest T tokens of prompt[:-1] into a cache under no_grad, the rest with the graph

Each runs anew for every response; nothing is shared, so nothing can leak from one branch to another.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
import transformers
from safetensors import safe_open
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import LinearAttentionLayer
from transformers.utils import logging

from oracle.objective import Objective, advantages, window_term
from oracle.tiny_families import unpack_experts
from oracle.trajectories import Group

logging.disable_progress_bar()

Reference = Sequence[Sequence[Sequence[float]]]


def load(hf_dir: Path | str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The model in evaluation mode, with the plainest of transformers' implementations of attention and experts.

    The class is the one that config.json names, so that a vision-language directory keeps its names. Gated DeltaNet
    runs transformers' torch path, which computes in float32 whatever the dtype.
    """
    named = json.loads((Path(hf_dir) / "config.json").read_text())["architectures"][0]
    kinds = {"attn_implementation": "eager", "experts_implementation": "eager"}
    return getattr(transformers, named).from_pretrained(hf_dir, dtype=dtype, **kinds).eval()


def logprobs_of(logits_RV: torch.Tensor, ids: Sequence[int], temperature: float) -> torch.Tensor:
    """log softmax(logits / temperature) at the given tokens, [R]."""
    table_RV = torch.log_softmax(logits_RV.float() / temperature, dim=-1)
    return table_RV[torch.arange(len(ids)), torch.tensor(ids)]


def full_logprobs(
    model: PreTrainedModel, prompt: Sequence[int], response: Sequence[int], temperature: float
) -> torch.Tensor:
    """Log-probabilities [R] of the response from one forward over the full sequence, with its graph."""
    fed = torch.tensor([[*prompt, *response[:-1]]])
    positions = torch.arange(fed.shape[1])[None]
    logits_RV = model(fed, use_cache=False, position_ids=positions).logits[0, len(prompt) - 1 :]
    return logprobs_of(logits_RV, response, temperature)


def replayed_logprobs(
    model: PreTrainedModel, prompt: Sequence[int], response: Sequence[int], temperature: float, live: int = 0
) -> torch.Tensor:
    """Log-probabilities [R] of the response against a constant cache of the prompt without its last token.

    The cache holds keys and values, and of Gated DeltaNet layers the recurrent state and the convolution's tail.

    Args:
        live: so many of the newest tokens of that prefix stay out of the cache and in the graph.
    """
    cache = DynamicCache(config=model.config)
    constant = max(0, len(prompt) - 1 - live)
    if constant:
        positions = torch.arange(constant)[None]
        with torch.no_grad():
            model(
                torch.tensor([prompt[:constant]]),
                past_key_values=cache,
                use_cache=True,
                position_ids=positions,
            )
        for layer in cache.layers:
            if isinstance(layer, LinearAttentionLayer):
                # transformers overwrites the state in place, although the graph still needs the one it started from
                layer.update_recurrent_state = lambda states, *_, **__: states
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
            reference_R = None if reference is None else reference[number][branch]
            window_term(logprobs_R, groups, response, advantage, objective, reference_R).backward()
    return named_as_stored(
        {
            name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
            for name, p in model.named_parameters()
            if ".visual." not in name
        },
        hf_dir,
    )


def stored_names(hf_dir: Path | str) -> set[str]:
    """Names of all tensors in the directory's files."""
    names: set[str] = set()
    for file in Path(hf_dir).glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            names.update(tensors.keys())
    return names


def named_as_stored(gradients: dict[str, torch.Tensor], hf_dir: Path | str) -> dict[str, torch.Tensor]:
    """Gradients under the names of the directory's files: experts, packed in memory, may be stored one by one."""
    stored = stored_names(hf_dir)
    result = gradients if gradients.keys() <= stored else unpack_experts(gradients)
    if missing := sorted(result.keys() - stored):
        raise AssertionError(f"{hf_dir} holds no tensor {missing[0]}")
    return result


def routing_margin(hf_dir: Path | str, groups: Sequence[Group]) -> float:
    """The smallest distance between a score that was chosen and the best one that was not, over all tokens and layers.

    In units of the score that decides: router logits for softmax, sigmoid + bias for GLM (of experts and of groups of
    experts). Infinite for a model without experts. Rounding must stay well below it: then no implementation can
    choose other experts than transformers does.
    """
    model = load(hf_dir)
    margins: list[float] = []

    def gap(scores_TE: torch.Tensor, count: int) -> None:
        if count < scores_TE.shape[-1]:
            best_TE = scores_TE.sort(dim=-1, descending=True).values
            margins.append(float((best_TE[:, count - 1] - best_TE[:, count]).min()))

    def watch(router: torch.nn.Module, _: object, output: tuple[torch.Tensor, ...]) -> None:
        logits_TE = output[0]
        if not hasattr(router, "e_score_correction_bias"):
            return gap(logits_TE, router.top_k)
        scores_TE = logits_TE.sigmoid() + router.e_score_correction_bias
        of_group_TGe = scores_TE.unflatten(-1, (router.num_group, -1))
        group_TG = of_group_TGe.topk(2, dim=-1).values.sum(-1)
        gap(group_TG, router.topk_group)
        chosen_TG = torch.zeros_like(group_TG).scatter(1, group_TG.topk(router.topk_group).indices, 1.0)
        return gap(of_group_TGe.masked_fill(chosen_TG[..., None] == 0, -torch.inf).flatten(1), router.top_k)

    for module in model.modules():
        if type(module).__name__.lower().endswith("topkrouter"):
            module.register_forward_hook(watch)
    with torch.no_grad():
        for group in groups:
            for response in group["responses"]:
                full_logprobs(model, group["prompt_ids"], response["ids"], 1.0)
    return min(margins, default=float("inf"))


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
