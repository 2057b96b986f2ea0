"""Resident state of one recurrent layer on this rank: what stands behind the newest token, and before each advance.

    snapshot 0     snapshot 1     ...    now            sweep of advance n: starts from snapshot n, its result takes the
        └─ advance 0 ─┴─ advance 1 ─ ... ─┘              adjoint of snapshot n + 1 and leaves that of snapshot n

A recurrent layer's state has the same size after any number of tokens. Going back in time therefore needs a snapshot
per advance (only where a sweep will want it), and the adjoint that moves through a sweep is one state at a time.

What the state is made of is the kind's own.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Self, TypeVar

import torch
from torch import Tensor

from megatron_lrl.layers.kind import Capture, Growth, Kept, LayerKind, LayerState, Member, Place, Resident
from megatron_lrl.layers.layout import TokenLayout

Snapshot = tuple[Tensor, ...]
"""The state behind some token of each branch, [branches, ...]: a NamedTuple of the kind's own."""
S = TypeVar("S", bound=Snapshot)


def _like[S: Snapshot](snapshot: S, tensors: Iterable[Tensor]) -> S:
    """A snapshot of the same kind."""
    return snapshot._make(tensors)  # type: ignore[attr-defined,no-any-return]


class Source(NamedTuple):
    """Where a state came from: ``layer`` as it was before its advance ``number``."""

    layer: RecurrentLayer[Any]
    number: int


class RecurrentLayer[S: Snapshot](LayerState):
    """State of one recurrent layer.

    ``origin`` is where it continues from (a prefix, or itself at an earlier time). With ``log`` it remembers what was
    before each advance, so that it can be swept.
    """

    def __init__(self, origin: Source | None = None, log: bool = False) -> None:
        self.origin = origin
        self.now: S | None = None  # None until the first advance: then what `origin` says
        self.done = 0  # advances
        self.live_from: int | None = None  # with adjoints: tokens are live from this advance on
        self._snapshots: list[S | None] | None = [] if log else None
        self._adjoints: dict[int, list[Tensor]] = {}

    @classmethod
    def empty(cls, growth: Growth) -> Self:
        return cls(None, growth.log)

    @staticmethod
    def joined(parts: Sequence[Member]) -> JoinedRecurrent:
        return JoinedRecurrent(parts)

    def fork(self, growth: Growth) -> Self:
        return self.before(self.done, growth)

    def before(self, number: int, growth: Growth) -> Self:
        return type(self)(Source(self, number), growth.log)

    @property
    def newest(self) -> tuple[Tensor, ...] | None:
        return self.now if self.now is not None and any(x.requires_grad for x in self.now) else None

    def read(self, trigger: Tensor, branches: int, fresh: Callable[[], S]) -> S:
        """The state before the tokens of the advance under way; ``fresh()`` before a document's first token.

        Under autograd the gradient of a resident state that is live goes to its adjoint. ``trigger``: a tensor of the
        graph.
        """
        if self.now is not None:
            return self.now
        found, source = self._at(0)
        if found is None:
            return fresh()
        if source is not None and torch.is_grad_enabled():
            found = _like(found, _Resident.apply(trigger, source, *found))
        if found[0].shape[0] == branches:
            return found
        return _like(
            found, (x.expand(branches, *x.shape[1:]) for x in found)
        )  # one row is shared, not copied

    def commit(self, snapshot: S, keep: bool = True) -> None:
        """The state behind the tokens of the advance under way. ``keep``: remember what was before, if logged."""
        if self._snapshots is not None:
            self._snapshots.append(self.now if keep else None)
        self.now = snapshot
        self.done += 1

    def keep(self, branches: Sequence[int]) -> None:
        if self.now is not None:
            index = torch.tensor(branches).to(self.now[0].device, non_blocking=True)
            self.now = _like(self.now, (x.index_select(0, index) for x in self.now))

    def enable_adjoints(self, dtype: torch.dtype, first_live: int | None, spare: bool = False) -> int:
        """The buffer is of the size of the newest state, the only one that forks read."""
        self.live_from = self.done if first_live is None else first_live
        if self.now is None or self.done <= self.live_from:
            return 0
        return sum(x.nbytes for x in self._adjoint(self.done, dtype))

    def take_adjoint(self, number: int, like: Sequence[Tensor], device: torch.device) -> list[Tensor]:
        """The gradient of the state behind advance ``number``, which is freed here."""
        adjoint = self._adjoints.pop(number + 1, None)
        if adjoint is None:
            return [torch.zeros(x.shape, dtype=x.dtype, device=device) for x in like]
        return [x.to(shape.dtype) for x, shape in zip(adjoint, like, strict=True)]

    def absorb(self, again: Self, layout: TokenLayout, keep: bool) -> None:
        assert again.now is not None
        self.commit(_like(again.now, (x.detach() for x in again.now)), keep)

    def refill(self, again: Self, first: int) -> None:
        """Take the snapshots of ``again``, which was logged."""
        assert self._snapshots is not None and again._snapshots is not None
        for i, snapshot in enumerate((*again._snapshots[1:], again.now), start=first + 1):
            if i < self.done:
                self._snapshots[i] = snapshot

    def forget(self, number: int) -> None:
        """Drop the snapshots of advances from ``number`` on."""
        if self._snapshots is not None:
            self._snapshots[number:] = [None] * len(self._snapshots[number:])

    def tensors(self) -> Iterator[Tensor]:
        for snapshot in (self.now, *(self._snapshots or ())):
            if snapshot is not None:
                yield from snapshot
        for adjoint in self._adjoints.values():
            yield from adjoint

    def clear(self) -> None:
        self.origin, self.now, self._snapshots = None, None, None
        self._adjoints.clear()

    def add_adjoint(self, number: int, gradients: Sequence[Tensor | None], like: Snapshot) -> None:
        """Add to the gradient of the state before advance ``number``."""
        dtype = torch.promote_types(like[0].dtype, torch.float32)
        for total, gradient in zip(self._adjoint(number, dtype, like), gradients, strict=True):
            if gradient is not None:
                total += gradient

    def _adjoint(self, number: int, dtype: torch.dtype, like: Snapshot | None = None) -> list[Tensor]:
        if number not in self._adjoints:
            like = self.now if like is None else like
            assert like is not None
            self._adjoints[number] = [
                torch.zeros(x.shape, dtype=torch.promote_types(x.dtype, dtype), device=x.device) for x in like
            ]
        return self._adjoints[number]

    def _at(self, number: int) -> tuple[S | None, Source | None]:
        """The state before advance ``number``, and whose adjoint its gradient belongs to (None: it is a constant)."""
        if number == 0:
            return (None, None) if self.origin is None else self.origin.layer._at(self.origin.number)
        if number == self.done:
            found = self.now
        else:
            assert self._snapshots is not None, "the state was made without a log"
            found = self._snapshots[number]
        assert found is not None, f"the state before advance {number} was not kept"
        live = self.live_from is not None and number > self.live_from
        return found, Source(self, number) if live else None


