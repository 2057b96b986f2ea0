"""Resident state under LastKV attention.

While chunk c is open, a layer reads

    chunks <= c-2   history   K^L, V^L of the last layer           one copy per pipeline stage
    chunk  c-1      previous  (1-alpha) own-layer + alpha last-layer
    chunk  c        open      its own keys and values, causally

so a layer keeps its own pages only of chunks c-1 and c; those of the last layer are kept for good and serve all layers.
On stages that do not have the last layer, its number stands for a store that is filled when a chunk commits (`settle`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lrl.layers.kind import Growth, LayerState
from megatron_lrl.layers.lastkv.blend import blend
from megatron_lrl.layers.lastkv.clock import Clock
from megatron_lrl.layers.lastkv.retention import Retention, by_chunk
from megatron_lrl.layers.layout import Piece, TokenLayout
from megatron_lrl.layers.sequence import SequenceState
from megatron_lrl.layers.softmax.kv import KVLayer
from megatron_lrl.layers.softmax.pages import joined
from megatron_lrl.layers.softmax.segment import Block, segment_attention


class LastKVAttention(ABC):
    """How a layer attends, whatever its branches' states are."""

    @abstractmethod
    def blocks(self, number: int, lengths: Sequence[int], gate_h: Tensor) -> list[Block]:
        """What layer ``number`` sees of the tokens before ``lengths`` new ones."""

    @abstractmethod
    def append(self, number: int, k_mhd: Tensor, v_mhd: Tensor, layout: TokenLayout) -> None:
        """Layer ``number`` grows by new tokens whose attention nothing reads."""

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
        """Layer ``number`` attends over history, blended previous chunk and open chunk, and grows. Returns o_mHd.

        ``gate_h``: the layer's logits of alpha.
        """
        blocks = self.blocks(number, layout.lengths, gate_h)
        o_mHd = segment_attention(q_mHd, k_mhd, v_mhd, layout, blocks, scale, cp_group)
        self.append(number, k_mhd, v_mhd, layout)
        return o_mHd


