"""The clock of LastKV: which chunk a position belongs to, and where a run of tokens is cut.

Integers only. A position is absolute within its document, and a document starts at position 0: nothing but a declared
document start moves the clock, neither padding nor micro-batches, packing, a prompt's end or a response's end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class Clock:
    """Chunks of ``size`` tokens: chunk c holds positions [c size, (c + 1) size)."""

    def __init__(self, size: int) -> None:
        """Raises ValueError unless ``size`` >= 1."""
        if size < 1:
            raise ValueError(f"a LastKV chunk holds at least one token, not {size}")
        self.size = size

    def chunk(self, position: int) -> int:
        """The chunk of a position; of a count of fed tokens: the chunk the next token enters."""
        return position // self.size

    def phase(self, position: int) -> int:
        """Tokens of the open chunk before this position, in [0, size)."""
        return position % self.size

    def to_boundary(self, position: int) -> int:
        """Tokens from this position to the next boundary, in [1, size]."""
        return self.size - position % self.size

    def read_from(self, positions: Iterable[int]) -> frozenset[int]:
        """Chunks whose own-layer keys and values tokens from any of these positions on read: the chunk before that of
        the position and, in the middle of a chunk, the chunk itself."""
        return frozenset(
            chunk
            for p in positions
            for chunk in range(self.chunk(p) - 1, self.chunk(p) + (self.phase(p) > 0))
        )

    def boundaries(self, start: int, stop: int) -> list[int]:
        """Boundaries strictly inside (start, stop)."""
        return list(range((start // self.size + 1) * self.size, stop, self.size))

    def rounds(self, starts: Sequence[int], lengths: Sequence[int]) -> list[tuple[int, ...]]:
        """Cut an advance of several branches so that in each round no branch crosses a boundary.

        In every round each branch feeds up to its next boundary. Returns tokens per branch and round; none is empty.
        """
        fed = [0] * len(lengths)
        rounds = []
        while any(done < length for done, length in zip(fed, lengths, strict=True)):
            step = tuple(
                min(length - done, self.to_boundary(start + done))
                for start, done, length in zip(starts, fed, lengths, strict=True)
            )
            rounds.append(step)
            fed = [done + n for done, n in zip(fed, step, strict=True)]
        return rounds
