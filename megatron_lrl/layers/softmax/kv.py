"""Keys and values of one attention layer on this rank: what it shares with a prefix, and what it grows itself.

Legend: m this rank's new slots, H query heads, h KV heads of this tp rank, d head dim.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from megatron_lrl.layers.kind import Growth, LayerState, Member
from megatron_lrl.layers.layout import Piece, TokenLayout, pieces_of
from megatron_lrl.layers.softmax.pages import Entry, Page, PageSlice, Shelf, enable_adjoints
from megatron_lrl.layers.softmax.segment import Block, piece_of, segment_attention

_GROWTH = 64
"""Smallest capacity, in tokens, of a page that follows a full one in decoding."""


def grown_capacity(tokens: int) -> int:
    """Tokens that the pages of a branch make room for, when so many came one by one."""
    capacity = _GROWTH
    while capacity < tokens:
        capacity *= 2
    return capacity


class KVLayer(LayerState):
    """Resident state of one full-attention layer.

    ``past`` are slices of pages that belong to another state (a prefix, or this state at an earlier time); ``own`` are
    the pages it appends to. With ``log`` every advance's pieces are remembered, so that `before` can go back in time.
    """

    newest: tuple[Tensor, Tensor] | None = None  # k_mhd, v_mhd of the last advance, if they are live

    def __init__(self, past: Sequence[PageSlice] = (), growth: Growth = Growth()) -> None:  # noqa: B008 - immutable
        """``growth.reserve``: by chunk, tokens that its first page makes room for; ``growing``: later pages are larger;
        ``together``: what is reserved lies in one storage, so that chunks can be read as one block (`joined`)."""
        self.past = tuple(past)
        self.own: list[Page] = []
        self.rounds: list[list[Entry]] | None = [] if growth.log else None
        self._refilled: list[Page] = []
        self._reserve, self._growing = dict(growth.reserve or {}), growth.growing
        self._shelf = Shelf(sum(self._reserve.values())) if growth.together and self._reserve else None

    @classmethod
    def empty(cls, growth: Growth) -> Self:
        return cls((), growth)

    @staticmethod
    def joined(parts: Sequence[Member]) -> JoinedKV:
        return JoinedKV(parts)

    def fork(self, growth: Growth) -> Self:
        return type(self)(self.shared_slices(), growth)

    def before(self, number: int, growth: Growth) -> Self:
        return type(self)(self.slices_before(number), growth)

    def attend(
        self, q_mHd: Tensor, k_mhd: Tensor, v_mhd: Tensor, layout: TokenLayout, scale: float, cp_group: Any
    ) -> Tensor:
        """Attention over everything resident and the new tokens, which then become resident. Returns o_mHd."""
        o_mHd = segment_attention(q_mHd, k_mhd, v_mhd, layout, self.blocks(), scale, cp_group)
        self.append(k_mhd, v_mhd, layout.pieces)
        return o_mHd

    def slices(self) -> list[PageSlice]:
        """Everything this layer remembers, oldest first."""
        return [*self.past, *self.own_slices()]

    def own_slices(self) -> list[PageSlice]:
        """What it has grown itself."""
        return [PageSlice(page, page.length, shared=False) for page in self.own]

    def blocks(self) -> list[Block]:
        return [block for part in self.slices() for block in part.blocks()]

    def shared_slices(self) -> list[PageSlice]:
        """The same as one sequence that all branches of a fork read. Raises ValueError for more than one branch."""
        if any(page.branches > 1 or page.branch for page in self.own):
            raise ValueError("only a state of one branch can be forked")
        return [*self.past, *(PageSlice(page, page.length, shared=True) for page in self.own)]

    def slices_before(self, number: int) -> list[PageSlice]:
        """What this layer remembered before its advance ``number`` (0-based)."""
        assert self.rounds is not None, "the state was made without a log"
        if (
            not self.rounds
        ):  # pages that another stage computed: whole chunks, of which attention takes the committed
            return self.slices()
        lengths: dict[int, tuple[Page, int]] = {}
        for entries in self.rounds[:number]:
            for entry in entries:
                lengths[id(entry.page)] = (entry.page, entry.row + entry.piece.length)
        return [*self.past, *(PageSlice(page, stop, shared=False) for page, stop in lengths.values())]

    def adopt(self, piece: Piece, k_bhtd: Tensor, v_bhtd: Tensor, chunk: int) -> None:
        """A page of its own for tokens that another stage computed."""
        capacity = max(self._reserve.pop(chunk, 0), piece.length)
        self.own.append(Page(piece, k_bhtd, v_bhtd, capacity, chunk, self._shelf))

    def enable_adjoints(self, dtype: torch.dtype, first_live: int | None, spare: bool = False) -> int:
        return self.enable_pages(dtype, self.constants(first_live), spare)

    def constants(self, first_live: int | None) -> list[int]:
        """Of each own page, how many tokens were written before the advance ``first_live`` (None: all)."""
        return [self._constant_tokens(page, first_live) for page in self.own]

    def enable_pages(self, dtype: torch.dtype, constants: Sequence[int], spare: bool = False) -> int:
        """Gradient buffers for the own pages; ``constants[i]`` tokens of page i need none. Returns the bytes."""
        if self._shelf is not None:
            return enable_adjoints(self.own, dtype, constants, spare)
        return sum(
            page.enable_adjoint(dtype, constant, spare)
            for page, constant in zip(self.own, constants, strict=True)
        )

    def take_adjoint(self, number: int, like: Sequence[Tensor], device: torch.device) -> list[Tensor]:
        assert self.rounds is not None
        k_mhd, v_mhd = (torch.zeros(x.shape, dtype=x.dtype, device=device) for x in like)
        for entry in self.rounds[number]:
            entry.adjoint_rows(k_mhd, v_mhd)
        return [k_mhd, v_mhd]

    def absorb(self, again: Self, layout: TokenLayout, keep: bool) -> None:
        assert again.newest is not None
        k_mhd, v_mhd = (x.detach() for x in again.newest)
        self.append(k_mhd, v_mhd, layout.pieces)

    def refill(self, again: Self, first: int) -> None:
        """Take the keys and values of pages that were dropped."""
        assert again.rounds is not None and self.rounds is not None
        for entries, anew in zip(self.rounds[first:], again.rounds, strict=False):
            for entry, new in zip(entries, anew, strict=True):
                if entry.page.dropped:
                    entry.page.refill(new.page)
                    self._refilled.append(entry.page)

    def forget(self, number: int) -> None:
        for page in self._refilled:
            page.drop()
        self._refilled.clear()

    def merge(self, oldest: int, newest: int) -> None:
        """Make one page of each branch's own pages of chunks ``oldest`` to ``newest``; not for a logged state."""
        groups: dict[tuple[int, int], list[Page]] = {}
        for page in self.own:
            if oldest <= page.chunk <= newest:
                groups.setdefault((page.branch, page.branches), []).append(page)
        for pages in groups.values():
            if len(pages) > 1:
                k, v = (
                    torch.cat([x[:, :, : page.length] for page, x in zip(pages, xs, strict=True)], dim=2)
                    for xs in ([page.k_bhtd for page in pages], [page.v_bhtd for page in pages])
                )
                piece = Piece(pages[0].branch, pages[0].branches, 0, k.shape[2])
                merged = Page(piece, k, v, 0, pages[-1].chunk)
                self.own[self.own.index(pages[0])] = merged
                self.own = [page for page in self.own if page not in pages]

    def keep(self, branches: Sequence[int]) -> None:
        place = {branch: i for i, branch in enumerate(branches)}
        kept = []
        for page in self.own:
            rows = [row for row in range(page.branches) if page.branch + row in place]
            if rows:
                page.select(rows, place[page.branch + rows[0]])
                kept.append(page)
        self.own = kept

    def tensors(self) -> Iterator[Tensor]:
        for page in self.own:
            yield from page.tensors()

    def clear(self) -> None:
        self.past, self.own, self.newest, self.rounds = (), [], None, None

    def append(self, k_mhd: Tensor, v_mhd: Tensor, pieces: Iterable[Piece], chunk: int = 0) -> None:
        """Make new tokens resident."""
        live = k_mhd.requires_grad or v_mhd.requires_grad
        self.newest = (k_mhd, v_mhd) if live else None
        entries = []
        for piece in pieces:
            k_bhtd = piece_of(k_mhd, piece)
            v_bhtd = k_bhtd if v_mhd is k_mhd else piece_of(v_mhd, piece)
            entries.append(self._put(k_bhtd, v_bhtd, piece, chunk, live))
        if self.rounds is not None:
            self.rounds.append(entries)

    def _constant_tokens(self, page: Page, first_live: int | None) -> int:
        if first_live is None:
            return page.length
        if first_live == 0 or self.rounds is None:
            return 0
        written = [
            entry.row + entry.piece.length
            for entries in self.rounds[:first_live]
            for entry in entries
            if entry.page is page
        ]
        return max(written, default=0)

    def _put(self, k_bhtd: Tensor, v_bhtd: Tensor, piece: Piece, chunk: int, live: bool) -> Entry:
        target = next((page for page in self.own if not live and page.fits(piece, chunk)), None)
        if target is not None:
            row = target.length
            target.write(k_bhtd, v_bhtd)
            return Entry(target, row, piece)
        capacity = 0 if live else max(self._reserve.pop(chunk, 0), piece.length)
        if capacity and self._growing:
            # Decoding starts or outgrew its page: double, so that pages stay few.
            grown = sum(
                p.length
                for p in self.own
                if (p.branch, p.branches, p.chunk) == (piece.branch, piece.branches, chunk)
            )
            capacity = max(capacity, grown, _GROWTH if grown or piece.length == 1 else 0)
        page = Page(piece, k_bhtd, v_bhtd, capacity, chunk, self._shelf)
        self.own.append(page)
        return Entry(page, 0, piece)


class JoinedKV:
    """A layer of several states whose branches lie in one flat list: one attention, each keeps its own tokens."""

    def __init__(self, parts: Sequence[Member]) -> None:
        self._parts = parts

    def attend(
        self, q_mHd: Tensor, k_mhd: Tensor, v_mhd: Tensor, layout: TokenLayout, scale: float, cp_group: Any
    ) -> Tensor:
        """As `KVLayer.attend`, of all branches."""
        blocks = [
            block.within(first, count) for first, count, layer in self._parts for block in layer.blocks()
        ]
        o_mHd = segment_attention(q_mHd, k_mhd, v_mhd, layout, blocks, scale, cp_group)
        self.append(k_mhd, v_mhd, layout.pieces)
        return o_mHd

    def append(self, k_mhd: Tensor, v_mhd: Tensor, pieces: Sequence[Piece], chunk: int = 0) -> None:
        """Make new tokens resident."""
        for first, count, layer in self._parts:
            layer.append(k_mhd, v_mhd, pieces_of(pieces, first, count), chunk)
