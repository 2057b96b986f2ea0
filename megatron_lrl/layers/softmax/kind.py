"""Softmax attention as a layer kind; with LastKV its layers keep what `layers/lastkv` says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from megatron_lrl.layers.architecture import ATTENTION, Architecture
from megatron_lrl.layers.kind import Capture, Kept, LayerKind, Operations, Place, Resident, StandIn
from megatron_lrl.layers.lastkv import footprint
from megatron_lrl.layers.softmax.rows import ROWS
from megatron_lrl.runtime import Layout


class SoftmaxKind(LayerKind):
    """Grouped-query attention over resident keys and values."""

    name, title, fused_norm, rows = ATTENTION, "softmax attention", "linear_qkv", ROWS
    parameters = (("qkv", r"linear_qkv\."), ("attention out", r"linear_proj\."))

    def install(self, submodules: Any, arch: Architecture, transformer_engine: bool, norm: Any) -> None:
        from megatron_lrl.layers.lastkv.core import LastKVCoreAttention
        from megatron_lrl.layers.softmax import core

        spec, attention = submodules.self_attention, submodules.self_attention.submodules
        spec.module = core.GatedSelfAttention
        spec.params = {**spec.params, "rope_factor": arch.rope.attention_factor}
        if arch.qk_norm and not transformer_engine:
            attention.q_layernorm = attention.k_layernorm = norm
        if arch.attention_output_bias:
            attention.linear_proj = core.RowParallelLinearWithBias
        attention.core_attention = core.SegmentCoreAttention if arch.lastkv is None else LastKVCoreAttention

    def widths(self, arch: Architecture) -> dict[str, int]:
        return {"attention heads": arch.num_heads, "KV heads": arch.num_kv_heads}

    def check_layout(self, arch: Architecture, layout: Layout) -> None:
        if arch.lastkv is not None:
            footprint.check_stages(arch, layout)

    def snapshot_bytes(self, place: Place) -> Kept:
        if place.arch.lastkv is None:
            return Kept()
        return Kept(chunk=footprint.chunk_bytes(place) * self._token_bytes(place, place.dtype))

    def resident(self, place: Place, capture: Capture, adjoint_dtype: torch.dtype) -> Resident:
        layers = place.layers(self.name)
        held, live = layers * sum(capture.local), layers * capture.live
        if place.arch.lastkv is not None:
            held, live = footprint.resident_tokens(place, capture)
        return Resident(
            held * self._token_bytes(place, place.dtype), live * self._token_bytes(place, adjoint_dtype)
        )

    def refilled(self, place: Place, capture: Capture, again: Sequence[int]) -> int:
        if place.arch.lastkv is None:
            return 0
        return footprint.refilled_tokens(place, capture, again) * self._token_bytes(place, place.dtype)

    def operations(self, arch: Architecture) -> Operations:
        queries, keys = arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
        weights = 2.0 * arch.hidden_size * ((3 if arch.output_gate else 2) * queries + 2 * keys)
        return Operations(weights, rest=2.0 * arch.hidden_size * queries, pair=4.0 * queries)

    def stand_ins(self) -> Sequence[StandIn]:
        from megatron_lrl.layers.softmax import kernels

        return [StandIn(kernels, "attend_backward", _shapes_of_backward)]

    @staticmethod
    def _token_bytes(place: Place, dtype: torch.dtype) -> int:
        """Of the keys and values of one token in one layer."""
        arch = place.arch
        return 2 * arch.head_dim * arch.num_kv_heads // place.layout.tp * dtype.itemsize


def _shapes_of_backward(
    _do: torch.Tensor, q_nqsd: torch.Tensor, k_nqtd: torch.Tensor, v_nqtd: torch.Tensor, *_rest: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """In the place of `kernels.attend_backward`, which goes tile by tile where there is no fused kernel."""
    return torch.empty_like(q_nqsd), torch.empty_like(k_nqtd), torch.empty_like(v_nqtd)


__all__ = ["SoftmaxKind"]
