"""The state of a run of tokens on this rank: one layer state per layer of this pipeline stage.

Lifecycle: OPEN (grows by `advance`) -> FROZEN (read by forks only) -> CLOSED (freed; any use raises).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from typing import Any, Self

import torch
from torch import Tensor

from megatron_lrl.layers.gdn.state import RecurrentLayer, Snapshot, Source
from megatron_lrl.layers.layout import TokenLayout
from megatron_lrl.layers.softmax.kv import KVLayer
from megatron_lrl.layers.softmax.pages import PageSlice, poison


class Phase(Enum):
    """OPEN: may grow. FROZEN: a prefix that forks read. CLOSED: freed; a read is an error."""

    OPEN = "open"
    FROZEN = "frozen"
    CLOSED = "closed"


class SequenceState:
    """What the model remembers of the tokens fed so far, for one or more branches, under full attention.

    Append-only. A fork shares the tokens of a one-branch state and owns what comes after. Other attention kinds are
    subclasses: they say where an advance must be cut (`rounds`) and how a layer attends. Recurrent layers, if the model
    has any, keep their own kind of state beside it.
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
        self._layers: dict[int, KVLayer] = {}
        self._recurrent: dict[int, RecurrentLayer] = {}
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

    def attend(
        self,
        number: int,
        q_mHd: Tensor,
        k_mhd: Tensor,
        v_mhd: Tensor,
        layout: TokenLayout,
        scale: float,
        cp_group: Any,
        gate_h: Tensor | None = None,
    ) -> Tensor:
        """Layer ``number`` (1-based, global) attends over its state and the new tokens, and grows. Returns o_mHd."""
        return self.layer(number).attend(q_mHd, k_mhd, v_mhd, layout, scale, cp_group)

    def append(self, number: int, k_mhd: Tensor, v_mhd: Tensor, layout: TokenLayout) -> None:
        """Layer ``number`` grows by new tokens whose attention nothing reads."""
        self.layer(number).append(k_mhd, v_mhd, layout.pieces)

    def layer(self, number: int) -> KVLayer:
        """State of a layer; created at first use."""
        self._check_readable()
        if number not in self._layers:
            past = () if self._parent is None else self._parent.layer(number).shared_slices()
            self._layers[number] = self._new_layer(number, past)
        return self._layers[number]

    def layers(self) -> Iterator[tuple[int, KVLayer]]:
        """(number, state) of every attention layer that has state on this rank."""
        self._check_readable()
        yield from self._layers.items()

    def recurrent(self, number: int) -> RecurrentLayer:
        """State of a recurrent layer; created at first use."""
        self._check_readable()
        if number not in self._recurrent:
            origin = None
            if self._parent is not None:
                theirs = self._parent.recurrent(number)
                origin = Source(theirs, theirs.done)
            self._recurrent[number] = RecurrentLayer(origin, self._log)
        return self._recurrent[number]

    def recurrent_layers(self) -> Iterator[tuple[int, RecurrentLayer]]:
        """(number, state) of every recurrent layer that has state on this rank."""
        self._check_readable()
        yield from self._recurrent.items()

    def recur(self, number: int, snapshot: Snapshot) -> None:
        """Recurrent layer ``number`` has processed the tokens of the advance under way."""
        wanted = self.keep_from is not None and self.counts[0] >= self.keep_from
        wanted = wanted and (self.restarts is None or self.counts[0] in self.restarts)
        self.recurrent(number).commit(snapshot, keep=wanted)

    def restart(self, first: int, stop: int) -> Self:
        """This state `before` advance ``first``, to be advanced through all up to ``stop`` once more for `refill`."""
        return self.before(first, log=True)

    def refill(self, again: SequenceState, first: int) -> None:
        """Take from ``again``, made by `restart` and advanced, what `before` needs between two ``restarts``."""
        for key, layer in again.recurrent_layers():
            self.recurrent(key).fill(layer, first)

    def forget(self, number: int) -> None:
        """Drop what `refill` took, when advances from ``number`` on were swept."""
        for layer in self._recurrent.values():
            layer.forget(number)

    def absorb(self, again: SequenceState, layout: TokenLayout) -> None:
        """Grow by what ``again``, this state's `before` now, computed under autograd; its graph stays with it."""
        for number, layer in again.layers():
            assert layer.newest is not None
            k_mhd, v_mhd = (x.detach() for x in layer.newest)
            self.append(number, k_mhd, v_mhd, layout)
        for number, recurrent in again.recurrent_layers():
            assert recurrent.now is not None
            self.recur(number, Snapshot(*(x.detach() for x in recurrent.now)))
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
            state._layers[key] = state._new_layer(key, self._slices_before(key, layer, number))
        for key, recurrent in self._recurrent.items():
            state._recurrent[key] = recurrent.before(number, log)
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
        for recurrent in self._recurrent.values():
            recurrent.keep(branches)
        self.counts = [self.counts[branch] for branch in branches]

    def enable_adjoints(self, dtype: torch.dtype, live_from: int = 0, spare: bool = False) -> int:
        """Give every page this state owns a gradient buffer, for tokens at positions >= ``live_from``.

        ``live_from`` must be where an advance of this (logged) state began, or its end. ``spare``: the state is still
        to grow within its pages. Returns the bytes allocated.
        """
        total = 0
        first = next((i for i, counts in enumerate(self._counts_before) if counts[0] >= live_from), None)
        for number, layer in self.layers():
            constants = [_constant_tokens(layer, page, first) for page in layer.own]
            total += self._enable_layer(number, layer, dtype, constants, spare)
        for _, recurrent in self.recurrent_layers():
            total += recurrent.enable_adjoint(dtype, len(self._counts_before) if first is None else first)
        return total

    def prepare_sweep(self, number: int) -> int:
        """Before advance ``number`` is recomputed: make the adjoints it adds to, and free those of what was swept.

        Returns by how many bytes the state grew.
        """
        return 0

    def _enable_layer(
        self, number: int, layer: KVLayer, dtype: torch.dtype, constants: Sequence[int], spare: bool
    ) -> int:
        """Adjoints of one attention layer's own pages; ``constants[i]`` tokens of page i need none."""
        return layer.enable_adjoints(dtype, constants, spare)

    def tensors(self) -> Iterator[Tensor]:
        """Storage owned by this state alone, each tensor once."""
        for layer in self._layers.values():
            yield from layer.tensors()
        for recurrent in self._recurrent.values():
            yield from recurrent.tensors()

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
        for recurrent in self._recurrent.values():
            recurrent.clear()
        self._layers.clear()
        self._recurrent.clear()
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

    def _new_layer(self, number: int, past: Sequence[PageSlice]) -> KVLayer:
        return KVLayer(past, self._reserve, self._log, self._growing)

    def _slices_before(self, number: int, layer: KVLayer, advance: int) -> list[PageSlice]:
        return layer.slices_before(advance)

    def _check_readable(self) -> None:
        owner: SequenceState | None = self
        while owner is not None:
            if owner.phase is Phase.CLOSED:
                raise RuntimeError(
                    "stale state: its prompt group was closed or the optimizer has stepped since"
                )
            owner = owner._parent


def _constant_tokens(layer: KVLayer, page: Any, first_live: int | None) -> int:
    """Tokens of a page that were written before the advance ``first_live``."""
    if first_live is None:
        return page.length
    if first_live == 0 or layer.rounds is None:
        return 0
    written = [
        entry.row + entry.piece.length
        for entries in layer.rounds[:first_live]
        for entry in entries
        if entry.page is page
    ]
    return max(written, default=0)
