"""The low-rank product beside one frozen linear layer, under tensor and sequence parallelism.

    y = W x + scale · B (A x)        Hu et al., LoRA, arXiv:2106.09685, equation 3

A fused layer (query, key and value; gate and up) holds several projections, each with an A and a B of its own: their
A's lie one under the other, and each output row takes the B A of the projection that it belongs to.

    column-parallel   x ── A (whole) ── u, r numbers a projection ── to all tp ranks ── B (its rows) ─► + y
    row-parallel      x (its columns) ── A (its columns) ── u, summed over tp ranks ── B (whole) ─► + y

so a token costs r numbers of communication, not H. What every tp rank holds whole is marked as norms are: under
sequence parallelism its gradient is the sum over the ranks. Inside experts the dispatcher exchanges tokens and there
is nothing to sum on the way.

Legend: s slots (of this rank's tp slice: s / tp), i inputs, o outputs, n rows that B has, S projections, r rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor
from torch.nn import Module, Parameter


class LowRank(Module):
    """A and B of the projections of one linear layer, on this rank.

    Attributes:
        lora_A: [S r, i] of a column-parallel layer, [r, i / tp] of a row-parallel one.
        lora_B: [n, r], the rows of this rank's outputs that have an adapter; [o, r] of a row-parallel layer.
    """

    rows: Tensor
    owners: Tensor

    def __init__(
        self, linear: Any, a_shape: Sequence[int], b_shape: Sequence[int], rows: Tensor, owners: Tensor,
        *, rank: int, scale: float, column: bool, dtype: torch.dtype,
    ) -> None:  # fmt: skip
        """``rows``, ``owners``: for each row of B, the output row it adds to and the projection whose A it reads."""
        super().__init__()
        weight = linear.weight
        self.rank, self.scale, self.column, self.enabled = rank, scale, column, True
        self.outputs, self.sources = weight.shape[0], a_shape[0] // rank
        self.group, self.tp = linear.tp_group, linear.tp_group.size() if linear.tp_group is not None else 1
        self.expert = bool(linear.is_expert)
        self.sequence_parallel = bool(linear.config.sequence_parallel) and self.tp > 1
        self.lora_A = Parameter(torch.empty(*a_shape, dtype=dtype, device=weight.device))
        self.lora_B = Parameter(torch.empty(*b_shape, dtype=dtype, device=weight.device))
        self.plain = self.sources == 1 and b_shape[0] == self.outputs
        """Whether B is one projection's, of all outputs in their order."""
        self.register_buffer("rows", rows.to(weight.device), persistent=False)
        self.register_buffer("owners", owners.to(weight.device), persistent=False)
        whole, cut, axis = (self.lora_A, self.lora_B, 0) if column else (self.lora_B, self.lora_A, 1)
        set_tensor_model_parallel_attributes(cut, self.tp > 1, axis, 1)
        set_tensor_model_parallel_attributes(whole, False, axis, 1)
        for parameter in (whole, cut):
            parameter.allreduce = getattr(weight, "allreduce", True)  # type: ignore[attr-defined]
        # Of experts each rank's part is partial in any case: sequence parallelism is on wherever they are cut by tp.
        whole.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]

    def expanded(self) -> Tensor:
        """B as the product takes it: [o, S r], each row in the columns of its projection."""
        if self.plain:
            return self.lora_B
        whole = self.lora_B.new_zeros(self.outputs, self.sources, self.rank)
        return whole.index_put((self.rows, self.owners), self.lora_B).flatten(1)

    def whole_a(self) -> Tensor:
        """A for a layer that applies the product itself, to what every tp rank has whole.

        Its gradient is the ranks' sum: under sequence parallelism the mark says so, else the backward adds up.
        """
        if self.tp > 1 and not self.sequence_parallel:
            return copy_to_tensor_model_parallel_region(self.lora_A, group=self.group)
        return self.lora_A

    def forward(self, x_s1i: Tensor) -> Tensor:
        """The part to add to the layer's output, of the same rows: [s, 1, o] in the adapter's dtype."""
        u = F.linear(x_s1i.to(self.lora_A.dtype), self.lora_A)
        if self.tp > 1 and not self.expert:
            u = self._exchanged(u)
        return F.linear(u, self.expanded()) * self.scale

    def _exchanged(self, u: Tensor) -> Tensor:
        if self.column:
            if self.sequence_parallel:
                return gather_from_sequence_parallel_region(
                    u, tensor_parallel_output_grad=True, group=self.group
                )
            return copy_to_tensor_model_parallel_region(u, group=self.group)
        if self.sequence_parallel:
            return reduce_scatter_to_sequence_parallel_region(u, group=self.group)
        return reduce_from_tensor_model_parallel_region(u, group=self.group)


def attach(linear: Any, low_rank: LowRank) -> None:
    """Let a linear layer of Megatron-Core add the low-rank product to what it gives."""
    linear.adapter = low_rank
    linear.register_forward_hook(_add)


def _add(linear: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Any]) -> tuple[Tensor, Any] | None:
    if not linear.adapter.enabled:
        return None
    result, bias = output
    return result + linear.adapter(inputs[0]).to(result.dtype), bias


__all__ = ["LowRank", "attach"]
