"""The main job: GRPO updates on resident prefixes, four nested lifetimes an update.

    with open_run(...) as run:                       parameters, optimizer
        with UpdateWindow(run) as window:          one model version, one step
            with window.prompt_group(...) as prefix:     capture -> sample -> (journal, normaliser) -> replay -> sweep
                ... Replay(prefix) ...                       K live graphs at a time
            window.reduce(); window.step()

Everything before the step is an attempt: after a failure of any rank it is made again, from the recorded responses if
they were recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from typing import Any

import torch

from megatron_lrl.lifetimes.prompt import PromptGroup
from megatron_lrl.lifetimes.run import Run
from megatron_lrl.lifetimes.stale import Drift, LeasedGroup, StalePrefixCache
from megatron_lrl.lifetimes.window import UpdateWindow
from megatron_lrl.passes.schedule import in_lockstep
from megatron_lrl.rl.accumulate import (
    WindowPlan,
    accumulate,
    branches_of,
    nonfinite_branches,
    routing_mismatch,
)
from megatron_lrl.rl.loss import summarise
from megatron_lrl.rl.omitted import exact_gradient, measures_omitted, omitted_metrics
from megatron_lrl.rl.retry import Retry
from megatron_lrl.rl.reward_workers import RewardWorkers, part_metrics
from megatron_lrl.rl.rewards import SOLVED, Reward
from megatron_lrl.rl.stopwatch import Stopwatch
from megatron_lrl.rl.update import run_update, speed
from megatron_lrl.rollout.builtin import Rollout, Sampler
from megatron_lrl.rollout.data import prompts_at
from megatron_lrl.rollout.journal import Journal, Recorded
from megatron_lrl.rollout.text import Text
from megatron_lrl.rollout.types import Group, Prompt

_SHOWN_PROMPT_TOKENS = 48
"""The end of a prompt that a logged sample shows."""

_TIMED = ("capture", "rollout", "score", "replay", "reduce", "step")


@dataclass(frozen=True)
class _Accumulated:
    """An update up to its reduction. Equal on every rank, except ``plan.local`` and the gradient."""

    plan: WindowPlan
    recorded: Recorded
    sums: dict[str, torch.Tensor]
    drifts: list[Drift]
    exact: (
        dict[str, torch.Tensor] | None
    )  # the exact gradient, where this update measures what its contract leaves out


class Trainer:
    """Runs updates; every rank of the world calls `update` with the same number."""

    def __init__(
        self,
        run: Run,
        prompts: Sequence[Prompt],
        reward: Reward | None,
        text: Text,
        journal: Journal | None = None,
        retry: Retry | None = None,
    ) -> None:
        """``journal``: where rollouts are recorded, and found again after a restart. ``retry``: default one attempt."""
        self.run, self.prompts, self.reward, self.text = run, prompts, reward, text
        self.journal, self.retry = journal, retry or Retry(run, 1)
        self.sampler = Sampler(run, text.stop_ids)
        staleness = run.config.prefix.max_staleness
        self.stale = StalePrefixCache(run, staleness) if staleness else None
        if self.stale is not None:
            self.retry.on_restart.append(self.stale.evict_current)
        self._recorded: tuple[int, Recorded] | None = None  # the update in progress

    def close(self) -> None:
        """Free what outlives a window: prefixes kept under prefix.max_staleness."""
        if self.stale is not None:
            self.stale.close()

    def update(self, number: int) -> tuple[dict[str, float], list[str]]:
        """One update at the current model version. Returns its metrics and sample texts (equal on every rank).

        Raises as `run_update`.
        """
        watch = Stopwatch()
        done = run_update(
            self.retry,
            number,
            watch,
            lambda window: self._accumulate(window, number, watch),
            lambda found: {} if found.exact is None else omitted_metrics(self.run, found.exact),
            lambda window, found: nonfinite_branches(window, found.plan, self.run.reference),
        )
        found = done.accumulated
        metrics = {
            **_metrics(found.plan, found.sums, watch),
            **_staleness(found.drifts),
            **routing_mismatch(found.sums),
            **done.measured,
            "rollout/entropy": found.recorded.entropy,
            **done.metrics,
        }
        self._recorded = None
        return metrics, self._samples(found.recorded.groups)

    def _accumulate(self, window: UpdateWindow, number: int, watch: Stopwatch) -> _Accumulated:
        """Sample, or take what is recorded, and add the window's gradient."""
        run, runtime = self.run, self.run.runtime
        with ExitStack() as resident:
            captured: dict[str, PromptGroup] = {}
            recorded = self._recall(number)
            if recorded is None:
                with in_lockstep(run):
                    captured, rollouts = self._sample(window, resident, number, watch)
                recorded = self._record(number, rollouts)
            plan = WindowPlan(recorded.groups, run.config, runtime.dp, runtime.dp_rank)
            if self.stale is not None and not captured:
                with in_lockstep(run):
                    captured = {
                        g.id: self.stale.lease(window, g.id, g.prompt_ids, quiet=False) for g in plan.local
                    }
            with watch.timed("score"):
                drifts = self._drifts(window, plan, captured)
            exact = exact_gradient(run, plan, watch) if measures_omitted(run.config, number) else None
            sums = accumulate(window, plan, captured=captured, reference=run.reference, watch=watch)
        return _Accumulated(plan, recorded, sums, drifts, exact)

    def _drifts(
        self, window: UpdateWindow, plan: WindowPlan, captured: dict[str, PromptGroup]
    ) -> list[Drift]:
        """How stale each replica's oldest leased prefix is, measured on its first response; of all replicas."""
        if self.stale is None:
            return []
        leased = [group for group in captured.values() if isinstance(group, LeasedGroup) and group.age]
        mine: list[Drift] = []
        with in_lockstep(self.run):
            if leased:
                oldest = max(leased, key=lambda group: group.age)
                group = next(group for group in plan.groups if group.id == oldest.name)
                mine = [self.stale.drift(window, oldest, branches_of(group)[0])]
        runtime = self.run.runtime
        leading = mine if runtime.is_replica_leader else []
        return [drift for part in runtime.gather_objects(leading) for drift in part]

    def _recall(self, number: int) -> Recorded | None:
        """What is recorded of this update, by an attempt before this one or in the journal; equal on all ranks."""
        runtime, found = self.run.runtime, None
        if self._recorded is not None and self._recorded[0] == number:
            found = self._recorded[1]
        elif self.journal is not None and runtime.is_main:
            found = self.journal.recall(number, self._prompts(number))
        # A failure may have come when only some ranks had recorded: what one has, all take.
        return next((part for part in runtime.gather_objects(found) if part is not None), None)

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

        The captured prefixes serve the replay too, unless the contract has no prefix or the reference model needs the
        room first: then they come and go as they are sampled.
        """
        config, runtime = self.run.config, self.run.runtime
        keep = config.prefix.contract != "conventional" and self.run.reference is None
        mine = list(enumerate(self._prompts(number)))[runtime.dp_rank :: runtime.dp]
        contract = config.prefix.contract if keep else "response_only"

        def capture(group: PromptGroup) -> None:
            with watch.timed("capture"):
                group.capture()

        groups: list[PromptGroup] = []
        for _, prompt in mine:
            if self.stale is not None:
                with watch.timed("capture"):
                    groups.append(self.stale.lease(window, prompt.id, prompt.prompt_ids, quiet=False))
                continue
            group = window.prompt_group(prompt.id, prompt.prompt_ids, contract, quiet=False)
            groups.append(resident.enter_context(closing(group)))
            if keep:
                capture(group)
        with watch.timed("rollout"):
            rollouts = self.sampler.sample_together(
                groups, config.rollout.group_size, config.rollout.max_new_tokens, number, capture
            )
        captured = {group.name: group for group in groups} if keep or self.stale is not None else {}
        return captured, {place: rollout for (place, _), rollout in zip(mine, rollouts, strict=True)}

    def _record(self, number: int, rollouts: dict[int, Rollout]) -> Recorded:
        """Reward the responses, share all groups of the window with every rank, in prompt order, and journal them.

        One rank of each replica calls the reward function, so that a reward need not be deterministic for the ranks
        to agree.
        """
        runtime, prompts = self.run.runtime, self._prompts(number)

        def reward_local() -> list[tuple[int, tuple[Group, float]]]:
            if not runtime.is_replica_leader:
                return []
            groups = self.rewarded([(prompts[place], rollout) for place, rollout in rollouts.items()])
            return [
                (place, (group, rollout.entropy))
                for (place, rollout), group in zip(rollouts.items(), groups, strict=True)
            ]

        groups, entropies = zip(*runtime.in_order(runtime.together(reward_local)), strict=True)
        recorded = Recorded(groups, sum(entropies) / len(entropies))
        journal = self.journal if runtime.is_main else None
        runtime.together(lambda: journal.record(number, recorded) if journal is not None else None)
        self._recorded = (number, recorded)
        return recorded

    def rewarded(self, sampled: Sequence[tuple[Prompt, Rollout]]) -> list[Group]:
        """The sampled responses as groups, with their rewards if there is a reward function."""
        if self.reward is None:
            return [Group(prompt.id, prompt.prompt_ids, rollout.responses) for prompt, rollout in sampled]
        workers = RewardWorkers(self.reward, self.run.config.data)
        return workers.reward([(prompt, rollout.responses) for prompt, rollout in sampled], self.text)

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
            samples.append(f"{group.id} reward {reward}\n... {prompt}\n>>> {self.text.decode(response.ids)}")
        return samples


def _staleness(drifts: Sequence[Drift]) -> dict[str, float]:
    """Nothing if no prefix was older than the model."""
    if not drifts:
        return {}
    return {
        "staleness/age": float(max(drift.age for drift in drifts)),
        "staleness/drift": sum(drift.mean for drift in drifts) / len(drifts),
        "staleness/drift_max": max(drift.largest for drift in drifts),
    }


def _metrics(plan: WindowPlan, sums: dict[str, torch.Tensor], watch: Stopwatch) -> dict[str, float]:
    """What TensorBoard shows of an update's responses."""
    responses = [response for group in plan.groups for response in group.responses]
    rewards = [float(response.reward or 0.0) for response in responses]
    # Of a response: the mean over the tokens that the policy chose.
    advantages = torch.stack(
        [(terms.advantage_R * terms.weight_R).sum() / terms.weight_R.sum() for terms in plan.terms.values()]
    )
    lengths = [len(response.ids) for response in responses]
    loss = summarise(sums)
    tokens, shared = sum(len(group.prompt_ids) - 1 for group in plan.groups) + sum(lengths), plan.shared
    values: dict[str, Any] = {
        "reward/mean": sum(rewards) / len(rewards),
        "reward/max": max(rewards),
        "reward/solved": sum(reward >= SOLVED for reward in rewards) / len(rewards),
        **part_metrics(responses, "reward"),
        "advantage/mean": float(advantages.mean()),
        "advantage/std": float(advantages.std(correction=0)),
        "advantage/max": float(advantages.abs().max()),
        "response/length": sum(lengths) / len(lengths),
        "response/length_max": max(lengths),
        "prompt/length": sum(len(group.prompt_ids) for group in plan.groups) / len(plan.groups),
        "tokens/scored": plan.totals.tokens,
        "tokens/shared": shared,
        "tokens/fed": tokens - shared,
        "update/responses_without_gradient": plan.skipped,
        "loss/total": loss["loss"],
        "loss/policy": loss["policy_loss"],
        **speed(tokens, watch.total),
    }
    if replayed := float(sums["tokens"]):  # else nothing is known of them
        values |= {
            "loss/kl": loss["kl_per_token"],
            "loss/clip_fraction": loss["clip_fraction"],
            "policy/entropy": float(sums["entropy_sum"]) / replayed,
            "ratio/mean_before_step": loss["ratio_mean"],
            "ratio/max_deviation_before_step": loss["ratio_deviation_max"],
            "mismatch/kl": loss["sampler_kl"],
            "mismatch/bitwise": loss["bitwise"],
            "mismatch/max_ratio_deviation": loss["sampler_ratio_max"],
            "mismatch/effective_sample_size": loss["effective_sample_size"],
            "mismatch/importance_capped": loss["importance_capped"],
        }
    return values | {f"seconds/{name}": watch.seconds.get(name, 0.0) for name in _TIMED}
