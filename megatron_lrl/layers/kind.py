"""The protocol of a layer kind: what it is to a builder, a converter and a plan, and its resident state on one rank.

    LayerKind     install ─ settings ─ check_layout ─ rows    how a layer is built, cut and converted
                  snapshot_bytes ─ resident ─ refilled    what a prefix keeps of it, and what a sweep makes again
                  operations ─ stand_ins    what its work costs, and how a plan rehearses it
    LayerState    empty ─ fork ─ before(n) ─ keep    where a state comes from, and what stays of it
                  joined    what stands in its place where several are advanced together
                  enable_adjoints ─ newest ─ take_adjoint    how gradients reach the tokens it came from
                  absorb ─ refill ─ forget    what a capture with a graph gives, and what a sweep makes again
                  tensors ─ clear    what it owns

`SequenceState` holds one per layer and loops over them; how a layer's module reads and grows its state is between them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from megatron_lrl.layers.architecture import Architecture
from megatron_lrl.layers.conversion import Row
from megatron_lrl.layers.layout import TokenLayout
from megatron_lrl.runtime import Layout


class Growth(NamedTuple):
    """How a layer's state will grow.

    ``reserve``: tokens this rank will own, by chunk. ``log``: remember each advance, so that `before` can go back to
    it. ``growing``: tokens come one by one. ``together``: what is reserved lies in one storage.
    """

    reserve: Mapping[int, int] | None = None
    log: bool = False
    growing: bool = False
    together: bool = False


class Member(NamedTuple):
    """A layer's state of some of the branches that are advanced together, from ``first`` on."""

    first: int
    branches: int
    layer: Any  # LayerState


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

    @staticmethod
    @abstractmethod
    def joined(parts: Sequence[Member]) -> Any:
        """What a layer's module reads and grows in the place of this, where several states are advanced together."""

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


class Place(NamedTuple):
    """A rank's share of a model: the layers of ``stage`` (None: of the stage that has most), in ``dtype``."""

    arch: Architecture
    layout: Layout
    stage: int | None
    dtype: torch.dtype

    def layers(self, kind: str) -> int:
        """Layers of a kind."""
        stages = range(self.layout.pp) if self.stage is None else (self.stage,)
        return max(self.mixers(stage).count(kind) for stage in stages)

    def mixers(self, stage: int) -> tuple[str, ...]:
        """Kinds of a stage's layers."""
        count = self.arch.num_layers // self.layout.pp
        return self.arch.mixers[stage * count : (stage + 1) * count]

    @property
    def has_last_layer(self) -> bool:
        return self.stage == self.layout.pp - 1


@dataclass(frozen=True)
class Capture:
    """How a prefix lies on a rank: captured chunks as [low, high), the rank's tokens of each, and how it is swept.

    ``live_from``: position of the first token that is no constant. ``restarts``: positions that a sweep restarts from;
    None: from every live chunk.
    """

    spans: tuple[tuple[int, int], ...]
    local: tuple[int, ...]
    live_from: int
    restarts: frozenset[int] | None = None

    @property
    def starts(self) -> tuple[int, ...]:
        return tuple(low for low, _ in self.spans)

    @property
    def live_local(self) -> tuple[int, ...]:
        """The rank's live tokens of each chunk."""
        return tuple(
            n if low >= self.live_from else 0 for n, low in zip(self.local, self.starts, strict=True)
        )

    @property
    def live(self) -> int:
        """The rank's live tokens."""
        return sum(self.live_local)

    @cached_property
    def restart_count(self) -> int:
        """States before some live chunk that are kept for its sweep; before a document's start there is none."""
        if not self.live:
            return 0
        live = [low for low in self.starts if low >= self.live_from]
        return len(live if self.restarts is None else self.restarts) - (self.live_from == 0)


class Resident(NamedTuple):
    """Bytes of a captured prefix: its state, and its adjoint at the peak."""

    state: int
    adjoint: int


class Kept(NamedTuple):
    """Bytes that a sweep needs, and nothing else keeps: before each captured chunk, and of each LastKV chunk."""

    advance: int = 0
    chunk: int = 0


class Operations(NamedTuple):
    """Floating-point operations of one layer's forward.

    ``weights``: products with weights, a token. ``rest``: those of them that follow what the layer's state needs.
    ``scan``: of a token's recurrence, whose backward runs it twice more before its two products. ``pair``: of one
    (query, key) pair of attention.
    """

    weights: float
    rest: float = 0.0
    scan: float = 0.0
    pair: float = 0.0


class StandIn(NamedTuple):
    """Stands in a rehearsal for something that depends on values, or takes long for shapes alone."""

    owner: Any  # module or class
    name: str
    value: Any

    @property
    def path(self) -> str:
        owner = self.owner
        if isinstance(owner, ModuleType):
            return f"{owner.__name__}.{self.name}"
        return f"{owner.__module__}.{owner.__qualname__}.{self.name}"


class LayerKind(ABC):
    """A kind of token mixer. Stateless: a model's sizes stand in `Architecture` (`Architecture.sizes[name]`)."""

    name: str
    """In `Architecture.mixers` and `Architecture.sizes`."""
    title: str
    """For messages and identities."""
    fused_norm: str
    """The projection into which Transformer Engine fuses the layer's input norm; "": none."""
    parameters: tuple[tuple[str, str], ...] = ()
    """(name, regular expression) of groups of parameters whose gradients are compared as one."""
    rows: tuple[Row, ...] = ()
    """Conversion rows of its parameters; a family that stores them otherwise has its own (`checkpoint/table_rows`)."""
    adjoint_in_backward = False
    """Whether memory that a plan counts comes to life in its backward."""

    @abstractmethod
    def install(self, submodules: Any, arch: Architecture, transformer_engine: bool, norm: Any) -> None:
        """Put the mixer's spec in the place of self-attention in a layer's submodules.

        Its module runs as Megatron-Core's self-attention does, and has `grow_state` (see `PolicyLayer`). ``norm``: the
        builder's class of norms.
        """

    def settings(self, arch: Architecture) -> dict[str, Any]:
        """What Megatron-Core's configuration must say of it."""
        return {}

    def widths(self, arch: Architecture) -> dict[str, int]:
        """By name, counts that tp must divide."""
        return {}

    def check_layout(self, arch: Architecture, layout: Layout) -> None:  # noqa: B027 - few kinds ask for more
        """Raise `UserError` for a layout that cuts it where it cannot be cut, `widths` and pp apart."""

    @abstractmethod
    def snapshot_bytes(self, place: Place) -> Kept:
        """What recomputing a chunk needs, and nothing but a sweep keeps, of all its layers."""

    @abstractmethod
    def resident(self, place: Place, capture: Capture, adjoint_dtype: torch.dtype) -> Resident:
        """What a captured prefix holds of all its layers when the first replay begins."""

    @abstractmethod
    def refilled(self, place: Place, capture: Capture, again: Sequence[int]) -> int:
        """Bytes that come from running chunks ``again`` forward once more, of all its layers."""

    @abstractmethod
    def operations(self, arch: Architecture) -> Operations:
        """Work of one layer."""

    def stand_ins(self) -> Sequence[StandIn]:
        """What stands in its place where a plan rehearses it on meta tensors."""
        return ()


__all__ = [
    "Capture",
    "Growth",
    "Kept",
    "LayerKind",
    "LayerState",
    "Member",
    "Operations",
    "Place",
    "Resident",
    "StandIn",
]
