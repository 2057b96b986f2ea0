"""What a Gated DeltaNet layer remembers: the delta rule's state, and the inputs of the convolution's newest tokens.

Legend: b branches, c channels of the convolution, w its width, h value heads, k key dim, v value dim; heads and
channels are this rank's.
"""

from __future__ import annotations

from typing import NamedTuple, Self

import torch
from torch import Tensor

from megatron_lrl.layers.recurrent import RecurrentLayer


class Snapshot(NamedTuple):
    """The state behind some token of each branch."""

    tail_bcw: Tensor  # inputs of the convolution's last w - 1 tokens, in the model's dtype
    state_bhkv: Tensor  # float32, or float64 for a float64 model

    @classmethod
    def zeros(cls, like: Tensor, tail: tuple[int, ...], state: tuple[int, ...]) -> Self:
        """Before a document's first token, in a model of this dtype."""
        wide = torch.promote_types(like.dtype, torch.float32)
        return cls(like.new_zeros(tail), like.new_zeros(state, dtype=wide))


class DeltaNetLayer(RecurrentLayer[Snapshot]):
    """State of one layer."""


__all__ = ["DeltaNetLayer", "Snapshot"]
