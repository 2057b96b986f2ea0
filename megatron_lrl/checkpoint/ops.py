"""Conversion ops between Hugging Face tensors and tensor-parallel Megatron shards.

An op states once, for one tp rank, which slice of which Hugging Face tensor lies where in that rank's
shard: an ordered list of `Piece`s. The forward direction concatenates the pieces, the inverse copies each
piece back to where it came from, so the two cannot disagree. Pieces are slices along one axis, hence a
shard is read without reading the rest.

Symbols: N query heads, M key-value heads, r = N / M, D head dim, F feed-forward size, V vocabulary, H
hidden size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch


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
            sources: the Hugging Face tensors (lazily sliceable), in the op's order, all of one dtype.
            width: shape of a source without the op's axis; shapes the padding.

        Returns:
            A new contiguous tensor in the sources' dtype.
        """
        pieces = self.pieces(rank, size)
        found = [self._read(sources, piece) for piece in pieces]
        # a rank may hold nothing but padding: one row tells the dtype
        like = next((part for part in found if part is not None), None)
        like = self._read(sources, Piece(0, 0, 1)) if like is None else like
        assert like is not None
        parts = [
            like.new_zeros(self._shape(width, piece.length)) if part is None else part
            for part, piece in zip(found, pieces, strict=True)
        ]
        return torch.cat(parts, dim=self.axis).contiguous()

    def from_shards(self, shards: Sequence[torch.Tensor], shapes: Sequence[torch.Size]) -> list[torch.Tensor]:
        """The Hugging Face tensors out of all tp ranks' shards, in rank order; padding is dropped."""
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

    def _read(self, sources: Sequence[Sliceable], piece: Piece) -> torch.Tensor | None:
        if piece.source is None:
            return None
        index = (*(slice(None) for _ in range(self.axis)), slice(piece.start, piece.stop))
        return sources[piece.source][index]


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
        part = _divide(self.length, size)
        return (Piece(0, rank * part, (rank + 1) * part),)


@dataclass(frozen=True)
class InterleaveQkv(Op):
    """q [N·D, …], k [M·D, …], v [M·D, …] -> [q × r, k, v] per group; a rank holds M / size groups."""

    heads: int
    groups: int
    head_dim: int

    def pieces(self, rank: int, size: int) -> tuple[Piece, ...]:
        part, q_rows = _divide(self.groups, size), _divide(self.heads, self.groups) * self.head_dim
        pieces = []
        for group in range(rank * part, (rank + 1) * part):
            rows = (group * self.head_dim, (group + 1) * self.head_dim)
            pieces += [Piece(0, group * q_rows, (group + 1) * q_rows), Piece(1, *rows), Piece(2, *rows)]
        return tuple(pieces)


@dataclass(frozen=True)
class FuseGateUp(Op):
    """gate [F, …], up [F, …] -> per rank [gate part, up part]."""

    length: int

    def pieces(self, rank: int, size: int) -> tuple[Piece, ...]:
        part = _divide(self.length, size)
        rows = (rank * part, (rank + 1) * part)
        return (Piece(0, *rows), Piece(1, *rows))


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


def _divide(length: int, size: int) -> int:
    if length % size:
        raise ValueError(f"{length} does not divide into {size} equal parts")
    return length // size
