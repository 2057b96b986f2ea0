"""Pages: the storage of resident keys and values on one rank.

A page holds consecutive tokens of some branches. Without autograd it has spare capacity and is written in place; with
autograd it is the live tensors themselves. What other states read of a page is a `PageSlice`.

Legend: b branches, h KV heads of this tp rank, t tokens, d head dim; m slots of an advance on this rank.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_lrl.attention.layout import Piece
from megatron_lrl.attention.segment import Adjoint, Block


class Page:
    """Keys and values of ``branches`` branches from ``branch`` on, ``length`` tokens each, of one LastKV chunk."""

    def __init__(self, piece: Piece, k_bhtd: Tensor, v_bhtd: Tensor, capacity: int, chunk: int) -> None:
        """``capacity``: tokens to make room for; 0 keeps the given (live) tensors. ``chunk``: 0 where there is none."""
        self.branch, self.branches, self.length, self.chunk = piece.branch, piece.branches, piece.length, chunk
        self.writable = capacity > 0
        self.adjoint: Adjoint | None = None
        self.constant = 0  # tokens at the front that stay constant when there is an adjoint
        if self.writable:
            b, h, t, _ = k_bhtd.shape
            self.k_bhtd = k_bhtd.new_empty(b, h, capacity, k_bhtd.shape[-1])
            self.v_bhtd = v_bhtd.new_empty(b, h, capacity, v_bhtd.shape[-1])
            self.k_bhtd[:, :, :t] = k_bhtd
            self.v_bhtd[:, :, :t] = v_bhtd
        else:
            self.k_bhtd, self.v_bhtd = k_bhtd, v_bhtd

    def fits(self, piece: Piece, chunk: int) -> bool:
        """Whether the piece can be written behind the page's tokens."""
        return (
            self.writable
            and self.chunk == chunk
            and (self.branch, self.branches) == (piece.branch, piece.branches)
            and self.length + piece.length <= self.k_bhtd.shape[2]
        )

    def write(self, k_bhtd: Tensor, v_bhtd: Tensor) -> None:
        """Append tokens in place."""
        end = self.length + k_bhtd.shape[2]
        self.k_bhtd[:, :, self.length : end] = k_bhtd
        self.v_bhtd[:, :, self.length : end] = v_bhtd
        self.length = end

    def select(self, rows: list[int], branch: int) -> None:
        """Keep these rows, the first of which becomes ``branch``; they stay neighbours."""
        index = torch.tensor(rows, device=self.k_bhtd.device)
        self.k_bhtd, self.v_bhtd = (x.index_select(0, index) for x in (self.k_bhtd, self.v_bhtd))
        self.branch, self.branches = branch, len(rows)

    def enable_adjoint(self, dtype: torch.dtype, constant: int = 0, spare: bool = False) -> int:
        """Allocate gradient buffers for all tokens but the first ``constant``. Returns the bytes allocated.

        ``spare``: also for the tokens that there is room for.
        """
        self.constant = constant
        stop = self.k_bhtd.shape[2] if spare else self.length
        k, v = self.k_bhtd[:, :, constant:stop], self.v_bhtd[:, :, constant:stop]
        self.adjoint = Adjoint(
            torch.zeros(k.shape, dtype=dtype, device=k.device), torch.zeros(v.shape, dtype=dtype, device=v.device)
        )
        return self.adjoint.dk_bhtd.nbytes + self.adjoint.dv_bhtd.nbytes

    def tensors(self) -> tuple[Tensor, ...]:
        """The page's storage, adjoint included."""
        if self.adjoint is None:
            return self.k_bhtd, self.v_bhtd
        return self.k_bhtd, self.v_bhtd, self.adjoint.dk_bhtd, self.adjoint.dv_bhtd


@dataclass(frozen=True)
class PageSlice:
    """The first ``stop`` tokens of a page as some state reads them: one sequence for all branches, or its own rows."""

    page: Page
    stop: int
    shared: bool

    @property
    def chunk(self) -> int:
        return self.page.chunk

    def blocks(self) -> list[Block]:
        """What attention sees: a constant block, a block with its adjoint, or (where only the end is live) both."""
        page = self.page
        cuts = [(0, self.stop)] if page.adjoint is None else [(0, page.constant), (page.constant, self.stop)]
        return [self._block(low, min(high, self.stop)) for low, high in cuts if low < min(high, self.stop)]

    def _block(self, low: int, high: int) -> Block:
        page = self.page
        k, v = page.k_bhtd[:, :, low:high], page.v_bhtd[:, :, low:high]
        if page.adjoint is None or high <= page.constant:
            return Block(k, v, self.shared, page.branch)
        rows = slice(low - page.constant, high - page.constant)
        adjoint = Adjoint(page.adjoint.dk_bhtd[:, :, rows], page.adjoint.dv_bhtd[:, :, rows])
        return Block(k, v, self.shared, page.branch, adjoint)


@dataclass(frozen=True)
class Entry:
    """Where a piece of one advance went: ``page`` from ``row`` on."""

    page: Page
    row: int
    piece: Piece

    def adjoint_rows(self, out_k_mhd: Tensor, out_v_mhd: Tensor) -> None:
        """Write the piece's adjoint into [m, h, d] tensors; constant tokens stay as they are."""
        page, piece = self.page, self.piece
        if page.adjoint is None:
            return
        skipped = max(0, page.constant - self.row)
        low = self.row + skipped - page.constant
        end = piece.start + piece.branches * piece.length
        for out, total in ((out_k_mhd, page.adjoint.dk_bhtd), (out_v_mhd, page.adjoint.dv_bhtd)):
            rows = out[piece.start : end].view(piece.branches, piece.length, *out.shape[1:]).transpose(1, 2)
            rows[:, :, skipped:] = total[:, :, low : low + piece.length - skipped]


def piece_of(x_mhd: Tensor, piece: Piece) -> Tensor:
    """[m, h, d] -> the piece's [b, h, t, d], a view."""
    run = x_mhd[piece.start : piece.start + piece.branches * piece.length]
    return run.view(piece.branches, piece.length, *x_mhd.shape[1:]).transpose(1, 2)


def poison(tensors: Iterable[Tensor]) -> None:
    """Fill with NaN: a stale read fails loudly."""
    for tensor in tensors:
        if tensor.is_floating_point() and not tensor.requires_grad:
            with torch.no_grad():
                tensor.fill_(float("nan"))
