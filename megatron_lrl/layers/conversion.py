"""Conversion ops between Hugging Face tensors and tensor-parallel Megatron shards.

An op states once, for one tp rank, which slice of which Hugging Face tensor lies where in that rank's
shard: an ordered list of `Piece`s. The forward direction concatenates the pieces, the inverse copies each
piece back to where it came from, so the two cannot disagree. Pieces are slices along one axis, hence a
shard is read without reading the rest.

A layer kind says in `Row`s which tensors make its parameters; ops that no other kind has stand with its rows.

Symbols: F feed-forward size, V vocabulary, H hidden size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import NamedTuple, Protocol

import torch

from megatron_lrl.layers.architecture import Architecture


class Sliceable(Protocol):
    """What a source must offer: a tensor, or the lazy handle of one in a safetensors file."""

    def __getitem__(self, index: tuple[slice, ...]) -> torch.Tensor: ...


@dataclass(frozen=True)
class Piece:
    """Rows `start:stop`, along the op's axis, of source number `source`; None stands for zero padding."""

    source: int | None
    start: int
    stop: int

    @property
    def length(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Op(ABC):
    """One conversion. `axis` is the dimension that pieces slice and that tensor parallelism splits."""

    @property
    def axis(self) -> int:
        return 0

    @property
    def replicated(self) -> bool:
        """True when every tp rank holds the same shard."""
        return False

    @abstractmethod
    def pieces(self, rank: int, size: int) -> tuple[Piece, ...]:
        """The pieces of tp rank `rank` of `size`, in the order in which they lie in the shard."""

    def to_shard(self, sources: Sequence[Sliceable], rank: int, size: int, width: torch.Size) -> torch.Tensor:
        """The shard of one tp rank.

        Args:
            sources: the Hugging Face tensors (lazily sliceable), in the op's order.
            width: shape of a source without the op's axis; shapes the padding.

        Returns:
            A contiguous tensor in the narrowest dtype that holds all sources.
        """
        pieces = self.pieces(rank, size)
        if len(pieces) == 1 and pieces[0].source is not None:
            return self._read(sources, pieces[0]).contiguous()
        dtypes = [self._read(sources, Piece(i, 0, 1)).dtype for i in self._sources_of(pieces)]
        shard = torch.zeros(self.shard_shape(rank, size, width), dtype=reduce(torch.promote_types, dtypes))
        offset = 0
        for piece in pieces:  # one at a time: the memory is that of the shard and of one piece
            if piece.source is not None:
                shard.narrow(self.axis, offset, piece.length).copy_(self._read(sources, piece))
            offset += piece.length
        return shard

    def from_shards(
        self, shards: Sequence[torch.Tensor], shapes: Sequence[torch.Size], copy: bool = True
    ) -> list[torch.Tensor]:
        """The Hugging Face tensors out of all tp ranks' shards, in rank order; padding is dropped.

        `copy` = False: may return a shard itself, where it is all of a tensor.
        """
        whole = [Piece(0, 0, shards[0].shape[self.axis])]
        if not copy and list(self.pieces(0, len(shards))) == whole and [shards[0].shape] == list(shapes):
            return [shards[0]]
        outputs = [torch.empty(shape, dtype=shards[0].dtype, device=shards[0].device) for shape in shapes]
        for rank, shard in enumerate(shards[:1] if self.replicated else shards):
            offset = 0
            for piece in self.pieces(rank, len(shards)):
                if piece.source is not None:
                    target = outputs[piece.source].narrow(self.axis, piece.start, piece.length)
                    target.copy_(shard.narrow(self.axis, offset, piece.length))
                offset += piece.length
        return outputs

    def shard_shape(self, rank: int, size: int, width: torch.Size) -> torch.Size:
        """Shape of one tp rank's shard."""
        return self._shape(width, sum(piece.length for piece in self.pieces(rank, size)))

    def _shape(self, width: torch.Size, length: int) -> torch.Size:
        return torch.Size((*width[: self.axis], length, *width[self.axis :]))

    def _read(self, sources: Sequence[Sliceable], piece: Piece) -> torch.Tensor:
        assert piece.source is not None
        index = (*(slice(None) for _ in range(self.axis)), slice(piece.start, piece.stop))
        return sources[piece.source][index]

    @staticmethod
    def _sources_of(pieces: Sequence[Piece]) -> list[int]:
        """Source numbers that occur; a rank that holds nothing but padding has the dtype of the first source."""
        return sorted({piece.source for piece in pieces if piece.source is not None}) or [0]


@dataclass(frozen=True)
class Copy(Op):
    """One tensor of `length` rows, whole on every rank (norm weights, output biases)."""

    length: int

    @property
    def replicated(self) -> bool:
        return True

    def pieces(self, rank: int, size: int) -> tuple[Piece, ...]:
        return (Piece(0, 0, self.length),)


@dataclass(frozen=True)
class Split(Op):
    """One tensor cut into equal parts along `along`; row-parallel weights are cut along axis 1."""

    length: int
    along: int = 0

    @property
    def axis(self) -> int:
        return self.along

    def pieces(self, rank: int, size: int) -> tuple[Piece, ...]:
        part = divide(self.length, size)
        return (Piece(0, rank * part, (rank + 1) * part),)


@dataclass(frozen=True)
class FuseGateUp(Op):
    """gate [F, …], up [F, …] -> per rank [gate part, up part].

    `fused`: the source is one tensor [2F, …], gate first.
    """

    length: int
    fused: bool = False

    def pieces(self, rank: int, size: int) -> tuple[Piece, ...]:
        part = divide(self.length, size)
        start, stop = rank * part, (rank + 1) * part
        if self.fused:
            return (Piece(0, start, stop), Piece(0, self.length + start, self.length + stop))
        return (Piece(0, start, stop), Piece(1, start, stop))


@dataclass(frozen=True)
class PadVocabulary(Op):
    """[V, H] -> V rounded up to a multiple of size, cut into equal parts; rows past V are zero."""

    vocab: int

    def pieces(self, rank: int, size: int) -> tuple[Piece, ...]:
        part = -(-self.vocab // size)
        start, stop = rank * part, (rank + 1) * part
        real = (min(start, self.vocab), min(stop, self.vocab))
        pieces = []
        if real[1] > real[0]:
            pieces.append(Piece(0, *real))
        if stop - start > real[1] - real[0]:
            pieces.append(Piece(None, real[1] - real[0], part))
        return tuple(pieces)


def divide(length: int, size: int) -> int:
    """``length / size``; raises ValueError where that is not whole."""
    if length % size:
        raise ValueError(f"{length} does not divide into {size} equal parts")
    return length // size


class Made(NamedTuple):
    """Shapes of a row's Hugging Face tensors in a given model, and the op over them."""

    shapes: tuple[tuple[int, ...], ...]
    op: Op


@dataclass(frozen=True)
class Row:
    """One parameter of a layer, and the Hugging Face tensors it is made of; `{e}` is the number of a routed expert.

    Attributes:
        name, te_name: the parameter's under the local and (where it differs) the Transformer Engine spec.
        made: shapes and op in a model; None where it has no such tensor.
        packed, made_packed: the one source that holds all experts, in files that store them packed.
        wide: the model keeps it in float32 whatever its parameter dtype.
        buffer: not a parameter: it has no gradient.
    """

    name: str
    hf_names: tuple[str, ...]
    made: Callable[[Architecture], Made | None]
    te_name: str = ""
    packed: str = ""
    made_packed: Callable[[Architecture], Made | None] | None = None
    wide: Callable[[Architecture], bool] = lambda _: False
    buffer: bool = False


def norm(name: str, hf_name: str, te_name: str = "") -> Row:
    """A norm over the hidden size; Transformer Engine fuses some into the linear layer behind them."""
    return Row(name, (hf_name,), lambda a: Made(((a.hidden_size,),), Copy(a.hidden_size)), te_name)
