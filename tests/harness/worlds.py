"""The parallel layouts that every numerical claim is shown in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class World(NamedTuple):
    """Tensor, context, pipeline, data and expert parallel sizes. Sequence parallelism is on whenever tp > 1.

    Expert parallelism takes no ranks of its own: ep divides cp * dp.
    """

    tp: int = 1
    cp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.tp * self.cp * self.pp * self.dp

    @property
    def name(self) -> str:
        """A pytest id, e.g. `tp2-cp2` (`one` for the single rank)."""
        parts = [f"{axis}{n}" for axis, n in zip(self._fields, self, strict=True) if n > 1]
        return "-".join(parts) or "one"

    @property
    def overrides(self) -> list[str]:
        """The layout as `key=value` settings of the command line; dp follows from the world size."""
        return [f"parallel.{axis}={getattr(self, axis)}" for axis in ("tp", "cp", "pp", "ep")]


ONE = World()

WORLDS = [
    ONE,
    World(tp=2),
    World(cp=2),
    World(pp=2),
    World(dp=2),
    World(tp=2, cp=2),
    World(tp=2, pp=2),
    World(cp=2, pp=2),
    World(cp=2, dp=2),
    World(tp=2, cp=2, pp=2),
]

EP_WORLDS = [
    World(dp=2, ep=2),
    World(tp=2, dp=2, ep=2),
    World(pp=2, dp=2, ep=2),
    World(cp=2, ep=2),
]


def of_size(limit: int) -> list[World]:
    """The worlds of at most `limit` ranks, in the order of `WORLDS`."""
    return [world for world in WORLDS if world.size <= limit]


# What runs by default; a test's cases in other worlds are slow. Every axis alone and with each other one is in these:
# tensor, context and pipeline parallel ranks at once, replicas that share a context, experts over replicas.
COVERING = [ONE, World(tp=2, cp=2, pp=2), World(cp=2, dp=2), World(dp=2, ep=2), World(pp=2, dp=2, ep=2)]


def left_out(worlds: Sequence[World]) -> set[World]:
    """Of the worlds of one test, those that are slow: all but the covering ones.

    A test that has several ranks, but in no covering world, keeps the last world it names.
    """
    several = [world for world in worlds if world.size > 1]
    kept = [world for world in several if world in COVERING] or several[-1:]
    return set(several) - set(kept)
