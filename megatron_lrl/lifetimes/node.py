"""Nodes: tokens that several branches share, resident from their capture to their sweep.

    PromptGroup    the root: a prompt without its last token, under a gradient contract
      SharedTokens   below it: a run of tokens that several responses go through
        ...
    Documents      a root without tokens, for next-token training

Lifecycle: NEW -> CAPTURED (capture) -> SWEPT (the node's own gradient was added, or none is owed) -> CLOSED.

The last token of a node is not part of what is resident: it is fed again with each child, since its output predicts the
child's first token. Chunks are an execution detail: no chunk size changes a result.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from enum import Enum
from types import TracebackType
from typing import Any, Self

import torch

from megatron_lrl.layers.advance import split_rounds
from megatron_lrl.layers.sequence import SequenceState
from megatron_lrl.lifetimes.ledger import SavedBytes
from megatron_lrl.lifetimes.run import Run
from megatron_lrl.passes.sweep import Terms, TokenRun, feed, sweep
from megatron_lrl.precision import accumulate_dtype


class NodePhase(Enum):
    NEW = "new"
    CAPTURED = "captured"
    SWEPT = "swept"
    CLOSED = "closed"


class Node(ABC):
    """What branches are forked from, and what is fed of them. Exit of a ``with`` block frees it."""

    conventional = False
    """Whether branches begin at position 0 and feed everything themselves."""

    def __init__(self, run: Run, name: str, model: Any) -> None:
        self.run, self.name, self.model = run, name, model
        self.phase = NodePhase.NEW
        self.state: SequenceState | None = None
        self._nbytes = 0
        self._live = False  # the state has adjoints

    @property
    def whole_graph(self) -> bool:
        """Whether a replay keeps one graph through everything it feeds."""
        return self.conventional

    @abstractmethod
    def feed(
        self, branches: Sequence[Sequence[int]]
    ) -> tuple[list[tuple[int, ...]], list[int], list[Sequence[int]]]:
        """What is fed of each branch, the position whose output predicts its first scored token, what is scored."""

    @abstractmethod
    def check_identity(self) -> None:
        """Raise `IdentityMismatch` if the model, prompt or layout is no longer the captured one."""

    def fork(self, branches: int, log: bool = False) -> SequenceState:
        """A state of ``branches`` continuations of what is resident.

        Under autograd the gradient of its live part accumulates in its adjoint, which is allocated when the first
        replay needs it: sampling and scoring do not.
        """
        self.check_identity()
        assert self.state is not None
        if torch.is_grad_enabled():
            self._enable_adjoints()
        return self.state.fork(branches, log)

    def sweep(self) -> list[Any]:
        """Add the node's own gradient; call once, after the last replay. Returns the metric sums of its terms."""
        return []

    def close(self) -> None:
        """Free the state and its adjoint; with ``replay.check_poison`` fill them with NaN first."""
        if self.phase is NodePhase.CLOSED:
            return
        if self.state is not None:
            self.state.close(self.run.config.replay.check_poison)
        self.run.ledger.add("group", -self._nbytes)
        self._nbytes = 0
        self.phase = NodePhase.CLOSED

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _require(self, phase: NodePhase, what: str) -> None:
        if self.phase is not phase:
            raise RuntimeError(f"group {self.name} cannot be {what}: it is {self.phase.value}")

    def _enable_adjoints(self, live_from: int = 0, spare: bool = False) -> None:
        """Allocate the adjoint, once. ``spare``: the capture is not finished."""
        if not self._live:
            assert self.state is not None
            dtype = accumulate_dtype(self.run.core(self.model).config.params_dtype)
            self._hold(self.state.enable_adjoints(dtype, live_from, spare))
            self._live = True

    def _hold(self, nbytes: int) -> None:
        self._nbytes += nbytes
        self.run.ledger.add("group", nbytes)


class Documents(Node):
    """A root without tokens: each branch is a document that starts at position 0, so that nothing leaks into another.

    Under the conventional contract a document is one graph, else it is swept by rounds.
    """

    conventional = True

    def __init__(self, run: Run) -> None:
        super().__init__(run, "documents", run.model)

    @property
    def whole_graph(self) -> bool:
        return self.run.config.prefix.contract == "conventional"

    def check_identity(self) -> None:
        """Nothing is resident that could be another model's."""

    def fork(self, branches: int, log: bool = False) -> SequenceState:
        return self.run.new_state(branches, log=log)

    def feed(
        self, branches: Sequence[Sequence[int]]
    ) -> tuple[list[tuple[int, ...]], list[int], list[Sequence[int]]]:
        return [tuple(ids[:-1]) for ids in branches], [0] * len(branches), [ids[1:] for ids in branches]


class SharedTokens(Node):
    """A run of tokens below another node, resident for the branches that go on from it; its own tokens are scored too.

    Its contract is always exact: what comes after the prompt is live.
    """

    def __init__(self, above: Node, ids: Sequence[int], terms: Terms, start: int) -> None:
        """``ids``: the tokens that are scored; ``start``: position whose output predicts the first of them."""
        super().__init__(above.run, f"{above.name}+{len(ids)}", above.model)
        self.above, self.ids, self.terms, self.start = above, tuple(ids), terms, start
        self._tokens: TokenRun | None = None

    def check_identity(self) -> None:
        if self.phase is NodePhase.CLOSED:
            raise RuntimeError(f"group {self.name} is closed: its tokens are gone")
        self.above.check_identity()

    def feed(
        self, branches: Sequence[Sequence[int]]
    ) -> tuple[list[tuple[int, ...]], list[int], list[Sequence[int]]]:
        tokens = [(*self.ids[-1:], *ids[:-1]) for ids in branches]
        return tokens, [self.start + len(self.ids)] * len(branches), list(branches)

    def capture(self, scored: bool = False) -> list[Any]:
        """Feed the tokens without a graph. ``scored``: returns (values [2, S], index [S]) of each part, on the last
        stage; nothing is swept then."""
        self._require(NodePhase.NEW, "captured")
        self.phase = NodePhase.CAPTURED
        (tokens,), _, _ = self.above.feed([self.ids])
        with torch.set_grad_enabled(not scored):  # what is above gets its adjoint, if it is to be swept
            self.state = self.above.fork(1, log=not scored)
        parts = split_rounds(self.state, [tokens], self.run.config.replay.chunk_size)
        self._tokens = TokenRun(
            self.run, self.model, self.state, parts, self.terms, read_later=True, grown=self._hold
        )
        (found,) = feed([self._tokens], scored=scored)
        self.state.freeze(self.run.runtime.groups.pp)
        self._hold(self.state.nbytes)
        return found

    def sweep(self) -> list[Any]:
        self.check_identity()
        self._require(NodePhase.CAPTURED, "swept")
        assert self._tokens is not None
        self._enable_adjoints()
        meter = SavedBytes(self.run.core(self.model).parameters())
        with meter.measure():
            metrics = sweep([self._tokens])
        self.run.ledger.observe_peak("replay", meter.peak)
        self.phase = NodePhase.SWEPT
        return metrics
