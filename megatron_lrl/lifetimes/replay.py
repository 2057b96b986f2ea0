"""Replay: the live graphs of K responses at a time, against the resident prefix.

A replay feeds ``[last prompt token] + response[:-1]`` and scores ``response``; under the conventional contract it feeds
the whole sequence. Each micro-batch of K responses is one graph; it is freed as soon as its gradient is in the buffers.

Legend: N response tokens of a micro-batch, one response after another; S those scored on this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_lrl.experts.recorded import RecordedRouting, ReplayRouting
from megatron_lrl.layers.adjoint import add_adjoint
from megatron_lrl.layers.advance import advance, split_rounds
from megatron_lrl.layers.sequence import SequenceState
from megatron_lrl.layers.softmax.kernels import accumulate_dtype
from megatron_lrl.lifetimes.contributions import BranchKey
from megatron_lrl.lifetimes.documents import Documents
from megatron_lrl.lifetimes.group import PromptGroup
from megatron_lrl.models.head import LogprobHead, Targets, logits_rows
from megatron_lrl.passes.ledger import SavedBytes
from megatron_lrl.passes.schedule import from_last_stage, run_schedule, sum_over_cp

TokenLoss = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, dict[str, Tensor]]]
"""``loss(logprob_S, entropy_S, index_S)``: final-weight loss sum and metric sums of the tokens scored on this rank.
``index_S`` are their places among the micro-batch's N response tokens."""


@dataclass(frozen=True)
class Branch:
    """A recorded response of a group."""

    key: BranchKey
    ids: tuple[int, ...]
    routing: RecordedRouting | None = None  # of the tokens that are fed, if it was recorded
    mask: tuple[int, ...] | None = None  # 0 where a token is fed but never scored


class NonFiniteLoss(FloatingPointError):
    """Losses of a window are NaN or infinite; the message names the branches."""


class Replay:
    """Passes of responses over one prompt group."""

    def __init__(self, group: PromptGroup | Documents, balance: float = 0.0) -> None:
        """``balance``: weight of a response's auxiliary loss in the window (moe.aux_loss_coef)."""
        self.group, self.run, self.balance = group, group.run, balance
        self.nonfinite: list[
            str
        ] = []  # losses that were NaN or infinite, with their branches (last stage only)

    def gradient(
        self, batches: Sequence[Sequence[Branch]], losses: Sequence[TokenLoss]
    ) -> list[dict[str, Tensor]]:
        """Add the gradient of each micro-batch to the buffers. Returns this rank's metric sums (last stage only).

        A loss that is not finite is named in `nonfinite` and counts as 0; its backward still runs, because the
        other ranks of the replica are in it.
        """
        # Resident state is referenced, not saved; parameters and tied views are the run's.
        meter = SavedBytes([*self.run.core(self.group.model).parameters()])
        passes = [_Pass(self, batch, loss) for batch, loss in zip(batches, losses, strict=True)]
        metrics: list[dict[str, Tensor]] = []
        with meter.measure():
            for flight in self._flights(passes):
                with flight:
                    metrics += flight.gradient()
        self.run.ledger.observe_peak("replay", meter.peak)
        return metrics

    def score(self, batches: Sequence[Sequence[Branch]]) -> list[list[tuple[Tensor, Tensor]]]:
        """Log-probabilities and entropies of every response token, on every rank of the replica.

        Returns, per batch and branch, (logprob_R, entropy_R) in float32 (float64 for float64), on the CPU.
        """
        results = []
        for flight in self._flights([_Pass(self, batch, None) for batch in batches]):
            with flight:
                parts = flight.score()
            for i, one in enumerate(flight.passes):
                full = torch.zeros(2, one.targets.tokens, dtype=self.run.wide, device=self.run.runtime.device)
                for values_2S, index_S in parts[i]:
                    full[:, index_S] = values_2S
                full = from_last_stage(sum_over_cp(full, self.run.runtime), self.run.runtime).cpu()
                lengths = [len(ids) for ids in one.targets.ids]
                results.append(list(zip(full[0].split(lengths), full[1].split(lengths), strict=True)))
        return results

    def routing(
        self, batch: Sequence[Branch], first: Sequence[int], ids: Sequence[Sequence[int]]
    ) -> ReplayRouting | None:
        """What sees the routing of a micro-batch, if anything is asked of it.

        Another model than the policy (the reference) has its own routing: records are not its.
        """
        run = self.run
        policy = run.core(self.group.model) is run.core(run.model)
        records = [branch.routing if policy else None for branch in batch]
        wanted = self.balance or run.config.moe.router_bias_update_rate
        planned = run.runtime.device.type == "meta"  # there are no values to see
        if planned or (not (policy and wanted) and all(record is None for record in records)):
            return None
        return ReplayRouting(run, records, first, [len(branch) for branch in ids], self.balance)

    def _flights(self, passes: list[_Pass]) -> Iterator[_Flight]:
        """Micro-batches that are under way together.

        One round each: all of them, since a graph is freed before the next one is built. Several rounds: as many as
        fill the pipeline, since their states stay resident between rounds.
        """
        probe = self.run.new_state(1) if self.group.conventional else self.group.fork(1)
        longest = max((len(tokens) for one in passes for tokens in one.tokens), default=0)
        several = len(probe.rounds([longest])) > 1
        size = self.run.runtime.layout.pp if several else max(1, len(passes))
        for start in range(0, len(passes), size):
            yield _Flight(self, passes[start : start + size])


