"""Peaks of saved-for-backward bytes of one pipeline stage, from passes of a short prompt through a short stage.

    layers of the stage   D D D A D D D A          D, A: kinds (token mixer, dense or experts)
    base                  D A                      one of each kind, the real last layer last
    one more of a kind    D D A     A D A          each further layer of a kind adds what one adds

Of many graphs at once two and three are run: each further one adds the same. A graph does not depend on what is
resident, so a prompt of a few chunks gives the peaks of a long one. Only a conventional pass, whose graph is the
whole sequence, is run at full length; it is one pass, whatever the length. Under LastKV both take a pass for every
LastKV chunk, and a response one for every replay.chunk_size, so many are extrapolated from few.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from megatron_lrl.adapters.adapt import adapt
from megatron_lrl.lifetimes.contributions import BranchKey
from megatron_lrl.lifetimes.ledger import Ledger
from megatron_lrl.lifetimes.open import adapter_dtype
from megatron_lrl.lifetimes.prompt import PromptGroup
from megatron_lrl.lifetimes.replay import Replay
from megatron_lrl.lifetimes.run import Run
from megatron_lrl.lifetimes.work import Branch, batches_of, work_of
from megatron_lrl.models.build import configured_model
from megatron_lrl.models.hf_config import Architecture
from megatron_lrl.plan.world import flights

_FEW_FLIGHTS = 3
"""Graphs at once from which on each further one adds the same."""
_FEW_CHUNKS = 4
"""Chunks from which on a response (or, under LastKV, a conventional prompt) takes the same for every further one."""


@dataclass(frozen=True)
class Work:
    """The shape of a window: G responses of R tokens for each prompt of P tokens, K replayed at once."""

    prompt: int
    response: int
    group: int
    concurrent: int

    @property
    def at_once(self) -> int:
        """Responses in one graph: K, or the whole group if it is smaller."""
        return min(self.concurrent, self.group)


class Peaks(NamedTuple):
    """Saved-for-backward bytes."""

    replay: int
    sweep: int


class _Parts(NamedTuple):
    """Bytes: saved for backward by a replay, held by its responses between chunks, saved for backward by the sweep."""

    graph: int
    held: int
    sweep: int


class _PartsLedger(Ledger):
    """Tells graphs from what is held beside them."""

    graph = 0

    def observe_peak(self, lifetime: str, nbytes: int) -> None:
        if lifetime == "replay":
            self.graph = max(self.graph, self.live[lifetime] + nbytes)
        else:
            super().observe_peak(lifetime, nbytes)


class Kind(NamedTuple):
    """What makes layers differ: token mixer, and whether the MLP is a mixture of experts."""

    mixer: str
    sparse: bool


def stage_kinds(arch: Architecture, stages: int, stage: int) -> tuple[Kind, ...]:
    """The layers of one of ``stages`` equal pipeline stages."""
    count = arch.num_layers // stages
    kinds = [Kind(*pair) for pair in zip(arch.mixers, arch.moe_layers, strict=True)]
    return tuple(kinds[stage * count : (stage + 1) * count])


def short_stage(kinds: Sequence[Kind]) -> tuple[tuple[Kind, ...], Counter[Kind]]:
    """One layer of each kind, in the order of their last ones, and how many more there are of each."""
    base: list[Kind] = []
    for kind in reversed(kinds):
        if kind not in base:
            base.insert(0, kind)
    return tuple(base), Counter(kinds) - Counter(base)


class Graphs:
    """Peaks of windows of any shape, for the stage of a planned run."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self._kinds = stage_kinds(run.arch, run.runtime.layout.pp, run.runtime.pp_rank)
        self._runs: dict[tuple[Kind, ...], Run] = {self._kinds: run}
        self._found: dict[tuple[str, Work, int], Peaks] = {}
        self._sweeps: dict[tuple[tuple[Kind, ...], str, int, int], int] = {}

    @property
    def in_flight(self) -> int:
        """Graphs this stage may hold at once."""
        return self.run.runtime.layout.pp - self.run.runtime.pp_rank

    def peaks(self, contract: str, work: Work) -> Peaks:
        """Peaks of a window's replays and of its sweep."""
        depth = self.in_flight
        if depth <= _FEW_FLIGHTS:
            return self._peaks(contract, work, depth)
        few, one_more = (self._peaks(contract, work, n) for n in (_FEW_FLIGHTS - 1, _FEW_FLIGHTS))
        # A sweep has no more graphs than the prompt has chunks.
        swept = min(depth, -(-(work.prompt - 1) // self.run.config.prefix.chunk_size))
        further = (depth, depth if contract == "conventional" else swept)
        return Peaks(
            *(
                a + max(0, n - _FEW_FLIGHTS + 1) * (b - a)
                for n, a, b in zip(further, few, one_more, strict=True)
            )
        )

    def _peaks(self, contract: str, work: Work, depth: int) -> Peaks:
        """With ``depth`` graphs at once."""
        short = replace(
            work, prompt=self._short_prompt(work.prompt, contract, depth), group=work.at_once * depth
        )
        if (contract, short, depth) not in self._found:
            kinds, more = short_stage(self._kinds)
            with flights(depth):
                base = self._rehearse(kinds, contract, short)
                total = list(base)
                for kind, count in more.items():
                    # In front: what is freed before the topmost recurrent layer's backward stays the same.
                    longer = self._rehearse((kind, *kinds), contract, short)
                    total = [t + count * (b - a) for t, a, b in zip(total, base, longer, strict=True)]
            self._found[contract, short, depth] = Peaks(*total)
        return self._found[contract, short, depth]

    def _rehearse(self, kinds: tuple[Kind, ...], contract: str, work: Work) -> Peaks:
        """A pass over layers of these kinds."""
        parts = self._parts(kinds, contract, work)
        return Peaks(max(parts.graph, parts.held), parts.sweep)

    def _parts(self, kinds: tuple[Kind, ...], contract: str, work: Work) -> _Parts:
        """What the pass takes. Many chunks are few and a straight line: every further one adds the same."""
        for size, unit in self._chunks(contract).items():
            tokens = getattr(work, size)
            further = tokens // unit - _FEW_CHUNKS
            if further > 1:
                few, one_more = (
                    self._parts(kinds, contract, replace(work, **{size: tokens - n * unit}))
                    for n in (further, further - 1)
                )
                line = zip(few, one_more, strict=True)
                return _Parts(*(first + further * (second - first) for first, second in line))
        return self._measured(kinds, contract, work)

    def _chunks(self, contract: str) -> dict[str, int]:
        """Tokens after which a pass over a prompt or a response repeats itself."""
        sizes = ("prompt", "response") if contract == "conventional" else ("response",)
        if (lastkv := self.run.arch.lastkv) is not None:
            return dict.fromkeys(sizes, lastkv.chunk_size)
        chunk = self.run.config.replay.chunk_size
        return {"response": chunk} if chunk and contract != "conventional" else {}

    def _measured(self, kinds: tuple[Kind, ...], contract: str, work: Work) -> _Parts:
        run = self._with_layers(kinds)
        branches = [Branch(BranchKey("plan", i), (0,) * work.response) for i in range(work.group)]
        batches = batches_of(branches, work.concurrent)
        before, run.ledger = run.ledger, _PartsLedger()
        try:
            with PromptGroup(run, "plan", (0,) * work.prompt, contract) as group:
                Replay(group).gradient(work_of(batches, [_no_loss] * len(batches)))
                graph, held = run.ledger.graph, run.ledger.peak["replay"]
                # A sweep knows the prompt, not what was replayed.
                swept = kinds, contract, work.prompt, work.group
                if swept not in self._sweeps:
                    run.ledger.graph = 0
                    group.sweep()
                    self._sweeps[swept] = run.ledger.graph
                return _Parts(graph, held, self._sweeps[swept])
        finally:
            run.ledger = before

    def _with_layers(self, kinds: tuple[Kind, ...]) -> Run:
        """A run whose every stage has these layers."""
        if kinds not in self._runs:
            run, pp = self.run, self.run.runtime.layout.pp
            arch = replace(
                run.arch,
                num_layers=len(kinds) * pp,
                mixers=tuple(kind.mixer for kind in kinds) * pp,
                moe_layers=tuple(kind.sparse for kind in kinds) * pp,
            )
            model = configured_model(run.config, arch, run.runtime)
            if (adapters := run.core(run.model).adapters) is not None:
                adapt(model, arch, adapters.spec.like(arch), run.runtime, adapter_dtype(run.config))
            self._runs[kinds] = Run(run.config, run.runtime, arch, model, version=1)
        return self._runs[kinds]

    def _short_prompt(self, prompt: int, contract: str, depth: int) -> int:
        """A prompt that ends as this one and fills the pipeline with its chunks."""
        if contract == "conventional":
            return prompt
        unit, chunks = self.run.config.prefix.chunk_size, depth + 1
        if (lastkv := self.run.arch.lastkv) is not None:
            unit, chunks = math.lcm(unit, lastkv.chunk_size), chunks + 1
        prefix = prompt - 1
        if prefix >= (chunks + 1) * unit and contract != "truncated" and self.run.arch.lastkv is None:
            return 1 + chunks * unit  # a shorter last chunk changes no peak
        return 1 + (prefix if prefix < (chunks + 1) * unit else prefix % unit + chunks * unit)


def _no_loss(
    logprob_S: torch.Tensor, _entropy: torch.Tensor, _index: torch.Tensor
) -> tuple[torch.Tensor, dict]:
    return logprob_S.sum(), {}


__all__ = ["Graphs", "Kind", "Peaks", "Work", "short_stage", "stage_kinds"]
