"""Replicas whose experts are spread over each other take the same passes at the same time.

Experts exchange tokens in every layer. Where one copy of the experts is shared by several dp replicas, a pass of one
replica needs a pass of the others, but replicas differ in prompt chunks, decode steps and responses. So before each
schedule they announce what they are about to run:

    replica 0   capture x3 ─┐                 ┌─ its 3 passes                       ┐
    replica 1   capture x2 ─┤ lowest kind:    ├─ its 2 passes, 1 idle               ├─ announce again
    replica 2   decode  x1 ─┤ capture x3      ├─ 3 idle passes, then again: decode  │
    replica 3   done       ─┘                 └─ 3 idle passes, then again: done    ┘    ... until all are done

An idle pass feeds one token to a fresh state, and in a backward its loss is zero: it meets every exchange, serves the
others' tokens with its experts, and adds their gradient. Its own token leaves nothing behind.

Sampling, accumulating and scoring run inside `Lockstep.scope`, which serves idle passes until all are done.
Nothing inside may be a collective over other replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lrl.errors import RankFailure, UserError
from megatron_lrl.layers.advance import advance
from megatron_lrl.layers.architecture import Architecture
from megatron_lrl.lifetimes.run import Run
from megatron_lrl.runtime import Layout
from megatron_lrl.settings import Config

_BACKWARD, _FULL, _REFERENCE = 1, 2, 4
"""Bits of an announced kind: with a backward; the last layer is run to its end; the reference model's pass."""

IDLE_TOKEN = 0
"""What an idle pass feeds; nothing reads the outcome."""

MicroBatch = Callable[[Any], tuple[Tensor, Any]]


class Word(IntEnum):
    """Announcements that are no pass. Kinds of passes are 0 to 7; the lowest runs first."""

    DONE = 100
    FAILED = -1


def spans_replicas(layout: Layout) -> bool:
    """Whether one copy of the experts lies on several dp replicas: their ranks are cp's first, then dp's."""
    return layout.cp % layout.ep != 0


def check_lockstep(config: Config, arch: Architecture, layout: Layout, contract: str | None = None) -> None:
    """Raise `UserError` for settings whose passes cannot be counted where experts span replicas.

    ``contract``: the gradient contract (default: the config's).
    """
    if not spans_replicas(layout):
        return
    where = f"parallel.ep = {layout.ep} spreads the experts over data-parallel replicas (parallel.cp = {layout.cp})"
    if kept := config.prefix.keep_graph_bytes:
        raise UserError(f"prefix.keep_graph_bytes = {kept}: {where}, which have to recompute alike; valid: 0")
    if arch.lastkv is not None and (contract or config.prefix.contract) == "conventional" and layout.pp == 1:
        raise UserError(
            f'the contract "conventional" with LastKV: {where}, and a response then makes a number of passes that the '
            "others cannot know; valid: another contract, parallel.pp > 1, or a parallel.ep that divides parallel.cp"
        )