class _Pass:
    """A micro-batch of responses: what is fed, what is scored, what its loss is."""

    def __init__(self, replay: Replay, batch: Sequence[Branch], loss: TokenLoss | None) -> None:
        self.batch, self.loss, self.nonfinite = batch, loss, replay.nonfinite
        tokens, first, ids = replay.group.feed([branch.ids for branch in batch])
        self.routing = replay.routing(batch, first, ids)
        self.tokens: Sequence[Sequence[int]] = tokens
        self.targets = Targets(first, ids, [branch.mask for branch in batch])

    def finish(self, values_2S: Tensor, index_S: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss and metric sums of scored tokens."""
        assert self.loss is not None
        total, metrics = self.loss(values_2S[0], values_2S[1].detach(), index_S)
        if not torch.isfinite(total):
            names = ", ".join(str(branch.key) for branch in self.batch)
            self.nonfinite.append(f"the loss of {names} is {total.item()}")
            total = values_2S.nan_to_num(0.0, 0.0, 0.0).mul(0.0).sum()
        return total, metrics


class _Flight:
    """Micro-batches that go through the rounds of their state together.

    A response that crosses no LastKV boundary is one round: one graph, forward and backward. One that does is fed
    without a graph up to its last round; then its rounds are swept in reverse, one round's graph alive at a time. One
    that crosses a boundary but is no longer than a chunk stays one graph (without a pipeline): a round may be as large.
    """

    def __init__(self, replay: Replay, passes: Sequence[_Pass]) -> None:
        self.replay, self.run, self.model, self.passes = replay, replay.run, replay.group.model, passes
        self.config = self.run.config
        self.states: list[SequenceState] = []
        self.feeds: list[list[Any]] = []
        self._nbytes = 0

    def __enter__(self) -> _Flight:
        return self

    def __exit__(self, *_: object) -> None:
        for state in self.states:
            state.close(self.config.replay.check_poison)
        self.run.ledger.add("replay", -self._nbytes)
        self._nbytes = 0

    def score(self) -> list[list[tuple[Tensor, Tensor]]]:
        """Per micro-batch the (values [2, S], index [S]) of each round, on the last stage."""
        with torch.no_grad():
            self._open(log=False)
            found: list[list[tuple[Tensor, Tensor]]] = [[] for _ in self.passes]
            for number in range(max(map(len, self.feeds))):
                members = [j for j, feed in enumerate(self.feeds) if number < len(feed)]
                results = run_schedule(
                    self.run,
                    self.model,
                    [partial(self._feed, j, number, True) for j in members],
                    backward=False,
                )
                for j, result in zip(members, results, strict=bool(results)):
                    found[j].append(result)
                self._settle(members)
        return found

    def gradient(self) -> list[dict[str, Tensor]]:
        """Add the micro-batches' gradient to the buffers."""
        with torch.enable_grad():
            self._open(log=True)
        rounds = max(map(len, self.feeds))
        for number in range(rounds - 1):
            members = [j for j, feed in enumerate(self.feeds) if number < len(feed) - 1]
            steps = [partial(self._feed, j, number, False) for j in members]
            run_schedule(self.run, self.model, steps, backward=False, state_only=True)
            self._settle(members)
        if rounds > 1:
            dtype = accumulate_dtype(self.run.core(self.model).config.params_dtype)
            for state in self.states:
                state.enable_adjoints(dtype)
            self._nbytes = sum(state.nbytes for state in self.states)
            self.run.ledger.add("replay", self._nbytes)
        metrics: list[dict[str, Tensor]] = []
        for number in reversed(range(rounds)):
            members = [j for j, feed in enumerate(self.feeds) if number < len(feed)]
            for j in members:
                if number < len(self.feeds[j]) - 1:
                    self.states[j].collect_adjoints(number, self.run.runtime.groups.pp)
            steps = [partial(self._sweep, j, number) for j in members]
            metrics += run_schedule(self.run, self.model, steps, backward=True)
        return metrics

    def _open(self, log: bool) -> None:
        group = self.replay.group
        for one in self.passes:
            state = group.fork(len(one.batch), log)
            self.states.append(state)
            # One graph through all rounds, where asked for or small, and where stages need no exchange between them.
            small = state.in_one_graph([len(tokens) for tokens in one.tokens])
            whole = (group.whole_graph or small) and log and self.run.runtime.layout.pp == 1
            self.feeds.append([one.tokens] if whole else split_rounds(state, one.tokens))

    def _settle(self, members: Sequence[int]) -> None:
        for j in members:
            self.states[j].settle(self.run.runtime.groups.pp)

    def _head(self, j: int) -> LogprobHead:
        rows = logits_rows(self.config, self.run.arch.vocab_size, self.run.runtime.layout.tp)
        return LogprobHead(self.passes[j].targets, self.config.rollout.temperature, rows)

    def _feed(self, j: int, number: int, scored: bool, model: Any) -> tuple[Tensor, Any]:
        """A round without a graph."""
        head = self._head(j) if scored else None
        output = advance(model, self.states[j], self.feeds[j][number], head, self.passes[j].routing)
        return output, lambda values_2S: (values_2S, head.index_S) if head else None

    def _sweep(self, j: int, number: int, model: Any) -> tuple[Tensor, Any]:
        """A round with its graph: the loss of its tokens, and the adjoint of its state if later rounds read it."""
        state, last = self.states[j], number == len(self.feeds[j]) - 1
        if len(self.feeds[j]) > 1:
            grown = state.prepare_sweep(number)
            self._nbytes += grown
            self.run.ledger.add("replay", grown)
        # A view, gone after this call: only autograd holds the graph, and the schedule frees it after the backward.
        again = state.before(number)
        head = self._head(j)
        output = advance(model, again, self.feeds[j][number], head, self.passes[j].routing)
        if last:
            return output, lambda values_2S: self.passes[j].finish(values_2S, head.index_S)
        if not self.run.core(model).post_process:
            return add_adjoint(output, again, state, number), None

        def finish(values_2S: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            total, metrics = self.passes[j].finish(values_2S, head.index_S)
            return add_adjoint(total, again, state, number), metrics

        return output, finish


def batches_of(branches: Iterable[Branch], size: int) -> list[list[Branch]]:
    """Cut branches into micro-batches of at most ``size``, in order."""
    branches = list(branches)
    return [branches[i : i + size] for i in range(0, len(branches), size)]
