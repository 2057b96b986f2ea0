"""The state of a run of tokens on this rank: one layer state per layer of this pipeline stage.

Lifecycle: OPEN (grows by `advance`) -> FROZEN (read by forks only) -> CLOSED (freed; any use raises).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any, Self, TypeVar, overload

import torch
from torch import Tensor

from megatron_lrl.layers.kind import Growth, LayerState
from megatron_lrl.layers.layout import TokenLayout

L = TypeVar("L", bound=LayerState)


class Phase(Enum):
    """OPEN: may grow. FROZEN: a prefix that forks read. CLOSED: freed; a read is an error."""

    OPEN = "open"
    FROZEN = "frozen"
    CLOSED = "closed"


class SequenceState:
    """What the model remembers of the tokens fed so far, for one or more branches, under full attention.

    Append-only. A fork shares the tokens of a one-branch state and owns what comes after. Each layer's module says of
    which kind its state is. Where layers read each other's state (LastKV) a subclass says so, and where an advance must
    be cut (`rounds`).
    """

    def __init__(
        self,
        branches: int = 1,
        start: int = 0,
        reserve: Mapping[int, int] | None = None,
        log: bool = False,
        keep_from: int | None = None,
    ) -> None:
        """An empty state of ``branches`` sequences whose first token will stand at position ``start``.

        ``reserve``: tokens this rank will own, by chunk (see `reservation`), so that they lie in one page. ``log``:
        remember each advance, so that `before` can go back to it. ``keep_from``: a sweep will go back to this position
        at most (default: ``start``, if logged); what only older tokens need is dropped.
        """
        if branches < 1:
            raise ValueError(f"a state holds at least one branch, not {branches}")
        self.counts: list[int] = [start] * branches
        self.phase = Phase.OPEN
        self._layers: dict[int, LayerState] = {}
        self.keep_from = start if log and keep_from is None else keep_from
        self._parent: SequenceState | None = None
        self._reserve, self._log = reserve, log
        self._growing = False  # tokens come one by one: pages get spare capacity
        self._counts_before: list[tuple[int, ...]] = []  # counts before each advance
        self.restarts: frozenset[int] | None = None
        """Positions that a sweep goes back to directly (None: every advance from `keep_from` on); set before growth."""

    @property
    def branches(self) -> int:
        return len(self.counts)

    def rounds(self, lengths: Sequence[int]) -> list[tuple[int, ...]]:
        """How an advance by ``lengths`` must be cut: tokens per branch of each pass over the model."""
        return [tuple(lengths)]

    def in_one_graph(self, lengths: Sequence[int]) -> bool:
        """Whether all rounds of such an advance together are no larger than one round may be."""
        return True

    def cuts(self, count: int) -> set[int]:
        """Positions below ``count`` where a capture from position 0 must be cut (none, under full attention)."""
        return set()

    def reservation(self, spans: Sequence[tuple[int, int]], local: Sequence[int]) -> dict[int, int]:
        """Room to reserve for a capture in these spans, of which this rank owns ``local`` tokens each."""
        return {0: sum(local)}

    sequential = False
    """Whether a pass needs what the last pipeline stage computed in the one before it."""

    def settle(self, pp_group: Any) -> None:
        """After a pass: the last stage hands out what other stages need of the state. Collective over the stages."""

    def collect_adjoints(self, number: int, pp_group: Any) -> None:
        """Before advance ``number`` is swept: its adjoints return to the stage that computed it. Collective."""

    @overload
    def layer(self, number: int) -> LayerState: ...

    @overload
    def layer(self, number: int, kind: type[L]) -> L: ...

    def layer(self, number: int, kind: type[LayerState] | None = None) -> LayerState:
        """State of a layer (1-based, global), which is of class ``kind``; created at first use, where that is given."""
        self._check_readable()
        if number not in self._layers:
            if self._parent is not None:
                self._layers[number] = (
                    self._parent.layer(number) if kind is None else self._parent.layer(number, kind)
                ).fork(self._growth(number))
            elif kind is not None:
                self._layers[number] = kind.empty(self._growth(number))
            else:
                raise KeyError(f"layer {number} has no state yet")
        found = self._layers[number]
        if kind is not None and not isinstance(found, kind):
            raise TypeError(f"layer {number} has a {type(found).__name__}, not a {kind.__name__}")
        return found

    def layers(self) -> Iterator[tuple[int, LayerState]]:
        """(number, state) of every layer that has state on this rank."""
        self._check_readable()
        yield from self._layers.items()

    @property
    def restarts_here(self) -> bool:
        """Whether a sweep goes back to where this state stands now."""
        wanted = self.keep_from is not None and self.counts[0] >= self.keep_from
        return wanted and (self.restarts is None or self.counts[0] in self.restarts)

    def restart(self, first: int, stop: int) -> Self:
        """This state `before` advance ``first``, to be advanced through all up to ``stop`` once more for `refill`."""
        return self.before(first, log=True)

    def refill(self, again: SequenceState, first: int) -> None:
        """Take from ``again``, made by `restart` and advanced, what `before` needs between two ``restarts``."""
        for number, layer in again.layers():
            self.layer(number).refill(layer, first)

    def forget(self, number: int) -> None:
        """Drop what `refill` took, when advances from ``number`` on were swept."""
        for layer in self._layers.values():
            layer.forget(number)

    def absorb(self, again: SequenceState, layout: TokenLayout) -> None:
        """Grow by what ``again``, this state's `before` now, computed under autograd; its graph stays with it."""
        for number, layer in again.layers():
            self.layer(number, type(layer)).absorb(layer, layout, self.restarts_here)
        self.grow(layout.lengths)

    def freeze(self, pp_group: Any = None) -> Self:
        """No more growth; from now on only forks read it. Collective over the stages, if there are several."""
        self._check_readable()
        self.phase = Phase.FROZEN
        return self

    def fork(self, branches: int, log: bool = False) -> Self:
        """``branches`` continuations of this (frozen, one-branch) state that share its tokens."""
        self._check_readable()
        if self.phase is not Phase.FROZEN or self.branches != 1:
            raise ValueError(
                f"fork a frozen state of one branch, not a {self.phase.value} one of {self.branches}"
            )
        child = self._empty(branches, self.counts[0], log)
        child._parent, child._growing = self, not log
        return child

    def before(self, number: int, log: bool = False, reserve: Mapping[int, int] | None = None) -> Self:
        """This state as it was before its advance ``number`` (the number of advances so far: as it is).

        Growing it leaves this state alone; it dies with this state.
        """
        self._check_readable()
        state = self._empty(self.branches, 0, log)
        state._reserve = reserve
        state.counts = list([*self._counts_before, self.counts][number])
        state._parent = self
        for key, layer in self._layers.items():
            state._layers[key] = layer.before(number, state._growth(key))
        return state

    def keep(self, branches: Sequence[int]) -> None:
        """Drop all branches but these (ascending); they become branches 0, 1, ..."""
        self.check_open()
        if list(branches) != sorted(set(branches)) or not all(0 <= b < self.branches for b in branches):
            raise ValueError(
                f"branches to keep must ascend within 0..{self.branches - 1}, not {list(branches)}"
            )
        for layer in self._layers.values():
            layer.keep(branches)
        self.counts = [self.counts[branch] for branch in branches]

    def enable_adjoints(self, dtype: torch.dtype, live_from: int = 0, spare: bool = False) -> int:
        """Give what this state owns gradient buffers, for tokens at positions >= ``live_from``.

        ``live_from`` must be where an advance of this (logged) state began, or its end. ``spare``: the state is still
        to grow within its pages. Returns the bytes allocated.
        """
        first = next((i for i, counts in enumerate(self._counts_before) if counts[0] >= live_from), None)
        return sum(self._enable(number, layer, dtype, first, spare) for number, layer in self.layers())

    def prepare_sweep(self, number: int) -> int:
        """Before advance ``number`` is recomputed: make the adjoints it adds to, and free those of what was swept.

        Returns by how many bytes the state grew.
        """
        return 0

    def _enable(
        self, number: int, layer: LayerState, dtype: torch.dtype, first_live: int | None, spare: bool
    ) -> int:
        """Adjoints of one layer, for advances from ``first_live`` on."""
        return layer.enable_adjoints(dtype, first_live, spare)

    def tensors(self) -> Iterator[Tensor]:
        """Storage owned by this state alone, each tensor once."""
        for layer in self._layers.values():
            yield from layer.tensors()

    @property
    def nbytes(self) -> int:
        """Bytes this state owns on this rank, spare capacity and adjoints included."""
        storages = {x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in self.tensors()}
        return sum(storages.values())

    def close(self, fill_nan: bool = False) -> None:
        """Free the state. ``fill_nan`` poisons its storage first, so that whoever still holds a view reads NaN."""
        if self.phase is Phase.CLOSED:
            return
        if fill_nan:
            poison(self.tensors())
        for layer in self._layers.values():
            layer.clear()
        self._layers.clear()
        self.phase = Phase.CLOSED

    def grow(self, lengths: Sequence[int]) -> None:
        """Count tokens that every layer has processed."""
        if self._log:
            self._counts_before.append(tuple(self.counts))
        self.counts = [count + length for count, length in zip(self.counts, lengths, strict=True)]

    def check_open(self) -> None:
        """Raise unless the state may grow."""
        self._check_readable()
        if self.phase is not Phase.OPEN:
            raise RuntimeError("this state is frozen: fork it and advance the fork")

    def _empty(self, branches: int, start: int, log: bool) -> Self:
        """A state of this kind without tokens."""
        return type(self)(branches, start, log=log)

    def _growth(self, number: int) -> Growth:
        """How layer ``number`` will grow."""
        return Growth(self._reserve, self._log, self._growing)

    def _check_readable(self) -> None:
        owner: SequenceState | None = self
        while owner is not None:
            if owner.phase is Phase.CLOSED:
                raise RuntimeError(
                    "stale state: its prompt group was closed or the optimizer has stepped since"
                )
            owner = owner._parent


def poison(tensors: Iterable[Tensor]) -> None:
    """Fill with NaN: a stale read fails loudly."""
    for tensor in tensors:
        if tensor.is_floating_point() and not tensor.requires_grad:
            with torch.no_grad():
                tensor.fill_(float("nan"))
