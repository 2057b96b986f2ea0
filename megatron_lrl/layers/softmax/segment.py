"""Segment attention: the one primitive behind capture, sampling, scoring and replay.

Queries of new tokens attend to resident blocks (fully visible) and to the new tokens themselves (causal). Each task
gives a partial output and its log-sum-exp; partials merge exactly:

    lse = logaddexp(lse_1, ...),   o = sum_i o_i softmax(lse)_i

The backward calls each segment's flash backward with the merged output and log-sum-exp. What a block's gradient does is
a property of the block: nothing (constant), an addition to its adjoint, or a live autograd edge.

Under context parallelism queries are gathered, each rank attends with its own keys, and partials return to the query's
owner; dK and dV of a key are complete on the rank that owns the key.

Legend: M new slots of all cp ranks, m = M / cp; H = h g query heads in h KV groups of g; b branches of a block,
t its keys, d head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megatron_lrl.layers.exchange import (
    gather_tokens,
    group_size,
    in_rank_order,
    return_partials,
    sum_to_owner,
)
from megatron_lrl.layers.layout import NEW, BlockShape, Piece, Task, TokenLayout
from megatron_lrl.layers.softmax import invariant, kernels
from megatron_lrl.precision import accumulate_dtype


@dataclass(frozen=True)
class Adjoint:
    """Where the gradient of a block's keys and values accumulates: buffers shaped like the block."""

    dk_bhtd: Tensor
    dv_bhtd: Tensor


@dataclass(frozen=True)
class Block:
    """Resident keys and values of this rank, visible to every query of the branches it belongs to.

    ``shared``: one sequence (b = 1) that all branches read, or ``readers`` of them from ``branch`` on. Otherwise row i
    belongs to branch ``branch + i``.
    """

    k_bhtd: Tensor
    v_bhtd: Tensor
    shared: bool = True
    branch: int = 0
    adjoint: Adjoint | None = None
    readers: int = 0

    @property
    def shape(self) -> BlockShape:
        return BlockShape(self.shared, self.branch, self.k_bhtd.shape[0], self.k_bhtd.shape[2], self.readers)

    def within(self, first: int, branches: int) -> Block:
        """The same block where its state's branches are ``branches`` from ``first`` on of a longer list."""
        if self.shared:
            return replace(self, branch=first, readers=branches)
        return replace(self, branch=self.branch + first)

    @property
    def live(self) -> bool:
        """Its keys and values carry an autograd graph."""
        return self.k_bhtd.requires_grad or self.v_bhtd.requires_grad


def segment_attention(
    q_mHd: Tensor,
    k_mhd: Tensor,
    v_mhd: Tensor,
    layout: TokenLayout,
    blocks: Sequence[Block],
    scale: float,
    cp_group: Any = None,
) -> Tensor:
    """Attention of this rank's new tokens over ``blocks`` and the new tokens of all cp ranks.

    Args:
        q_mHd: queries of this rank's slots, any floating dtype; k_mhd, v_mhd likewise with h KV heads.
        layout: how the new tokens lie; its cp size and rank are those of ``cp_group``.
        blocks: this rank's resident blocks.
        scale: multiplies the scores, usually d ** -0.5.
        cp_group: context-parallel process group (None: alone).

    Returns: o_mHd in the queries' dtype; padding slots are zero.
    """
    # Keys by position need no plan, but for the backward.
    planned = torch.is_grad_enabled() or not layout.same_bits
    tasks = layout.plan([block.shape for block in blocks]) if planned else ()
    live: list[Tensor] = []
    for block in blocks:
        live += [block.k_bhtd, block.v_bhtd] if block.live else []
    return _SegmentAttention.apply(q_mHd, k_mhd, v_mhd, layout, tasks, tuple(blocks), scale, cp_group, *live)


def _gather_by_head(tensors: Sequence[Tensor], h: int, cp_group: Any) -> list[Tensor]:
    """[m, H, d] of this rank -> [h, M, g, d] of all ranks, in one message."""
    if group_size(cp_group) > 1:
        tensors = gather_tokens(torch.stack(list(tensors), dim=1), cp_group).unbind(1)
    return [x.unflatten(1, (h, -1)).transpose(0, 1).contiguous() for x in tensors]


