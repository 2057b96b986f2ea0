"""Sums over tensor-parallel ranks in the order of the ranks, under `model.same_bits` with tp > 2.

A library's all-reduce of more than two terms adds them in an order that depends on an element's place in the message,
so a token's sum would depend on how many others travel with it. Here every rank's part is sent and added by number.

Legend: s slots (of this rank's tp slice: s / tp), H hidden size.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from megatron.core.tensor_parallel.layers import RowParallelLinear
from torch import Tensor
from torch.autograd import Function

from megatron_lrl.layers.exchange import gather_tokens, in_rank_order, return_partials


def keep_order(linear: RowParallelLinear) -> None:
    """Let a row-parallel projection add its ranks' parts in their order."""
    linear._adds_bias = not linear.skip_bias_add
    linear.explicit_expert_comm = linear.skip_bias_add = (
        True  # the forward then returns this rank's part alone
    )
    linear.forward = partial(_forward, linear)


def release_order(linear: RowParallelLinear) -> None:
    """Undo `keep_order`."""
    del linear.forward
    linear.explicit_expert_comm, linear.skip_bias_add = False, not linear._adds_bias


def _forward(linear: Any, input_: Tensor) -> tuple[Tensor, Tensor | None]:
    """Megatron-Core's result: the projection [s (/ tp), 1, H], and a bias that is left to the caller."""
    part, bias = type(linear).forward(linear, input_)
    output = _OrderedSum.apply(part, linear.tp_group, linear.sequence_parallel)
    if bias is not None and linear._adds_bias:
        return output + bias, None
    return output, bias


class _OrderedSum(Function):
    """[s, 1, H] of each rank -> their sum, under sequence parallelism this rank's slice of it."""

    @staticmethod
    def forward(ctx: Any, part_s1H: Tensor, group: Any, scatter: bool) -> Tensor:
        ctx.group, ctx.scatter = group, scatter
        if scatter:
            return in_rank_order(return_partials(part_s1H, group))
        return in_rank_order(gather_tokens(part_s1H, group).unflatten(0, (group.size(), -1)))

    @staticmethod
    def backward(ctx: Any, dsum: Tensor) -> tuple[Tensor, None, None]:
        return gather_tokens(dsum, ctx.group) if ctx.scatter else dsum, None, None


__all__ = ["keep_order", "release_order"]
