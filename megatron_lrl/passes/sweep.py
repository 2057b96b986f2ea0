"""One way to feed tokens and one way back, for whatever is fed: prompts, shared turns, responses, documents.

    feed    part 0, 1, … n     no graph; each part sees the state that the ones before it left
    sweep   part n, … 1, 0     one part's graph at a time: recomputed from the state before it,
                               loss = its own tokens' terms + <state of the part, its adjoint>, backward, freed

Several runs go together, part by part, so that a pipeline's stages have something to do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_lrl.layers.adjoint import add_adjoint
from megatron_lrl.layers.advance import Tokens, advance
from megatron_lrl.layers.sequence import SequenceState
from megatron_lrl.lifetimes.run import Run
from megatron_lrl.models.head import LogprobHead
from megatron_lrl.passes.schedule import MicroBatch, in_passes, run_schedule


class Terms(Protocol):
    """What a run's tokens are scored on, and the loss of it."""

    routing: Any

    def head(self) -> LogprobHead: ...

    def finish(self, values_2S: Tensor, index_S: Tensor) -> tuple[Tensor, Any]:
        """Loss and metric sums of scored tokens."""
        ...


class TokenRun:
    """Tokens of one branch or several that grow one state, in parts."""

    def __init__(
        self,
        run: Run,
        model: Any,
        state: SequenceState,
        parts: Sequence[Sequence[Tokens]],
        terms: Terms | None = None,
        read_later: bool = False,
        grown: Callable[[int], None] = lambda nbytes: None,
    ) -> None:
        """``parts``: the tokens of each branch, part by part.

        ``read_later``: the state is forked when all parts are fed, so that even the last one has an adjoint.
        ``grown``: told by how many bytes the state grew before a part is swept.
        """
        self.run, self.model, self.state, self.parts, self.terms = run, model, state, parts, terms
        self.read_later, self.grown = read_later, grown

    @property
    def last(self) -> int:
        return len(self.parts) - 1

    def owes(self, number: int) -> bool:
        """Whether the state of a part has an adjoint: later tokens read it."""
        return number < self.last or self.read_later

    def forward(self, number: int, scored: bool) -> MicroBatch:
        """A part without a graph; ``scored``: gives (values [2, S], index [S]) on the last stage, else None."""

        def micro_batch(model: Any) -> tuple[Tensor, Any]:
            head = self.terms.head() if scored and self.terms is not None else None
            output = self.feed(number, model, head)
            return output, lambda values_2S: None if head is None else (values_2S, head.index_S)

        return micro_batch

    def backward(self, number: int) -> MicroBatch:
        """A part with its graph."""

        def micro_batch(model: Any) -> tuple[Tensor, Any]:
            terms, state = self.terms, self.state
            if self.last or self.read_later:
                self.grown(state.prepare_sweep(number))
            head = None if terms is None else terms.head()
            output, again = self.anew(number, model, head)
            if terms is None or head is None:
                if self.run.core(model).post_process:
                    # The last layer's output feeds nothing: only what the state holds carries a gradient.
                    output = output.new_zeros(())
                return add_adjoint(output, again, state, number), lambda loss: (loss, None)
            if not self.owes(number):
                return output, lambda values_2S: terms.finish(values_2S, head.index_S)
            if not self.run.core(model).post_process:
                return add_adjoint(output, again, state, number), None

            def finish(values_2S: Tensor) -> tuple[Tensor, Any]:
                total, metrics = terms.finish(values_2S, head.index_S)
                return add_adjoint(total, again, state, number), metrics

            return output, finish

        return micro_batch

    def feed(self, number: int, model: Any, head: LogprobHead | None) -> Tensor:
        """Grow the state by a part."""
        return advance(model, self.state, self.parts[number], head, self.terms and self.terms.routing)

    def anew(self, number: int, model: Any, head: LogprobHead | None) -> tuple[Tensor, SequenceState]:
        """A part once more, from the state before it. Returns the output and that state, grown."""
        # A view, gone after the backward: only autograd holds the graph, and the schedule frees it.
        again = self.state.before(number)
        return advance(model, again, self.parts[number], head, self.terms and self.terms.routing), again


def feed(
    runs: Sequence[TokenRun], *, scored: bool = False, but_last: bool = False, settle: bool = True
) -> list[list[Any]]:
    """Feed the runs' parts without a graph. Returns each run's results by part (`TokenRun.forward`), on the last stage.

    ``but_last``: the last part of each is left out: a sweep starts with it. ``settle`` false: what a pipeline's last
    stage hands out is known everywhere already.
    """
    first = runs[0]
    run, pp_group = first.run, first.run.runtime.groups.pp
    found: list[list[Any]] = [[] for _ in runs]
    stops = [len(one.parts) - but_last for one in runs]
    with torch.no_grad():
        numbers_all = list(range(max(stops)))
        for numbers in in_passes(numbers_all, first.state, run) if settle else [numbers_all]:
            members = [(number, j) for number in numbers for j, stop in enumerate(stops) if number < stop]
            steps = [runs[j].forward(number, scored) for number, j in members]
            results = run_schedule(run, first.model, steps, backward=False, state_only=not scored)
            for (_, j), result in zip(members, results, strict=bool(results)):
                found[j].append(result)
            for j in dict.fromkeys(j for _, j in members) if settle else ():
                runs[j].state.settle(pp_group)
    return found


def sweep(runs: Sequence[TokenRun], numbers: Sequence[int] | None = None) -> list[Any]:
    """Add the gradient of the runs' parts (or of these, descending) to the buffers, and to the adjoints of what they
    read.

    Returns the metric sums of their terms, on the last stage. The states' adjoints must be enabled where they owe one.
    """
    first = runs[0]
    run, pp_group = first.run, first.run.runtime.groups.pp
    if numbers is None:
        numbers = range(max(len(one.parts) for one in runs))[::-1]
    metrics: list[Any] = []
    for batch in in_passes(numbers, first.state, run):
        for one in runs:
            if batch[0] <= one.last and one.owes(batch[0]):
                one.state.collect_adjoints(batch[0], pp_group)
        steps = [one.backward(number) for number in batch for one in runs if number <= one.last]
        plain = all(one.terms is None for one in runs)
        metrics += run_schedule(run, first.model, steps, backward=True, state_only=plain)
    return metrics
