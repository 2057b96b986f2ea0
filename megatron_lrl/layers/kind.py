"""The protocol of a layer kind: its resident state on one rank.

    LayerState    empty ─ fork ─ before(n) ─ keep    where a state comes from, and what stays of it
                  enable_adjoints ─ newest ─ take_adjoint    how gradients reach the tokens it came from
                  absorb ─ refill ─ forget    what a capture with a graph gives, and what a sweep makes again
                  tensors ─ clear    what it owns

`SequenceState` holds one per layer and loops over them; how a layer's module reads and grows its state is between them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor

from megatron_lrl.layers.layout import TokenLayout


class Growth(NamedTuple):
    """How a layer's state will grow.

    ``reserve``: tokens this rank will own, by chunk. ``log``: remember each advance, so that `before` can go back to
    it. ``growing``: tokens come one by one. ``together``: what is reserved lies in one storage.
    """

    reserve: Mapping[int, int] | None = None
    log: bool = False
    growing: bool = False
    together: bool = False


class LayerState(ABC):
    """What one layer remembers, on this rank, of the tokens fed so far."""

    @property
    @abstractmethod
    def newest(self) -> tuple[Tensor, ...] | None:
        """What the newest advance made, where it is part of a graph; its gradient is what `take_adjoint` gives."""

    @classmethod
    @abstractmethod
    def empty(cls, growth: Growth) -> Self:
        """The state before a document's first token."""

    @abstractmethod
    def fork(self, growth: Growth) -> Self:
        """A state of any number of branches that continues this one of a single branch, and shares what it holds."""

    @abstractmethod
    def before(self, number: int, growth: Growth) -> Self:
        """A state that continues from what was before (logged) advance ``number``, 0-based."""

    @abstractmethod
    def keep(self, branches: Sequence[int]) -> None:
        """Drop all branches but these (ascending), which become 0, 1, ...; only without autograd."""

    @abstractmethod
    def enable_adjoints(self, dtype: torch.dtype, first_live: int | None, spare: bool = False) -> int:
        """Make gradient buffers for what advances from ``first_live`` on (None: no one) left. Returns the bytes.

        ``spare``: the state is still to grow within what it reserved.
        """

    @abstractmethod
    def take_adjoint(self, number: int, like: Sequence[Tensor], device: torch.device) -> list[Tensor]:
        """The gradient of what advance ``number`` made, which later advances and forks left here, zero where none did.

        ``like``: the shapes and dtypes (meta tensors) of `newest` of the advance that was made anew.
        """

    @abstractmethod
    def absorb(self, again: Self, layout: TokenLayout, keep: bool) -> None:
        """Grow by what ``again`` computed under autograd, from this state on; its graph stays with it.

        ``keep``: a sweep goes back to what was before.
        """

    @abstractmethod
    def refill(self, again: Self, first: int) -> None:
        """Take from ``again``, this state `before` advance ``first`` advanced anew, what was not kept for a sweep."""

    @abstractmethod
    def forget(self, number: int) -> None:
        """Drop what `refill` took: advances from ``number`` on were swept."""

    @abstractmethod
    def tensors(self) -> Iterator[Tensor]:
        """Storage that this state alone owns (what it shares is counted where it was captured)."""

    @abstractmethod
    def clear(self) -> None:
        """Let go of everything."""


__all__ = ["Growth", "LayerState"]
