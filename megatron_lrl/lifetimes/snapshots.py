"""Coarse snapshots of recurrent states: fewer bytes for one more forward of the chunks between them.

    captured chunks   0   1   2   3   4   5   6   7 |          a snapshot before every 3rd: 0, 3, 6
    sweep                                   6   7 ◄─┘  run 6 forward: snapshot before 7; sweep 7, 6; drop
                                  3   4   5 ◄───────── run 3, 4 forward: snapshots before 4, 5; sweep 5, 4, 3
                      0   1   2 ◄───────────────────── ...

With n live chunks and a snapshot before every s-th, ceil(n / s) + s - 1 snapshots exist at most.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_lrl.errors import UserError
from megatron_lrl.models.hf_config import GDN, Architecture
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
    per_stage = arch.num_layers // layout.pp
    counts = [arch.mixers[i * per_stage : (i + 1) * per_stage].count(GDN) for i in range(layout.pp)]
    return (state + tail) * (max(counts) if stage is None else counts[stage])


def snapshot_every(live_chunks: int, snapshot: int, budget: int, group: str) -> int:
    """Live chunks per snapshot, the fewest that keep ``budget`` bytes (0: no limit).

    Raises `UserError` if no number does.
    """
    if not budget or not snapshot or live_chunks <= 1:
        return 1
    for every in range(1, live_chunks + 1):
        if most_snapshots(live_chunks, every) * snapshot <= budget:
            return every
    needed = min(most_snapshots(live_chunks, every) for every in range(1, live_chunks + 1)) * snapshot
    raise UserError(
        f"prefix.snapshot_bytes = {budget}: group {group} captures {live_chunks} live chunks whose recurrent states "
        f"need at least {needed} bytes on a rank; valid: so many or more, 0 for no limit, or a larger prefix.chunk_size"
    )


def most_snapshots(live_chunks: int, every: int) -> int:
    """Snapshots that exist at once while a prefix of so many live chunks is swept."""
    return -(-live_chunks // every) + min(every, live_chunks) - 1


def sweep_parts(live: Sequence[int], every: int) -> list[list[int]]:
    """Live chunks, ascending, in parts that begin at a snapshot; one part where every chunk has one."""
    size = len(live) if every == 1 else every
    return [list(live[i : i + size]) for i in range(0, len(live), size)]


__all__ = ["most_snapshots", "recurrent_bytes", "snapshot_every", "sweep_parts"]
