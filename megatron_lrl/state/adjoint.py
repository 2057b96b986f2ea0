"""The adjoint of a resident prefix: gradients of its keys and values, and how they flow back into the prefix.

Because the prefix is shared, one pass over it serves all branches: replays add to the adjoint; then chunks are taken in
reverse, each recomputed under autograd from the state before it, and ``sum <state of the chunk, its adjoint>`` is
backpropagated, which adds to the adjoints of earlier chunks and to the parameters' gradients.

Legend: b = 1 branch, h KV heads, t tokens of this rank, d head dim; m slots of a chunk on this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_lrl.attention.segment import Adjoint, Block
from megatron_lrl.state.kv import KVLayer, poison
from megatron_lrl.state.sequence import SequenceState


class AdjointState:
    """Adjoint buffers over a frozen prefix, from the first live token of this rank on."""

    def __init__(self, prefix: SequenceState, constant_tokens: int, dtype: torch.dtype) -> None:
        """``constant_tokens`` of this rank's oldest tokens are constant; the rest get buffers of ``dtype``."""
        self.prefix, self.constant = prefix, constant_tokens
        self._buffers: dict[int, Adjoint] = {}
        for number, layer in prefix.layers():
            for block in layer.blocks():
                k, v = (x[:, :, constant_tokens:] for x in (block.k_bhtd, block.v_bhtd))
                self._buffers[number] = Adjoint(
                    torch.zeros(k.shape, dtype=dtype, device=k.device),
                    torch.zeros(v.shape, dtype=dtype, device=v.device),
                )

    @property
    def nbytes(self) -> int:
        return sum(a.dk_bhtd.nbytes + a.dv_bhtd.nbytes for a in self._buffers.values())

    def fork(self, branches: int) -> SequenceState:
        """Continuations of the whole prefix whose key and value gradients accumulate here."""
        return self._view(None, branches, self.prefix.counts[0])

    def before(self, tokens: int, position: int) -> SequenceState:
        """The state as it was when this rank had ``tokens`` tokens and the next one stood at ``position``."""
        return self._view(tokens, 1, position)

    def rows(
        self, number: int, first: int, count: int, like_mhd: Sequence[Tensor], device: torch.device
    ) -> list[Tensor]:
        """A layer's adjoints of this rank's ``count`` tokens from ``first`` on, padded with zeros to [m, h, d]."""
        out = [torch.zeros(x.shape, dtype=x.dtype, device=device) for x in like_mhd]
        if count:
            adjoint = self._buffers[number]
            low = first - self.constant
            for x_mhd, total in zip(out, (adjoint.dk_bhtd, adjoint.dv_bhtd), strict=True):
                x_mhd[:count] = total[0, :, low : low + count].transpose(0, 1)
        return out

    def close(self, fill_nan: bool) -> None:
        if fill_nan:
            poison(x for a in self._buffers.values() for x in (a.dk_bhtd, a.dv_bhtd))
        self._buffers.clear()

    def _view(self, tokens: int | None, branches: int, position: int) -> SequenceState:
        layers = {}
        for number, layer in self.prefix.layers():
            blocks: list[Block] = []
            for block in layer.blocks():
                end = block.k_bhtd.shape[2] if tokens is None else tokens
                adjoint = self._buffers[number]
                live = max(0, end - self.constant)
                for low, high, sink in (
                    (0, min(end, self.constant), None),
                    (self.constant, end, Adjoint(adjoint.dk_bhtd[:, :, :live], adjoint.dv_bhtd[:, :, :live])),
                ):
                    if low < high:
                        k, v = block.k_bhtd[:, :, low:high], block.v_bhtd[:, :, low:high]
                        blocks.append(Block(k, v, True, 0, sink))
            layers[number] = KVLayer(blocks)
        return SequenceState.over(self.prefix, layers, branches, position)


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


def add_adjoint(
    output: Tensor, chunk: SequenceState, adjoint: AdjointState, first: int, count: int
) -> Tensor:
    """``output``, with the chunk's keys and values of every layer of this stage attached to their adjoints.

    ``chunk``: the state just advanced under autograd from `AdjointState.before`; its tokens are this rank's ``count``
    tokens from ``first`` on. Every rank attaches all its slots, padding included, so that all ranks meet in the
    backward's collectives.
    """
    tensors: list[Tensor] = []
    shapes: list[tuple[int, list[Tensor]]] = []
    for number, layer in chunk.layers():
        assert layer.newest is not None
        tensors += layer.newest
        # Only shapes and dtypes travel to the backward: `empty` on the meta device holds no bytes and no graph.
        shapes.append((number, [torch.empty_like(x, device="meta") for x in layer.newest]))
    device = output.device

    def read() -> list[Tensor]:
        return [x for number, like in shapes for x in adjoint.rows(number, first, count, like, device)]

    return _AddAdjoint.apply(output, read, *tensors)
