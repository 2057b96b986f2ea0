"""How the adjoint of resident state flows back into the tokens it came from.

Because a prefix is shared, one pass over it serves all branches: replays add to its pages' adjoints; then its chunks
are taken in reverse, each recomputed under autograd from the state before it, and ``sum <state of the chunk, its
adjoint>`` is backpropagated, which adds to the adjoints of earlier chunks and to the parameters' gradients. The rounds
of a response that crosses LastKV boundaries are swept by the same code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_lrl.layers.sequence import SequenceState


class _AddAdjoint(torch.autograd.Function):
    """Identity on its first argument; in the backward each further tensor receives its adjoint as gradient.

    The adjoints are read in the backward, not before: a pipeline stage runs the forward of an older chunk while the
    newer one's backward, which adds to the older one's adjoint, is still to come.
    """

    @staticmethod
    def forward(ctx: Any, output: Tensor, read: Callable[[], list[Tensor]], *tensors: Tensor) -> Tensor:
        ctx.read = read
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, doutput: Tensor) -> tuple[Tensor | None, ...]:
        return (doutput, None, *ctx.read())


def add_adjoint(output: Tensor, again: SequenceState, state: SequenceState, number: int) -> Tensor:
    """``output``, with what an advance made anew of each layer's state attached to its adjoint.

    ``again``: `state.before(number)` after it was advanced under autograd by the same tokens. Every rank attaches all
    its slots, padding included (with zero gradient), so that all ranks meet in the backward's collectives.
    """
    tensors: list[Tensor] = []
    places: list[tuple[int, list[Tensor]]] = []
    for key, layer in again.layers():
        if layer.newest is not None:
            tensors += layer.newest
            # Only shapes and dtypes travel to the backward: no bytes and no graph.
            places.append((key, [torch.empty_like(x, device="meta") for x in layer.newest]))
    device = output.device

    def read() -> list[Tensor]:
        return [x for key, like in places for x in state.layer(key).take_adjoint(number, like, device)]

    return _AddAdjoint.apply(output, read, *tensors)