def _first_covers(tasks: Sequence[Task], x_hMgd: Tensor) -> bool:
    """The first task's queries are all slots: its result is taken as it is, not added to zeros."""
    return bool(tasks) and tasks[0].branches * tasks[0].q_len == x_hMgd.shape[1]


def _from_runs(x_bhsgd: Tensor) -> Tensor:
    """[b, h, s, g, d] -> [h, b s, g, d], a view where the memory allows."""
    return x_bhsgd.transpose(0, 1).flatten(1, 2)


def _query_runs(x_hMgd: Tensor, task: Task) -> Tensor:
    """View of the task's queries, [b, h, s, g, d]."""
    h, _, g, *rest = x_hMgd.shape
    end = task.q_start + task.branches * task.q_len
    x = x_hMgd[:, task.q_start : end].view(h, task.branches, task.q_len, g, *rest)
    return x.transpose(0, 1)


def _to_kernel(x_bhsgd: Tensor, causal: bool) -> Tensor:
    """Fold the KV group into the query axis ([b, h, s g, d]); causal runs keep heads apart ([b h, g, s, d])."""
    if causal:
        return x_bhsgd.transpose(2, 3).flatten(0, 1)
    return x_bhsgd.flatten(2, 3)


def _from_kernel(x: Tensor, like_bhsgd: Tensor, causal: bool) -> Tensor:
    b, h, s, g = like_bhsgd.shape[:4]
    if causal:
        return x.view(b, h, g, s, *x.shape[3:]).transpose(2, 3)
    return x.reshape(b, h, s, g, *x.shape[3:])


def _keys(x: Tensor, block: Block | None, task: Task, g: int) -> Tensor:
    """The task's keys (or values) in the kernel's axes."""
    if block is None:
        run = x[task.k_start : task.k_start + task.branches * task.k_len]
        x_bhtd = run.view(task.branches, task.k_len, *x.shape[1:]).transpose(1, 2)
    else:
        first = task.k_start // task.k_len
        x_bhtd = x[first : first + task.branches]
    if not task.causal:
        return x_bhtd
    b, h, t, d = x_bhtd.shape
    return x_bhtd.reshape(b * h, 1, t, d).expand(b * h, g, t, d)


def _merge(o: Tensor, lse: Tensor, o_part: Tensor, lse_part: Tensor) -> None:
    """Fold one partial into the running output and log-sum-exp, in place.

    exp(lse_part - logaddexp(lse, lse_part)) is the sigmoid of the difference, and the two weights add up to 1.
    """
    o.lerp_(o_part.to(o.dtype), torch.sigmoid(lse_part - lse).unsqueeze(-1))
    torch.logaddexp(lse, lse_part, out=lse)


