"""Attention whose result for a token does not depend on what stands beside it.

Keys are attended in tiles of `TILE` that start at multiples of it in the *absolute position*, in ascending order, each
by one product of whole `ROWS` and always `TILE` columns; a key that a query must not see, and a place that
no key fills yet, has a score of -inf, so its weight is exactly 0 and a half-filled tile gives the bits of the full one.
Each tile has its own maximum, sum and output, float32 (float64 for float64), which are merged one after another. So
batch, chunk size, pass and order leave no trace.

    sources, oldest first:   prefix pages (shared) │ own pages │ new tokens       cut into tiles by position
        full tiles inside the shared pages         ─► views, read once for the queries of all branches
        the others                                 ─► copied together, a row a branch

Legend: n branches of a run, h KV heads, s new tokens of each, g query heads of a KV head, T keys of a tile, d head dim.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_lrl.layers.layout import TILE, fill_rows
from megatron_lrl.precision import accumulate_dtype

_SCORES = 1 << 20
"""Scores of the tiles that are taken together."""


class Source(NamedTuple):
    """Keys and values of consecutive positions: [n, h, t, d], or [1, h, t, d] of one sequence for all branches."""

    k_bhtd: Tensor
    v_bhtd: Tensor

    @property
    def length(self) -> int:
        return self.k_bhtd.shape[2]


def attend(
    q_nhsgd: Tensor, sources: Sequence[Source], visible: Sequence[int], scale: float
) -> tuple[Tensor, Tensor]:
    """Causal attention of consecutive tokens over this rank's keys.

    Args:
        sources: oldest first; together they hold this rank's keys from position 0 to the newest token.
        visible: how many of them each token sees, the oldest ones; ascends to all.

    Returns: output [n, h, s, g, d] and log-sum-exp [n, h, s, g] in the accumulation dtype, 0 and -inf for a token that
    sees no key. Raises ValueError where the sources hold another number of keys.
    """
    n, h, s, g, d = q_nhsgd.shape
    if sum(source.length for source in sources) != visible[-1]:
        raise ValueError(f"{visible[-1]} keys are needed, the sources hold {[x.length for x in sources]}")
    wide = accumulate_dtype(q_nhsgd.dtype)
    q = q_nhsgd.to(wide)
    o = torch.zeros(n, h, s, g, d, dtype=wide, device=q.device)
    total = torch.zeros(n, h, s, g, dtype=wide, device=q.device)
    top = torch.full_like(total, float("-inf"))
    visible_s = torch.tensor(visible).to(q.device, non_blocking=True)
    at_once = max(1, _SCORES // (n * h * s * g * TILE))
    for first, count, k_bhtd, v_bhtd in _tiles(sources, wide, visible[0], at_once):
        low = bisect_right(visible, first)  # earlier queries see nothing of this tile
        whole = bisect_left(visible, first + TILE * count)  # later ones all of it
        place_T = torch.arange(first, first + TILE, device=q.device)
        hidden_sT = None if low == whole else place_T >= visible_s[low:whole].unsqueeze(-1)
        parts = _attend_tiles(q[:, :, low:], k_bhtd, v_bhtd, count, hidden_sT, scale)
        for part in parts:
            _merge(top[:, :, low:], total[:, :, low:], o[:, :, low:], *part)
    # The largest term of a total is 1, unless nothing was seen.
    return o.div_(total.clamp_min(1).unsqueeze(-1)), total.log_().add_(top)


def _attend_tiles(
    q_nhsgd: Tensor, k_bhtd: Tensor, v_bhtd: Tensor, count: int, hidden_sT: Tensor | None, scale: float
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Maximum, sum and output of each of ``count`` tiles by itself. ``hidden_sT``: of one tile, the first queries."""
    shape, b = q_nhsgd.shape, k_bhtd.shape[0]
    rows_bhrd = _rows(q_nhsgd, b)
    # Several tiles of one shared sequence are as many products of the shapes that one alone has.
    rows, k, v = rows_bhrd, k_bhtd, v_bhtd
    if count > 1:
        rows = rows_bhrd[0].unsqueeze(1)
        k, v = (x[0].unflatten(1, (count, TILE)) for x in (k, v))
    scores = (rows @ k.transpose(-1, -2)).mul_(scale)
    if hidden_sT is not None:
        first_queries = _unfolded(scores, shape)[:, :, : hidden_sT.shape[0]]
        first_queries.masked_fill_(hidden_sT.unsqueeze(1), float("-inf"))
    top = scores.amax(-1, keepdim=True)
    p = scores.sub_(top).exp_()
    found = top, p.sum(-1, keepdim=True), p @ v
    by_tile = [[x[:, i].unsqueeze(0) for x in found] for i in range(count)] if count > 1 else [[*found]]
    return [
        (_unfolded(top, shape).squeeze(-1), _unfolded(total, shape).squeeze(-1), _unfolded(o, shape))
        for top, total, o in by_tile
    ]


