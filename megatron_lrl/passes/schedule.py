"""One driver for every pass over the model: Megatron-Core's schedules over a list of micro-batches.

Capture, scoring, sampling and replay differ only in what a micro-batch does. At pp = 1 the schedule is a loop, at
pp > 1 it is 1F1B (or its forward-only form); micro-batches enter each stage in the order given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megatron_lrl.layers.sequence import SequenceState
from megatron_lrl.lifetimes.run import Run
from megatron_lrl.runtime import Runtime

MicroBatch = Callable[[Any], tuple[Tensor, Callable[[Tensor], Any]]]
"""``micro_batch(model) -> (output, finish)``; on the last stage ``finish(output)`` gives what the pass returns of it:
``(loss, data)`` when gradients are wanted, ``data`` otherwise."""


def run_schedule(
    run: Run, model: Any, micro_batches: Sequence[MicroBatch], backward: bool, state_only: bool = False
) -> list[Any]:
    """Run the micro-batches through this rank's stage. Returns their data, in order, on the last stage ([] elsewhere).

    With ``backward`` each micro-batch's graph is freed as soon as its gradient has been added to the buffers.
    ``state_only``: their advances have no head. Where experts are shared by several replicas, these run together
    (`Lockstep`).
    """
    if not micro_batches:
        return []

    execute = partial(_execute, run)
    if run.lockstep is None:
        return execute(model, micro_batches, backward)
    return run.lockstep.schedule(model, micro_batches, backward, state_only, execute)


@contextmanager
def in_lockstep(run: Run) -> Iterator[None]:
    """A part of the work in which replicas may run different numbers of passes, and that they leave together.

    Collective over the replicas that share experts; where none do, it does nothing.
    """
    if run.lockstep is None:
        yield
        return
    with run.lockstep.scope(partial(_execute, run)):
        yield


def _execute(run: Run, model: Any, micro_batches: Sequence[MicroBatch], backward: bool) -> list[Any]:
    run.pipeline_use.note(len(micro_batches), run.runtime.layout.pp)

    def forward_step(iterator: Any, stage: Any) -> tuple[Tensor, Callable[..., Any]]:
        output, finish = next(iterator)(stage)

        def loss_function(output: Tensor, non_loss_data: bool = False) -> Any:
            if non_loss_data:
                return finish(output)
            loss, data = finish(output)
            # A triple under calculate_per_token_loss: Megatron-Core neither divides nor scales the sum.
            return loss, torch.zeros((), dtype=torch.int, device=loss.device), data

        return output, loss_function

    with torch.set_grad_enabled(backward):
        return get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(micro_batches),
            model=[model],
            num_microbatches=len(micro_batches),
            seq_length=1,  # shapes travel with the tensors (variable_seq_lengths)
            micro_batch_size=1,
            forward_only=not backward,
            collect_non_loss_data=not backward,
        )


def in_passes[T](steps: Sequence[T], state: SequenceState, run: Run) -> list[list[T]]:
    """Micro-batches of one sequence as lists that may run in one schedule.

    All at once fill a pipeline; a state whose passes wait for the last stage's result gets one pass at a time.
    """
    if state.sequential and run.runtime.layout.pp > 1:
        return [[step] for step in steps]
    return [list(steps)] if steps else []


def sum_over_cp(value: Tensor, runtime: Runtime) -> Tensor:
    """Sum a last-stage tensor over context-parallel ranks, in place."""
    if runtime.layout.cp > 1 and runtime.is_last_stage:
        dist.all_reduce(value, group=runtime.groups.cp)
    return value


def from_last_stage(value: Tensor, runtime: Runtime) -> Tensor:
    """Broadcast a tensor of known shape and dtype from the last pipeline stage to all stages, in place."""
    if runtime.layout.pp > 1:
        last = dist.get_global_rank(runtime.groups.pp, runtime.layout.pp - 1)
        dist.broadcast(value, src=last, group=runtime.groups.pp)
    return value
