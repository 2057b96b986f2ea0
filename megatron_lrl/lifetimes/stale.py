"""StalePrefixCache: the one place where captured prefixes outlive their window, on purpose and within a bound.

    window at version v      lease ── not here ──> capture at v ──> keep
    window at v+1 ... v+n    lease ── here, age <= n ──> the state of v     (policy: prefix of v, response of v+age)
    window at v+n+1          evicted, captured anew

Sampling, scoring and replay of a window use the same lease, so that they agree on the policy; it is the policy that is
stale, and `drift` says by how much its log-probabilities differ from those on a fresh capture. A stale prefix is a
constant: the contract must be response_only. A run that resumes captures anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_lrl.errors import UserError
from megatron_lrl.lifetimes.identity import Identity, hash_tokens
from megatron_lrl.lifetimes.node import NodePhase
from megatron_lrl.lifetimes.prompt import PromptGroup
from megatron_lrl.lifetimes.replay import Replay
from megatron_lrl.lifetimes.run import Run
from megatron_lrl.lifetimes.window import UpdateWindow
from megatron_lrl.lifetimes.work import Branch, work_of


@dataclass(frozen=True)
class Drift:
    """Log-probabilities of the same tokens on a stale prefix and on a fresh one, natural logarithms."""

    mean: float  # of the absolute difference
    largest: float
    age: int  # updates since the stale prefix was captured


class LeasedGroup(PromptGroup):
    """A group on a prefix that belongs to the cache: capture takes it over, close gives it back."""

    def __init__(
        self, run: Run, name: str, prompt_ids: Sequence[int], owner: PromptGroup, max_staleness: int
    ) -> None:
        super().__init__(run, name, prompt_ids, "response_only")
        self.version, self.max_staleness = owner.version, max_staleness
        self._owner = owner
        self.state, self.phase = owner.state, NodePhase.CAPTURED

    @property
    def age(self) -> int:
        """Optimizer steps since the prefix was captured."""
        return self.run.version - self.version

    @property
    def identity(self) -> Identity:
        return replace(super().identity, max_staleness=self.max_staleness)

    def check_identity(self) -> None:
        """As for any group, but the model may be up to ``max_staleness`` steps ahead of the prefix."""
        if NodePhase.CLOSED in (self.phase, self._owner.phase):
            raise RuntimeError(f"group {self.name} is closed: its prefix is gone")
        needed = self.run.identity(self.prefix_ids)
        self.identity.require(replace(needed, max_staleness=self.max_staleness))

    def close(self) -> None:
        """End the lease; the prefix stays with the cache."""
        self.state, self.phase = None, NodePhase.CLOSED


class StalePrefixCache:
    """Prefixes of a run by the hash of their token ids."""

    def __init__(self, run: Run, max_staleness: int) -> None:
        """Raises `UserError` unless the run's contract leaves prefixes constant."""
        contract = run.config.prefix.contract
        if contract != "response_only":
            raise UserError(
                f'prefix.max_staleness = {max_staleness} needs prefix.contract = "response_only", not "{contract}": '
                "the prefix's own gradient belongs to the model that captured it"
            )
        self.run, self.max_staleness = run, max_staleness
        self._kept: dict[str, PromptGroup] = {}

    def close(self) -> None:
        """Free them all."""
        for key in list(self._kept):
            self._evict(key)

    def lease(
        self, window: UpdateWindow, name: str, prompt_ids: Sequence[int], quiet: bool = True
    ) -> LeasedGroup:
        """A group of ``window`` on the kept prefix, captured if there is none; it ends with the window."""
        self.evict_old()
        key = hash_tokens(prompt_ids[:-1])
        if key not in self._kept:
            owner = PromptGroup(self.run, name, prompt_ids, "response_only", None, quiet)
            self._kept[key] = owner.__enter__()
        group = LeasedGroup(self.run, name, prompt_ids, self._kept[key], self.max_staleness)
        window.adopt(group)
        return group

    def evict_old(self) -> None:
        """Free what is more than ``max_staleness`` steps old."""
        for key, owner in list(self._kept.items()):
            if self.run.version - owner.version > self.max_staleness:
                self._evict(key)

    def evict_current(self) -> None:
        """Free what was captured at the current version: after a failure only some ranks may hold it."""
        for key, owner in list(self._kept.items()):
            if owner.version == self.run.version:
                self._evict(key)

    def drift(self, window: UpdateWindow, leased: LeasedGroup, probe: Branch) -> Drift:
        """Score one response on the leased prefix and on a fresh capture of the same prompt."""

        def score(group: PromptGroup) -> Tensor:
            return Replay(group).score(work_of([[probe]]))[0][1][0].double()

        with torch.no_grad():
            stale_R = score(leased)
            with window.prompt_group(leased.name, leased.prompt_ids, "response_only") as fresh:
                difference_R = (score(fresh) - stale_R).abs()
        return Drift(float(difference_R.mean()), float(difference_R.max()), leased.age)

    def _evict(self, key: str) -> None:
        self._kept.pop(key).close()
