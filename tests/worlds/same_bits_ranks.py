"""Rank functions of `test_same_bits`: sampled and replayed log-probabilities as float64, which JSON would round."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from harness.worlds import World

from megatron_lrl.checks.positions import sample_and_score
from megatron_lrl.layers import layout
from megatron_lrl.layers.moe import same_bits as experts
from megatron_lrl.layers.softmax import invariant
from megatron_lrl.layers.softmax.kv import KVLayer
from megatron_lrl.lifetimes.open import open_run
from megatron_lrl.lifetimes.window import UpdateWindow
from megatron_lrl.passes.schedule import in_lockstep
from megatron_lrl.rl.accumulate import accumulate, branches_of, score_group
from megatron_lrl.rollout.builtin import Sampler
from megatron_lrl.rollout.types import Group, Prompt
from worlds.ranks import Case, config_of, opened, scope


def sampled_and_replayed(world: World, cases: Sequence[Case]) -> list[list[dict[str, Any]]]:
    """Each case's prompts sampled and scored on the same weights: by prompt, ids and both log-probabilities, flat, and
    a hash of the captured prefix on this rank. ``case["fault"]``: what is broken meanwhile."""
    found = []
    with scope(world) as runtime:
        for case in cases:
            config = config_of(world, case)
            with (
                open_run(config, runtime) as run,
                broken(case.get("fault")),  # after the probe, which finds it too
                UpdateWindow(run) as window,
                in_lockstep(run),
            ):
                groups = [_one(run, window, i, ids, case) for i, ids in enumerate(case["prompt_ids"])]
                if case.get("together"):
                    _sample_together(run, window, case, groups)
                found.append(groups)
    return found


def _sample_together(run: Any, window: Any, case: Case, groups: list[dict[str, Any]]) -> None:
    """The case's prompts again, decoded as one flat list: the log-probabilities in the place of those of `_one`."""
    prefixes = [
        window.prompt_group(f"p{i}", tuple(ids), "response_only") for i, ids in enumerate(case["prompt_ids"])
    ]
    rollout = run.config.rollout
    rollouts = Sampler(run, case.get("stop", ())).sample_together(
        prefixes, rollout.group_size, rollout.max_new_tokens, 0
    )
    for group, sampled in zip(groups, rollouts, strict=True):
        assert group["ids"] == [list(response.ids) for response in sampled.responses]
        group["sampled"] = _logprobs(sampled.responses)


def _logprobs(responses: Sequence[Any]) -> torch.Tensor:
    return torch.tensor([x for response in responses for x in response.logprobs or ()], dtype=torch.float64)


def with_graphs(world: World, cases: Sequence[Case]) -> list[tuple[int, int]]:
    """Of each case's window: tokens whose log-probability under autograd is the recorded number, and all of them."""
    found = []
    with scope(world) as runtime:
        for case in cases:
            with opened(world, case, runtime) as (_, window, plan):
                sums = accumulate(window, plan)
                found.append((int(sums["mismatch_bitwise_count"]), plan.totals.tokens))
    return found


def where_they_part(world: World, cases: Sequence[Case]) -> list[str | None]:
    """What `check` names of each case's first prompt."""
    found = []
    with scope(world) as runtime:
        for case in cases:
            with open_run(config_of(world, case), runtime) as run, broken(case.get("fault")):
                found.append(sample_and_score(run, [Prompt("p", tuple(case["prompt_ids"][0]))])[2])
    return found


def _one(run: Any, window: Any, number: int, prompt_ids: Sequence[int], case: Case) -> dict[str, Any]:
    rollout = run.config.rollout
    with window.prompt_group(f"p{number}", tuple(prompt_ids), "response_only") as prefix:
        sampled = Sampler(run, case.get("stop", ())).sample(
            prefix, rollout.group_size, rollout.max_new_tokens, 0
        )
        group = Group(f"p{number}", tuple(prompt_ids), sampled.responses)
        scored = score_group(prefix, branches_of(group))
        state = _state_hash(prefix.state)
    return {
        "ids": [list(response.ids) for response in sampled.responses],
        "sampled": _logprobs(sampled.responses),
        "replayed": torch.cat([scored[branch.key].double() for branch in branches_of(group)]),
        "prefix": state,
    }


def _state_hash(state: Any) -> str:
    """Of the keys and values of every layer, joined in their order."""
    digest = hashlib.blake2b()
    for _, layer in state.layers():
        if isinstance(layer, KVLayer):
            for name in ("k_bhtd", "v_bhtd"):
                parts = [getattr(part.page, name)[:, :, : part.stop] for part in layer.slices()]
                if parts:
                    digest.update(torch.cat(parts, 2).contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


@contextmanager
def broken(fault: str | None) -> Iterator[None]:
    """A seeded fault: products of too few rows, tiles that depend on the pass, or experts summed as they come."""
    if fault is None:
        yield
    elif fault == "rows":
        with mock.patch.object(layout, "ROWS", 1):
            yield
    elif fault == "tiles":
        attend = invariant.attend

        def by_pass(q: Any, *rest: Any) -> Any:
            with mock.patch.object(invariant, "TILE", 256 if q.shape[2] > 1 else 64):
                return attend(q, *rest)

        with mock.patch.object(invariant, "attend", by_pass):
            yield
    elif fault == "experts":
        with mock.patch.object(experts, "fill_rows", lambda x: x):
            yield
    else:
        raise ValueError(fault)