class JoinedRecurrent:
    """A layer of several states whose branches lie in one flat list: read and written as one state of all branches."""

    def __init__(self, parts: Sequence[Member]) -> None:
        self._parts = parts

    def read[S: Snapshot](self, trigger: Tensor, branches: int, fresh: Callable[[], S]) -> S:
        """As `RecurrentLayer.read`, of all branches."""

        def empty(count: int) -> Callable[[], S]:
            return lambda: _like(whole := fresh(), (x[:count] for x in whole))

        found = [layer.read(trigger, count, empty(count)) for _, count, layer in self._parts]
        return _like(found[0], map(_rows, zip(*found, strict=True)))

    def commit(self, snapshot: Snapshot, keep: bool = True) -> None:
        """As `RecurrentLayer.commit`."""
        for first, count, layer in self._parts:
            layer.commit(_like(snapshot, (x[first : first + count] for x in snapshot)), keep)


def _rows(parts: Sequence[Tensor]) -> Tensor:
    """Tensors one behind the other along their first axis; not copied where they lie so already (after `commit`)."""
    first = parts[0]
    stride, end, storage = first.stride(), first.storage_offset(), first.untyped_storage()._cdata
    for x in parts:
        if (x.stride(), x.storage_offset(), x.untyped_storage()._cdata) != (stride, end, storage):
            return torch.cat(list(parts))
        end += x.shape[0] * stride[0]
    return first.as_strided(
        (sum(x.shape[0] for x in parts), *first.shape[1:]), stride, first.storage_offset()
    )


class _Resident(torch.autograd.Function):
    """A resident state as part of a graph: its gradient is added to its adjoint and goes no further."""

    @staticmethod
    def forward(ctx: Any, trigger: Tensor, source: Source, *found: Tensor) -> tuple[Tensor, ...]:
        ctx.source, ctx.like = source, found
        return tuple(x.view_as(x) for x in found)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        ctx.source.layer.add_adjoint(ctx.source.number, gradients, ctx.like)
        return None, None, *(None for _ in ctx.like)


class RecurrentKind(LayerKind):
    """A kind whose layers keep a `RecurrentLayer`: one state, and one before each chunk that a sweep goes back to."""

    adjoint_in_backward = True

    @abstractmethod
    def state_bytes(self, place: Place, dtype: torch.dtype) -> int:
        """One sequence's state in one layer of a model of this dtype."""

    def snapshot_bytes(self, place: Place) -> Kept:
        return Kept(advance=self._bytes(place, place.dtype))

    def resident(self, place: Place, capture: Capture, adjoint_dtype: torch.dtype) -> Resident:
        state = self._bytes(place, place.dtype) * (1 + capture.restart_count)
        return Resident(state, self._bytes(place, adjoint_dtype) if capture.live else 0)

    def refilled(self, place: Place, capture: Capture, again: Sequence[int]) -> int:
        return len(again) * self._bytes(place, place.dtype)

    def _bytes(self, place: Place, dtype: torch.dtype) -> int:
        return self.state_bytes(place, dtype) * place.layers(self.name)


__all__ = ["JoinedRecurrent", "RecurrentKind", "RecurrentLayer", "Snapshot", "Source"]
