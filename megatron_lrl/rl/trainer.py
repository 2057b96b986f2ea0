"""The main job: GRPO updates on resident prefixes, four nested lifetimes an update.

    with open_run(...) as run:                       parameters, optimizer
        with run.update_window() as window:          one model version, one step
            with window.prompt_group(...) as prefix:     capture -> sample -> (normaliser) -> replay -> sweep
                ... Replay(prefix) ...                       K live graphs at a time
            window.reduce(); window.step()
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch

from megatron_lrl.lifetimes.group import PromptGroup
from megatron_lrl.lifetimes.run import Run, StepResult
from megatron_lrl.lifetimes.window import UpdateWindow
from megatron_lrl.rl.accumulate import WindowPlan, accumulate
from megatron_lrl.rl.data import prompts_at
from megatron_lrl.rl.loss import summarise
from megatron_lrl.rl.rewards import Reward
from megatron_lrl.rl.rollout import Rollout, Sampler
from megatron_lrl.rl.stopwatch import Stopwatch
from megatron_lrl.rl.text import Text
from megatron_lrl.rl.types import Group, Prompt

_SHOWN_PROMPT_TOKENS = 48
"""The end of a prompt that a logged sample shows."""

_PHASES = ("capture", "rollout", "score", "replay", "reduce", "step")


class Trainer:
    """Runs updates; every rank of the world calls `update` with the same number."""

    def __init__(self, run: Run, prompts: Sequence[Prompt], reward: Reward | None, text: Text) -> None:
        self.run, self.prompts, self.reward, self.text = run, prompts, reward, text
        self.sampler = Sampler(run, text.stop_ids)

    def update(self, number: int) -> tuple[dict[str, float], list[str]]:
        """One update at the current model version. Returns its metrics and sample texts (equal on every rank)."""
        run, watch = self.run, Stopwatch()
        with run.update_window() as window, ExitStack() as resident:
            captured, rollouts = self._sample(window, resident, number, watch)
            groups, entropy = self._record(number, rollouts)
            plan = WindowPlan(groups, run.config, run.runtime.dp, run.runtime.dp_rank)
            sums = accumulate(window, plan, captured=captured, reference=run.reference, watch=watch)
            with watch.phase("reduce"):
                window.reduce()
            with watch.phase("step"):
                result = window.step()
        sampler_metrics = {"rollout/entropy": entropy}
        metrics = {**_metrics(plan, sums, result, watch), **sampler_metrics, **run.ledger.metrics()}
        return metrics, self._samples(groups)

    def _prompts(self, number: int) -> list[Prompt]:
        """This update's prompts, named by their place in the run, so that no name comes twice."""
        config = self.run.config
        count = config.train.groups_per_update
        chosen = prompts_at(
            self.prompts, number * count, count, shuffle=config.data.shuffle, seed=config.train.seed
        )
        return [replace(p, id=f"{p.id}@{number * count + i}") for i, p in enumerate(chosen)]

    def _sample(
        self, window: UpdateWindow, resident: ExitStack, number: int, watch: Stopwatch
    ) -> tuple[dict[str, PromptGroup], dict[int, Rollout]]:
        """Capture and sample this replica's prompts.

        The captured prefix serves the replay too, unless the contract has no prefix or the reference model needs the
        room first.
        """
        config, runtime = self.run.config, self.run.runtime
        keep = config.prefix.contract != "conventional" and self.run.reference is None
        captured: dict[str, PromptGroup] = {}
        rollouts: dict[int, Rollout] = {}
        for place, prompt in enumerate(self._prompts(number)):
            if place % runtime.dp != runtime.dp_rank:
                continue
            contract = config.prefix.contract if keep else "response_only"
            with watch.phase("capture"):
                group = resident.enter_context(
                    window.prompt_group(prompt.id, prompt.prompt_ids, contract, quiet=False)
                )
            with watch.phase("rollout"):
                rollouts[place] = self.sampler.sample(
                    group, config.rollout.group_size, config.rollout.max_new_tokens, number
                )
            if keep:
                captured[prompt.id] = group
            else:
                group.close()
        return captured, rollouts

    def _record(self, number: int, rollouts: dict[int, Rollout]) -> tuple[list[Group], float]:
        """Reward the responses and share all groups of the window with every rank, in prompt order.

        Also returns the mean entropy of sampling. One rank of each replica calls the reward function, so that a
        reward need not be deterministic for the ranks to agree.
        """
        runtime, prompts = self.run.runtime, self._prompts(number)

        def reward_local() -> list[tuple[int, Group, float]]:
            if not runtime.is_replica_leader:
                return []
            return [
                (place, self.rewarded(prompts[place], rollout), rollout.entropy)
                for place, rollout in rollouts.items()
            ]

        mine = runtime.together(reward_local)
        everyone = sorted(
            (item for part in runtime.gather_objects(mine) for item in part), key=lambda item: item[0]
        )
        entropies = [entropy for _, _, entropy in everyone]
        return [group for _, group, _ in everyone], sum(entropies) / len(entropies)

    def rewarded(self, prompt: Prompt, rollout: Rollout) -> Group:
        """The sampled responses as a group, with their rewards if there is a reward function.

        The function reads the text without the token that ended the response.
        """
        if self.reward is None:
            return Group(prompt.id, prompt.prompt_ids, rollout.responses)
        responses = []
        for response in rollout.responses:
            ids = response.ids
            spoken = ids[:-1] if ids[-1] in self.text.stop_ids else ids
            responses.append(replace(response, reward=self.reward(self.text.decode(spoken), prompt)))
        return Group(prompt.id, prompt.prompt_ids, tuple(responses))

    def _samples(self, groups: Sequence[Group]) -> list[str]:
        """train.log_samples responses with the end of their prompt: every group's best, then the second
        best ..."""
        ranked = [
            (place, number, group, response)
            for number, group in enumerate(groups)
            for place, response in enumerate(
                sorted(group.responses, key=lambda response: response.reward or 0.0, reverse=True)
            )
        ]
        ranked.sort(key=lambda item: item[:2])
        samples = []
        for _, _, group, response in ranked[: self.run.config.train.log_samples]:
            prompt = self.text.decode(group.prompt_ids[-_SHOWN_PROMPT_TOKENS:])
            reward = "none" if response.reward is None else f"{response.reward:.3f}"
            samples.append(
                f"{group.id} reward {reward}\n... {prompt}\n>>> {self.text.decode(response.ids)}"
            )
        return samples


