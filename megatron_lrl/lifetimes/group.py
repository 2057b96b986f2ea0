"""PromptGroup: one prompt's resident prefix, its identity, and in exact mode the adjoint of its state.

Lifecycle: NEW -> CAPTURED (capture) -> SWEPT (the prefix's own gradient was added, or none is owed) -> CLOSED.

The prefix is the prompt without its last token; that token is fed again with each response, since its output predicts
the first response token. Chunks are an execution detail: no chunk size changes a result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from itertools import pairwise
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from tqdm import tqdm

from megatron_lrl.attention.kernels import accumulate_dtype
from megatron_lrl.lifetimes.identity import Identity
from megatron_lrl.lifetimes.ledger import SavedBytes
from megatron_lrl.lifetimes.schedule import run_schedule
from megatron_lrl.state import SequenceState, advance
from megatron_lrl.state.adjoint import AdjointState, add_adjoint
from megatron_lrl.state.advance import token_layout

if TYPE_CHECKING:
    from megatron_lrl.lifetimes.run import Run

_PROGRESS_CHUNKS = 8
"""A capture of at least this many chunks shows a progress bar on rank 0."""


class GroupPhase(Enum):
    NEW = "new"
    CAPTURED = "captured"
    SWEPT = "swept"
    CLOSED = "closed"


@dataclass(frozen=True)
class Gradient:
    """Which part of the prefix is live: tokens from ``live_from`` on (its length: none)."""

    live_from: int

    @classmethod
    def of_contract(cls, contract: str, prefix_tokens: int, truncate_tokens: int) -> Gradient:
        """The live part under a contract; truncated(0) is response_only, truncated(>= P) is exact."""
        live = {"response_only": 0, "exact": prefix_tokens, "truncated": truncate_tokens}[contract]
        return cls(max(0, prefix_tokens - live))


class PromptGroup:
    """Context manager around the resident prefix of one prompt, for one model.

    Enter captures; exit frees. Under the conventional contract nothing is captured and replays feed the whole
    sequence.
    """

    def __init__(
        self, run: Run, name: str, prompt_ids: Sequence[int], contract: str, model: Any = None, quiet: bool = True
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
        self._adjoint: AdjointState | None = None
        self._quiet = quiet or not run.runtime.is_main
        self._nbytes = 0
        self._local: list[int] = []  # this rank's tokens of each captured chunk

    @property
    def prefix_ids(self) -> tuple[int, ...]:
        return self.prompt_ids[:-1]

    @property
    def conventional(self) -> bool:
        return self.contract == "conventional"

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

    def fork(self, branches: int) -> SequenceState:
        """A state of ``branches`` continuations of the prefix (of nothing, under the conventional contract)."""
        self.check_identity()
        if self.conventional:
            return SequenceState(branches)
        assert self.state is not None
        if torch.is_grad_enabled() and self._gradient().live_from < len(self.prefix_ids):
            return self._adjoint_buffers().fork(branches)
        return self.state.fork(branches)

    def _adjoint_buffers(self) -> AdjointState:
        """The adjoint of the live part, allocated when the first replay needs it: sampling and scoring do not."""
        if self._adjoint is None:
            assert self.state is not None
            live_from = self._gradient().live_from
            constant = sum(
                n for n, (low, _) in zip(self._local, self._spans(), strict=True) if low < live_from
            )
            dtype = accumulate_dtype(self.run.core(self.model).config.params_dtype)
            self._adjoint = AdjointState(self.state, constant, dtype)
            self._hold(self._adjoint.nbytes)
        return self._adjoint

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
        if self._adjoint is not None:
            spans = [(low, high) for low, high in self._spans() if low >= self._gradient().live_from]
            steps = [partial(self._sweep_chunk, low, high) for low, high in reversed(spans)]
            meter = SavedBytes(self.run.core(self.model).parameters())
            with meter.measure():
                run_schedule(self.model, steps, backward=True)
            self.run.ledger.observe_peak("replay", meter.peak)
        self.phase = GroupPhase.SWEPT

    def close(self) -> None:
        """Free the prefix and its adjoint; with ``replay.check_poison`` fill them with NaN first."""
        if self.phase is GroupPhase.CLOSED:
            return
        fill_nan = self.run.config.replay.check_poison
        if self._adjoint is not None:
            self._adjoint.close(fill_nan)
        if self.state is not None:
            self.state.close(fill_nan)
        self.run.ledger.add("group", -self._nbytes)
        self._nbytes = 0
        self.phase = GroupPhase.CLOSED

    def _gradient(self) -> Gradient:
        prefix = self.run.config.prefix
        return Gradient.of_contract(self.contract, len(self.prefix_ids), prefix.truncate_tokens)

    def _spans(self) -> list[tuple[int, int]]:
        """Captured chunks as [low, high): every multiple of the chunk size, and the limit of the live part."""
        count = len(self.prefix_ids)
        cuts = {*range(0, count, self.run.config.prefix.chunk_size), count}
        live_from = self._gradient().live_from
        if live_from < count:
            cuts.add(live_from)
        return list(pairwise(sorted(cuts)))

    def capture(self) -> None:
        """Feed the prefix, chunk by chunk, without a graph. Entering the group does it; call it once otherwise."""
        if self.phase is not GroupPhase.NEW:
            raise RuntimeError(f"group {self.name} was already captured")
        self.phase = GroupPhase.CAPTURED
        if self.conventional:
            return
        spans = self._spans()
        core = self.run.core(self.model)
        empty = SequenceState()
        self._local = [token_layout(core, empty, [high - low]).local_tokens for low, high in spans]
        self.state = SequenceState(reserve=sum(self._local))
        bar = tqdm(
            total=len(self.prefix_ids), desc=f"capture {self.name}", unit="tok", leave=False, delay=2,
            disable=self._quiet or len(spans) < _PROGRESS_CHUNKS,
        )  # fmt: skip
        with bar:
            run_schedule(self.model, [partial(self._feed, *span, bar) for span in spans], backward=False)
        self.state.freeze()
        self._hold(self.state.nbytes)

    def _feed(self, low: int, high: int, bar: Any, model: Any) -> tuple[Tensor, Any]:
        assert self.state is not None
        output = advance(model, self.state, [self.prefix_ids[low:high]])
        bar.update(high - low)
        return output, lambda _: None

    def _sweep_chunk(self, low: int, high: int, model: Any) -> tuple[Tensor, Any]:
        """Recompute a chunk from the state before it; its loss is <state of the chunk, its adjoint>."""
        assert self._adjoint is not None
        before = [n for n, (start, _) in zip(self._local, self._spans(), strict=True) if start < low]
        first, count = sum(before), self._local[len(before)]
        state = self._adjoint.before(first, low)
        output = advance(model, state, [self.prefix_ids[low:high]])
        if self.run.core(model).post_process:
            # The last layer's output feeds nothing: only keys and values carry the prefix's gradient.
            output = output.new_zeros(())
        return add_adjoint(output, state, self._adjoint, first, count), lambda loss: (loss, None)
