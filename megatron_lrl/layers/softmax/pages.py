"""Pages: the storage of resident keys and values on one rank.

A page holds consecutive tokens of some branches. Without autograd it has spare capacity and is written in place; with
autograd it is the live tensors themselves. What other states read of a page is a `PageSlice`.

Legend: b branches, h KV heads of this tp rank, t tokens, d head dim; m slots of an advance on this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_lrl.layers.layout import Piece
from megatron_lrl.layers.softmax.segment import Adjoint, Block


def room_for(x_bhtd: Tensor, tokens: int) -> Tensor:
    """Uninitialised [b, h, tokens, d]."""
    return x_bhtd.new_empty(*x_bhtd.shape[:2], tokens, x_bhtd.shape[3])


class Shelf:
    """One storage from which pages of the same branches take their room, one behind the other (see `joined`)."""

    def __init__(self, tokens: int) -> None:
        self._tokens, self._used = tokens, 0
        self._storage: tuple[Tensor, Tensor] | None = None

    def take(self, k_bhtd: Tensor, v_bhtd: Tensor, tokens: int) -> tuple[Tensor, Tensor] | None:
        """Room for ``tokens`` like the given keys and values; None if there is not as much left, or for other rows."""
        if self._storage is None:
            self._storage = _each(lambda x: room_for(x, self._tokens), k_bhtd, v_bhtd)
        low, high = self._used, self._used + tokens
        if high > self._tokens or self._storage[0].shape[0] != k_bhtd.shape[0]:
            return None
        self._used = high
        return _each(lambda x: x[:, :, low:high], *self._storage)


def _each(change: Callable[[Tensor], Tensor], k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Both changed; values that are their keys (the same tensor) stay so."""
    changed = change(k)
    return changed, changed if v is k else change(v)


class Page:
    """Keys and values of ``branches`` branches from ``branch`` on, ``length`` tokens each, of one LastKV chunk.

    Where keys are given as the values too, there is one storage and one adjoint for both.
    """

    def __init__(
        self,
        piece: Piece,
        k_bhtd: Tensor,
        v_bhtd: Tensor,
        capacity: int,
        chunk: int,
        shelf: Shelf | None = None,
    ) -> None:
        """``capacity``: tokens to make room for; 0 keeps the given (live) tensors. ``chunk``: 0 where there is none.

        ``shelf``: where the room is taken from, if it has as much left.
        """
        self.branch, self.branches, self.length = piece.branch, piece.branches, piece.length
        self.chunk = chunk
        self.writable = capacity > 0
        self.dropped = False
        self.adjoint: Adjoint | None = None
        self.constant = 0  # tokens at the front that stay constant when there is an adjoint
        if self.writable:
            t, room = k_bhtd.shape[2], None if shelf is None else shelf.take(k_bhtd, v_bhtd, capacity)
            self.k_bhtd, self.v_bhtd = room or _each(lambda x: room_for(x, capacity), k_bhtd, v_bhtd)
            self.k_bhtd[:, :, :t] = k_bhtd
            if not self.one:
                self.v_bhtd[:, :, :t] = v_bhtd
        else:
            self.k_bhtd, self.v_bhtd = k_bhtd, v_bhtd

    @property
    def one(self) -> bool:
        """Whether the values are the keys."""
        return self.v_bhtd is self.k_bhtd

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
        if not self.one:
            self.v_bhtd[:, :, self.length : end] = v_bhtd
        self.length = end

    def drop(self) -> None:
        """Free the keys and values; where they were is remembered, for `refill`."""
        self.k_bhtd, self.v_bhtd = _each(lambda x: room_for(x, 0), self.k_bhtd, self.v_bhtd)
        self.dropped = True

    def refill(self, again: Page) -> None:
        """Take the keys and values of a page into which the same tokens were written anew."""
        if (again.length, again.branch, again.branches) != (self.length, self.branch, self.branches):
            raise ValueError(f"a page of {self.length} tokens cannot be filled with {again.length} others")
        self.k_bhtd, self.v_bhtd, self.dropped = again.k_bhtd, again.v_bhtd, False

    def select(self, rows: list[int], branch: int) -> None:
        """Keep these rows, the first of which becomes ``branch``; they stay neighbours."""
        index = torch.tensor(rows).to(self.k_bhtd.device, non_blocking=True)
        self.k_bhtd, self.v_bhtd = _each(lambda x: x.index_select(0, index), self.k_bhtd, self.v_bhtd)
        self.branch, self.branches = branch, len(rows)

    def enable_adjoint(self, dtype: torch.dtype, constant: int = 0, spare: bool = False) -> int:
        """Allocate gradient buffers for all tokens but the first ``constant``. Returns the bytes allocated.

        ``spare``: also for the tokens that there is room for.
        """
        return enable_adjoints([self], dtype, [constant], spare)

    def tensors(self) -> tuple[Tensor, ...]:
        """The page's storage, adjoint included."""
        pairs = [(self.k_bhtd, self.v_bhtd)]
        if self.adjoint is not None:
            pairs.append((self.adjoint.dk_bhtd, self.adjoint.dv_bhtd))
        return tuple(x for pair in pairs for x in (pair[:1] if self.one else pair))


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
        """What attention sees: a constant block, a block with its adjoint, or (where only the end is live) both.

        Without autograd nothing is added to an adjoint: all is one constant block.
        """
        page = self.page
        if page.dropped:
            raise RuntimeError(
                f"keys and values of chunk {page.chunk} were dropped: no restart of a sweep needs them"
            )
        if page.adjoint is None or not torch.is_grad_enabled():
            k, v = page.k_bhtd[:, :, : self.stop], page.v_bhtd[:, :, : self.stop]
            return [Block(k, v, self.shared, page.branch)] if self.stop else []
        cuts = [(0, page.constant), (page.constant, self.stop)]
        return [self._block(low, min(high, self.stop)) for low, high in cuts if low < min(high, self.stop)]

    def _block(self, low: int, high: int) -> Block:
        page = self.page
        k, v = page.k_bhtd[:, :, low:high], page.v_bhtd[:, :, low:high]
        if high <= page.constant:
            return Block(k, v, self.shared, page.branch)
        assert page.adjoint is not None
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


