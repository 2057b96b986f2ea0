"""Branches of several sequences that are advanced as one flat list, each sequence with its own state (decoding).

fork of prefix A, 4 branches ─┐
fork of prefix B, 4 branches ─┼─ one pass over the model: everything but the layers' state sees 11 tokens
fork of prefix B, 3 branches ─┘  attention, recurrence: each branch reads and grows the state it belongs to
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from megatron_lrl.layers.kind import LayerState, Member
from megatron_lrl.layers.sequence import SequenceState


class Together:
    """What `advance` grows in the place of one state: the branches of its members, one member after another."""

    restarts_here = False
    """Nothing of it is swept."""

    def __init__(self, members: Sequence[SequenceState]) -> None:
        """``members``: open states of one kind, without a log."""
        if not members:
            raise ValueError("nothing to advance together")
        self.members = list(members)

    @property
    def counts(self) -> list[int]:
        return [count for member in self.members for count in member.counts]

    @property
    def branches(self) -> int:
        return sum(member.branches for member in self.members)

    def rounds(self, lengths: Sequence[int]) -> list[tuple[int, ...]]:
        """One pass. Raises ValueError for more tokens than each member takes in one."""
        for member, own in self.with_lengths(lengths):
            if len(member.rounds(own)) > 1:
                raise ValueError("what is advanced together takes one pass, a token a branch always fits")
        return [tuple(lengths)]

    def with_lengths(self, lengths: Sequence[int]) -> list[tuple[SequenceState, Sequence[int]]]:
        """Each member and its part of a list with an entry for every branch."""
        return [(member, lengths[low : low + member.branches]) for low, member in self.placed()]

    def placed(self) -> list[tuple[int, SequenceState]]:
        """Each member and its first branch in the list."""
        firsts = accumulate((member.branches for member in self.members), initial=0)
        return list(zip(firsts, self.members, strict=False))

    def layer(self, number: int, kind: type[LayerState]) -> Any:
        """What stands for a layer's state of class ``kind``."""
        parts = [Member(low, member.branches, member.layer(number, kind)) for low, member in self.placed()]
        return kind.joined(parts)

    def grow(self, lengths: Sequence[int]) -> None:
        """Count tokens that every layer has processed."""
        for member, own in self.with_lengths(lengths):
            member.grow(own)

    def check_open(self) -> None:
        """Raise unless every member may grow."""
        for member in self.members:
            member.check_open()

    def close(self) -> None:
        """Free all members."""
        for member in self.members:
            member.close()


__all__ = ["Together"]
