"""Decoding: branches of several groups sampled as one flat list, as many as a byte budget allows.

    waiting   A A A A | B B B B | C C C C          parts of groups, in order; each enters when all of it fits
    decoding  fork of A: 4 branches ─┐
              fork of B: 3 branches ─┴─ advance one token ─ draw ─ finished branches leave, what waits enters

Under pipeline parallelism there are as many micro-batches of branches as stages, all in one schedule. Every decision
follows from shapes and sampled ids, so all ranks of a replica take it alike.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from megatron_lrl.experts.record import Routing
from megatron_lrl.experts.recorded import Recorder
from megatron_lrl.layers.advance import advance
from megatron_lrl.layers.sequence import SequenceState
from megatron_lrl.lifetimes.node import NodePhase
from megatron_lrl.lifetimes.prompt import PromptGroup
from megatron_lrl.lifetimes.room import Room
from megatron_lrl.passes.schedule import from_last_stage, run_schedule, sum_over_cp
from megatron_lrl.rollout.sampling import SampleHead, uniform
from megatron_lrl.settings import RolloutTable

_COMPACT_BELOW = 0.75
"""Finished branches leave a state once fewer than this share of its branches is still decoding."""


@dataclass
class Sampled:
    """What was sampled of a group so far, by response."""

    group: PromptGroup
    number: int  # of its first response among those of all groups
    ids: list[list[int]]
    logprobs: list[list[float]]
    owned: bool  # captured for decoding, and closed with its last response
    prefix_bytes: int
    entropy: float = 0.0
    unfinished: int = 0  # responses that wait or decode
    routing: list[Routing] | None = None


@dataclass
class Cohort:
    """Responses of a group that enter together and keep step."""

    of: Sampled
    active: list[int]  # branch -> response of the group
    state: SequenceState | None = None
    done: set[int] = field(default_factory=set)

    @property
    def feed(self) -> list[list[int]]:
        """The newest token of each branch. A finished one that still has a branch is fed its last token; nothing reads
        the outcome."""
        last = self.of.group.prompt_ids[-1]
        return [[self.of.ids[response][-1] if self.of.ids[response] else last] for response in self.active]


class Decoding:
    """Samples ``responses`` continuations of each group's prompt."""

    def __init__(
        self,
        run: Any,
        settings: RolloutTable,
        stop_ids: frozenset[int],
        groups: Sequence[PromptGroup],
        responses: int,
        max_new_tokens: int,
        update: int,
        capture: Callable[[PromptGroup], None] = PromptGroup.capture,
    ) -> None:
        """Groups that are not captured yet are captured (by ``capture``) when their first branches enter, and closed
        after their last response."""
        self.run, self.settings, self.stop_ids = run, settings, stop_ids
        self.longest, self.update, self.capture = max_new_tokens, update, capture
        self.room = Room(run, max_new_tokens)
        self.recorder = Recorder(run, max_new_tokens) if settings.record_routing else None
        self.sampled = [
            Sampled(
                group,
                place * responses,
                [[] for _ in range(responses)],
                [[] for _ in range(responses)],
                owned := group.phase is NodePhase.NEW,
                self.room.prefix(group) if owned else 0,
                unfinished=responses,
            )
            for place, group in enumerate(groups)
        ]
        self.waiting = deque(part for sampled in self.sampled for part in self._parts(sampled, len(groups)))
        # One list of parts for each micro-batch.
        self.decoding: list[list[Cohort]] = [[] for _ in range(run.runtime.layout.pp)]

    def finish(self) -> list[Sampled]:
        """Sample everything. Returns it in the order of the groups."""
        with torch.no_grad():
            self._enter()
            while any(self.decoding):
                self._step()
                self._leave()
                self._enter()
        return self.sampled

    def _parts(self, sampled: Sampled, groups: int) -> list[Cohort]:
        """A group's responses as they enter: all at once, unless the budget or the pipeline asks for fewer."""
        count = sampled.unfinished
        prefix, budget = len(sampled.group.prefix_ids), self.settings.decode_bytes
        largest = self.room.at_once(prefix, count, budget - sampled.prefix_bytes)
        if self.run.runtime.layout.pp > groups:
            largest = min(largest, -(-count * groups // self.run.runtime.layout.pp))
        return [
            Cohort(sampled, list(range(low, min(low + largest, count)))) for low in range(0, count, largest)
        ]

    def _enter(self) -> None:
        """Let parts in, in order, while they fit; one at least decodes."""
        while self.waiting:
            part = self.waiting[0]
            inside = [other for batch in self.decoding for other in batch]
            if inside and self._bytes([*inside, part]) > self.settings.decode_bytes:
                return
            self.waiting.popleft()
            if part.of.group.phase is NodePhase.NEW:
                self.capture(part.of.group)
            part.state = part.of.group.fork(len(part.active))
            min(self.decoding, key=lambda batch: sum(len(other.active) for other in batch)).append(part)

    def _bytes(self, parts: Sequence[Cohort]) -> int:
        """Of the branches' own tokens at their longest, and of prefixes that are resident for them alone."""
        prefixes = {part.of.number: part.of.prefix_bytes for part in parts}
        return sum(prefixes.values()) + sum(
            len(part.active) * self.room.branch(len(part.of.group.prefix_ids)) for part in parts
        )

    def _step(self) -> None:
        """Draw the next token of every branch."""
        batches = [batch for batch in self.decoding if batch]
        sizes = [sum(len(part.active) for part in batch) for batch in batches]
        starts = list(accumulate(sizes, initial=0))
        token_n, logprob_n, entropy_n = self._draw(batches, starts).tolist()
        for batch, start in zip(batches, starts, strict=False):
            branch = start
            for part in batch:
                for response in part.active:
                    if response not in part.done:
                        self._take(part, response, int(token_n[branch]), logprob_n[branch], entropy_n[branch])
                    branch += 1

    def _take(self, part: Cohort, response: int, token: int, logprob: float, entropy: float) -> None:
        sampled = part.of
        sampled.ids[response].append(token)
        sampled.logprobs[response].append(logprob)
        sampled.entropy += entropy
        if token in self.stop_ids or len(sampled.ids[response]) == self.longest:
            part.done.add(response)
            sampled.unfinished -= 1

    def _leave(self) -> None:
        """Drop finished branches, and what only they needed."""
        ending = [part for batch in self.decoding for part in batch if len(part.done) == len(part.active)]
        shrinking = [
            part
            for batch in self.decoding
            for part in batch
            if 0 < len(part.active) - len(part.done) < _COMPACT_BELOW * len(part.active)
        ]
        if ending or shrinking:  # states only grow in between
            held = sum(p.state.nbytes for batch in self.decoding for p in batch if p.state is not None)
            self.run.ledger.observe_peak("replay", held)
        for part in shrinking:
            assert part.state is not None
            live = [branch for branch, response in enumerate(part.active) if response not in part.done]
            part.state.keep(live)
            part.active, part.done = [part.active[branch] for branch in live], set()
        for part in ending:
            assert part.state is not None
            part.state.close()
            part.state = None
        for sampled in {part.of.number: part.of for part in ending}.values():  # parts may end together
            if not sampled.unfinished:
                self._end(sampled)
        self.decoding = [[part for part in batch if part.state is not None] for batch in self.decoding]

    def _end(self, sampled: Sampled) -> None:
        if self.recorder is not None:
            sampled.routing = self.recorder.records(sampled.number, [len(ids) for ids in sampled.ids])
        if sampled.owned:
            sampled.group.close()

    def _draw(self, batches: Sequence[Sequence[Cohort]], starts: Sequence[int]) -> Tensor:
        """[3, branches] token, log-probability, entropy of each branch's next token, on every rank, on the CPU."""
        runtime = self.run.runtime
        values = torch.zeros(3, starts[-1], dtype=torch.float64, device=runtime.device)
        steps = [
            self._micro_batch(batch, values[:, low:high])
            for batch, low, high in zip(batches, starts, starts[1:], strict=False)
        ]
        run_schedule(self.run, batches[0][0].of.group.model, steps, backward=False)
        for batch in batches:
            for part in batch:
                assert part.state is not None
                part.state.settle(runtime.groups.pp)
        return from_last_stage(sum_over_cp(values, runtime), runtime).cpu()

    def _micro_batch(self, batch: Sequence[Cohort], values_3n: Tensor) -> Any:
        """One token of each branch; ``values_3n`` takes those of this rank's slots."""
        branches = [(part, response) for part in batch for response in part.active]

        def uniforms(first: int) -> list[float]:
            return [
                uniform(
                    self.settings.seed, self.update, part.of.group.name, response, len(part.of.ids[response])
                )
                for part, response in branches[first:]
            ]

        head = SampleHead(uniforms, self.settings.temperature, self.settings.top_p)

        def micro_batch(model: Any) -> tuple[Tensor, Any]:
            local: list[int] = []

            def sample(hidden: Tensor, layout: Any, core: Any) -> Tensor:
                local.append(layout.local_start)
                return head(hidden, layout, core)

            if self.recorder is not None:
                self.recorder.active = [part.of.number + response for part, response in branches]
                self.recorder.first = [len(part.of.group.prompt_ids) - 1 for part, _ in branches]
            state = self.run.together([part.state for part in batch])
            output = advance(
                model, state, [ids for part in batch for ids in part.feed], sample, self.recorder
            )

            def finish(out_3n: Tensor) -> None:
                values_3n[:, local[0] : local[0] + out_3n.shape[1]] = out_3n

            return output, finish

        return micro_batch


__all__ = ["Decoding", "Sampled"]
