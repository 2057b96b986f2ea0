"""Latent attention as a layer kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from megatron_lrl.layers.architecture import Architecture
from megatron_lrl.layers.kind import Capture, Kept, LayerKind, Operations, Place, Resident
from megatron_lrl.layers.mla.rows import ROWS
from megatron_lrl.layers.mla.sizes import MLA, sizes_of


class LatentKind(LayerKind):
    """One resident row a token, whole on every tp rank; cp and pp divide rows as they divide keys and values."""

    name, title, fused_norm, rows = MLA, "latent attention", "", ROWS
    parameters = (("latents", r"linear_(q|kv)_(down|up)\."), ("attention out", r"linear_proj\."))

    def install(self, submodules: Any, arch: Architecture, transformer_engine: bool, norm: Any) -> None:
        from megatron.core.transformer.spec_utils import ModuleSpec

        from megatron_lrl.layers.mla.module import ResidentMLA

        submodules.self_attention = ModuleSpec(module=ResidentMLA, params={"arch": arch, "norm": norm})
        submodules.input_layernorm = norm  # no projection norms its own input

    def widths(self, arch: Architecture) -> dict[str, int]:
        return {"attention heads": arch.num_heads}

    def snapshot_bytes(self, place: Place) -> Kept:
        return Kept()

    def resident(self, place: Place, capture: Capture, adjoint_dtype: torch.dtype) -> Resident:
        layers, row = place.layers(self.name), sizes_of(place.arch).row
        held, live = layers * sum(capture.local) * row, layers * capture.live * row
        return Resident(held * place.dtype.itemsize, live * adjoint_dtype.itemsize)

    def refilled(self, place: Place, capture: Capture, again: Sequence[int]) -> int:
        return 0

    def operations(self, arch: Architecture) -> Operations:
        """Absorbed: each token's queries go to the latent and its outputs come from it."""
        spec, hidden, heads = sizes_of(arch), arch.hidden_size, arch.num_heads
        queries = (hidden * spec.query_rank + spec.query_rank * heads * spec.query) if spec.query_rank else (
            hidden * heads * spec.query
        )  # fmt: skip
        rest = 2.0 * (queries + heads * spec.expanded * spec.latent + heads * spec.value * hidden)
        return Operations(rest + 2.0 * hidden * spec.row, rest=rest, pair=4.0 * heads * spec.row)


__all__ = ["LatentKind"]
