"""What a sweep restarts from: fewer bytes for one more forward of the chunks between.

    captured chunks   0   1   2   3   4   5   6   7 |          restarts before every 3rd: 0, 3, 6
    sweep                                   6   7 ◄─┘  run 6 forward: the state before 7; sweep 7, 6; drop
                                  3   4   5 ◄───────── run 3, 4 forward: the states before 4, 5; sweep 5, 4, 3
                      0   1   2 ◄───────────────────── ...

Recomputing a chunk needs the keys and values before it, and what nothing else needs: recurrent states before the
chunk, and under LastKV the own-layer keys and values of the chunk before. With n live chunks and restarts before every
s-th, ceil(n / s) + s - 1 of these exist at most.

Under LastKV a sweep restarts where a LastKV chunk starts, which may be several captured chunks ("advances") long.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_lrl.errors import UserError
from megatron_lrl.layers.architecture import Architecture
from megatron_lrl.layers.kind import Kept, Place
from megatron_lrl.layers.kinds import kinds_of
from megatron_lrl.layers.lastkv.retention import again
from megatron_lrl.runtime import Layout


def kept_bytes(arch: Architecture, layout: Layout, dtype: torch.dtype) -> Kept:
    """What a sweep needs of all kinds of layers, each on the pipeline stage that has most."""
    place = Place(arch, layout, None, dtype)
    parts = [kind.snapshot_bytes(place) for kind in kinds_of(arch)]
    return Kept(sum(part.advance for part in parts), sum(part.chunk for part in parts))


@dataclass(frozen=True)
class Part:
    """Live advances, ascending, that are swept from one restart; ``again``: those that are run forward before."""

    advances: tuple[int, ...]
    again: tuple[int, ...] = ()


@dataclass(frozen=True)
class Restarts:
    """The parts of a prompt's sweep, in the order of the tokens. ``starts``: the position of each advance."""

    parts: tuple[Part, ...]
    starts: tuple[int, ...]
    every: int

    @property
    def positions(self) -> frozenset[int] | None:
        """Positions that a sweep restarts from; None: every advance, and nothing is run again."""
        if self.every == 1:
            return None
        return frozenset(self.starts[part.advances[0]] for part in self.parts)


def plan_restarts(
    starts: Sequence[int],
    live_from: int,
    arch: Architecture,
    layout: Layout,
    dtype: torch.dtype,
    budget: int,
    name: str,
) -> Restarts:
    """How prompt ``name``, captured in advances that begin at ``starts``, is swept down to position ``live_from``.

    Restarts are as dense as ``budget`` bytes allow on the rank that needs most (0: no limit). Every rank decides alike.

    Raises: `UserError` if no density fits.
    """
    chunk = None if arch.lastkv is None else arch.lastkv.chunk_size
    units: list[list[int]] = []  # advances between which no sweep restarts
    for number, start in enumerate(starts):
        if start >= live_from:
            if units and chunk and start // chunk == starts[units[-1][0]] // chunk:
                units[-1].append(number)
            else:
                units.append([number])
    kept = kept_bytes(arch, layout, dtype)
    # A first unit from the middle of a LastKV chunk is a part of its own, so that later ones restart at boundaries.
    first = 1 if chunk and units and starts[units[0][0]] % chunk else 0
    every = _every(len(units), first, max(map(len, units), default=0), kept, budget, name)
    if every == 1:
        parts = [Part(tuple(number for unit in units for number in unit))] if units else []
        return Restarts(tuple(parts), tuple(starts), 1)
    groups = [units[:first]] if first else []
    groups += [units[i : i + every] for i in range(first, len(units), every)]
    parts = []
    for group in groups:
        advances = [number for unit in group for number in unit]
        missing = advances[:-1] if kept.advance else again(group, newest=group is groups[-1])
        parts.append(Part(tuple(advances), tuple(missing)))
    return Restarts(tuple(parts), tuple(starts), every)


def _every(units: int, first: int, longest: int, kept: Kept, budget: int, name: str) -> int:
    """Units per restart, the fewest that keep the budget; the ``first`` 0 or 1 of them are a part of their own.

    ``longest``: most advances of a unit.
    """
    recurrent, own = kept

    def most(every: int) -> int:
        if every == 1:
            return units * (own + longest * recurrent)
        again = min(every, units - first) - 1
        return (
            (first - (first - units) // every) * (own + recurrent)
            + again * own
            + (again * longest + longest - 1) * recurrent
        )

    if not budget or not recurrent + own or units <= 1:
        return 1
    for every in range(1, units + 1):
        if most(every) <= budget:
            return every
    needed = min(most(every) for every in range(1, units + 1))
    raise UserError(
        f"prefix.snapshot_bytes = {budget}: the sweep of prompt {name} restarts in {units} live chunks, which takes at "
        f"least {needed} bytes on a rank; valid: so many or more, 0 for no limit"
        + ("" if own else ", or a larger prefix.chunk_size")
    )


__all__ = ["Part", "Restarts", "kept_bytes", "plan_restarts"]