class _SegmentAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q_mHd, k_mhd, v_mhd, layout, tasks, blocks, scale, cp_group, *live):
        wide = accumulate_dtype(q_mHd.dtype)
        (q_hMgd,) = _gather_by_head([q_mHd], k_mhd.shape[1], cp_group)
        g = q_hMgd.shape[2]
        first_is_all = not layout.same_bits and _first_covers(tasks, q_hMgd)
        o_hMgd, lse_hMg = (q_hMgd, q_hMgd) if first_is_all else _nothing_seen(q_hMgd, wide)
        if layout.same_bits:
            _attend_by_position(q_hMgd, k_mhd, v_mhd, layout, blocks, scale, o_hMgd, lse_hMg)
        for task in () if layout.same_bits else tasks:
            block = None if task.source == NEW else blocks[task.source]
            q_runs = _query_runs(q_hMgd, task)
            o_part, lse_part = kernels.attend(
                _to_kernel(q_runs, task.causal),
                _keys(k_mhd if block is None else block.k_bhtd, block, task, g),
                _keys(v_mhd if block is None else block.v_bhtd, block, task, g),
                task.causal,
                scale,
            )
            o_part = _from_kernel(o_part, q_runs, task.causal)
            lse_part = _from_kernel(lse_part, q_runs, task.causal)
            if first_is_all:
                o_hMgd, lse_hMg, first_is_all = _from_runs(o_part).to(wide), _from_runs(lse_part), False
            else:
                _merge(_query_runs(o_hMgd, task), _query_runs(lse_hMg, task), o_part, lse_part)
        o_mHd, lse_mH = _collect(o_hMgd, lse_hMg, cp_group, q_mHd.dtype)
        ctx.save_for_backward(q_mHd, k_mhd, v_mhd, o_mHd, lse_mH, *live)
        ctx.tasks, ctx.scale, ctx.cp_group = tasks, scale, cp_group
        # Live blocks come back through saved tensors; the rest is resident state and outlives this graph.
        ctx.blocks = tuple(None if block.live else block for block in blocks)
        ctx.live_shapes = tuple(block.shape for block in blocks)
        return o_mHd

    @staticmethod
    def backward(ctx, do_mHd):
        q_mHd, k_mhd, v_mhd, o_mHd, lse_mH, *live = ctx.saved_tensors
        h, wide = k_mhd.shape[1], lse_mH.dtype
        q_hMgd, do_hMgd, o_hMgd = _gather_by_head([q_mHd, do_mHd.to(q_mHd.dtype), o_mHd], h, ctx.cp_group)
        (lse_hMg,) = _gather_by_head([lse_mH], h, ctx.cp_group)
        g = q_hMgd.shape[2]
        first_is_all = _first_covers(ctx.tasks, q_hMgd)
        dq_hMgd = q_hMgd if first_is_all else torch.zeros_like(q_hMgd, dtype=wide)
        dk_mhd = torch.zeros(k_mhd.shape, dtype=wide, device=q_mHd.device)
        dv_mhd = torch.zeros(v_mhd.shape, dtype=wide, device=q_mHd.device)
        blocks, grads = _live_blocks(ctx.blocks, ctx.live_shapes, live, wide)
        for task in ctx.tasks:
            block = None if task.source == NEW else blocks[task.source]
            runs = [_to_kernel(_query_runs(x, task), task.causal) for x in (q_hMgd, do_hMgd, o_hMgd)]
            q_runs = _query_runs(q_hMgd, task)
            lse = _to_kernel(_query_runs(lse_hMg, task), task.causal)
            k = _keys(k_mhd if block is None else block.k_bhtd, block, task, g)
            v = _keys(v_mhd if block is None else block.v_bhtd, block, task, g)
            if block is not None and block.adjoint is None:
                dq = kernels.constant_backward(runs[1], runs[0], k, v, runs[2], lse, ctx.scale)
            else:
                dq, dk, dv = kernels.attend_backward(
                    runs[1], runs[0], k, v, runs[2], lse, task.causal, ctx.scale
                )
                into = (dk_mhd, dv_mhd) if block is None else (block.adjoint.dk_bhtd, block.adjoint.dv_bhtd)
                for total, part in zip(into, (dk, dv), strict=True):
                    _add_key_gradient(total, part, block, task, h)
            dq = _from_kernel(dq, q_runs, task.causal)
            if first_is_all:
                dq_hMgd, first_is_all = _from_runs(dq).to(wide), False
            else:
                _query_runs(dq_hMgd, task).add_(dq)
        dq_Mhgd = dq_hMgd.transpose(0, 1)
        dq_mHd = sum_to_owner(dq_Mhgd, ctx.cp_group).reshape(q_mHd.shape).to(q_mHd.dtype)
        live_grads = [grad.to(x.dtype) for grad, x in zip(grads, live, strict=True)]
        return (
            dq_mHd, dk_mhd.to(k_mhd.dtype), dv_mhd.to(v_mhd.dtype),
            None, None, None, None, None, *live_grads,
        )  # fmt: skip


def _attend_by_position(
    q_hMgd: Tensor,
    k_mhd: Tensor,
    v_mhd: Tensor,
    layout: TokenLayout,
    blocks: Sequence[Block],
    scale: float,
    o_hMgd: Tensor,
    lse_hMg: Tensor,
) -> None:
    """Output and log-sum-exp of all new tokens over this rank's keys, run by run, with the same bits in any company."""
    for run in layout.runs([block.shape for block in blocks]):
        sources = [
            invariant.Source(block.k_bhtd, block.v_bhtd)
            if block.shared
            else invariant.Source(*(x[_rows_of(run, block.branch)] for x in (block.k_bhtd, block.v_bhtd)))
            for block in blocks
            if block.shape.read_by(run.branch)
        ]
        for piece in layout.pieces:
            if piece.branch <= run.branch < piece.branch + piece.branches:
                rows = _rows_of(run, piece.branch)
                sources.append(invariant.Source(*(piece_of(x, piece)[rows] for x in (k_mhd, v_mhd))))
        task = Task(NEW, run.start, run.length, run.branches, 0, 0, False)
        o, lse = invariant.attend(_query_runs(q_hMgd, task), sources, layout.visible(run.branch), scale)
        _query_runs(o_hMgd, task).copy_(o)
        _query_runs(lse_hMg, task).copy_(lse)