def _merge(
    top_nhsg: Tensor, total_nhsg: Tensor, o_nhsgd: Tensor, top: Tensor, total: Tensor, o: Tensor
) -> None:
    """Fold one tile into the running maximum, sum and output, in place."""
    higher = torch.maximum(top_nhsg, top)
    kept, added = (top_nhsg - higher).exp_(), (top - higher).exp_()
    total_nhsg.mul_(kept).addcmul_(total, added)
    o_nhsgd.mul_(kept.unsqueeze(-1)).addcmul_(o, added.unsqueeze(-1))
    top_nhsg.copy_(higher)


def _rows(x_nhsgd: Tensor, b: int) -> Tensor:
    """[n, h, s, g, d] -> [b, h, r, d] rows of one product: of all branches for b = 1, filled up by zeros."""
    n, h, s, g, d = x_nhsgd.shape
    x = x_nhsgd if b == n else x_nhsgd.transpose(0, 1)
    return fill_rows(x.reshape(b, h, n * s * g // b, d), 2).contiguous()


def _unfolded(x_bhrd: Tensor, shape: torch.Size) -> Tensor:
    """The inverse of `_rows`, as a view: [b, h, r, d] -> [n, h, s, g, d]."""
    n, _, s, g = shape[:4]
    if x_bhrd.shape[0] == 1 and n > 1:
        return x_bhrd[0, :, : n * s * g].unflatten(1, (n, s, g)).transpose(0, 1)
    return x_bhrd[:, :, : s * g].unflatten(2, (s, g))


def _tiles(
    sources: Sequence[Source], wide: torch.dtype, seen: int, at_once: int
) -> Iterator[tuple[int, int, Tensor, Tensor]]:
    """(first key, tiles, keys, values), ascending, filled up to whole tiles with zeros, in ``wide``.

    Up to ``at_once`` tiles of one shared source come together, of the first ``seen`` keys, which no query may miss.
    """
    end, first = sum(source.length for source in sources), 0
    while first < end:
        parts: list[Source] = []
        low, count = 0, 1
        for source in sources:
            a, b = max(first, low), min(first + TILE, low + source.length)
            if a < b:
                if not parts and source.k_bhtd.shape[0] == 1:
                    count = max(1, min(at_once, (min(low + source.length, seen) - first) // TILE))
                    b = max(b, first + count * TILE) if count > 1 else b
                parts.append(Source(*(x[:, :, a - low : b - low] for x in source)))
            low += source.length
            if count > 1:
                break
        k_bhtd, v_bhtd = (_together([part[i] for part in parts], count * TILE, wide) for i in (0, 1))
        yield first, count, k_bhtd, v_bhtd
        first += count * TILE


def _together(parts: Sequence[Tensor], tokens: int, wide: torch.dtype) -> Tensor:
    """Neighbouring keys as one [b, h, tokens, d]."""
    rows = max(part.shape[0] for part in parts)
    _, h, _, d = parts[0].shape
    if len(parts) == 1 and parts[0].shape[2] == tokens:
        return parts[0].to(wide)
    out = torch.zeros(rows, h, tokens, d, dtype=wide, device=parts[0].device)
    low = 0
    for part in parts:
        out[:, :, low : low + part.shape[2]].copy_(part)
        low += part.shape[2]
    return out


__all__ = ["TILE", "Source", "attend"]