def _metrics(
    plan: WindowPlan, sums: dict[str, torch.Tensor], result: StepResult, watch: Stopwatch
) -> dict[str, float]:
    """Everything TensorBoard shows of an update, bytes and sampler entropy apart."""
    responses = [response for group in plan.groups for response in group.responses]
    rewards = [float(response.reward or 0.0) for response in responses]
    advantages = torch.cat(plan.advantages)
    lengths = [len(response.ids) for response in responses]
    loss = summarise(sums)
    fed = sum(len(group.prompt_ids) - 1 for group in plan.groups) + plan.totals.tokens
    seconds = watch.total
    values: dict[str, Any] = {
        "reward/mean": sum(rewards) / len(rewards),
        "reward/max": max(rewards),
        "reward/solved": sum(reward >= 1.0 for reward in rewards) / len(rewards),
        "advantage/mean": float(advantages.mean()),
        "advantage/std": float(advantages.std(correction=0)),
        "advantage/max": float(advantages.abs().max()),
        "response/length": sum(lengths) / len(lengths),
        "response/length_max": max(lengths),
        "prompt/length": sum(len(group.prompt_ids) for group in plan.groups) / len(plan.groups),
        "loss/total": loss["loss"],
        "loss/policy": loss["policy_loss"],
        "loss/kl": loss["kl_per_token"],
        "loss/clip_fraction": loss["clip_fraction"],
        "policy/entropy": float(sums["entropy_sum"]) / max(1.0, float(sums["tokens"])),
        "ratio/mean_before_step": loss["ratio_mean"],
        "ratio/max_deviation_before_step": loss["ratio_deviation_max"],
        "mismatch/kl": loss["sampler_kl"],
        "mismatch/effective_sample_size": loss["effective_sample_size"],
        "mismatch/importance_capped": loss["importance_capped"],
        "optimizer/grad_norm": result.grad_norm,
        "optimizer/lr": result.lr,
        "speed/tokens_per_second": fed / seconds,
        "speed/updates_per_hour": 3600.0 / seconds,
        "seconds/update": seconds,
    }
    return values | {f"seconds/{name}": watch.seconds.get(name, 0.0) for name in _PHASES}
