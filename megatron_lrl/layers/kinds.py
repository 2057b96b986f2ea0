"""The registry of layer kinds: one line per kind."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_lrl.layers.architecture import ATTENTION, Architecture
from megatron_lrl.layers.gdn.kind import GatedDeltaNetKind
from megatron_lrl.layers.kind import LayerKind, StandIn
from megatron_lrl.layers.mla.kind import LatentKind
from megatron_lrl.layers.moe import kind as moe
from megatron_lrl.layers.softmax.kind import SoftmaxKind

KINDS: dict[str, LayerKind] = {
    "attention": SoftmaxKind(),
    "gdn": GatedDeltaNetKind(),
    "mla": LatentKind(),
}


def kinds_of(arch: Architecture) -> tuple[LayerKind, ...]:
    """The kinds of a model's layers, in the registry's order. Raises ValueError for one that is not registered."""
    if unknown := set(arch.mixers) - KINDS.keys():
        raise ValueError(f"layers of unknown kinds {sorted(unknown)}; registered: {', '.join(KINDS)}")
    return tuple(kind for name, kind in KINDS.items() if name in arch.mixers)


def stand_ins() -> Sequence[StandIn]:
    """Of every kind, and of experts."""
    return [stand_in for kind in KINDS.values() for stand_in in kind.stand_ins()] + list(moe.stand_ins())


def describe_attention(arch: Architecture) -> str:
    """For identities and logs: "full", "lastkv C=512 blend", "full, 3 of 4 layers Gated DeltaNet"."""
    words = ["full" if arch.lastkv is None else str(arch.lastkv)]
    for kind in kinds_of(arch):
        if kind.name != ATTENTION:
            words.append(f"{arch.mixers.count(kind.name)} of {arch.num_layers} layers {kind.title}")
    return ", ".join(words)


__all__ = ["KINDS", "describe_attention", "kinds_of", "stand_ins"]
