"""Sequences at different places of their chunks, advanced as one flat list: each reads by its own clock."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from megatron_lrl.layers.lastkv.state import LastKVAttention, LastKVState
from megatron_lrl.layers.layout import TokenLayout, pieces_of
from megatron_lrl.layers.softmax.segment import Block
from megatron_lrl.layers.together import Together


class LastKVTogether(LastKVAttention, Together):
    """`Together` of `LastKVState`s; branches of one member keep step, members need not."""

    members: list[LastKVState]  # type: ignore[assignment]

    def placed(self) -> list[tuple[int, LastKVState]]:  # type: ignore[override]
        return super().placed()  # type: ignore[return-value]

    def blocks(self, number: int, lengths: Sequence[int], gate_h: Tensor) -> list[Block]:
        return [
            block.within(low, member.branches)
            for low, member in self.placed()
            for block in member.blocks(number, lengths[low : low + member.branches], gate_h)
        ]

    def append(self, number: int, k_mhd: Tensor, v_mhd: Tensor, layout: TokenLayout) -> None:
        for low, member in self.placed():
            pieces = pieces_of(layout.pieces, low, member.branches)
            member.grow_layer(number, k_mhd, v_mhd, pieces, layout.lengths[low : low + member.branches])


__all__ = ["LastKVTogether"]
