"""Graphs of captured chunks that wait for the sweep (prefix.keep_graph_bytes).

    capture   ... chunk without a graph | chunk under autograd: its keys and values go to the state, its graph is kept
    sweep     newest chunk first: a kept graph is backpropagated as it is, any other chunk is recomputed

Which chunks: the newest whose graphs fit the budget together. Graphs grow with a chunk's tokens alone, so
the first live chunk, captured under autograd, tells what all others will take.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lrl.layers.advance import Tokens, advance, token_layout
from megatron_lrl.layers.sequence import SequenceState
from megatron_lrl.lifetimes.ledger import SavedBytes
from megatron_lrl.runtime import unwrap


class KeptGraphs:
    """The kept graphs of one prompt group. Chunks are named by their number in the capture."""

    def __init__(self, budget: int, slots: Sequence[int], first: int, parameters: Sequence[Tensor]) -> None:
        """``budget`` bytes; ``slots`` of this rank by chunk; ``first`` live chunk; ``parameters`` are not counted."""
        self._slots, self._first, self._budget = slots, first, budget
        self._meter = SavedBytes(parameters)
        self._oldest = first  # the oldest chunk to keep, once the first one was measured
        self._graphs: dict[int, tuple[Tensor, SequenceState]] = {}

    @property
    def nbytes(self) -> int:
        """Saved-for-backward bytes of the graphs that are kept now."""
        return self._meter.live

    def wants(self, number: int) -> bool:
        """Whether a chunk is to be captured under autograd: it is kept, or the first live one, which is measured."""
        return number == self._first or number >= self._oldest

    def capture(
        self,
        model: Any,
        state: SequenceState,
        tokens: Tokens,
        number: int,
        agree: Callable[[int], int],
    ) -> Tensor:
        """Feed a chunk under autograd, let ``state`` grow by its keys and values, and keep the graph if it fits.

        ``agree``: the largest of some bytes over the ranks that share the prompt. Returns the output, without a graph.
        """
        core = unwrap(model)
        layout = token_layout(core, state, [len(tokens)])
        again = state.before(number)
        with torch.enable_grad(), self._meter.measure():
            output = advance(model, again, [tokens])
        state.absorb(again, layout)
        if number == self._first:
            self._oldest = self._oldest_that_fits(agree(self._meter.live))
        if number >= self._oldest:
            self._graphs[number] = (output, again)
        return output.detach()

    def take(self, number: int) -> tuple[Tensor, SequenceState] | None:
        """A chunk's output and the state it grew, if its graph was kept; it is handed out once."""
        return self._graphs.pop(number, None)

    def clear(self) -> None:
        """Drop every graph."""
        self._graphs.clear()

    def _oldest_that_fits(self, measured: int) -> int:
        """From the bytes of the first live chunk's graph; len(slots) if not even the newest chunk fits."""
        per_slot, total = measured / self._slots[self._first], 0.0
        for number in reversed(range(self._first, len(self._slots))):
            total += per_slot * self._slots[number]
            if total > self._budget:
                return number + 1
        return self._first


def largest_over_replica(nbytes: int, runtime: Any) -> int:
    """The largest of some bytes over the tp and cp ranks that share a prompt; collective over them."""
    value = torch.tensor(nbytes, device=runtime.device)
    for group in (runtime.groups.tp, runtime.groups.cp):
        if group.size() > 1:
            dist.all_reduce(value, op=dist.ReduceOp.MAX, group=group)
    return int(value)
