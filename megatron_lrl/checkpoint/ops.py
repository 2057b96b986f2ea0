"""Conversion ops between Hugging Face tensors and tensor-parallel Megatron shards.

An op states once, for one tp rank, which slice of which Hugging Face tensor lies where in that rank's
shard: an ordered list of `Piece`s. The forward direction concatenates the pieces, the inverse copies each
piece back to where it came from, so the two cannot disagree. Pieces are slices along one axis, hence a
shard is read without reading the rest.

Symbols: N query heads, M key-value heads, r = N / M, D head dim, F feed-forward size, V vocabulary, H
hidden size; Gated DeltaNet: n key heads of d dims, m value heads of e dims, w = m / n.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
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
        part = _divide(self.length, size)
        return (Piece(0, rank * part, (rank + 1) * part),)


@dataclass(frozen=True)
class InterleaveQkv(Op):
    """q [N·D, …], k [M·D, …], v [M·D, …] -> [q × r, k, v] per group; a rank holds M / size groups.

    `gated`: q is [N·2D, …], for each head its query rows and then its output gate's; a group becomes
    [q × r, gate × r, k, v].
    """

    heads: int
    groups: int
    head_dim: int
    gated: bool = False

    def pieces(self, rank: int, size: int) -> tuple[Piece, ...]:
        part, ratio = _divide(self.groups, size), _divide(self.heads, self.groups)
        pieces = []
        for group in range(rank * part, (rank + 1) * part):
            heads = range(group * ratio, (group + 1) * ratio)
            if self.gated:
                starts = [2 * head * self.head_dim for head in heads]
                starts += [start + self.head_dim for start in starts]
                pieces += [Piece(0, start, start + self.head_dim) for start in starts]
            else:
                pieces.append(Piece(0, heads.start * self.head_dim, heads.stop * self.head_dim))
            rows = (group * self.head_dim, (group + 1) * self.head_dim)
            pieces += [Piece(1, *rows), Piece(2, *rows)]
        return tuple(pieces)


@dataclass(frozen=True)
class FuseGateUp(Op):
    """gate [F, …], up [F, …] -> per rank [gate part, up part].

    `fused`: the source is one tensor [2F, …], gate first.
    """

    length: int
    fused: bool = False

    def pieces(self, rank: int, size: int) -> tuple[Piece, ...]:
        part = _divide(self.length, size)
        start, stop = rank * part, (rank + 1) * part
        if self.fused:
            return (Piece(0, start, stop), Piece(0, self.length + start, self.length + stop))
        return (Piece(0, start, stop), Piece(1, start, stop))


@dataclass(frozen=True)
class GdnHeads:
    """Heads of a Gated DeltaNet layer: n key heads of d dims, m = n·w value heads of e dims."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int

    @property
    def ratio(self) -> int:
        """w, value heads per key head."""
        return _divide(self.value_heads, self.key_heads)

    def of_rank(self, rank: int, size: int) -> range:
        """The key heads of a tp rank; their value heads go with them."""
        part = _divide(self.key_heads, size)
        return range(rank * part, (rank + 1) * part)


@dataclass(frozen=True)
class GdnInputFlat(Op):
    """qkv [2nd + me, H], z [me, H], b [m, H], a [m, H] -> per rank [q; k; v; z; b; a] of its heads."""

    heads: GdnHeads

    def pieces(self, rank: int, size: int) -> tuple[Piece, ...]:
        h, mine = self.heads, self.heads.of_rank(rank, size)
        values = (mine.start * h.ratio, mine.stop * h.ratio)
        z = (values[0] * h.value_dim, values[1] * h.value_dim)
        return (*_qkv_pieces(h, mine), Piece(1, *z), Piece(2, *values), Piece(3, *values))


@dataclass(frozen=True)
class GdnInputGrouped(Op):
    """qkvz [n·(2d + 2we), H], ba [n·2w, H], both by key head -> per rank [q; k; v; z; b; a] of its heads.

    A key head's rows are [q (d); k (d); v (w·e); z (w·e)] and [b (w); a (w)].
    """

    heads: GdnHeads

    def pieces(self, rank: int, size: int) -> tuple[Piece, ...]:
        h = self.heads
        wide, narrow = h.ratio * h.value_dim, h.ratio
        parts = [(0, 0, h.key_dim), (0, h.key_dim, h.key_dim), (0, 2 * h.key_dim, wide)]
        parts += [(0, 2 * h.key_dim + wide, wide), (1, 0, narrow), (1, narrow, narrow)]
        rows = (2 * h.key_dim + 2 * wide, 2 * narrow)  # of one key head, in each source
        return tuple(
            Piece(source, head * rows[source] + start, head * rows[source] + start + length)
            for source, start, length in parts
            for head in h.of_rank(rank, size)
        )


@dataclass(frozen=True)
class GdnConvolution(Op):
    """Channels [2nd + me, 1, kernel] = [q; k; v] -> per rank [q; k; v] of its heads."""

    heads: GdnHeads

    def pieces(self, rank: int, size: int) -> tuple[Piece, ...]:
        return _qkv_pieces(self.heads, self.heads.of_rank(rank, size))


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


def _qkv_pieces(h: GdnHeads, mine: range) -> tuple[Piece, ...]:
    """Rows of some key heads and of their value heads in a tensor [q; k; v]."""
    keys, values = h.key_heads * h.key_dim, h.ratio * h.value_dim
    q = (mine.start * h.key_dim, mine.stop * h.key_dim)
    v = (2 * keys + mine.start * values, 2 * keys + mine.stop * values)
    return (Piece(0, *q), Piece(0, keys + q[0], keys + q[1]), Piece(0, *v))


def _divide(length: int, size: int) -> int:
    if length % size:
        raise ValueError(f"{length} does not divide into {size} equal parts")
    return length // size
