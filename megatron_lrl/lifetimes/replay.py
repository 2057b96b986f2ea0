"""Replay: the live graphs of K branches at a time, against what is resident.

A replay feeds ``[last token of the node] + branch[:-1]`` and scores ``branch``; under the conventional contract it
feeds the whole sequence. Each micro-batch of K branches is one graph, or one graph for each of its parts where they are
long (replay.chunk_size) or cross LastKV boundaries; a graph is freed as soon as its gradient is in the buffers.

    visit(node):  its leaves, K at a time
                  for each run of tokens that several branches share:  capture it, visit it, sweep it, free it

Legend: N tokens of a micro-batch, one branch after another; S those scored on this rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from megatron_lrl.experts.recorded import ReplayRouting
from megatron_lrl.layers.advance import split_rounds
from megatron_lrl.lifetimes.ledger import SavedBytes
from megatron_lrl.lifetimes.node import Node, SharedTokens
from megatron_lrl.lifetimes.work import Batch, Branch, Shared, Work
from megatron_lrl.models.head import LogprobHead, Targets, logits_rows
from megatron_lrl.passes.schedule import from_last_stage, sum_over_cp
from megatron_lrl.passes.sweep import TokenRun, feed, sweep
from megatron_lrl.precision import accumulate_dtype

Scores = tuple[Tensor, Tensor]
"""(logprob_R, entropy_R) of a branch's tokens, float32 (float64 for float64), on the CPU; 0 where nothing is scored."""


class NonFiniteLoss(FloatingPointError):
    """Losses of a window are NaN or infinite; the message names the branches."""


class Replay:
    """Passes of branches over one node."""

    def __init__(self, node: Node, balance: float = 0.0) -> None:
        """``balance``: weight of a response's auxiliary loss in the window (moe.aux_loss_coef)."""
        self.node, self.run, self.balance = node, node.run, balance
        self.nonfinite: list[
            str
        ] = []  # losses that were NaN or infinite, with their branches (last stage only)

    def gradient(self, work: Work) -> list[dict[str, Tensor]]:
        """Add the gradient of the work to the buffers. Returns this rank's metric sums (last stage only).

        A loss that is not finite is named in `nonfinite` and counts as 0; its backward still runs, because the
        other ranks of the replica are in it.
        """
        # Resident state is referenced, not saved; parameters and tied views are the run's.
        meter = SavedBytes([*self.run.core(self.node.model).parameters()])
        passes = [_Pass(self, self.node, batch) for batch in work.batches]
        metrics: list[dict[str, Tensor]] = []
        with meter.measure():
            for flight in self._flights(passes):
                with flight:
                    metrics += flight.gradient()
        self.run.ledger.observe_peak("replay", meter.peak)
        for part in work.shared:
            with self._resident(part) as node:
                node.capture()
                below = Replay(node, self.balance)
                below.nonfinite = self.nonfinite
                metrics += below.gradient(part.below)
                metrics += node.sweep()
        return metrics

    def score(self, work: Work) -> list[tuple[Branch, Scores]]:
        """Log-probabilities and entropies of every branch and part, on every rank of the replica."""
        results: list[tuple[Branch, Scores]] = []
        for flight in self._flights([_Pass(self, self.node, batch) for batch in work.batches]):
            with flight:
                parts = flight.score()
            for one, found in zip(flight.passes, parts, strict=True):
                results += one.scores(found)
        for part in work.shared:
            with torch.no_grad(), self._resident(part) as node:
                results += _Pass(self, self.node, part.own).scores(node.capture(scored=True))
                results += Replay(node).score(part.below)
        return results

    def _resident(self, part: Shared) -> SharedTokens:
        terms = _Pass(self, self.node, part.own)
        return SharedTokens(self.node, part.branch.ids, terms, terms.targets.first[0])

    def _flights(self, passes: list[_Pass]) -> Iterator[_Flight]:
        """Micro-batches that are under way together.

        One part each: all of them, since a graph is freed before the next one is built. Several parts: as many as
        fill the pipeline, since their states stay resident between parts.
        """
        longest = max((len(tokens) for one in passes for tokens in one.tokens), default=0)
        if not longest:
            return
        probe = self.run.new_state(1) if self.node.conventional else self.node.fork(1)
        several = len(split_rounds(probe, [range(longest)], self.run.config.replay.chunk_size)) > 1
        size = self.run.runtime.layout.pp if several else len(passes)
        for start in range(0, len(passes), size):
            yield _Flight(self.node, passes[start : start + size])


