"""RoPE at explicit absolute positions, on Megatron-Core's interface."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from torch import Tensor

from megatron_lrl.layers.rope_spec import RopeSpec
from megatron_lrl.precision import accumulate_dtype


class PositionRotaryEmbedding(RotaryEmbedding):
    """Angles for the positions an `advance` names, instead of 0..s-1.

    Megatron-Core asks for a length and then for the angles of that many positions; here the "length" is the tensor
    of positions itself, so one stage of a pipeline and one slice of a context-parallel chunk need no offset.
    Angles are computed in float32, as transformers does, and in float64 when the model is float64.
    Pairs of neighbours (``rope.interleaved``) rely on Megatron-Core's ``rotary_interleaved`` in the model's config.
    The spec's attention factor multiplies cos and sin in Megatron-Core's attention (set by `build`).
    """

    def __init__(self, rope: RopeSpec, dtype: torch.dtype, device: torch.device) -> None:
        torch.nn.Module.__init__(self)
        wide = accumulate_dtype(dtype)
        inv_freq, _ = rope.inv_freq(wide)
        self.inv_freq = inv_freq.to(device)
        self.rotary_interleaved = rope.interleaved
        self.cp_group = None

    def get_rotary_seq_len(self, *args: Any, **kwargs: Any) -> Any:
        """The positions [m] of the advance that is the last positional argument (``packed_seq_params``)."""
        advance = kwargs.get("packed_seq_params") or args[-1]
        return advance.positions_m

    def forward(
        self, max_seq_len: Any, offset: int = 0, packed_seq: bool = False, cp_group: Any = None
    ) -> Tensor:
        """Angles [m, 1, 1, rotary_dim] of the positions [m] that stand in ``max_seq_len``.

        Each pair of dimensions holds its angle twice: in both halves, or, interleaved, side by side.
        """
        angles = torch.outer(max_seq_len.to(self.inv_freq.dtype), self.inv_freq)
        if self.rotary_interleaved:
            return angles.repeat_interleave(2, dim=-1)[:, None, None, :]
        return torch.cat((angles, angles), dim=-1)[:, None, None, :]