def _rows_of(run: Piece, branch: int) -> slice:
    """The run's rows of what begins with ``branch``."""
    return slice(run.branch - branch, run.branch - branch + run.branches)


def piece_of(x_mhd: Tensor, piece: Piece) -> Tensor:
    """[m, h, d] -> the piece's [b, h, t, d], a view."""
    run = x_mhd[piece.start : piece.start + piece.branches * piece.length]
    return run.view(piece.branches, piece.length, *x_mhd.shape[1:]).transpose(1, 2)


def _nothing_seen(q_hMgd: Tensor, wide: torch.dtype) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of queries that no key was visible to yet."""
    lse_hMg = torch.full(q_hMgd.shape[:3], float("-inf"), dtype=wide, device=q_hMgd.device)
    return torch.zeros_like(q_hMgd, dtype=wide), lse_hMg


def _collect(o_hMgd: Tensor, lse_hMg: Tensor, cp_group: Any, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return partials to the queries' owners and merge them: o_mHd, lse_mH. Slots that saw no key become zero."""
    if cp_group is None or cp_group.size() == 1:
        o, lse = o_hMgd.transpose(0, 1), lse_hMg.transpose(0, 1)
    else:
        packed = torch.cat([o_hMgd, lse_hMg.unsqueeze(-1)], dim=-1).transpose(0, 1)
        parts = return_partials(packed, cp_group)
        o, lse = _of_ranks(parts[..., :-1], parts[..., -1].contiguous())
    lse = lse.masked_fill(lse == float("-inf"), 0)
    m = o.shape[0]
    return o.reshape(m, -1, o.shape[-1]).to(dtype), lse.reshape(m, -1)


def _of_ranks(o_parts: Tensor, lse_parts: Tensor) -> tuple[Tensor, Tensor]:
    """Partials [ranks, ...] as one; weights that add up to 1 whatever offset the scores share.

    exp(lse_part - lse) does not: lse is rounded in proportion to the offset, and the backward multiplies what the sum
    of the weights misses by that offset.
    """
    top = lse_parts.amax(0).clamp_min(torch.finfo(lse_parts.dtype).min)
    weights = (lse_parts - top).exp()
    total = in_rank_order(weights)
    weights /= total.clamp_min(1)  # the largest was 1; all are 0 where no rank saw a key
    return in_rank_order(o_parts * weights.unsqueeze(-1)), total.log_().add_(top)


def _live_blocks(
    blocks: Sequence[Block | None], shapes: Sequence[BlockShape], live: Sequence[Tensor], wide: torch.dtype
) -> tuple[list[Block], list[Tensor]]:
    """Blocks of the backward: live ones rebuilt from saved tensors with a gradient buffer as their adjoint."""
    rebuilt: list[Block] = []
    grads: list[Tensor] = []
    tensors = iter(live)
    for block, shape in zip(blocks, shapes, strict=True):
        if block is None:
            k, v = next(tensors), next(tensors)
            dk, dv = torch.zeros_like(k, dtype=wide), torch.zeros_like(v, dtype=wide)
            grads += [dk, dv]
            block = Block(k, v, shape.shared, shape.branch, Adjoint(dk, dv))
        rebuilt.append(block)
    return rebuilt, grads


def _add_key_gradient(total: Tensor, part: Tensor, block: Block | None, task: Task, h: int) -> None:
    """Add a task's dk or dv where its keys came from."""
    if task.causal:
        part = part.sum(1).view(task.branches, h, task.k_len, -1)
    if block is None:
        end = task.k_start + task.branches * task.k_len
        total[task.k_start : end].view(task.branches, task.k_len, h, -1).transpose(1, 2).add_(part)
    else:
        first = task.k_start // task.k_len
        total[first : first + task.branches].add_(part)