class _Pass:
    """A micro-batch of branches: what is fed, what is scored, what its loss is."""

    def __init__(self, replay: Replay, node: Node, batch: Batch) -> None:
        self.run, self.batch, self.loss, self.nonfinite = (
            replay.run,
            batch.branches,
            batch.loss,
            replay.nonfinite,
        )
        self.tokens, first, ids = node.feed([branch.ids for branch in self.batch])
        self.routing = self._routing(replay, node, first, [len(one) for one in ids])
        self.targets = Targets(first, ids, [branch.mask for branch in self.batch])

    def head(self) -> LogprobHead:
        config = self.run.config
        rows = logits_rows(config, self.run.arch.vocab_size, self.run.runtime.layout.tp)
        return LogprobHead(self.targets, config.rollout.temperature, rows)

    def finish(self, values_2S: Tensor, index_S: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss and metric sums of scored tokens."""
        assert self.loss is not None
        total, metrics = self.loss(values_2S[0], values_2S[1].detach(), index_S)
        if not torch.isfinite(total):
            names = ", ".join(str(key) for branch in self.batch for key, _ in branch.owners)
            self.nonfinite.append(f"the loss of {names} is {total.item()}")
            total = values_2S.nan_to_num(0.0, 0.0, 0.0).mul(0.0).sum()
        return total, metrics

    def scores(self, parts: Sequence[tuple[Tensor, Tensor]]) -> list[tuple[Branch, Scores]]:
        """The (values [2, S], index [S]) of each part, found on the last stage, by branch and on every rank."""
        runtime = self.run.runtime
        full_2N = torch.zeros(
            2, self.targets.tokens, dtype=self.run.precision.accumulation, device=runtime.device
        )
        for values_2S, index_S in parts:
            full_2N[:, index_S] = values_2S
        full_2N = from_last_stage(sum_over_cp(full_2N, runtime), runtime).cpu()
        lengths = [len(ids) for ids in self.targets.ids]
        found = zip(full_2N[0].split(lengths), full_2N[1].split(lengths), strict=True)
        return list(zip(self.batch, found, strict=True))

    def _routing(
        self, replay: Replay, node: Node, first: Sequence[int], lengths: Sequence[int]
    ) -> ReplayRouting | None:
        """What sees the routing of the micro-batch, if anything is asked of it.

        Another model than the policy (the reference) has its own routing: records are not its.
        """
        run = self.run
        policy = run.core(node.model) is run.core(run.model)
        records = [branch.routing if policy else None for branch in self.batch]
        wanted = replay.balance or run.config.moe.router_bias_update_rate
        planned = run.runtime.device.type == "meta"  # there are no values to see
        if planned or (not (policy and wanted) and all(record is None for record in records)):
            return None
        return ReplayRouting(run, records, first, lengths, replay.balance)


class _Flight:
    """Micro-batches that go through the parts of their states together.

    One that is short and crosses no LastKV boundary is one part: one graph, forward and backward. Otherwise it is fed
    without a graph up to its last part; then its parts are swept in reverse, one part's graph alive at a time. One
    that crosses a boundary but is no longer than a LastKV chunk stays one graph (without a pipeline): a part may be as
    large.
    """

    def __init__(self, node: Node, passes: Sequence[_Pass]) -> None:
        self.node, self.run, self.passes = node, node.run, passes
        self._nbytes = 0
        self._runs: list[TokenRun] = []

    def __enter__(self) -> _Flight:
        return self

    def __exit__(self, *_: object) -> None:
        for one in self._runs:
            one.state.close(self.run.config.replay.check_poison)
        self._hold(-self._nbytes)

    def score(self) -> list[list[tuple[Tensor, Tensor]]]:
        """Per micro-batch the (values [2, S], index [S]) of each part, on the last stage."""
        with torch.no_grad():
            self._open(log=False)
            return feed(self._runs, scored=True)

    def gradient(self) -> list[dict[str, Tensor]]:
        """Add the micro-batches' gradient to the buffers."""
        with torch.enable_grad():
            self._open(log=True)
        if any(one.last for one in self._runs):
            feed(self._runs, but_last=True)
            dtype = accumulate_dtype(self.run.core(self.node.model).config.params_dtype)
            for one in self._runs:
                one.state.enable_adjoints(dtype)
            self._hold(sum(one.state.nbytes for one in self._runs))
        return sweep(self._runs)

    def _open(self, log: bool) -> None:
        limit = self.run.config.replay.chunk_size
        for one in self.passes:
            state = self.node.fork(len(one.batch), log)
            longest = max(len(tokens) for tokens in one.tokens)
            # One graph through all parts, where asked for or small, and where stages need no exchange between them.
            small = state.in_one_graph([len(tokens) for tokens in one.tokens]) and not 0 < limit < longest
            whole = (self.node.whole_graph or small) and log and self.run.runtime.layout.pp == 1
            limit = 0 if self.node.whole_graph else limit
            parts = [one.tokens] if whole else split_rounds(state, one.tokens, limit)
            run = TokenRun(self.run, self.node.model, state, parts, one, grown=self._hold)
            self._runs.append(run)

    def _hold(self, nbytes: int) -> None:
        self._nbytes += nbytes
        self.run.ledger.add("replay", nbytes)
