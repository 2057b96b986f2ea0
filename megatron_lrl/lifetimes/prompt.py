"""PromptGroup: the root of a group's tree, a prompt's resident prefix under a gradient contract."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Self

from torch import Tensor
from tqdm import tqdm

from megatron_lrl.layers.advance import local_keys, token_layout
from megatron_lrl.layers.sequence import SequenceState
from megatron_lrl.lifetimes.identity import Identity
from megatron_lrl.lifetimes.ledger import SavedBytes
from megatron_lrl.lifetimes.node import Node, NodePhase
from megatron_lrl.lifetimes.run import Run
from megatron_lrl.models.head import LogprobHead
from megatron_lrl.passes.kept import KeptGraphs, largest_over_replica
from megatron_lrl.passes.restarts import Part, Restarts, plan_restarts
from megatron_lrl.passes.sweep import TokenRun, feed, sweep

_PROGRESS_CHUNKS = 8
"""A capture of at least this many chunks shows a progress bar on rank 0."""


def live_from(contract: str, prefix_tokens: int, truncate_tokens: int) -> int:
    """Position from which prefix tokens are live (the prefix's length: none).

    truncated(0) is response_only, truncated(T >= P) is exact.
    """
    live = {"conventional": 0, "response_only": 0, "exact": prefix_tokens, "truncated": truncate_tokens}[
        contract
    ]
    return max(0, prefix_tokens - live)


class PromptGroup(Node):
    """The resident prefix of one prompt, for one model; entering captures.

    Under the conventional contract nothing is captured and replays feed the whole sequence.
    """

    def __init__(
        self,
        run: Run,
        name: str,
        prompt_ids: Sequence[int],
        contract: str,
        model: Any = None,
        quiet: bool = True,
    ) -> None:
        """``model``: whose prefix (default: the policy; else the reference). Raises ValueError for an empty prompt."""
        if not prompt_ids:
            raise ValueError(f"group {name}: the prompt is empty")
        super().__init__(run, name, run.model if model is None else model)
        self.prompt_ids, self.contract = tuple(prompt_ids), contract
        self.version = run.version
        self._tokens: _Prefix | None = None
        self._spans: list[tuple[int, int]] | None = None  # asked for with every chunk
        self._quiet = quiet or not run.runtime.is_main

    @property
    def prefix_ids(self) -> tuple[int, ...]:
        return self.prompt_ids[:-1]

    @property
    def conventional(self) -> bool:  # type: ignore[override]
        return self.contract == "conventional"

    def feed(
        self, branches: Sequence[Sequence[int]]
    ) -> tuple[list[tuple[int, ...]], list[int], list[Sequence[int]]]:
        prompt = self.prompt_ids if self.conventional else self.prompt_ids[-1:]
        return (
            [(*prompt, *ids[:-1]) for ids in branches],
            [len(self.prompt_ids) - 1] * len(branches),
            list(branches),
        )

    @property
    def identity(self) -> Identity:
        """What this group's prefix was captured for."""
        return self.run.identity(self.prefix_ids, self.version)

    def __enter__(self) -> Self:
        try:
            self.capture()
        except BaseException:
            self.close()
            raise
        return self

    def check_identity(self) -> None:
        if self.phase is NodePhase.CLOSED:
            raise RuntimeError(f"group {self.name} is closed: its prefix is gone")
        self.identity.require(self.run.identity(self.prefix_ids))

    def fork(self, branches: int, log: bool = False) -> SequenceState:
        if not self.conventional:
            return super().fork(branches, log)
        self.check_identity()
        return self.run.new_state(branches, log=log)

    @property
    def live_from(self) -> int:
        """Position of the first prefix token whose state is not a constant."""
        return live_from(self.contract, len(self.prefix_ids), self.run.config.prefix.truncate_tokens)

    def spans(self) -> list[tuple[int, int]]:
        """Captured chunks as [low, high): every multiple of the chunk size, the model's own cuts, the live limit."""
        if self._spans is None:
            count = len(self.prefix_ids)
            cuts = {*range(0, count, self.run.config.prefix.chunk_size), count}
            cuts |= self.run.new_state(1).cuts(count) | {min(self.live_from, count)}
            self._spans = list(pairwise(sorted(cuts)))
        return self._spans

    def restarts(self) -> Restarts:
        """How the prefix is swept: where from, and what is run forward again for it (prefix.snapshot_bytes)."""
        core, layout = self.run.core(self.model), self.run.runtime.layout
        budget, dtype = self.run.config.prefix.snapshot_bytes, core.config.params_dtype
        starts = [low for low, _ in self.spans()]
        return plan_restarts(starts, self.live_from, core.arch, layout, dtype, budget, self.name)

    def capture(self) -> None:
        """Feed the prefix, chunk by chunk, without a graph. Entering the group does it; call it once otherwise."""
        if self.phase is not NodePhase.NEW:
            raise RuntimeError(f"group {self.name} was already captured")
        self.phase = NodePhase.CAPTURED
        if self.conventional:
            return
        spans = self.spans()
        core, empty = self.run.core(self.model), self.run.new_state(1)
        local = local_keys(core, empty, spans)
        live = self.live_from < len(self.prefix_ids)
        self.state = self.run.new_state(
            1,
            reserve=empty.reservation(spans, local),
            log=live,
            keep_from=self.live_from if live else None,
        )
        if live:
            self.state.restarts = self.restarts().positions
        bar = tqdm(
            total=len(self.prefix_ids), desc=f"capture {self.name}", unit="tok", leave=False, delay=2,
            disable=self._quiet or len(spans) < _PROGRESS_CHUNKS,
        )  # fmt: skip
        self._tokens = _Prefix(self, self.state, bar)
        if spans:
            with bar:
                feed([self._tokens])
        self.state.freeze(self.run.runtime.groups.pp)
        # Adjoints that exist already are held; kept graphs live as long as the group, until they are swept.
        self._hold(self.state.nbytes - self._nbytes + self._tokens.kept_bytes)

    def sweep(self) -> list[Any]:
        """Chunks in reverse, one chunk's graph alive at a time. Adds nothing under response_only or conventional."""
        self.check_identity()
        self._require(NodePhase.CAPTURED, "swept")
        if self._live:
            assert self.state is not None and self._tokens is not None
            meter = SavedBytes(self.run.core(self.model).parameters())
            with meter.measure():
                for part in reversed(self.restarts().parts):
                    refilled = self._refill(part)
                    sweep([self._tokens], part.advances[::-1])
                    self.state.forget(part.advances[0] + 1)
                    self._hold(-refilled)
            self.run.ledger.observe_peak("replay", meter.peak)
        self.phase = NodePhase.SWEPT
        return []

    def close(self) -> None:
        if self._tokens is not None:
            self._tokens.drop_graphs()
        super().close()

    def _enable_adjoints(self, live_from: int = 0, spare: bool = False) -> None:
        if self.live_from < len(self.prefix_ids):
            super()._enable_adjoints(self.live_from, spare)

    def _refill(self, part: Part) -> int:
        """Run chunks forward once more for what is not kept before each of them. Returns by how much the state grew."""
        assert self.state is not None and self._tokens is not None
        if not part.again:
            return 0
        first, chunks = part.advances[0], self._tokens.parts
        again = self.state.restart(first, part.again[-1] + 1)
        # What a pipeline's last stage hands out was handed out in the capture: all chunks at once fill the stages.
        feed([TokenRun(self.run, self.model, again, [chunks[i] for i in part.again])], settle=False)
        before = self.state.nbytes
        self.state.refill(again, first)
        self._hold(grown := self.state.nbytes - before)
        return grown


class _Prefix(TokenRun):
    """A prompt's prefix on its way in and back; graphs of some chunks may be kept for the sweep."""

    def __init__(self, group: PromptGroup, state: SequenceState, bar: tqdm) -> None:
        chunks = [[group.prefix_ids[low:high]] for low, high in group.spans()]
        super().__init__(group.run, group.model, state, chunks, read_later=True, grown=group._hold)
        self._group, self._bar = group, bar
        self._kept = self._kept_graphs()

    @property
    def kept_bytes(self) -> int:
        """Saved-for-backward bytes of kept graphs."""
        return 0 if self._kept is None else self._kept.nbytes

    def drop_graphs(self) -> None:
        if self._kept is not None:
            self._kept.clear()

    def feed(self, number: int, model: Any, head: LogprobHead | None) -> Tensor:
        (tokens,) = self.parts[number]
        if self._kept is not None and self._kept.wants(number):
            if number:
                # The graph's backward adds to the adjoint of what the chunk reads: it must be there before.
                self._group._enable_adjoints(spare=True)
            runtime = self.run.runtime
            output = self._kept.capture(
                model, self.state, tokens, number, lambda nbytes: largest_over_replica(nbytes, runtime)
            )
        else:
            output = super().feed(number, model, head)
        self._bar.update(len(tokens))
        return output

    def anew(self, number: int, model: Any, head: LogprobHead | None) -> tuple[Tensor, SequenceState]:
        kept = None if self._kept is None else self._kept.take(number)
        return super().anew(number, model, head) if kept is None else kept

    def _kept_graphs(self) -> KeptGraphs | None:
        budget, low_limit = self.run.config.prefix.keep_graph_bytes, self._group.live_from
        if not budget or self.state.sequential or low_limit >= len(self._group.prefix_ids):
            return None
        core, empty, spans = self.run.core(self.model), self.run.new_state(1), self._group.spans()
        slots = [token_layout(core, empty, [high - low]).local_slots for low, high in spans]
        first = next(i for i, (low, _) in enumerate(spans) if low >= low_limit)
        return KeptGraphs(budget, slots, first, list(core.parameters()))
