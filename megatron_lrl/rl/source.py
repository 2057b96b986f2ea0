"""Where the recorded groups of a window come from (`rollout.source`).

    Source.groups(window, ...) ─┬─ Sampling       this trainer's own sampler: capture ─ sample ─ reward ─ journal
                                └─ Trajectories   a file of groups that anything recorded, each within its staleness

A source hands the same groups to every attempt at a window: what was sampled is recorded before its first replay.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import Protocol

from megatron_lrl.errors import UserError
from megatron_lrl.lifetimes.prompt import PromptGroup
from megatron_lrl.lifetimes.run import Run
from megatron_lrl.lifetimes.stale import StalePrefixCache
from megatron_lrl.lifetimes.window import UpdateWindow
from megatron_lrl.passes.schedule import in_lockstep
from megatron_lrl.rl.reward_workers import RewardWorkers
from megatron_lrl.rl.rewards import Reward
from megatron_lrl.rl.stopwatch import Stopwatch
from megatron_lrl.rollout.builtin import Rollout, Sampler
from megatron_lrl.rollout.data import prompts_at
from megatron_lrl.rollout.journal import Journal, Recorded
from megatron_lrl.rollout.text import Text
from megatron_lrl.rollout.types import Group, Prompt
from megatron_lrl.settings import Config


class Source(Protocol):
    """Hands each window its recorded groups."""

    stale: StalePrefixCache | None
    """Prefixes that it keeps over windows (prefix.max_staleness)."""

    def groups(
        self, window: UpdateWindow, resident: ExitStack, number: int, watch: Stopwatch
    ) -> tuple[dict[str, PromptGroup], Recorded]:
        """Of update ``number`` (0-based): the groups of all replicas, equal on every rank, and by name the prefixes of
        this replica's that are captured already, which ``resident`` closes. Collective over the world."""
        ...

    def stepped(self) -> None:
        """The update is over: its groups are not asked for again."""


class Trajectories:
    """``rollout.source = "file"``: update n takes the next train.groups_per_update groups, in the order of the file."""

    stale: StalePrefixCache | None = None

    def __init__(self, config: Config, groups: Sequence[Group]) -> None:
        """Raises `UserError` for fewer groups than the run takes, and for one that is too old, or from the future."""
        self._count, self._groups = config.train.groups_per_update, groups
        needed, most = config.train.updates * self._count, config.rollout.max_staleness
        name = f"rollout.trajectories = {config.rollout.trajectories}"
        if len(groups) < needed:
            raise UserError(
                f"{name} holds {len(groups)} groups; train.updates = {config.train.updates} with "
                f"train.groups_per_update = {self._count} takes {needed}"
            )
        for place, group in enumerate(groups[:needed]):
            update = place // self._count
            age = update - group.version
            if not 0 <= age <= most:
                found = f"{age} updates old" if age > 0 else "of a later model"
                raise UserError(
                    f"{name}: group {group.id!r} was sampled after {group.version} updates and would be trained on "
                    f"after {update}: {found}; rollout.max_staleness = {most} allows "
                    f"{max(0, update - most)} to {update}"
                )

    def groups(
        self, window: UpdateWindow, resident: ExitStack, number: int, watch: Stopwatch
    ) -> tuple[dict[str, PromptGroup], Recorded]:
        first = number * self._count
        return {}, Recorded(tuple(self._groups[first : first + self._count]), None)

    def stepped(self) -> None:
        """Nothing is kept."""


class Sampling:
    """``rollout.source = "builtin"``: the trainer's own sampler."""

    def __init__(
        self,
        run: Run,
        prompts: Sequence[Prompt],
        reward: Reward | None,
        text: Text,
        journal: Journal | None = None,
    ) -> None:
        """``journal``: where rollouts are recorded, and found again after a restart."""
        self.run, self.prompts, self.reward, self.text, self.journal = run, prompts, reward, text, journal
        self.sampler = Sampler(run, text.stop_ids)
        staleness = run.config.prefix.max_staleness
        self.stale = StalePrefixCache(run, staleness) if staleness else None
        self._recorded: tuple[int, Recorded] | None = None  # the update in progress

    def groups(
        self, window: UpdateWindow, resident: ExitStack, number: int, watch: Stopwatch
    ) -> tuple[dict[str, PromptGroup], Recorded]:
        recorded = self._recall(number)
        if recorded is not None:
            return {}, recorded
        with in_lockstep(self.run):
            captured, rollouts = self._sample(window, resident, number, watch)
        return captured, self._record(number, rollouts)

    def stepped(self) -> None:
        self._recorded = None

    def rewarded(self, sampled: Sequence[tuple[Prompt, Rollout]]) -> list[Group]:
        """The sampled responses as groups, with their rewards if there is a reward function."""
        if self.reward is None:
            return [Group(prompt.id, prompt.prompt_ids, rollout.responses) for prompt, rollout in sampled]
        workers = RewardWorkers(self.reward, self.run.config.data)
        return workers.reward([(prompt, rollout.responses) for prompt, rollout in sampled], self.text)

    def _recall(self, number: int) -> Recorded | None:
        """What is recorded of this update, by an attempt before this one or in the journal; equal on all ranks."""
        runtime, found = self.run.runtime, None
        if self._recorded is not None and self._recorded[0] == number:
            found = self._recorded[1]
        elif self.journal is not None and runtime.is_main:
            found = self.journal.recall(number, self.named_prompts(number))
        # A failure may have come when only some ranks had recorded: what one has, all take.
        return next((part for part in runtime.gather_objects(found) if part is not None), None)

    def named_prompts(self, number: int) -> list[Prompt]:
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
        mine = list(enumerate(self.named_prompts(number)))[runtime.dp_rank :: runtime.dp]
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
        runtime, prompts = self.run.runtime, self.named_prompts(number)

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
