"""How many tokens' keys and values a LastKV prefix holds, over a stage's layers, by the rules of `Retention`.

Every stage has the last layer's pages of every chunk; own-layer pages only of the newest chunks and of those that a
sweep restarts from or recomputes, whose adjoints exist for two chunks at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_lrl.errors import UserError
from megatron_lrl.layers.architecture import ATTENTION, Architecture
from megatron_lrl.layers.kind import Capture, Place
from megatron_lrl.layers.lastkv.clock import Clock
from megatron_lrl.layers.lastkv.retention import Retention, by_chunk
from megatron_lrl.runtime import Layout


def check_stages(arch: Architecture, layout: Layout) -> None:
    """Raise `UserError` unless every pipeline stage has an attention layer."""

    def everywhere(pp: int) -> bool:
        stages = Place(arch, Layout(pp=pp), None, None)  # type: ignore[arg-type]
        return all(ATTENTION in stages.mixers(stage) for stage in range(pp))

    if not everywhere(layout.pp):
        usable = [pp for pp in range(1, layout.pp) if not arch.num_layers % pp and everywhere(pp)]
        raise UserError(
            f"parallel.pp = {layout.pp}: with LastKV every pipeline stage needs an attention layer; "
            f"valid with this model: {', '.join(map(str, usable))}"
        )


def chunk_bytes(place: Place) -> int:
    """Own-layer tokens of a whole chunk, on the rank that has most."""
    stages = range(place.layout.pp) if place.stage is None else (place.stage,)
    most = max(_own_layers(place._replace(stage=stage)) for stage in stages)
    return most * -(-_clock(place).size // place.layout.cp)


def resident_tokens(place: Place, capture: Capture) -> tuple[int, int]:
    """(tokens of the state, tokens of the adjoint at its peak)."""
    clock, own_layers = _clock(place), _own_layers(place)
    open_chunk = clock.chunk(capture.starts[-1])
    retention = _retention(clock, capture)
    held = by_chunk(clock, capture.starts, capture.local)
    own = sum(n for chunk, n in held.items() if retention.keeps(chunk, open_chunk))
    live = by_chunk(clock, capture.starts, capture.live_local)
    pairs = max(n + live.get(chunk + 1, 0) for chunk, n in live.items())
    return sum(capture.local) + own_layers * own, capture.live + own_layers * pairs


def refilled_tokens(place: Place, capture: Capture, again: Sequence[int]) -> int:
    """Own-layer tokens of chunks that were dropped and are made ``again``."""
    clock = _clock(place)
    retention, open_chunk = _retention(clock, capture), clock.chunk(capture.starts[-1])
    dropped = (i for i in again if not retention.keeps(clock.chunk(capture.starts[i]), open_chunk))
    return _own_layers(place) * sum(capture.local[i] for i in dropped)


def _own_layers(place: Place) -> int:
    """Attention layers of a stage but the model's last."""
    return place.layers(ATTENTION) - place.has_last_layer


def _clock(place: Place) -> Clock:
    assert place.arch.lastkv is not None
    return Clock(place.arch.lastkv.chunk_size)


def _retention(clock: Clock, capture: Capture) -> Retention:
    live = capture.live_from < capture.spans[-1][1]
    return Retention(clock, capture.live_from if live else None, capture.restarts if live else None)


__all__ = ["check_stages", "chunk_bytes", "refilled_tokens", "resident_tokens"]