class Lockstep:
    """The agreement of one rank with the ranks that hold the rest of its experts.

    It reads the run's model and groups when it needs them.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.reference: Any = (
            None  # the model of passes that are not the policy's; every replica sets it alike
        )
        self._running = False  # inside a schedule: announcing would meet an exchange of the experts

    @property
    def _group(self) -> Any:
        """Ranks of this stage that must agree: those that share experts, and the cp ranks of their replicas."""
        layout, groups = self.run.runtime.layout, self.run.runtime.groups
        return groups.ep if layout.ep % layout.cp == 0 else groups.dp_cp

    def schedule(
        self, model: Any, micro_batches: Sequence[MicroBatch], backward: bool, state_only: bool, execute: Any
    ) -> list[Any]:
        """Run this replica's micro-batches at their turn; returns what ``execute(model, batches, backward)`` gives.

        ``state_only``: the micro-batches stop at the last layer's keys and values.
        """
        policy = self.run.core(model) is self.run.core(self.run.model)
        mine = _BACKWARD * backward | _FULL * (not state_only) | _REFERENCE * (not policy)
        while True:
            kind, count = self._announce(mine, len(micro_batches))
            if kind != mine:
                self._serve(kind, count, execute)
                continue
            idle = [self._idle(kind)] * (count - len(micro_batches))
            with self._inside():
                return execute(model, [*micro_batches, *idle], backward)[: len(micro_batches)]

    @contextmanager
    def scope(self, execute: Any) -> Iterator[None]:
        """A part of the work after which no replica goes on before all are done.

        A failure between two passes is announced, and the others raise it too (`UserError`, or its subclass
        `RankFailure` for what is nobody's mistake).
        """
        self._running = False  # whatever failed before, all ranks start here together
        try:
            yield
            while (found := self._announce(Word.DONE, 0))[0] != Word.DONE:
                self._serve(*found, execute)
        except _Announced as error:
            raise error.cause from None
        except Exception as error:
            if not self._running:
                self._tell(Word.FAILED, 0)
                self._failures(error)
            raise

    def all_true(self, value: bool) -> bool:
        """Whether it is true on every rank of the agreement; collective over them, between scopes."""
        flag = torch.tensor(float(value), device=self.run.runtime.device)
        dist.all_reduce(flag, op=dist.ReduceOp.MIN, group=self._group)
        return bool(flag)

    def _announce(self, kind: int, count: int) -> tuple[int, int]:
        """What runs next: the lowest kind announced and its largest count. Raises what another rank failed with."""
        told = self._tell(kind, count)
        lowest = min(other for other, _ in told)
        if lowest == Word.FAILED:
            raise _Announced(self._failures(None))
        return lowest, max(number for other, number in told if other == lowest)

    def _tell(self, kind: int, count: int) -> list[tuple[int, int]]:
        group, device = self._group, self.run.runtime.device
        mine = torch.tensor([int(kind), count], dtype=torch.int64, device=device)
        told = [torch.empty_like(mine) for _ in range(group.size())]
        dist.all_gather(told, mine, group=group)
        return [(int(pair[0]), int(pair[1])) for pair in told]

    def _failures(self, error: Exception | None) -> UserError:
        """The first failure of the group as every other rank raises it; collective over it."""
        group, message = self._group, None
        if error is not None:
            user = isinstance(error, UserError)
            message = (user, str(error) if user else f"{type(error).__name__}: {error}")
        ranks = dist.get_process_group_ranks(group)
        for rank, found in zip(ranks, self.run.runtime.gather_objects(message, group), strict=True):
            if found is not None:
                return UserError(found[1]) if found[0] else RankFailure(f"rank {rank} failed: {found[1]}")
        return RankFailure("another rank failed")

    def _serve(self, kind: int, count: int, execute: Any) -> None:
        """Idle passes for what others run."""
        model = self.reference if kind & _REFERENCE else self.run.model
        if model is None:
            raise RuntimeError("another replica runs a reference model that this one does not have")
        with self._inside():
            execute(model, [self._idle(kind)] * count, bool(kind & _BACKWARD))

    def _idle(self, kind: int) -> MicroBatch:
        """A micro-batch that meets every exchange of a pass of this kind."""
        backward, head = bool(kind & _BACKWARD), _keep if kind & _FULL else None

        def micro_batch(model: Any) -> tuple[Tensor, Any]:
            output = advance(model, self.run.new_state(1), [[IDLE_TOKEN]], head)
            if not backward:
                return output, lambda _: None
            last = self.run.core(model).post_process
            return (_Nothing.apply(output) if last else output), lambda loss: (loss, None)

        return micro_batch

    @contextmanager
    def _inside(self) -> Iterator[None]:
        self._running = True
        yield
        self._running = False  # stays true after a failure: the ranks no longer stand at the same exchange


class _Announced(Exception):
    """Another rank's failure, on its way out of the scope."""

    def __init__(self, cause: UserError) -> None:
        super().__init__(str(cause))
        self.cause = cause


def _keep(hidden_smh: Tensor, layout: Any, core: Any) -> Tensor:
    """A head that leaves the final hidden states as they are."""
    return hidden_smh


class _Nothing(torch.autograd.Function):
    """A loss of zero with a gradient of zero, whatever its input holds."""

    @staticmethod
    def forward(ctx: Any, output: Tensor) -> Tensor:
        ctx.save_for_backward(output)
        return output.new_zeros(())

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> Tensor:
        (output,) = ctx.saved_tensors
        return torch.zeros_like(output)
