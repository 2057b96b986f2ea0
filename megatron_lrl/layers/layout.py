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


class Piece(NamedTuple):
    """A run of new tokens on this rank: ``branches`` whole-or-partial branches of ``length`` tokens each."""

    branch: int
    branches: int
    start: int  # first slot in this rank's slice
    length: int  # tokens of each branch


def pieces_of(pieces: Iterable[Piece], first: int, branches: int) -> Iterator[Piece]:
    """What lies in the branches from ``first`` on, which count from 0 then."""
    for piece in pieces:
        low = max(piece.branch, first)
        count = min(piece.branch + piece.branches, first + branches) - low
        if count > 0:
            start = piece.start + (low - piece.branch) * piece.length
            yield Piece(low - first, count, start, piece.length)


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


@dataclass(frozen=True)
class TokenLayout:
    """The flat list of new tokens: where each branch starts, how long it is, and who owns which slice."""

    starts: tuple[int, ...]  # absolute position of each branch's first new token
    lengths: tuple[int, ...]
    cp_size: int = 1
    cp_rank: int = 0
    multiple: int = 1  # local slices are a multiple of this (tp under sequence parallelism)
    offsets: tuple[int, ...] = field(init=False)

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
        return max(1, -(-self.tokens // unit)) * self.multiple

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
        """The new tokens on this rank, neighbours of equal whole length joined into one batch."""
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
                pieces.append(Piece(branch, 1, first - low, last - first))
        return tuple(pieces)

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
            q_start = self.local_start + piece.start
            tasks.append(Task(NEW, q_start, piece.length, piece.branches, piece.start, piece.length, True))
            rest = self.offsets[piece.branch + 1] - (q_start + piece.length)
            if piece.branches == 1 and rest > 0:
                tasks.append(Task(NEW, q_start + piece.length, rest, 1, piece.start, piece.length, False))
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