class LastKVState(LastKVAttention, SequenceState):
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
        # A logged state is about to be swept, which needs own-layer pages that attention itself is done with.
        super().__init__(branches, start, reserve, log, keep_from)
        self.clock, self.blended, self.last_layer = clock, blended, last_layer
        # What no layer, and no token of the chunk, changes: blocks by what they were made for.
        self._history: dict[tuple[int, bool], list[Block]] = {}  # (newest chunk, autograd?)
        self._near: dict[int, tuple[int, list[Block]]] = {}  # layer -> (open chunk, blocks), without autograd
        self._entered = -1  # the newest chunk whose older pages were merged
        self._adjoint_dtype: torch.dtype | None = None
        self._handed_out: set[int] = set()  # chunks whose last-layer pages every stage has

    def rounds(self, lengths: Sequence[int]) -> list[tuple[int, ...]]:
        return self.clock.rounds(self.counts, lengths)

    def in_one_graph(self, lengths: Sequence[int]) -> bool:
        return max(lengths, default=0) <= self.clock.size

    def cuts(self, count: int) -> set[int]:
        return set(self.clock.boundaries(0, count))

    def reservation(self, spans: Sequence[tuple[int, int]], local: Sequence[int]) -> dict[int, int]:
        return by_chunk(self.clock, (low for low, _ in spans), local)

    def blocks(self, number: int, lengths: Sequence[int], gate_h: Tensor) -> list[Block]:
        chunk = self._chunk(lengths)
        layer = self.layer(number, KVLayer)
        self._enter(chunk)
        blocks = [*self._committed(chunk - 2), *self._previous_and_shared(number, layer, chunk, gate_h)]
        return blocks + [b for part in layer.own_slices() if part.chunk == chunk for b in part.blocks()]

    def append(self, number: int, k_mhd: Tensor, v_mhd: Tensor, layout: TokenLayout) -> None:
        self.grow_layer(number, k_mhd, v_mhd, layout.pieces, layout.lengths)

    def grow_layer(
        self, number: int, k_mhd: Tensor, v_mhd: Tensor, pieces: Iterable[Piece], lengths: Sequence[int]
    ) -> None:
        """As `append`, where ``pieces`` are these branches' of a longer list; ``lengths``: new tokens of each."""
        chunk = self._chunk(lengths)
        layer = self.layer(number, KVLayer)
        self._enter(chunk)
        layer.append(k_mhd, v_mhd, pieces, chunk)
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
        self._forget_blocks()
        store = self._store
        if store.rounds:
            return total
        # Pages that came from the last stage: as much of them is constant as of the local pages cut like them.
        constants = []
        for page in store.own:
            theirs = [other for other in store.own if other.chunk == page.chunk]
            mine = [other for other in self._any_own_layer().own if other.chunk == page.chunk]
            constants.append(mine[theirs.index(page)].constant if mine else page.length)
        # In the place of the buffers that were just made without knowing what is constant.
        total -= sum(x.nbytes for page in store.own for x in page.tensors()[2:])
        return total + store.enable_pages(dtype, constants)

    def prepare_sweep(self, number: int) -> int:
        """Own-layer adjoints exist for two chunks at a time: the one that is swept and the one before it."""
        chunk, grown = self.clock.chunk(max([*self._counts_before, self.counts][number])), 0
        for key, layer in self._attention_layers():
            for page in layer.own if key != self.last_layer else ():
                if page.chunk > chunk and page.adjoint is not None:
                    grown -= sum(x.nbytes for x in page.tensors()[2:])
                    page.adjoint = None
                elif chunk - 1 <= page.chunk <= chunk and page.adjoint is None:
                    assert self._adjoint_dtype is not None
                    grown += page.enable_adjoint(self._adjoint_dtype, page.constant)
        return grown

    def restart(self, first: int, stop: int) -> Self:
        chunks = {self.clock.chunk(max(counts)) for counts in self._counts_before[first:stop]}
        # Pages cut as this state's are, so that it can take them.
        return self.before(first, True, {c: n for c, n in (self._reserve or {}).items() if c in chunks})

    def _enable(
        self, number: int, layer: LayerState, dtype: torch.dtype, first_live: int | None, spare: bool
    ) -> int:
        if number == self.last_layer or not isinstance(layer, KVLayer):
            return super()._enable(number, layer, dtype, first_live, spare)
        # What comes next reads own-layer pages of the open chunk and the one before it; a sweep makes the older ones.
        self._adjoint_dtype, oldest, total = dtype, self.clock.chunk(max(self.counts)) - 1, 0
        for page, constant in zip(layer.own, layer.constants(first_live), strict=True):
            page.constant = constant
            if page.chunk >= oldest:
                total += page.enable_adjoint(dtype, constant, spare)
        return total

    def collect_adjoints(self, number: int, pp_group: Any) -> None:
        """Sum what all stages hold of the last layer's adjoint, for the chunk that advance ``number`` ended in.

        A chunk's pages are collected once, when its newest advance is about to be swept: later chunks are done by then,
        and stages without the last layer add nothing from inside the chunk itself. Nor do they have the pages of a
        chunk whose sweep begins before it was complete.
        """
        if pp_group.size() == 1:
            return
        chunk = self.clock.chunk(max(self._counts_before[number]))
        if chunk not in self._handed_out:
            return
        later = self._counts_before[number + 1 :]
        if later and self.clock.chunk(max(later[0])) == chunk:
            return
        for page in self._store.own:
            if page.chunk == chunk and page.adjoint is not None:
                for total in (page.adjoint.dk_bhtd, page.adjoint.dv_bhtd):
                    self._sum_on_last(total, pp_group)

    def keep(self, branches: Sequence[int]) -> None:
        super().keep(branches)
        self._forget_blocks()

    def close(self, fill_nan: bool = False) -> None:
        self._forget_blocks()
        super().close(fill_nan)

    def _empty(self, branches: int, start: int, log: bool) -> Self:
        return type(self)(
            branches, start, log=log, clock=self.clock, blended=self.blended, last_layer=self.last_layer
        )

    def _chunk(self, lengths: Sequence[int]) -> int:
        """The chunk of the tokens of one pass."""
        fed = {start for start, length in zip(self.counts, lengths, strict=True) if length}
        if len(fed) != 1:
            raise ValueError(
                f"branches under LastKV keep step, but this pass starts at positions {sorted(fed)}"
            )
        return self.clock.chunk(fed.pop())

    def _growth(self, number: int) -> Growth:
        # Layers read the last one's committed chunks as one block.
        return super()._growth(number)._replace(together=number == self.last_layer)

    def _attention_layers(self) -> Iterator[tuple[int, KVLayer]]:
        return ((number, layer) for number, layer in self.layers() if isinstance(layer, KVLayer))

    @property
    def _store(self) -> KVLayer:
        """The state of the model's last attention layer, or what stands for it on other stages."""
        return self.layer(self.last_layer, KVLayer)

    def _enter(self, chunk: int) -> None:
        """Decoding left several small pages of each older chunk: layers read one of the previous chunk, and one of
        all chunks before it."""
        if not self._growing or chunk <= self._entered:
            return
        self._entered = chunk
        for number, layer in self._attention_layers():
            layer.merge(chunk - 1, chunk - 1)
            if number == self.last_layer:
                layer.merge(0, chunk - 2)

    def _forget_blocks(self) -> None:
        self._history.clear()
        self._near.clear()

    def _committed(self, newest: int) -> list[Block]:
        """The last layer's blocks of chunks up to ``newest``: the same for every layer, as long as a chunk is open."""
        key = newest, torch.is_grad_enabled()
        if key not in self._history:
            parts = [part for part in self._store.slices() if part.chunk <= newest]
            self._history = {key: joined(block for part in parts for block in part.blocks())}
        return self._history[key]

    def _previous_and_shared(self, number: int, layer: KVLayer, chunk: int, gate_h: Tensor) -> list[Block]:
        """The previous chunk as layer ``number`` sees it, and what a prefix has of the open one.

        Without autograd both are made once per chunk, and into one block where they can be.
        """
        near = self._near.get(number)
        if near is not None and near[0] == chunk and not torch.is_grad_enabled():
            return near[1]
        previous = self._previous(number, layer, chunk - 1, gate_h)
        shared = [block for part in layer.past if part.chunk == chunk for block in part.blocks()]
        if (
            torch.is_grad_enabled() or not previous
        ):  # before the first boundary all is as under full attention
            return previous + shared
        blocks = _concatenated(joined(previous + shared))
        self._near[number] = chunk, blocks
        return blocks

    def _previous(self, number: int, layer: KVLayer, chunk: int, gate_h: Tensor) -> list[Block]:
        """The previous chunk's blocks as layer ``number`` sees them."""
        last = [part for part in self._store.slices() if part.chunk == chunk]
        if number == self.last_layer or not self.blended or not last:
            # At the last layer both sides of the blend are the same: the gate changes nothing.
            return [block for part in last for block in part.blocks()]
        own = [part for part in layer.slices() if part.chunk == chunk]
        alpha_h = torch.sigmoid(gate_h)
        return [
            blend(mine, theirs, alpha_h)
            for mine_part, their_part in zip(own, last, strict=True)
            for mine, theirs in zip(mine_part.blocks(), their_part.blocks(), strict=True)
        ]

    def _forget(self, number: int, layer: KVLayer, chunk: int) -> None:
        """Drop own-layer pages that nothing will read again."""
        if number == self.last_layer:
            return
        retention, oldest = self._retention, self._retention.oldest(chunk)
        for page in layer.own:
            if page.chunk >= oldest and not page.dropped and not retention.keeps(page.chunk, chunk):
                page.drop()
        if any(page.chunk < oldest for page in layer.own):
            layer.own = [page for page in layer.own if page.chunk >= oldest]
            if layer.rounds is not None:
                layer.rounds = [[e for e in entries if e.page.chunk >= oldest] for entries in layer.rounds]

    @cached_property
    def _retention(self) -> Retention:
        return Retention(self.clock, self.keep_from, self.restarts)

    def _hand_out(self, chunk: int, pp_group: Any) -> None:
        """Broadcast the last layer's own pages of a chunk from the last stage; other stages append them."""
        self._handed_out.add(chunk)
        last_stage = dist.get_global_rank(pp_group, pp_group.size() - 1)
        on_last = pp_group.rank() == pp_group.size() - 1
        store = self._store
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
                store.adopt(piece, k, v, chunk)

    def _sum_on_last(self, total: Tensor, pp_group: Any) -> None:
        on_last = pp_group.rank() == pp_group.size() - 1
        summed = total.contiguous()  # pages of one storage lie in it head by head
        dist.reduce(summed, dst=dist.get_global_rank(pp_group, pp_group.size() - 1), group=pp_group)
        total.copy_(summed) if on_last else total.zero_()

    def _any_own_layer(self) -> KVLayer:
        """A layer of this stage other than the last one of the model."""
        return next(layer for key, layer in self._attention_layers() if key != self.last_layer)


def _concatenated(blocks: list[Block]) -> list[Block]:
    """Constant blocks that the same branches read, as one."""
    groups: dict[tuple[bool, int, int], list[Block]] = {}
    for block in blocks:
        groups.setdefault((block.shared, block.branch, block.k_bhtd.shape[0]), []).append(block)
    out = []
    for (shared, branch, _), same in groups.items():
        if len(same) > 1:
            k_bhtd = torch.cat([block.k_bhtd for block in same], dim=2)
            v_bhtd = torch.cat([block.v_bhtd for block in same], dim=2)
            out.append(Block(k_bhtd, v_bhtd, shared, branch))
        else:
            out += same
    return out
