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
from functools import cached_property

from megatron_lrl.errors import UserError
from megatron_lrl.layers.lastkv.clock import Clock
from megatron_lrl.models.hf_config import ATTENTION, GDN, Architecture
from megatron_lrl.runtime import Layout


def recurrent_bytes(arch: Architecture, layout: Layout, itemsize: int, stage: int | None = None) -> int:
    """Bytes of one sequence's recurrent states on a rank of ``stage`` (None: of the stage that has most).

    ``itemsize``: of the parameter dtype, which the convolution tails have; states are float32 (float64 for float64).
    """
    if arch.gdn is None:
        return 0
    gdn, shards = arch.gdn, layout.tp * layout.cp
    state = gdn.value_heads // shards * gdn.key_dim * gdn.value_dim * max(4, itemsize)
    tail = gdn.conv_channels // shards * (gdn.conv_kernel - 1) * itemsize
    return (state + tail) * _layers_of(arch, GDN, layout.pp, stage)


def own_layer_bytes(arch: Architecture, layout: Layout, itemsize: int) -> int:
    """Bytes of the own-layer keys and values of a whole LastKV chunk, on the rank that has most; 0 without LastKV."""
    if arch.lastkv is None:
        return 0
    most = max(
        _layers_of(arch, ATTENTION, layout.pp, stage) - (stage == layout.pp - 1) for stage in range(layout.pp)
    )
    tokens = -(-arch.lastkv.chunk_size // layout.cp)
    return most * tokens * 2 * arch.num_kv_heads // layout.tp * arch.head_dim * itemsize


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
    lastkv_chunk: int | None = None

    @property
    def positions(self) -> frozenset[int] | None:
        """Positions that a sweep restarts from; None: every advance, and nothing is run again."""
        if self.every == 1:
            return None
        return frozenset(self.starts[part.advances[0]] for part in self.parts)

    @cached_property
    def kept_chunks(self) -> frozenset[int] | None:
        """LastKV chunks whose own-layer keys and values stay for a restart; None: all that are live."""
        if self.positions is None or self.lastkv_chunk is None:
            return None
        return Clock(self.lastkv_chunk).read_from(self.positions)


def plan_restarts(
    starts: Sequence[int],
    live_from: int,
    arch: Architecture,
    layout: Layout,
    itemsize: int,
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
    recurrent, own = recurrent_bytes(arch, layout, itemsize), own_layer_bytes(arch, layout, itemsize)
    # A first unit from the middle of a LastKV chunk is a part of its own, so that later ones restart at boundaries.
    first = 1 if chunk and units and starts[units[0][0]] % chunk else 0
    every = _every(len(units), first, max(map(len, units), default=0), recurrent, own, budget, name)
    if every == 1:
        parts = [Part(tuple(number for unit in units for number in unit))] if units else []
        return Restarts(tuple(parts), tuple(starts), 1, chunk)
    groups = [units[:first]] if first else []
    groups += [units[i : i + every] for i in range(first, len(units), every)]
    parts = []
    for group in groups:
        advances = [number for unit in group for number in unit]
        if arch.hybrid:
            again = advances[:-1]
        else:
            # The next restart keeps the own-layer pages of a part's last chunk; forks read those of the newest two.
            again = [number for unit in group[: -2 if group is groups[-1] else -1] for number in unit]
        parts.append(Part(tuple(advances), tuple(again)))
    return Restarts(tuple(parts), tuple(starts), every, chunk)


def _every(units: int, first: int, longest: int, recurrent: int, own: int, budget: int, name: str) -> int:
    """Units per restart, the fewest that keep the budget; the ``first`` 0 or 1 of them are a part of their own.

    ``longest``: most advances of a unit.
    """

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


def _layers_of(arch: Architecture, mixer: str, pp: int, stage: int | None) -> int:
    """Layers of a kind on a stage (None: on the one that has most)."""
    per_stage = arch.num_layers // pp
    counts = [arch.mixers[i * per_stage : (i + 1) * per_stage].count(mixer) for i in range(pp)]
    return max(counts) if stage is None else counts[stage]


__all__ = ["Part", "Restarts", "own_layer_bytes", "plan_restarts", "recurrent_bytes"]
