"""Evaluation on held-out prompts: mean reward and pass@k of the model between updates.

Nothing of it reaches training: its windows take no step, its draws depend on their own key alone (seed, updates done,
prompt, response, token), and it is not journaled. An update that is made again evaluates to the same numbers.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from math import comb

from megatron_lrl.lifetimes.run import Run
from megatron_lrl.lifetimes.window import UpdateWindow
from megatron_lrl.passes.schedule import in_lockstep
from megatron_lrl.rl.reward_workers import RewardWorkers, part_metrics
from megatron_lrl.rl.rewards import SOLVED, Reward
from megatron_lrl.rollout.builtin import Sampler
from megatron_lrl.rollout.text import Text
from megatron_lrl.rollout.types import Group, Prompt


def pass_at_k(samples: int, right: int, k: int) -> float:
    """The chance that k of ``samples`` responses, drawn without replacement, hold one of the ``right`` ones.

    The unbiased estimate 1 - C(n - c, k) / C(n, k) of Chen et al., arXiv 2107.03374.
    """
    return 1.0 - comb(samples - right, k) / comb(samples, k)


class Evaluation:
    """Evaluates a run's model when [eval] says so; every rank of the world calls it alike."""

    def __init__(self, run: Run, prompts: Sequence[Prompt], reward: Reward, text: Text) -> None:
        """``prompts``: held-out ones; without any, nothing is ever evaluated."""
        config = run.config
        self.run, self.prompts, self.text = run, prompts, text
        self.rewards = RewardWorkers(reward, config.data)
        self.settings = config.eval
        rollout = config.rollout.model_copy(
            update={"temperature": config.eval.temperature, "record_routing": False}
        )
        self.sampler = Sampler(run, text.stop_ids, rollout)

    def before(self, done: int) -> dict[str, float]:
        """Metrics of the model as loaded, "eval/..._start", where no update is done yet; else none."""
        if done:
            return {}
        return {f"{name}_start": value for name, value in self._measure(0).items()}

    def after(self, done: int) -> dict[str, float]:
        """Metrics "eval/..." of the model after so many updates, if they are due; equal on every rank."""
        every = self.settings.every
        due = done == self.run.config.train.updates or (every and done % every == 0)
        return self._measure(done) if due else {}

    def _measure(self, done: int) -> dict[str, float]:
        if not self.prompts:
            return {}
        runtime, start = self.run.runtime, time.perf_counter()
        places = range(runtime.dp_rank, len(self.prompts), runtime.dp)
        prompts, longest = [self.prompts[i] for i in places], self.sampler.settings.max_new_tokens
        with in_lockstep(self.run), UpdateWindow(self.run) as window:
            prefixes = [
                window.prompt_group(f"{prompt.id}@eval", prompt.prompt_ids, "response_only")
                for prompt in prompts
            ]
            rollouts = self.sampler.sample_together(prefixes, self.settings.samples, longest, done)
        mine = [(prompt, rollout.responses) for prompt, rollout in zip(prompts, rollouts, strict=True)]

        def rewarded() -> list[tuple[int, Group]]:
            if not runtime.is_replica_leader:
                return []
            return list(zip(places, self.rewards.reward(mine, self.text), strict=True))

        groups = runtime.in_order(runtime.together(rewarded))  # one order of sums in every layout
        return metrics(groups) | {"seconds/eval": time.perf_counter() - start}


def metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Mean reward, length and parts of all responses, and pass@k for k = 1, 2, 4, ... and all of a prompt's; all of
    one number of responses a prompt."""
    responses = [response for group in groups for response in group.responses]
    samples = len(groups[0].responses)
    right = [sum((response.reward or 0.0) >= SOLVED for response in group.responses) for group in groups]
    ks = [*(2**i for i in range(samples.bit_length()) if 2**i < samples), samples]
    return {
        "eval/reward": sum(response.reward or 0.0 for response in responses) / len(responses),
        **{f"eval/pass@{k}": sum(pass_at_k(samples, c, k) for c in right) / len(right) for k in ks},
        "eval/length": sum(len(response.ids) for response in responses) / len(responses),
        **part_metrics(responses, "eval"),
    }
