"""Resident rows of one latent attention layer: one vector a token that is key and value of every head.

Legend: m this rank's new slots, c width of a row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Self

import torch
from torch import Tensor

from megatron_lrl.layers.layout import Piece, TokenLayout
from megatron_lrl.layers.softmax.kv import KVLayer


class LatentLayer(KVLayer):
    """`KVLayer` whose keys are its values: pages hold one storage, and one adjoint, for both.

    Rows are given as [m, 1, c], the same tensor twice; every tp rank holds all of them.
    """

    newest: tuple[Tensor, ...] | None = None  # type: ignore[assignment]  # the rows of the last advance, if live

    def append(self, k_mhd: Tensor, v_mhd: Tensor, pieces: Iterable[Piece], chunk: int = 0) -> None:
        super().append(k_mhd, k_mhd, pieces, chunk)
        self.newest = self.newest and self.newest[:1]

    def take_adjoint(self, number: int, like: Sequence[Tensor], device: torch.device) -> list[Tensor]:
        """Of this tp rank's heads alone: the exchange that made the rows adds up the ranks'."""
        assert self.rounds is not None
        (row,) = (torch.zeros(x.shape, dtype=x.dtype, device=device) for x in like)
        for entry in self.rounds[number]:
            entry.adjoint_rows(row, row)
        return [row]

    def absorb(self, again: Self, layout: TokenLayout, keep: bool) -> None:
        assert again.newest is not None
        row = again.newest[0].detach()
        self.append(row, row, layout.pieces)


__all__ = ["LatentLayer"]
