"""UpdateWindow: gradient accumulation at one model version, closed by one optimizer step.

Lifecycle: OPEN (groups may be captured and sampled) -> FIXED (branches and normaliser are known) -> REPLAYED (every
branch counted once) -> CLOSED (stepped or abandoned; every prefix captured in it is dead).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from enum import Enum
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from torch import Tensor

from megatron_lrl.errors import UserError
from megatron_lrl.experts.balance import update_router_bias
from megatron_lrl.lifetimes.contributions import BranchKey, Contributions
from megatron_lrl.lifetimes.node import Node
from megatron_lrl.lifetimes.prompt import PromptGroup
from megatron_lrl.lifetimes.replay import NonFiniteLoss, Replay
from megatron_lrl.lifetimes.run import PipelineUse, Run, StepResult
from megatron_lrl.lifetimes.work import Work


class WindowPhase(Enum):
    OPEN = "open"
    FIXED = "fixed"
    REPLAYED = "replayed"
    CLOSED = "closed"


class UpdateWindow:
    """Context manager: enter clears the gradient buffers; exit frees every prefix captured inside."""

    def __init__(self, run: Run) -> None:
        self.run, self.version = run, run.version
        self.phase = WindowPhase.OPEN
        self.contributions: Contributions | None = None
        self._groups = ExitStack()
        self._nbytes = 0
        self._nonfinite: list[str] = []  # branches of this rank whose loss was not finite
        self._finite: bool | None = None  # whether the reduced gradient is, once it was asked
        self.balance = 0.0  # weight of each response's auxiliary loss

    def __enter__(self) -> UpdateWindow:
        self.run.ledger.start_window()
        self.run.pipeline_use = PipelineUse()
        self.run.zero_grad()
        self.run.routing.clear()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            # Nothing of a failed window may leak into the next one.
            self.run.zero_grad()
        self.close()

    def prompt_group(
        self,
        name: str,
        prompt_ids: Sequence[int],
        contract: str | None = None,
        model: Any = None,
        quiet: bool = True,
    ) -> PromptGroup:
        """A prompt's group, to be entered with ``with``; it never outlives the window.

        Default contract: the config's.
        """
        self._require(WindowPhase.OPEN, WindowPhase.FIXED)
        contract = contract or self.run.config.prefix.contract
        group = PromptGroup(self.run, name, prompt_ids, contract, model, quiet)
        self._groups.callback(group.close)
        return group

    def adopt(self, group: PromptGroup) -> None:
        """Close a group that was made elsewhere when this window's prefixes go."""
        self._require(WindowPhase.OPEN, WindowPhase.FIXED)
        self._groups.callback(group.close)

    def fix(self, branches: Iterable[BranchKey], nbytes: int = 0) -> None:
        """Name this rank's branches. From here on every loss term carries its final weight.

        ``nbytes``: what the window's recorded per-token values take, for the ledger.
        Raises `ContributionError` if a branch is listed twice.
        """
        self._require(WindowPhase.OPEN)
        self.contributions = Contributions(branches)
        self._nbytes = nbytes
        self.run.ledger.add("window", nbytes)
        self.phase = WindowPhase.FIXED

    def replay(self, node: Node, work: Work) -> list[dict[str, Tensor]]:
        """Add the gradient of what hangs below a node, count its responses, and sweep the node. Returns metric sums.

        All responses of the node that belong to this rank's window must be given in one call.
        """
        self._require(WindowPhase.FIXED)
        assert self.contributions is not None
        keys = work.keys()
        self.contributions.check(keys)
        replay = Replay(node, self.balance)
        metrics = replay.gradient(work)
        self._nonfinite += replay.nonfinite
        node.sweep()
        self.contributions.count(keys)
        return metrics

    def restart(self) -> None:
        """Drop the accumulated gradient and every open prefix, and start over from the recorded branches.

        A window that was not fixed yet stays open for its branches.
        """
        self._require(WindowPhase.OPEN, WindowPhase.FIXED, WindowPhase.REPLAYED)
        self.drop_prefixes()
        self.run.zero_grad()
        self.run.routing.clear()
        self._nonfinite.clear()
        self._finite = None
        if self.contributions is not None:
            self.contributions.restart()
            self.phase = WindowPhase.FIXED

    def reduce(self) -> None:
        """Sum gradients over ranks, once.

        Raises on all ranks alike: `ContributionError` or `RankFailure` if any branch of any rank is missing,
        `NonFiniteLoss` naming the branches whose loss is NaN or infinite.
        """
        self._require(WindowPhase.FIXED)
        assert self.contributions is not None
        runtime = self.run.runtime
        runtime.together(self.contributions.require_complete)
        found = {name for part in runtime.gather_objects(self._nonfinite) for name in part}
        if found:
            raise NonFiniteLoss("not finite: " + "; ".join(sorted(found)))
        finalize_model_grads([self.run.model], None)
        self.phase = WindowPhase.REPLAYED

    def gradient_finite(self) -> bool:
        """Whether the reduced gradient is finite on every rank; the same answer on all. Read once, then remembered."""
        self._require(WindowPhase.REPLAYED)
        if self._finite is None:
            finite = torch.tensor(float(self.run.gradients_finite()), device=self.run.runtime.device)
            dist.all_reduce(finite, op=dist.ReduceOp.MIN)
            self._finite = bool(finite)
        return self._finite

    def step(self) -> StepResult:
        """One optimizer step with the reduced gradient; bumps the model version and closes the window.

        Raises on all ranks alike: FloatingPointError, before any parameter changes, if a gradient is not finite;
        `UserError` if the parameters are not finite afterwards.
        """
        self._require(WindowPhase.REPLAYED)
        if not self.gradient_finite():
            raise FloatingPointError("the window's gradient is not finite; no parameter was changed")
        update_router_bias(self.run)
        result = self.run.step()
        self.close()
        finite = math.isfinite(result.grad_norm) and self.run.parameters_finite()
        everywhere = torch.tensor(float(finite), device=self.run.runtime.device)
        dist.all_reduce(everywhere, op=dist.ReduceOp.MIN)
        if not bool(everywhere):
            raise UserError(
                f"the step overflowed: its parameters are not finite (optimizer.lr = {result.lr:g}, gradient norm "
                f"{result.grad_norm:g}, model.dtype = {self.run.config.model.dtype}); they are not saved, and the "
                "checkpoints from before it are untouched"
            )
        return result

    def drop_prefixes(self) -> None:
        """Free every prefix captured in this window; the window itself goes on."""
        self._groups.close()

    def close(self) -> None:
        """Free every prefix captured in this window, and end it."""
        self.drop_prefixes()
        self.run.ledger.add("window", -self._nbytes)
        self._nbytes = 0
        self.phase = WindowPhase.CLOSED

    def _require(self, *phases: WindowPhase) -> None:
        if self.phase not in phases:
            valid = " or ".join(phase.value for phase in phases)
            raise RuntimeError(f"the update window is {self.phase.value}, this needs it {valid}")
