"""Keys and values of one attention layer on this rank: append-only blocks, forked cheaply.

Legend: m this rank's new slots, h KV heads of this tp rank, d head dim; b branches, t tokens of a block.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_lrl.attention.layout import Piece, TokenLayout
from megatron_lrl.attention.segment import Block, segment_attention

_GROWTH = 64
"""Smallest capacity, in tokens, of a block that grows by decoding."""


class _OwnBlock:
    """A block this layer appends to. Without autograd it has spare capacity and is written in place."""

    def __init__(self, piece: Piece, k_bhtd: Tensor, v_bhtd: Tensor, capacity: int) -> None:
        self.branch, self.branches, self.length = piece.branch, piece.branches, piece.length
        self.writable = capacity > 0
        if self.writable:
            b, h, t, d = k_bhtd.shape
            self.k_bhtd = k_bhtd.new_empty(b, h, capacity, d)
            self.v_bhtd = v_bhtd.new_empty(b, h, capacity, v_bhtd.shape[-1])
            self.k_bhtd[:, :, :t] = k_bhtd
            self.v_bhtd[:, :, :t] = v_bhtd
        else:
            self.k_bhtd, self.v_bhtd = k_bhtd, v_bhtd

    def fits(self, piece: Piece) -> bool:
        return (
            self.writable
            and (self.branch, self.branches) == (piece.branch, piece.branches)
            and self.length + piece.length <= self.k_bhtd.shape[2]
        )

    def write(self, k_bhtd: Tensor, v_bhtd: Tensor) -> None:
        end = self.length + k_bhtd.shape[2]
        self.k_bhtd[:, :, self.length : end] = k_bhtd
        self.v_bhtd[:, :, self.length : end] = v_bhtd
        self.length = end

    def select(self, rows: list[int], branch: int) -> None:
        """Keep these rows, the first of which becomes ``branch``; they stay neighbours."""
        index = torch.tensor(rows, device=self.k_bhtd.device)
        self.k_bhtd, self.v_bhtd = (x.index_select(0, index) for x in (self.k_bhtd, self.v_bhtd))
        self.branch, self.branches = branch, len(rows)

    def view(self, shared: bool) -> Block:
        k, v = self.k_bhtd[:, :, : self.length], self.v_bhtd[:, :, : self.length]
        return Block(k, v, shared, self.branch)


class KVLayer:
    """Resident state of one full-attention layer: frozen shared blocks and this state's own blocks."""

    def __init__(self, shared: Sequence[Block] = (), reserve: int = 0) -> None:
        """``reserve``: tokens of this rank to make room for at the first append."""
        self.shared = tuple(shared)
        self.own: list[_OwnBlock] = []
        self.reserve = reserve
        self.newest: tuple[Tensor, Tensor] | None = None  # k_mhd, v_mhd of the last advance, if they are live

    def attend(
        self, q_mHd: Tensor, k_mhd: Tensor, v_mhd: Tensor, layout: TokenLayout, scale: float, cp_group: Any
    ) -> Tensor:
        """Attention over everything resident and the new tokens, which then become resident. Returns o_mHd."""
        o_mHd = segment_attention(q_mHd, k_mhd, v_mhd, layout, self.blocks(), scale, cp_group)
        self._append(k_mhd, v_mhd, layout.pieces)
        return o_mHd

    def blocks(self) -> list[Block]:
        return [*self.shared, *(block.view(shared=False) for block in self.own)]

    def fork(self) -> KVLayer:
        """A layer whose branches all read this one's tokens."""
        if any(block.branches > 1 for block in self.own):
            raise ValueError("only a state of one branch can be forked")
        return KVLayer([*self.shared, *(block.view(shared=True) for block in self.own)])

    def keep(self, branches: Sequence[int]) -> None:
        """Drop all branches but these (ascending), which become 0, 1, ...; only without autograd."""
        place = {branch: i for i, branch in enumerate(branches)}
        kept = []
        for block in self.own:
            rows = [row for row in range(block.branches) if block.branch + row in place]
            if rows:
                block.select(rows, place[block.branch + rows[0]])
                kept.append(block)
        self.own = kept

    def tensors(self) -> Iterable[Tensor]:
        """Storage that this layer alone owns (what it forked from is counted where it was captured)."""
        for block in self.own:
            yield block.k_bhtd
            yield block.v_bhtd

    def clear(self) -> None:
        self.shared, self.own, self.newest = (), [], None

    def _append(self, k_mhd: Tensor, v_mhd: Tensor, pieces: Iterable[Piece]) -> None:
        live = k_mhd.requires_grad or v_mhd.requires_grad
        self.newest = (k_mhd, v_mhd) if live else None
        for piece in pieces:
            k_bhtd, v_bhtd = _piece(k_mhd, piece), _piece(v_mhd, piece)
            target = next((block for block in self.own if not live and block.fits(piece)), None)
            if target is not None:
                target.write(k_bhtd, v_bhtd)
                continue
            capacity = 0 if live else max(self.reserve, piece.length)
            same = [b.length for b in self.own if (b.branch, b.branches) == (piece.branch, piece.branches)]
            if capacity and (same or piece.length == 1):
                # A decode, starting or outgrowing its block: double, so that blocks stay few.
                capacity = max(capacity, sum(same), _GROWTH)
            self.reserve = 0
            self.own.append(_OwnBlock(piece, k_bhtd, v_bhtd, capacity))


def _piece(x_mhd: Tensor, piece: Piece) -> Tensor:
    """[m, h, d] -> the piece's [b, h, t, d], a view."""
    run = x_mhd[piece.start : piece.start + piece.branches * piece.length]
    return run.view(piece.branches, piece.length, *x_mhd.shape[1:]).transpose(1, 2)


def poison(tensors: Iterable[Tensor]) -> None:
    """Fill with NaN: a stale read fails loudly."""
    for tensor in tensors:
        if tensor.is_floating_point():
            with torch.no_grad():
                tensor.fill_(float("nan"))
