"""Resident state under LastKV attention.

While chunk c is open, a layer reads

    chunks <= c-2   history   K^L, V^L of the last layer           one copy per pipeline stage
    chunk  c-1      previous  (1-alpha) own-layer + alpha last-layer
    chunk  c        open      its own keys and values, causally

so a layer keeps its own pages only of chunks c-1 and c; those of the last layer are kept for good and serve all layers.
On stages that do not have the last layer, its number stands for a store that is filled when a chunk commits (`settle`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lrl.attention.layout import Piece, TokenLayout
from megatron_lrl.attention.segment import Block, segment_attention
from megatron_lrl.lastkv.blend import blend
from megatron_lrl.lastkv.clock import Clock
from megatron_lrl.state.kv import KVLayer
from megatron_lrl.state.pages import Page, PageSlice
from megatron_lrl.state.sequence import SequenceState


class LastKVState(SequenceState):
    """State of branches that keep step: all branches fed in one pass stand at the same position."""

    sequential = True

    def __init__(
        self,
        branches: int = 1,
        start: int = 0,
        reserve: Mapping[int, int] | None = None,
        log: bool = False,
        *,
        clock: Clock,
        blended: bool,
        last_layer: int,
        keep_from: int | None = None,
    ) -> None:
        """``last_layer``: global number of the last attention layer.

        ``keep_from``: keep own-layer pages from the chunk before this position's on, for a sweep that recomputes them
        (default: from ``start``, if the state is logged).
        """
        super().__init__(branches, start, reserve, log)
        self.clock, self.blended, self.last_layer = clock, blended, last_layer
        # A logged state is about to be swept, which needs own-layer pages that attention itself is done with.
        self.keep_from = start if log and keep_from is None else keep_from
        self._blends: dict[int, tuple[int, list[Block]]] = {}  # layer -> (chunk, blended blocks), without autograd

    def rounds(self, lengths: Sequence[int]) -> list[tuple[int, ...]]:
        return self.clock.rounds(self.counts, lengths)

    def cuts(self, count: int) -> set[int]:
        return set(self.clock.boundaries(0, count))

    def reservation(self, spans: Sequence[tuple[int, int]], local: Sequence[int]) -> dict[int, int]:
        room: dict[int, int] = {}
        for (low, _), tokens in zip(spans, local, strict=True):
            chunk = self.clock.chunk(low)
            room[chunk] = room.get(chunk, 0) + tokens
        return room

    def attend(
        self,
        number: int,
        q_mHd: Tensor,
        k_mhd: Tensor,
        v_mhd: Tensor,
        layout: TokenLayout,
        scale: float,
        cp_group: Any,
        gate_h: Tensor | None = None,
    ) -> Tensor:
        """History, blended previous chunk and open chunk as segments of the one attention primitive."""
        chunk = self._chunk(layout)
        layer = self.layer(number)
        blocks = [block for part in self._committed(chunk - 2) for block in part.blocks()]
        blocks += self._previous(number, layer, chunk - 1, gate_h)
        blocks += [block for part in layer.slices() if part.chunk == chunk for block in part.blocks()]
        o_mHd = segment_attention(q_mHd, k_mhd, v_mhd, layout, blocks, scale, cp_group)
        self.append(number, k_mhd, v_mhd, layout)
        return o_mHd

    def append(self, number: int, k_mhd: Tensor, v_mhd: Tensor, layout: TokenLayout) -> None:
        chunk = self._chunk(layout)
        layer = self.layer(number)
        layer.append(k_mhd, v_mhd, layout.pieces, chunk)
        self._forget(number, layer, chunk)

    def settle(self, pp_group: Any) -> None:
        """Hand the last layer's pages of the chunk that was just completed to the other stages."""
        if pp_group.size() == 1:
            return
        count = max(self.counts)
        if self.clock.phase(count) == 0 and count:
            self._hand_out(self.clock.chunk(count) - 1, pp_group)

    def freeze(self, pp_group: Any = None) -> Self:
        """Forks share the open chunk too, so the other stages get its last-layer pages now."""
        if pp_group is not None and pp_group.size() > 1 and self.clock.phase(self.counts[0]):
            self._hand_out(self.clock.chunk(self.counts[0]), pp_group)
        return super().freeze(pp_group)

    def enable_adjoints(self, dtype: torch.dtype, live_from: int = 0, spare: bool = False) -> int:
        total = super().enable_adjoints(dtype, live_from, spare)
        store = self.layer(self.last_layer)
        if store.rounds:
            return total
        # Pages that came from the last stage: as much of them is constant as of the local pages cut like them.
        for chunk in {page.chunk for page in store.own}:
            theirs = [page for page in store.own if page.chunk == chunk]
            mine = [page for page in self._any_own_layer().own if page.chunk == chunk]
            for i, page in enumerate(theirs):
                # In the place of the buffers that were just made without knowing what is constant.
                total -= sum(x.nbytes for x in page.tensors()[2:])
                total += page.enable_adjoint(dtype, mine[i].constant if mine else page.length)
        return total

    def collect_adjoints(self, number: int, pp_group: Any) -> None:
        """Sum what all stages hold of the last layer's adjoint, for the chunk that advance ``number`` ended in.

        A chunk's pages are collected once, when its newest advance is about to be swept: later chunks are done by then,
        and stages without the last layer add nothing from inside the chunk itself.
        """
        if pp_group.size() == 1:
            return
        chunk = self.clock.chunk(max(self._counts_before[number]))
        later = self._counts_before[number + 1 :]
        if later and self.clock.chunk(max(later[0])) == chunk:
            return
        for page in self.layer(self.last_layer).own:
            if page.chunk == chunk and page.adjoint is not None:
                for total in (page.adjoint.dk_bhtd, page.adjoint.dv_bhtd):
                    self._sum_on_last(total, pp_group)

    def keep(self, branches: Sequence[int]) -> None:
        super().keep(branches)
        self._blends.clear()

    def close(self, fill_nan: bool = False) -> None:
        self._blends.clear()
        super().close(fill_nan)

    def _empty(self, branches: int, start: int, log: bool) -> Self:
        return type(self)(
            branches, start, log=log, clock=self.clock, blended=self.blended, last_layer=self.last_layer
        )

    def _slices_before(self, number: int, layer: KVLayer, advance: int) -> list[PageSlice]:
        if layer.rounds:
            return layer.slices_before(advance)
        # The store of another stage's last layer: whole chunks, of which attention takes those that were committed.
        return layer.slices()

    def _chunk(self, layout: TokenLayout) -> int:
        """The chunk of the tokens of one pass."""
        fed = {start for start, length in zip(layout.starts, layout.lengths, strict=True) if length}
        if len(fed) != 1:
            raise ValueError(f"branches under LastKV keep step, but this pass starts at positions {sorted(fed)}")
        return self.clock.chunk(fed.pop())

    def _committed(self, newest: int) -> list[PageSlice]:
        """The last layer's slices of chunks up to ``newest``."""
        return [part for part in self.layer(self.last_layer).slices() if part.chunk <= newest]

    def _previous(self, number: int, layer: KVLayer, chunk: int, gate_h: Tensor | None) -> list[Block]:
        """The previous chunk's blocks as layer ``number`` sees them."""
        last = [part for part in self.layer(self.last_layer).slices() if part.chunk == chunk]
        if number == self.last_layer or not self.blended or not last:
            # At the last layer both sides of the blend are the same: the gate changes nothing.
            return [block for part in last for block in part.blocks()]
        if gate_h is None:
            raise ValueError(f"layer {number} has no LastKV gate")
        cached = self._blends.get(number)
        if not torch.is_grad_enabled() and cached is not None and cached[0] == chunk:
            return cached[1]
        own = [part for part in layer.slices() if part.chunk == chunk]
        alpha_h = torch.sigmoid(gate_h)
        blocks = [
            blend(mine, theirs, alpha_h)
            for mine_part, their_part in zip(own, last, strict=True)
            for mine, theirs in zip(mine_part.blocks(), their_part.blocks(), strict=True)
        ]
        if not torch.is_grad_enabled():
            self._blends[number] = (chunk, blocks)
        return blocks

    def _forget(self, number: int, layer: KVLayer, chunk: int) -> None:
        """Drop own-layer pages that nothing will read again."""
        if number == self.last_layer:
            return
        oldest = chunk - 1
        if self.keep_from is not None:
            oldest = min(oldest, self.clock.chunk(self.keep_from) - 1)
        if any(page.chunk < oldest for page in layer.own):
            layer.own = [page for page in layer.own if page.chunk >= oldest]
            if layer.rounds is not None:
                layer.rounds = [[e for e in entries if e.page.chunk >= oldest] for entries in layer.rounds]

    def _hand_out(self, chunk: int, pp_group: Any) -> None:
        """Broadcast the last layer's own pages of a chunk from the last stage; other stages append them."""
        last_stage = dist.get_global_rank(pp_group, pp_group.size() - 1)
        on_last = pp_group.rank() == pp_group.size() - 1
        store = self.layer(self.last_layer)
        # Every layer's pages are cut alike, so any local layer tells the shapes.
        like = store if on_last else self._any_own_layer()
        for page in [page for page in like.own if page.chunk == chunk]:
            k, v = (x[:, :, : page.length].contiguous() for x in (page.k_bhtd, page.v_bhtd))
            if not on_last:
                k, v = torch.empty_like(k), torch.empty_like(v)
            for x in (k, v):
                dist.broadcast(x, src=last_stage, group=pp_group)
            if not on_last:
                piece = Piece(page.branch, page.branches, 0, page.length)
                store.own.append(Page(piece, k, v, page.length, chunk))

    def _sum_on_last(self, total: Tensor, pp_group: Any) -> None:
        on_last = pp_group.rank() == pp_group.size() - 1
        dist.reduce(total, dst=dist.get_global_rank(pp_group, pp_group.size() - 1), group=pp_group)
        if not on_last:
            total.zero_()

    def _any_own_layer(self) -> KVLayer:
        """A layer of this stage other than the last one of the model."""
        return next(layer for key, layer in self.layers() if key != self.last_layer)
