"""PromptGroup: one prompt's resident prefix, its identity, and in exact mode the adjoint of its state.

Lifecycle: NEW -> CAPTURED (capture) -> SWEPT (the prefix's own gradient was added, or none is owed) -> CLOSED.

The prefix is the prompt without its last token; that token is fed again with each response, since its output predicts
the first response token. Chunks are an execution detail: no chunk size changes a result.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from functools import partial
from itertools import pairwise
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from tqdm import tqdm

from megatron_lrl.layers.adjoint import add_adjoint
from megatron_lrl.layers.advance import advance, token_layout
from megatron_lrl.layers.sequence import SequenceState
from megatron_lrl.layers.softmax.kernels import accumulate_dtype
from megatron_lrl.lifetimes.identity import Identity
from megatron_lrl.passes.kept import KeptGraphs, largest_over_replica
from megatron_lrl.passes.ledger import SavedBytes
from megatron_lrl.passes.restarts import Part, Restarts, plan_restarts
from megatron_lrl.passes.schedule import in_passes, run_schedule

if TYPE_CHECKING:
    from megatron_lrl.lifetimes.run import Run

_PROGRESS_CHUNKS = 8
"""A capture of at least this many chunks shows a progress bar on rank 0."""


class GroupPhase(Enum):
    NEW = "new"
    CAPTURED = "captured"
    SWEPT = "swept"
    CLOSED = "closed"


def live_from(contract: str, prefix_tokens: int, truncate_tokens: int) -> int:
    """Position from which prefix tokens are live (the prefix's length: none).

    truncated(0) is response_only, truncated(T >= P) is exact.
    """
    live = {"conventional": 0, "response_only": 0, "exact": prefix_tokens, "truncated": truncate_tokens}[
        contract
    ]
    return max(0, prefix_tokens - live)


class PromptGroup:
    """Context manager around the resident prefix of one prompt, for one model.

    Enter captures; exit frees. Under the conventional contract nothing is captured and replays feed the whole
    sequence.
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
        self.run, self.name, self.prompt_ids = run, name, tuple(prompt_ids)
        self.contract = contract
        self.model = run.model if model is None else model
        self.version = run.version
        self.phase = GroupPhase.NEW
        self.state: SequenceState | None = None
        self._live = False  # the state has adjoints
        self._kept: KeptGraphs | None = None
        self._spans: list[tuple[int, int]] | None = None  # asked for with every chunk
        self._quiet = quiet or not run.runtime.is_main
        self._nbytes = 0

    @property
    def prefix_ids(self) -> tuple[int, ...]:
        return self.prompt_ids[:-1]

    @property
    def conventional(self) -> bool:
        return self.contract == "conventional"

    @property
    def whole_graph(self) -> bool:
        """Whether a replay keeps one graph through everything it feeds."""
        return self.conventional

    def feed(
        self, responses: Sequence[Sequence[int]]
    ) -> tuple[list[tuple[int, ...]], list[int], list[Sequence[int]]]:
        """What a replay feeds, the position whose output predicts each response's first token, and what is scored."""
        prompt = self.prompt_ids if self.conventional else self.prompt_ids[-1:]
        tokens = [(*prompt, *ids[:-1]) for ids in responses]
        return tokens, [len(self.prompt_ids) - 1] * len(responses), list(responses)

    @property
    def identity(self) -> Identity:
        """What this group's prefix was captured for."""
        return self.run.identity(self.prefix_ids, self.version)

    def __enter__(self) -> PromptGroup:
        try:
            self.capture()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def check_identity(self) -> None:
        """Raise `IdentityMismatch` if the model, prompt or layout is no longer the captured one."""
        if self.phase is GroupPhase.CLOSED:
            raise RuntimeError(f"group {self.name} is closed: its prefix is gone")
        self.identity.require(self.run.identity(self.prefix_ids))

    def fork(self, branches: int, log: bool = False) -> SequenceState:
        """A state of ``branches`` continuations of the prefix (of nothing, under the conventional contract).

        Under autograd the gradient of the prefix's live part accumulates in its adjoint, which is allocated when the
        first replay needs it: sampling and scoring do not.
        """
        self.check_identity()
        if self.conventional:
            return self.run.new_state(branches, log=log)
        assert self.state is not None
        if torch.is_grad_enabled() and self.live_from < len(self.prefix_ids):
            self._enable_adjoints()
        return self.state.fork(branches, log)

    def _enable_adjoints(self, spare: bool = False) -> None:
        """Allocate the adjoint, once. ``spare``: the capture is not finished."""
        if not self._live:
            assert self.state is not None
            dtype = accumulate_dtype(self.run.core(self.model).config.params_dtype)
            self._hold(self.state.enable_adjoints(dtype, self.live_from, spare))
            self._live = True

    def _hold(self, nbytes: int) -> None:
        self._nbytes += nbytes
        self.run.ledger.add("group", nbytes)

    def sweep(self) -> None:
        """Add the prefix's own gradient: chunks in reverse, one chunk's graph alive at a time.

        Call once, after the last replay. Adds nothing under response_only or conventional.
        """
        self.check_identity()
        if self.phase is not GroupPhase.CAPTURED:
            raise RuntimeError(f"group {self.name} cannot be swept: it is {self.phase.value}")
        if self._live:
            assert self.state is not None
            meter = SavedBytes(self.run.core(self.model).parameters())
            with meter.measure():
                for part in reversed(self.restarts().parts):
                    refilled = self._refill(part)
                    for batch in in_passes(part.advances[::-1], self.state, self.run):
                        self.state.collect_adjoints(batch[0], self.run.runtime.groups.pp)
                        steps = [partial(self._sweep_chunk, i) for i in batch]
                        run_schedule(self.run, self.model, steps, backward=True, state_only=True)
                    self.state.forget(part.advances[0] + 1)
                    self._hold(-refilled)
            self.run.ledger.observe_peak("replay", meter.peak)
        self.phase = GroupPhase.SWEPT

    def restarts(self) -> Restarts:
        """How the prefix is swept: where from, and what is run forward again for it (prefix.snapshot_bytes)."""
        core, layout = self.run.core(self.model), self.run.runtime.layout
        budget, dtype = self.run.config.prefix.snapshot_bytes, core.config.params_dtype
        starts = [low for low, _ in self.spans()]
        return plan_restarts(starts, self.live_from, core.arch, layout, dtype, budget, self.name)

    def _refill(self, part: Part) -> int:
        """Run chunks forward once more for what is not kept before each of them. Returns by how much the state grew."""
        assert self.state is not None
        if not part.again:
            return 0
        first, spans = part.advances[0], self.spans()
        again = self.state.restart(first, part.again[-1] + 1)

        def feed(low: int, high: int, model: Any) -> tuple[Tensor, Any]:
            return advance(model, again, [self.prefix_ids[low:high]]), lambda _: None

        with torch.no_grad():
            # What a pipeline's last stage hands out was handed out in the capture: all chunks at once fill the stages.
            steps = [partial(feed, *spans[i]) for i in part.again]
            run_schedule(self.run, self.model, steps, backward=False, state_only=True)
        before = self.state.nbytes
        self.state.refill(again, first)
        self._hold(grown := self.state.nbytes - before)
        return grown

    def close(self) -> None:
        """Free the prefix and its adjoint; with ``replay.check_poison`` fill them with NaN first."""
        if self.phase is GroupPhase.CLOSED:
            return
        fill_nan = self.run.config.replay.check_poison
        if self._kept is not None:
            self._kept.clear()
        if self.state is not None:
            self.state.close(fill_nan)
        self.run.ledger.add("group", -self._nbytes)
        self._nbytes = 0
        self.phase = GroupPhase.CLOSED

    @property
    def live_from(self) -> int:
        """Position of the first prefix token whose state is not a constant."""
        return live_from(self.contract, len(self.prefix_ids), self.run.config.prefix.truncate_tokens)

    def spans(self) -> list[tuple[int, int]]:
        """Captured chunks as [low, high): every multiple of the chunk size, the model's own cuts, the live limit."""
        if self._spans is not None:
            return self._spans
        count = len(self.prefix_ids)
        cuts = {*range(0, count, self.run.config.prefix.chunk_size), count} | self.run.new_state(1).cuts(
            count
        )
        self._spans = list(pairwise(sorted(cuts | {min(self.live_from, count)})))
        return self._spans

    def capture(self) -> None:
        """Feed the prefix, chunk by chunk, without a graph. Entering the group does it; call it once otherwise."""
        if self.phase is not GroupPhase.NEW:
            raise RuntimeError(f"group {self.name} was already captured")
        self.phase = GroupPhase.CAPTURED
        if self.conventional:
            return
        spans = self.spans()
        core, empty = self.run.core(self.model), self.run.new_state(1)
        local = [token_layout(core, empty, [high - low]).local_tokens for low, high in spans]
        live = self.live_from < len(self.prefix_ids)
        self.state = self.run.new_state(
            1,
            reserve=empty.reservation(spans, local),
            log=live,
            keep_from=self.live_from if live else None,
        )
        if live:
            self.state.restarts = self.restarts().positions
        if live and self.run.config.prefix.keep_graph_bytes and not self.state.sequential:
            slots = [token_layout(core, empty, [high - low]).local_slots for low, high in spans]
            first = next(i for i, (low, _) in enumerate(spans) if low >= self.live_from)
            budget = self.run.config.prefix.keep_graph_bytes
            self._kept = KeptGraphs(budget, slots, first, list(core.parameters()))
        bar = tqdm(
            total=len(self.prefix_ids), desc=f"capture {self.name}", unit="tok", leave=False, delay=2,
            disable=self._quiet or len(spans) < _PROGRESS_CHUNKS,
        )  # fmt: skip
        with bar:
            steps = [partial(self._feed, i, *span, bar) for i, span in enumerate(spans)]
            for batch in in_passes(steps, self.state, self.run):
                run_schedule(self.run, self.model, batch, backward=False, state_only=True)
                self.state.settle(self.run.runtime.groups.pp)
        self.state.freeze(self.run.runtime.groups.pp)
        # Adjoints that exist already are held; kept graphs live as long as the group, until they are swept.
        held = 0 if self._kept is None else self._kept.nbytes
        self._hold(self.state.nbytes - self._nbytes + held)

    def _feed(self, number: int, low: int, high: int, bar: Any, model: Any) -> tuple[Tensor, Any]:
        assert self.state is not None
        tokens = self.prefix_ids[low:high]
        if self._kept is not None and self._kept.wants(number):
            if number:
                # The graph's backward adds to the adjoint of what the chunk reads: it must be there before.
                self._enable_adjoints(spare=True)
            output = self._kept.capture(
                model, self.state, tokens, number, lambda n: largest_over_replica(n, self.run.runtime)
            )
        else:
            output = advance(model, self.state, [tokens])
        bar.update(high - low)
        return output, lambda _: None

    def _sweep_chunk(self, index: int, model: Any) -> tuple[Tensor, Any]:
        """Recompute a chunk from the state before it; its loss is <state of the chunk, its adjoint>."""
        assert self.state is not None
        self._hold(self.state.prepare_sweep(index))
        kept = None if self._kept is None else self._kept.take(index)
        if kept is not None:
            output, again = kept
        else:
            low, high = self.spans()[index]
            again = self.state.before(index)
            output = advance(model, again, [self.prefix_ids[low:high]])
        if self.run.core(model).post_process:
            # The last layer's output feeds nothing: only keys and values carry the prefix's gradient.
            output = output.new_zeros(())
        return add_adjoint(output, again, self.state, index), lambda loss: (loss, None)
