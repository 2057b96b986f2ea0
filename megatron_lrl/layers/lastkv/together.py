"""Sequences at different places of their chunks, advanced as one flat list: each reads by its own clock."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from megatron_lrl.layers.lastkv.state import LastKVState
from megatron_lrl.layers.layout import TokenLayout, pieces_of
from megatron_lrl.layers.softmax.segment import segment_attention
from megatron_lrl.layers.together import Together


class LastKVTogether(Together):
    """`Together` of `LastKVState`s; branches of one member keep step, members need not."""

    members: list[LastKVState]  # type: ignore[assignment]

    def attend(
        self,
        number: int,
        q_mHd: Tensor,
        k_mhd: Tensor,
        v_mhd: Tensor,
        layout: TokenLayout,
        scale: float,
        cp_group: Any,
        gate_h: Tensor,
    ) -> Tensor:
        """As `LastKVState.attend`, of all branches."""
        low, blocks = 0, []
        for member in self.members:
            lengths = layout.lengths[low : low + member.branches]
            own = member.blocks(number, lengths, gate_h)
            blocks += [block.within(low, member.branches) for block in own]
            low += member.branches
        o_mHd = segment_attention(q_mHd, k_mhd, v_mhd, layout, blocks, scale, cp_group)
        self.append(number, k_mhd, v_mhd, layout)
        return o_mHd

    def append(self, number: int, k_mhd: Tensor, v_mhd: Tensor, layout: TokenLayout) -> None:
        """As `LastKVState.append`."""
        low = 0
        for member in self.members:
            lengths = layout.lengths[low : low + member.branches]
            pieces = pieces_of(layout.pieces, low, member.branches)
            member.grow_layer(number, k_mhd, v_mhd, pieces, lengths)
            low += member.branches


__all__ = ["LastKVTogether"]
