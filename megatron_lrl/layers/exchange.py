"""Context-parallel traffic of segment attention: queries move, resident state does not.

Every tensor here is proportional to the new tokens, never to the prefix. All functions are no-ops at cp = 1.

Legend: M new slots of all ranks, m = M / cp of one rank.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


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


def sum_to_owner(x: Tensor, group: Any) -> Tensor:
    """[M, ...] -> [m, ...]: sum over ranks of what concerns my slots (reduce-scatter)."""
    size = group_size(group)
    if size == 1:
        return x
    out = x.new_empty((x.shape[0] // size, *x.shape[1:]))
    dist.reduce_scatter_tensor(out, x.contiguous(), group=group)
    return out
