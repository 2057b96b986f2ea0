"""Bytes that sampling will take, counted from shapes: the same numbers on every rank of a replica."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from megatron_lrl.layers.advance import token_layout
from megatron_lrl.layers.kind import Capture, Place
from megatron_lrl.layers.kinds import kinds_of
from megatron_lrl.layers.softmax.kv import grown_capacity
from megatron_lrl.lifetimes.prompt import PromptGroup
from megatron_lrl.lifetimes.run import Run
from megatron_lrl.precision import accumulate_dtype


class Room:
    """What prefixes and branches hold on a rank, each on the pipeline stage that has most."""

    def __init__(self, run: Run, tokens: int) -> None:
        """``tokens``: fed of a branch, at most."""
        self.run, self.tokens = run, tokens
        self._core = run.core(run.model)
        self._place = Place(run.arch, run.runtime.layout, None, self._core.config.params_dtype)
        self._branch: dict[int, int] = {}  # by the length of the prefix

    def branch(self, prefix: int) -> int:
        """A branch's own tokens behind a prefix of so many. A rank of cp holds those of 1 / cp of the branches."""
        if prefix not in self._branch:
            end, cp = prefix + self.tokens, self._place.layout.cp
            cuts = {cut for cut in self.run.new_state(1).cuts(end) if cut > prefix}  # the model's own chunks
            spans = list(pairwise(sorted({prefix, end} | cuts)))
            local = [-(-grown_capacity(high - low) // cp) for low, high in spans]
            self._branch[prefix] = self._resident(spans, local, end)
        return self._branch[prefix]

    def prefix(self, group: PromptGroup) -> int:
        """A group's prefix, without an adjoint."""
        spans = group.spans()
        if not spans:
            return 0
        empty = self.run.new_state(1)
        slots = {n: token_layout(self._core, empty, [n]).local_slots for n in {b - a for a, b in spans}}
        return self._resident(spans, [slots[high - low] for low, high in spans], spans[-1][1])

    def at_once(self, prefix: int, branches: int, nbytes: int) -> int:
        """How many of some branches decode together in so many bytes: one at least."""
        return max(1, min(branches, nbytes // max(1, self.branch(prefix))))

    def _resident(self, spans: Sequence[tuple[int, int]], local: Sequence[int], end: int) -> int:
        capture = Capture(tuple(spans), tuple(local), live_from=end)
        wide = accumulate_dtype(self._place.dtype)
        return sum(kind.resident(self._place, capture, wide).state for kind in kinds_of(self.run.arch))


__all__ = ["Room"]
