"""The state of a run of tokens on this rank: one layer state per layer of this pipeline stage.

Lifecycle: OPEN (grows by `advance`) -> FROZEN (read by forks only) -> CLOSED (freed; any use raises).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Enum

from torch import Tensor

from megatron_lrl.state.kv import KVLayer, poison


class Phase(Enum):
    """OPEN: may grow. FROZEN: a prefix that forks read. CLOSED: freed; a read is an error."""

    OPEN = "open"
    FROZEN = "frozen"
    CLOSED = "closed"


class SequenceState:
    """What the model remembers of the tokens fed so far, for one or more branches.

    Append-only. A fork shares the tokens of a one-branch state and owns what comes after.
    """

    def __init__(self, branches: int = 1, start: int = 0, reserve: int = 0) -> None:
        """An empty state of ``branches`` sequences whose first token will stand at position ``start``.

        ``reserve``: tokens this rank will own, if known, so that they lie in one block.
        """
        if branches < 1:
            raise ValueError(f"a state holds at least one branch, not {branches}")
        self.counts: list[int] = [start] * branches
        self.phase = Phase.OPEN
        self._layers: dict[int, KVLayer] = {}
        self._parent: SequenceState | None = None
        self._reserve = reserve

    @property
    def branches(self) -> int:
        return len(self.counts)

    def layer(self, number: int) -> KVLayer:
        """State of the layer with this (1-based, global) number; created at first use."""
        self._check_readable()
        if number not in self._layers:
            if self._parent is not None:
                self._layers[number] = self._parent.layer(number).fork()
            else:
                self._layers[number] = KVLayer(reserve=self._reserve)
        return self._layers[number]

    def layers(self) -> Iterator[tuple[int, KVLayer]]:
        """(number, state) of every layer that has processed tokens on this rank."""
        self._check_readable()
        yield from self._layers.items()

    @classmethod
    def over(
        cls, parent: SequenceState, layers: dict[int, KVLayer], branches: int, position: int
    ) -> SequenceState:
        """``branches`` continuations of layer states that are views of ``parent``; they die with it."""
        state = cls(branches, position)
        state._parent, state._layers = parent, layers
        return state

    def freeze(self) -> SequenceState:
        """No more growth; from now on only forks read it."""
        self._check_readable()
        self.phase = Phase.FROZEN
        return self

    def fork(self, branches: int) -> SequenceState:
        """``branches`` continuations of this (frozen, one-branch) state that share its tokens."""
        self._check_readable()
        if self.phase is not Phase.FROZEN or self.branches != 1:
            raise ValueError(f"fork a frozen state of one branch, not a {self.phase.value} one of {self.branches}")
        child = SequenceState(branches, self.counts[0])
        child._parent = self
        return child

    def keep(self, branches: Sequence[int]) -> None:
        """Drop all branches but these (ascending); they become branches 0, 1, ..."""
        self.check_open()
        if list(branches) != sorted(set(branches)) or not all(0 <= b < self.branches for b in branches):
            raise ValueError(f"branches to keep must ascend within 0..{self.branches - 1}, not {list(branches)}")
        for layer in self._layers.values():
            layer.keep(branches)
        self.counts = [self.counts[branch] for branch in branches]

    def tensors(self) -> Iterator[Tensor]:
        """Storage owned by this state alone, each tensor once."""
        for layer in self._layers.values():
            yield from layer.tensors()

    @property
    def nbytes(self) -> int:
        """Bytes this state owns on this rank, spare capacity included."""
        return sum(tensor.untyped_storage().nbytes() for tensor in self.tensors())

    def close(self, fill_nan: bool = False) -> None:
        """Free the state. ``fill_nan`` poisons its storage first, so that whoever still holds a view reads NaN."""
        if self.phase is Phase.CLOSED:
            return
        if fill_nan:
            poison(tensor for tensor in self.tensors() if not tensor.requires_grad)
        for layer in self._layers.values():
            layer.clear()
        self._layers.clear()
        self.phase = Phase.CLOSED

    def grow(self, lengths: tuple[int, ...]) -> None:
        """Count tokens that every layer has processed."""
        self.counts = [count + length for count, length in zip(self.counts, lengths, strict=True)]

    def check_open(self) -> None:
        """Raise unless the state may grow."""
        self._check_readable()
        if self.phase is not Phase.OPEN:
            raise RuntimeError("this state is frozen: fork it and advance the fork")

    def _check_readable(self) -> None:
        owner: SequenceState | None = self
        while owner is not None:
            if owner.phase is Phase.CLOSED:
                raise RuntimeError("stale state: its prompt group was closed or the optimizer has stepped since")
            owner = owner._parent
