"""How the new tokens of one `advance` lie in memory, and which attention tasks follow.

New tokens of all branches stand one after another in a flat list, branch by branch, padded at the end to a multiple
of cp (times tp under sequence parallelism) and cut into cp equal contiguous slices. Everything but attention works
token by token, so responses of different length need no padding and a decode step of G branches is G tokens.

Legend: N new tokens of all branches; M = N padded; m = M / cp, this rank's slice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import torch

NEW = -1
"""`Task.source` of the new tokens themselves; other values index the state's blocks."""

ROWS = 8
"""A float32 product of a multiple of so many rows gives each the same bits whatever the others are. Fewer take another
kernel, and so does what is left over when threads share the rows."""


def with_whole_rows(rows: int) -> int:
    """The next multiple of `ROWS`."""
    return -(-rows // ROWS) * ROWS


def fill_rows(x: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """Zeros after the rows along ``dim`` up to a multiple of `ROWS`."""
    short = with_whole_rows(x.shape[dim]) - x.shape[dim]
    if not short:
        return x
    return torch.cat([x, x.new_zeros(*x.shape[:dim], short, *x.shape[dim + 1 :])], dim)


TILE = 256
"""Where a token's bits must not depend on the others: keys of a tile, positions of a block that one cp rank owns."""


class Piece(NamedTuple):
    """A run of new keys on this rank: ``branches`` whole-or-partial branches of ``length`` tokens each."""

    branch: int
    branches: int
    start: int  # place of the first one among this rank's new keys
    length: int  # tokens of each branch
    first: int = 0  # new tokens of the branch before it


def pieces_of(pieces: Iterable[Piece], first: int, branches: int) -> Iterator[Piece]:
    """What lies in the branches from ``first`` on, which count from 0 then."""
    for piece in pieces:
        low = max(piece.branch, first)
        count = min(piece.branch + piece.branches, first + branches) - low
        if count > 0:
            start = piece.start + (low - piece.branch) * piece.length
            yield Piece(low - first, count, start, piece.length, piece.first)


class Task(NamedTuple):
    """One call of an attention kernel: a batch of query runs, each against its own run of keys.

    Queries are ``branches`` runs of ``q_len`` flat tokens from ``q_start``; keys are ``branches`` runs of ``k_len``
    tokens. ``causal`` runs are square; all others see every key.
    """

    source: int
    q_start: int
    q_len: int
    branches: int
    k_start: int
    k_len: int
    causal: bool


class BlockShape(NamedTuple):
    """What planning needs to know of a resident block."""

    shared: bool  # one sequence that all its readers see
    branch: int
    branches: int
    length: int
    readers: int = 0  # branches from `branch` on that see a shared block; 0: all of them

    def read_by(self, branch: int) -> bool:
        """Whether the branch's new tokens see it."""
        count = self.readers if self.shared else self.branches
        return (self.shared and not count) or self.branch <= branch < self.branch + count


@dataclass(frozen=True)
class TokenLayout:
    """The flat list of new tokens: where each branch starts, how long it is, and who owns which slice."""

    starts: tuple[int, ...]  # absolute position of each branch's first new token
    lengths: tuple[int, ...]
    cp_size: int = 1
    cp_rank: int = 0
    multiple: int = 1  # local slices are a multiple of this (tp under sequence parallelism)
    same_bits: bool = False  # a token's result must not depend on the others: enough rows, tiles by position
    offsets: tuple[int, ...] = field(init=False)
    _visible: dict[tuple[int, int], list[int]] = field(
        init=False, repr=False, compare=False, default_factory=dict
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "offsets", (0, *accumulate(self.lengths)))

    @property
    def tokens(self) -> int:
        """N: new tokens of all branches."""
        return self.offsets[-1]

    @property
    def local_slots(self) -> int:
        """m: slots of each rank's slice, padding included."""
        unit = self.cp_size * self.multiple
        slots = max(1, -(-self.tokens // unit))
        return (with_whole_rows(slots) if self.same_bits else slots) * self.multiple

    @property
    def padded(self) -> int:
        """M: slots of all ranks."""
        return self.local_slots * self.cp_size

    @property
    def local_start(self) -> int:
        return self.cp_rank * self.local_slots

    @property
    def local_tokens(self) -> int:
        """Real tokens in this rank's slice."""
        return max(0, min(self.local_slots, self.tokens - self.local_start))

    @property
    def dealt(self) -> bool:
        """Whether keys leave their query's rank for the one that owns their position: blocks of `TILE`, dealt round.

        Ownership then depends neither on the pass nor on the other branches, and every rank owns as much of any
        stretch of positions, to one block. Otherwise a rank's new keys are those of its slice.
        """
        return self.same_bits and self.cp_size > 1

    def owned_before(self, position: int) -> int:
        """How many positions below this one this rank owns, if they are dealt (alone it owns all)."""
        turns, rest = divmod(position, TILE * self.cp_size)
        return turns * TILE + min(max(rest - self.cp_rank * TILE, 0), TILE)

    @property
    def keys(self) -> int:
        """New keys of this rank."""
        return sum(piece.branches * piece.length for piece in self.pieces)

    @cached_property
    def key_slots(self) -> torch.Tensor:
        """[keys] int64: the slot, among those of all ranks, that each of this rank's new keys comes from."""
        starts = [
            (self.offsets[piece.branch + i] + piece.first, piece.length)
            for piece in self.pieces
            for i in range(piece.branches)
        ]
        return torch.cat([torch.arange(0), *(torch.arange(low, low + length) for low, length in starts)])

    def visible(self, branch: int) -> Sequence[int]:
        """For each new token of a branch, how many keys of this rank it sees, of all from position 0 on."""
        start, length = self.starts[branch], self.lengths[branch]
        if not self.dealt:
            return range(start + 1, start + length + 1)
        if (start, length) not in self._visible:
            self._visible[start, length] = [self.owned_before(start + i) for i in range(1, length + 1)]
        return self._visible[start, length]

    def positions(self, device: torch.device) -> torch.Tensor:
        """[m] int64: absolute position of each local slot; padding continues the last branch."""
        low, high = self.local_start, self.local_start + self.local_slots
        positions: list[int] = []
        for start, offset, length in zip(self.starts, self.offsets, self.lengths, strict=False):
            first = start - offset  # position of slot 0, as this branch counts
            positions += range(first + max(low, offset), first + min(high, offset + length))
        first = self.starts[-1] - self.offsets[-2]
        positions += range(first + max(low, self.tokens), first + high)
        # The host knows them: one copy, that waits for nothing.
        return torch.tensor(positions).to(device, non_blocking=True)

    def slice_local(self, flat: torch.Tensor, fill: float = 0) -> torch.Tensor:
        """[N, ...] -> [m, ...]: this rank's slice of a flat per-token tensor, padded with ``fill``."""
        local = flat[self.local_start : self.local_start + self.local_tokens]
        if local.shape[0] == self.local_slots:
            return local
        pad = local.new_full((self.local_slots - local.shape[0], *local.shape[1:]), fill)
        return torch.cat([local, pad])

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """This rank's new keys, neighbours of equal whole length joined into one batch."""
        if self.dealt:
            return self._dealt_pieces()
        low, high = self.local_start, self.local_start + self.local_tokens
        pieces: list[Piece] = []
        for branch, length in enumerate(self.lengths):
            first, last = max(low, self.offsets[branch]), min(high, self.offsets[branch + 1])
            if first >= last:
                continue
            whole = last - first == length
            previous = pieces[-1] if pieces else None
            if (
                whole
                and previous is not None
                and previous.length == length
                and previous.branch + previous.branches == branch
                and self.lengths[previous.branch] == length
            ):
                pieces[-1] = previous._replace(branches=previous.branches + 1)
            else:
                pieces.append(Piece(branch, 1, first - low, last - first, first - self.offsets[branch]))
        return tuple(pieces)

    def _dealt_pieces(self) -> tuple[Piece, ...]:
        pieces: list[Piece] = []
        at, turn = 0, TILE * self.cp_size
        for run in self.runs(()):
            start = self.starts[run.branch]
            for block in range(start // turn * turn + self.cp_rank * TILE, start + run.length, turn):
                low, high = max(start, block), min(start + run.length, block + TILE)
                if low < high:
                    pieces.append(Piece(run.branch, run.branches, at, high - low, low - start))
                    at += run.branches * (high - low)
        return tuple(pieces)

    def runs(self, blocks: Sequence[BlockShape]) -> tuple[Piece, ...]:
        """Neighbouring branches with new tokens of the same positions, each inside or outside every block as one."""
        belonging = [(b.branch, b.readers if b.shared else b.branches) for b in blocks]
        edges = {edge for first, count in belonging if count for edge in (first, first + count)}
        runs: list[Piece] = []
        for branch, (start, length) in enumerate(zip(self.starts, self.lengths, strict=True)):
            if not length:
                continue
            last = runs[-1] if runs else None
            joins = last is not None and last.branch + last.branches == branch and branch not in edges
            if last is not None and joins and (self.starts[last.branch], last.length) == (start, length):
                runs[-1] = last._replace(branches=last.branches + 1)
            else:
                runs.append(Piece(branch, 1, self.offsets[branch], length))
        return tuple(runs)

    def plan(self, blocks: Sequence[BlockShape]) -> tuple[Task, ...]:
        """All kernel calls of this rank: gathered queries against its own blocks and its own new keys."""
        tasks: list[Task] = []
        for index, block in enumerate(blocks):
            if block.length == 0:
                continue
            if block.shared:
                first = self.offsets[block.branch] if block.readers else 0
                end = self.offsets[block.branch + block.readers] if block.readers else self.tokens
                if first < end:
                    tasks.append(Task(index, first, end - first, 1, 0, block.length, False))
            else:
                tasks += self._own_block_tasks(index, block)
        for piece in self.pieces:
            length = piece.length
            if length == self.lengths[piece.branch]:
                q_start = self.offsets[piece.branch]
                tasks.append(Task(NEW, q_start, length, piece.branches, piece.start, length, True))
                continue
            for i in range(piece.branches):
                q_start, k_start = self.offsets[piece.branch + i] + piece.first, piece.start + i * length
                tasks.append(Task(NEW, q_start, length, 1, k_start, length, True))
                if rest := self.offsets[piece.branch + i + 1] - (q_start + length):
                    tasks.append(Task(NEW, q_start + length, rest, 1, k_start, length, False))
        return tuple(tasks)

    def _own_block_tasks(self, index: int, block: BlockShape) -> list[Task]:
        lengths = self.lengths[block.branch : block.branch + block.branches]
        if len(set(lengths)) == 1 and lengths[0]:
            return [
                Task(index, self.offsets[block.branch], lengths[0], block.branches, 0, block.length, False)
            ]
        # Ragged queries: one call per branch; k_start counts branches of the block in units of its length.
        return [
            Task(index, self.offsets[block.branch + i], length, 1, i * block.length, block.length, False)
            for i, length in enumerate(lengths)
            if length
        ]
