"""What generate, score and grad do, once a run is open.

`train` has a file of its own; `import` and `export` live in `checkpoint`, `check` in `checks`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from tqdm import tqdm

from megatron_lrl.checkpoint.hf_export import write_hf_file
from megatron_lrl.lifetimes.open import open_run, read_model_architecture
from megatron_lrl.lifetimes.prompt import PromptGroup
from megatron_lrl.lifetimes.window import UpdateWindow
from megatron_lrl.outputs import GRADIENT
from megatron_lrl.passes.schedule import in_lockstep
from megatron_lrl.rl.accumulate import (
    WindowPlan,
    accumulate,
    branches_of,
    routing_mismatch,
    score_group,
)
from megatron_lrl.rl.finite import reduce_finite, require_finite
from megatron_lrl.rl.material import load_prompts, recorded_groups, unrewarded_prompts
from megatron_lrl.rl.rewards import Reward, load_reward
from megatron_lrl.rl.source import Sampling
from megatron_lrl.rollout.data import write_jsonl, write_trajectories
from megatron_lrl.rollout.text import Text, hf_folder
from megatron_lrl.rollout.types import Group, Prompt
from megatron_lrl.runtime import Runtime
from megatron_lrl.settings import Config


def generate(config: Config, runtime: Runtime, prompts_path: str, out: str) -> None:
    """Sample a group for every prompt of a file and write trajectories, with rewards if the prompts have answers."""

    def prepare() -> tuple[Text, list[Prompt], Reward | None]:
        arch, text = read_model_architecture(config), Text(hf_folder(config))
        prompts = load_prompts(config, arch, text, prompts_path)
        reward = load_reward(config.data.reward, config.data.reward_args)
        unrewarded = unrewarded_prompts(reward, prompts)
        if len(unrewarded) == len(prompts):  # prompts without answers can be sampled, not rewarded
            return text, prompts, None
        if unrewarded:
            raise next(iter(unrewarded.values()))
        return text, prompts, reward

    text, prompts, reward = runtime.together(prepare)
    if runtime.is_main:
        print(text.describe(prompts), flush=True)
    with open_run(config, runtime) as run:
        source = Sampling(run, prompts, reward, text)
        mine = list(enumerate(prompts))[runtime.dp_rank :: runtime.dp]
        with in_lockstep(run), UpdateWindow(run) as window, _bar(runtime, "generate", len(mine)) as bar:

            def capture(prefix: PromptGroup) -> None:
                prefix.capture()
                bar.update()

            prefixes = [
                window.prompt_group(prompt.id, prompt.prompt_ids, "response_only", quiet=False)
                for _, prompt in mine
            ]
            rollouts = source.sampler.sample_together(
                prefixes, config.rollout.group_size, config.rollout.max_new_tokens, 0, capture
            )
        sampled = [(place, rollout) for (place, _), rollout in zip(mine, rollouts, strict=True)]

        def rewarded() -> list[tuple[int, Group]]:
            if not runtime.is_replica_leader:
                return []
            places = [place for place, _ in sampled]
            groups = source.rewarded([(prompts[place], rollout) for place, rollout in sampled])
            return list(zip(places, groups, strict=True))

        groups = runtime.in_order(runtime.together(rewarded))
    for group in groups:  # the same on every rank
        require_finite(config, group.id, [response.logprobs or () for response in group.responses])
    runtime.together(lambda: write_trajectories(out, groups) if runtime.is_main else None)
    _say_written(runtime, out, groups, sum(len(group.responses) for group in groups))


def score(config: Config, runtime: Runtime, trajectories: str, out: str) -> None:
    """Write the log-probabilities of recorded responses under the model."""
    groups = runtime.together(recorded_groups, config, trajectories)
    mine: list[tuple[int, dict[str, Any]]] = []
    with open_run(config, runtime) as run, in_lockstep(run):
        for place, group in _shared(list(enumerate(groups)), runtime, "score"):
            branches = branches_of(group)
            with (
                UpdateWindow(run) as window,
                window.prompt_group(group.id, group.prompt_ids, quiet=False) as prefix,
            ):
                logprobs = score_group(prefix, branches)
            scored = [_scored(logprobs[branch.key], branch.mask) for branch in branches]
            mine.append((place, {"id": group.id, "logprobs": scored}))
    records = runtime.in_order(mine)
    for record in records:  # the same on every rank
        require_finite(config, record["id"], record["logprobs"])
    runtime.together(lambda: write_jsonl(out, records) if runtime.is_main else None)
    _say_written(runtime, out, records, sum(len(record["logprobs"]) for record in records))


def _scored(logprob_R: torch.Tensor, mask: Sequence[int] | None) -> list[float | None]:
    """Log-probabilities of a response as `score` writes them: null for a token that the policy did not choose."""
    values: list[float | None] = logprob_R.tolist()
    return (
        values if mask is None else [value if one else None for value, one in zip(values, mask, strict=True)]
    )


def grad(config: Config, runtime: Runtime, trajectories: str, out: str) -> None:
    """Write the gradient of one window of recorded groups, under Hugging Face names and shapes.

    float32, or float64 for a float64 model; the metadata say which contract it follows.
    """
    groups = runtime.together(recorded_groups, config, trajectories)
    plan = runtime.together(WindowPlan, groups, config, runtime.dp, runtime.dp_rank)
    with open_run(config, runtime, gradients=True) as run, UpdateWindow(run) as window:
        # The reference is the model as loaded: the policy itself, or its base where there are adapters.
        reference = (run.reference or run.core(run.model)) if config.loss.kl_coef > 0 else None
        sums = accumulate(window, plan, reference=reference, quiet=False)
        reduce_finite(window)
        told: dict[str, Any] = {"contract": config.prefix.contract}
        if config.prefix.contract == "truncated":  # no other contract reads it
            told["truncate_tokens"] = config.prefix.truncate_tokens
        told |= {
            "loss": float(sums["loss_sum"]),
            "tokens": plan.totals.tokens,
            "responses": plan.totals.responses,
            **routing_mismatch(sums),
        }
        # safetensors holds strings alone
        metadata = {"format": "pt", **GRADIENT, **{name: str(value) for name, value in told.items()}}
        wide = run.precision.accumulation
        run.ledger.output = write_hf_file(run.model, run.arch, out, runtime, dtype=wide, metadata=metadata)
        if runtime.is_main:
            nbytes = {"run": run.ledger.run, **run.ledger.peak, "output": run.ledger.output}
            print(json.dumps({**told, "bytes": nbytes, "out": str(out)}), flush=True)


def _say_written(runtime: Runtime, out: str, groups: Sequence[Any], responses: int) -> None:
    if runtime.is_main:
        print(f"wrote {out}: {len(groups)} groups, {responses} responses", flush=True)


def _shared(items: Sequence[Any], runtime: Runtime, what: str) -> Iterator[Any]:
    """This replica's share of some items, with a progress bar on rank 0."""
    share = items[runtime.dp_rank :: runtime.dp]
    with _bar(runtime, what, len(share)) as bar:
        for item in share:
            yield item
            bar.update()


def _bar(runtime: Runtime, what: str, groups: int) -> tqdm:
    return tqdm(total=groups, desc=what, unit="group", delay=2, disable=not runtime.is_main or groups < 2)
