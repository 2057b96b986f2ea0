"""Context-parallel traffic of segment attention: queries move, resident state does not.

Every tensor here is proportional to the new tokens, never to the prefix. All functions are no-ops at cp = 1.

Legend: M new slots of all ranks, m = M / cp of one rank.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lrl.layers.layout import TokenLayout


def group_size(group: Any) -> int:
    """Size of a process group; None stands for one rank alone."""
    return 1 if group is None else group.size()


def gather_tokens(x: Tensor, group: Any) -> Tensor:
    """[m, ...] -> [M, ...]: every rank's slots, in rank order."""
    size = group_size(group)
    if size == 1:
        return x
    out = x.new_empty((size * x.shape[0], *x.shape[1:]))
    dist.all_gather_into_tensor(out, x.contiguous(), group=group)
    return out


def return_partials(x: Tensor, group: Any) -> Tensor:
    """[M, ...] -> [cp, m, ...]: each rank's partial results for my slots (all-to-all)."""
    size = group_size(group)
    if size == 1:
        return x.unsqueeze(0)
    x = x.contiguous()
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x, group=group)
    return out.view(size, x.shape[0] // size, *x.shape[1:])


def in_rank_order(parts: Tensor) -> Tensor:
    """[ranks, ...] -> [...]: the sum, in an order that does not depend on the shapes."""
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


def sum_to_owner(x: Tensor, group: Any) -> Tensor:
    """[M, ...] -> [m, ...]: sum over ranks of what concerns my slots (reduce-scatter)."""
    size = group_size(group)
    if size == 1:
        return x
    out = x.new_empty((x.shape[0] // size, *x.shape[1:]))
    dist.reduce_scatter_tensor(out, x.contiguous(), group=group)
    return out


def keys_to_owners(k_mhd: Tensor, v_mhd: Tensor, layout: TokenLayout, group: Any) -> tuple[Tensor, Tensor]:
    """New keys and values of this rank's slots -> those of the positions it owns, where they are dealt."""
    if not layout.dealt:
        return k_mhd, v_mhd
    k, v = _ToOwners.apply(torch.cat([k_mhd, v_mhd], -1), layout, group).split(
        [k_mhd.shape[-1], v_mhd.shape[-1]], -1
    )
    return k.contiguous(), v.contiguous()


class _ToOwners(torch.autograd.Function):
    """Every slot has one owner at most, so the sums of the backward add zeros: gradients return unrounded."""

    @staticmethod
    def forward(ctx: Any, x_mhd: Tensor, layout: TokenLayout, group: Any) -> Tensor:
        ctx.slots, ctx.padded, ctx.group = (
            layout.key_slots.to(x_mhd.device, non_blocking=True),
            layout.padded,
            group,
        )
        return gather_tokens(x_mhd, group).index_select(0, ctx.slots)

    @staticmethod
    def backward(ctx: Any, dx_khd: Tensor) -> tuple[Tensor, None, None]:
        dx_Mhd = dx_khd.new_zeros(ctx.padded, *dx_khd.shape[1:]).index_copy_(0, ctx.slots, dx_khd)
        return sum_to_owner(dx_Mhd, ctx.group), None, None