def enable_adjoints(
    pages: Sequence[Page], dtype: torch.dtype, constants: Sequence[int], spare: bool = False
) -> int:
    """Gradient buffers for all but the first ``constants[i]`` tokens of pages of the same branches.

    They lie one behind the other, so that pages which do can be read together (`joined`). ``spare``: also for the
    tokens that there is room for. Returns the bytes allocated.
    """
    if not pages:
        return 0
    stops = [page.k_bhtd.shape[2] if spare else page.length for page in pages]
    sizes = [stop - constant for stop, constant in zip(stops, constants, strict=True)]

    def zeros(x_bhtd: Tensor) -> Tensor:
        b, h, _, d = x_bhtd.shape
        return torch.zeros(b, h, sum(sizes), d, dtype=dtype, device=x_bhtd.device)

    dk, dv = _each(zeros, pages[0].k_bhtd, pages[0].v_bhtd)
    low = 0
    for page, size, constant in zip(pages, sizes, constants, strict=True):
        page.constant = constant
        rows = slice(low, low + size)
        page.adjoint = Adjoint(*_each(lambda x, rows=rows: x[:, :, rows], dk, dv))  # type: ignore[misc]
        low += size
    return dk.nbytes + (0 if dv is dk else dv.nbytes)


def joined(blocks: Iterable[Block]) -> list[Block]:
    """The same keys in fewer blocks: a block that lies right behind the one before it, as its adjoint does, joins it.

    Attention over a joined block is one kernel call. Live blocks stay as they are.
    """
    out: list[Block] = []
    for block in blocks:
        both = _followed(out[-1], block) if out else None
        if both is None:
            out.append(block)
        else:
            out[-1] = both
    return out


def _followed(a: Block, b: Block) -> Block | None:
    """Blocks a and b as one, or None."""
    if (a.shared, a.branch) != (b.shared, b.branch) or (a.adjoint is None) != (b.adjoint is None):
        return None
    pairs = [(a.k_bhtd, b.k_bhtd), (a.v_bhtd, b.v_bhtd)]
    if a.adjoint is not None and b.adjoint is not None:
        pairs += [(a.adjoint.dk_bhtd, b.adjoint.dk_bhtd), (a.adjoint.dv_bhtd, b.adjoint.dv_bhtd)]
    if not all(_behind(x, y) for x, y in pairs):
        return None
    k, v, *adjoint = (
        x.as_strided((*x.shape[:2], x.shape[2] + y.shape[2], x.shape[3]), x.stride(), x.storage_offset())
        for x, y in pairs
    )
    return Block(k, v, a.shared, a.branch, Adjoint(*adjoint) if adjoint else None)


def _behind(x_bhtd: Tensor, y_bhtd: Tensor) -> bool:
    """Whether y's tokens follow x's in memory."""
    b, h, t, d = x_bhtd.shape
    return (
        not x_bhtd.requires_grad
        and not y_bhtd.requires_grad
        # Storages are told apart by their handle: a planned tensor has no address.
        and x_bhtd.untyped_storage()._cdata == y_bhtd.untyped_storage()._cdata
        and (b, h, d) == (*y_bhtd.shape[:2], y_bhtd.shape[3])
        and x_bhtd.stride() == y_bhtd.stride()
        and x_bhtd.storage_offset() + t * x_bhtd.stride(2) == y_bhtd.storage_offset()
    )
