"""Which LastKV chunks' own-layer keys and values exist, and what of them a sweep makes again.

    open chunk c         attention reads own-layer keys and values of c - 1 and c
    live from position p    a sweep goes back to p: those of the chunk before p's, and of all later ones, stay
    restarts             of these, only what is read right behind a restart stays; a sweep makes the others again

Integers only: the state drops by these rules, a sweep and a plan count by them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from megatron_lrl.layers.lastkv.clock import Clock


@dataclass(frozen=True)
class Retention:
    """``keep_from``: the position that a sweep goes back to at most; None: there is none.
    ``restarts``: positions that it restarts from; None: every advance from ``keep_from`` on."""

    clock: Clock
    keep_from: int | None = None
    restarts: frozenset[int] | None = None

    def oldest(self, chunk: int) -> int:
        """The oldest chunk that anything will read while ``chunk`` is open; of older ones not even the place stays."""
        read = chunk - 1
        return read if self.keep_from is None else min(read, self.clock.chunk(self.keep_from) - 1)

    def keeps(self, own: int, chunk: int) -> bool:
        """Whether keys and values of chunk ``own`` exist while ``chunk`` is open."""
        if own >= chunk - 1:
            return True
        return own >= self.oldest(chunk) and (self.restarts is None or own in self._read_behind_restarts)

    @cached_property
    def _read_behind_restarts(self) -> frozenset[int]:
        return self.clock.read_from(self.restarts or ())


def again(units: Sequence[Sequence[int]], newest: bool) -> list[int]:
    """Advances that are run forward once more before a part of a sweep, given those of each of its LastKV chunks.

    The next restart keeps the own-layer pages of the part's last chunk; of the ``newest`` part, forks read those of the
    newest two.
    """
    return [number for unit in units[: -2 if newest else -1] for number in unit]


def by_chunk(clock: Clock, starts: Iterable[int], tokens: Iterable[int]) -> dict[int, int]:
    """Tokens of each LastKV chunk, given where captured chunks start and how many tokens of each there are."""
    room: dict[int, int] = {}
    for start, count in zip(starts, tokens, strict=True):
        chunk = clock.chunk(start)
        room[chunk] = room.get(chunk, 0) + count
    return room


__all__ = ["Retention", "again", "by_chunk"]
