"""Experts whose result for a token does not depend on the other tokens: products of whole `ROWS`, one order of sums.

Legend: n slots of this rank, k experts of a token, r rows of one expert, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_lrl.layers.activation import sigmoid
from megatron_lrl.layers.layout import fill_rows


def keep_bits(layer: Any) -> None:
    """Let a Megatron-Core `MoELayer` with separate experts give a token the same bits in any company."""
    for expert in layer.experts.local_experts:
        expert.forward = partial(_with_whole_rows, expert.forward)
    dispatcher = layer.token_dispatcher
    dispatcher.combine_postprocess = partial(_combine, dispatcher)
    layer.router.sigmoid = sigmoid


def _with_whole_rows(
    forward: Callable[[Tensor, Tensor], tuple[Tensor, Any]], hidden_rH: Tensor, weight_r: Tensor
) -> tuple[Tensor, Any]:
    """An expert's output for r rows; an expert that no token takes computes nothing."""
    rows = hidden_rH.shape[0]
    output_rH, bias = forward(fill_rows(hidden_rH), fill_rows(weight_r))
    return output_rH[:rows], bias


def _combine(dispatcher: Any, permuted: Tensor) -> Tensor:
    """Weighted outputs [n k, H], expert by expert, -> their sums in the tokens' shape, experts in ascending order."""
    # Where a token's outputs lie: a stable sort keeps the experts' order.
    order_nk = dispatcher.reversed_local_input_permutation_mapping.argsort(stable=True)
    top_k = permuted.shape[0] // dispatcher.hidden_shape_before_permute[0]
    parts_nkH = permuted.index_select(0, order_nk).unflatten(0, (-1, top_k))
    total_nH = parts_nkH[:, 0]
    for number in range(1, top_k):
        total_nH = total_nH + parts_nkH[:, number]
    output = total_nH.view(dispatcher.hidden_shape)
    if dispatcher.shared_experts is not None:
        output = output + dispatcher.shared_experts.get_output()
    return output


def release_bits(layer: Any) -> None:
    """Undo `keep_bits`."""
    for expert in layer.experts.local_experts:
        del expert.forward
    del layer.token_dispatcher.combine_postprocess
    layer.router.sigmoid = torch.sigmoid
