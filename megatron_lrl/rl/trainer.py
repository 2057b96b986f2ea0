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
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from megatron_lrl.lifetimes.prompt import PromptGroup
from megatron_lrl.lifetimes.run import Run
from megatron_lrl.lifetimes.stale import Drift, LeasedGroup
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
from megatron_lrl.rl.reward_workers import part_metrics
from megatron_lrl.rl.rewards import SOLVED
from megatron_lrl.rl.source import Source
from megatron_lrl.rl.stopwatch import Stopwatch
from megatron_lrl.rl.update import run_update, speed
from megatron_lrl.rollout.journal import Recorded
from megatron_lrl.rollout.text import Text
from megatron_lrl.rollout.types import Group

_SHOWN_PROMPT_TOKENS = 48
"""The end of a prompt that a logged sample shows."""

_TIMED = ("capture", "rollout", "score", "replay", "reduce", "step")


@dataclass(frozen=True)
class _Accumulated:
    """An update up to its reduction. Equal on every rank, except ``plan.local`` and ``exact``.

    exact: the gradient that the contract's is compared with, by parameter, in updates that measure it.
    """

    plan: WindowPlan
    recorded: Recorded
    sums: dict[str, torch.Tensor]
    drifts: list[Drift]
    exact: dict[str, torch.Tensor] | None


class Trainer:
    """Runs updates; every rank of the world calls `update` with the same number."""

    def __init__(self, run: Run, source: Source, text: Text, retry: Retry | None = None) -> None:
        """``retry``: default one attempt."""
        self.run, self.source, self.text, self.retry = run, source, text, retry or Retry(run, 1)
        self.stale = source.stale
        if self.stale is not None:
            self.retry.on_restart.append(self.stale.evict_current)

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
            self._omitted,
            lambda window, found: nonfinite_branches(window, found.plan, self.run.reference),
        )
        found = done.accumulated
        metrics = {
            **_metrics(found.plan, found.sums, watch),
            **_staleness(found.drifts),
            **routing_mismatch(found.sums),
            **done.measured,
            **done.metrics,
        }
        if found.recorded.entropy is not None:
            metrics["rollout/entropy"] = found.recorded.entropy
        self.source.stepped()
        return metrics, self._samples(found.recorded.groups)

    def _omitted(self, found: _Accumulated) -> dict[str, float]:
        if found.exact is None:
            return {}
        measured = omitted_metrics(self.run, found.exact)
        found.exact.clear()  # as large as the gradient: it ends before the step
        return measured

    def _accumulate(self, window: UpdateWindow, number: int, watch: Stopwatch) -> _Accumulated:
        """Take the source's groups and add their gradient."""
        run, runtime = self.run, self.run.runtime
        with ExitStack() as resident:
            captured, recorded = self.source.groups(window, resident, number, watch)
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
