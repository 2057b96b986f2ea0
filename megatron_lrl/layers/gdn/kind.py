"""Gated DeltaNet as a layer kind."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from megatron_lrl.errors import UserError
from megatron_lrl.layers.architecture import Architecture
from megatron_lrl.layers.gdn.rows import FLAT
from megatron_lrl.layers.gdn.sizes import GDN, sizes_of
from megatron_lrl.layers.kind import Operations, Place, StandIn
from megatron_lrl.layers.recurrent import RecurrentKind
from megatron_lrl.runtime import Layout

_BLOCK = 64  # tokens of a block of the delta rule


class GatedDeltaNetKind(RecurrentKind):
    """A recurrent state of one size after any number of tokens; going back needs a snapshot before each chunk."""

    name, title, fused_norm, rows = GDN, "Gated DeltaNet", "in_proj", FLAT
    parameters = (("gdn", r"self_attention\.(in_proj|conv1d|out_proj|A_log|dt_bias)"),)

    def install(self, submodules: Any, arch: Architecture, transformer_engine: bool, norm: Any) -> None:
        from megatron_lrl.layers.gdn.module import gdn_spec

        submodules.self_attention = gdn_spec(transformer_engine)

    def settings(self, arch: Architecture) -> dict[str, Any]:
        spec = sizes_of(arch)
        return {
            "linear_num_key_heads": spec.key_heads,
            "linear_num_value_heads": spec.value_heads,
            "linear_key_head_dim": spec.key_dim,
            "linear_value_head_dim": spec.value_dim,
            "linear_conv_kernel_dim": spec.conv_kernel,
        }

    def widths(self, arch: Architecture) -> dict[str, int]:
        spec = sizes_of(arch)
        return {"Gated DeltaNet key heads": spec.key_heads, "value heads": spec.value_heads}

    def check_layout(self, arch: Architecture, layout: Layout) -> None:
        """Heads are exchanged for tokens over cp: what tp left of them is dealt to the cp ranks."""
        spec = sizes_of(arch)
        heads = math.gcd(spec.key_heads, spec.value_heads) // layout.tp
        if heads % layout.cp:
            valid = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
            raise UserError(
                f"parallel.cp = {layout.cp}: tp x cp = {layout.tp * layout.cp} must divide the model's Gated DeltaNet "
                f"key heads ({spec.key_heads}) and value heads ({spec.value_heads}); "
                f"valid with this model and parallel.tp = {layout.tp}: {valid}"
            )

    def operations(self, arch: Architecture) -> Operations:
        """Projections and convolution; of the rule k k', q k', the triangular solve, attention within the block, and
        three products with the state."""
        spec, c = sizes_of(arch), _BLOCK
        projected = spec.conv_channels + 2 * spec.values + 2 * spec.value_heads  # q k v, z, b a; and out
        weights = 2.0 * arch.hidden_size * projected + 2.0 * spec.conv_channels * spec.conv_kernel
        k, v = spec.key_dim, spec.value_dim
        scan = float(spec.value_heads * (4 * c * k + c * (k + v) + 2 * c * v + 6 * k * v))
        return Operations(weights, scan=scan)

    def stand_ins(self) -> Sequence[StandIn]:
        from megatron_lrl.layers.gdn import delta_rule, stand_ins

        return [
            StandIn(delta_rule, "_DeltaRule", stand_ins.PlannedDeltaRule),
            StandIn(delta_rule, "_blocks", stand_ins.shapes_of_blocks),
        ]

    def state_bytes(self, place: Place, dtype: torch.dtype) -> int:
        """The convolution's tail in ``dtype``, the rule's state in float32 (float64 for float64)."""
        spec, shards = sizes_of(place.arch), place.layout.tp * place.layout.cp
        state = spec.value_heads // shards * spec.key_dim * spec.value_dim * max(4, dtype.itemsize)
        return state + spec.conv_channels // shards * (spec.conv_kernel - 1) * dtype.itemsize


__all__ = ["GatedDeltaNetKind"]
