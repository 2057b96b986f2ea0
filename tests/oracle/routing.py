"""Routing in transformers' own models: what their routers decide, and what follows when a record decides instead.

Records are the program's: experts and weights [R, L, k] by response, row i of the token whose output predicts token i.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from oracle import hf_oracle
from oracle.objective import Objective, window_term
from oracle.trajectories import Group

Record = tuple[torch.Tensor, torch.Tensor]
"""expert_RLk and weight_RLk of a response."""


def routers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Routers of the model, by layer."""
    return [m for m in model.modules() if type(m).__name__.lower().endswith("topkrouter")]


def decided(hf_dir: Path | str, groups: Sequence[Group]) -> list[list[Record]]:
    """What the routers decide for each response's tokens, in one forward over each full sequence."""
    model, seen = hf_oracle.load(hf_dir), list[tuple[torch.Tensor, torch.Tensor]]()
    for router in routers(model):
        router.register_forward_hook(lambda _, __, output: seen.append((output[2], output[1])))
    found = []
    for group in groups:
        of_group = []
        for response in group["responses"]:
            seen.clear()
            with torch.no_grad():
                hf_oracle.full_logprobs(model, group["prompt_ids"], response["ids"], 1.0)
            rows = slice(len(group["prompt_ids"]) - 1, None)
            of_group.append(tuple(torch.stack([part[i][rows] for part in seen], 1) for i in (0, 1)))
        found.append(of_group)
    return found


def score_and_grad(
    hf_dir: Path | str, groups: Sequence[Group], records: Sequence[Sequence[Record]]
) -> tuple[list[list[list[float]]], dict[str, torch.Tensor]]:
    """Log-probabilities, and the window's full gradient, with the records in the routers' place.

    Only for softmax routers that normalise. A weight's value is the record's; its slope is that of the router's own
    score of the recorded expert.
    """
    model = hf_oracle.load(hf_dir)
    place: dict[str, Any] = {}

    def replace(layer: int) -> Callable[..., Any]:
        def hook(_: Any, __: Any, output: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            logits_TE, weight_Tk, expert_Tk = output
            first, (expert_RLk, weight_RLk) = place["first"], place["record"]
            expert_Tk = torch.cat([expert_Tk[:first], expert_RLk[:, layer]])
            own_Tk = logits_TE.softmax(-1).gather(1, expert_Tk)
            own_Tk = own_Tk / own_Tk.sum(-1, keepdim=True)
            value_Tk = torch.cat([weight_Tk[:first].detach(), weight_RLk[:, layer].float()])
            return logits_TE, value_Tk + own_Tk - own_Tk.detach(), expert_Tk

        return hook

    for layer, router in enumerate(routers(model)):
        router.register_forward_hook(replace(layer))
    scores = []
    for group, of_group in zip(groups, records, strict=True):
        scores.append([])
        for response, record in zip(group["responses"], of_group, strict=True):
            place |= {"first": len(group["prompt_ids"]) - 1, "record": record}
            logprobs_R = hf_oracle.full_logprobs(model, group["prompt_ids"], response["ids"], 1.0)
            scores[-1].append(logprobs_R.tolist())
            window_term(logprobs_R, groups, response, response["advantage"], Objective()).backward()
    return scores, _gradients(model, hf_dir)


def balance_grad(hf_dir: Path | str, groups: Sequence[Group], coefficient: float) -> dict[str, torch.Tensor]:
    """The gradient of the sequence-wise auxiliary loss: a mean over responses, a sum over layers, alone."""
    model, seen = hf_oracle.load(hf_dir), list[tuple[torch.Tensor, ...]]()
    for router in routers(model):
        router.register_forward_hook(lambda _, __, output: seen.append(output))
    responses = sum(len(group["responses"]) for group in groups)
    for group in groups:
        for response in group["responses"]:
            seen.clear()
            hf_oracle.full_logprobs(model, group["prompt_ids"], response["ids"], 1.0)
            first, loss = len(group["prompt_ids"]) - 1, torch.zeros(())
            for router, (logits_TE, _, expert_Tk) in zip(routers(model), seen, strict=True):
                sigmoid = hasattr(router, "e_score_correction_bias")
                score_RE = (logits_TE.sigmoid() if sigmoid else logits_TE.softmax(-1))[first:]
                mean_E = (score_RE / score_RE.sum(-1, keepdim=True)).mean(0)
                experts, k = mean_E.numel(), expert_Tk.shape[-1]
                count_E = torch.bincount(expert_Tk[first:].flatten(), minlength=experts)
                loss = loss + experts * (count_E / (k * len(score_RE)) * mean_E).sum()
            (loss * coefficient / responses).backward()
    return _gradients(model, hf_dir)


def _gradients(model: torch.nn.Module, hf_dir: Path | str) -> dict[str, torch.Tensor]:
    found = {
        name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for name, p in model.named_parameters()
    }
    return hf_oracle.named_as_stored(found, hf_dir)
