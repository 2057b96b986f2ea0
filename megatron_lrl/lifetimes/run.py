"""Run: everything that lives as long as the program: parameters, gradient buffers, optimizer state, groups.

A leaf: it knows no window, no prefix and no pass. `lifetimes.open` makes one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from megatron_lrl.checkpoint.weights import all_finite
from megatron_lrl.layers.kinds import describe_attention
from megatron_lrl.layers.lastkv.clock import Clock
from megatron_lrl.layers.lastkv.state import LastKVState
from megatron_lrl.layers.lastkv.together import LastKVTogether
from megatron_lrl.layers.moe.routing import RoutingTotals, routing_policy
from megatron_lrl.layers.sequence import SequenceState
from megatron_lrl.layers.together import Together
from megatron_lrl.lifetimes.identity import Identity, hash_tokens
from megatron_lrl.lifetimes.ledger import Ledger, bytes_by_part
from megatron_lrl.lifetimes.optim import gradient_buffers
from megatron_lrl.models.hf_config import Architecture
from megatron_lrl.precision import Precision
from megatron_lrl.runtime import Runtime, unwrap
from megatron_lrl.settings import Config


@dataclass
class PipelineUse:
    """How much of a pipeline's time passes filled: m micro-batches take m + pp - 1 steps of a stage that works in m."""

    worked: int = 0
    passed: int = 0

    def note(self, micro_batches: int, stages: int) -> None:
        self.worked += micro_batches
        self.passed += micro_batches + stages - 1

    @property
    def bubble(self) -> float:
        """Idle share of a stage's time since the start, in [0, 1); 0 without a pipeline."""
        return 1.0 - self.worked / self.passed if self.passed else 0.0


class Agreement(Protocol):
    """How replicas that share experts take their passes together; see `passes.lockstep.Lockstep`."""

    reference: Any

    def schedule(
        self,
        model: Any,
        micro_batches: Sequence[Any],
        backward: bool,
        state_only: bool,
        execute: Callable[..., Any],
    ) -> list[Any]: ...

    def scope(self, execute: Callable[..., Any]) -> AbstractContextManager[None]: ...

    def all_true(self, value: bool) -> bool: ...


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step reports."""

    grad_norm: float  # global L2 norm before clipping
    lr: float


@dataclass
class Run:
    """The run-persistent lifetime. Open one with `open_run`, update it through an `UpdateWindow`."""

    config: Config
    runtime: Runtime
    arch: Architecture
    model: Any  # PolicyModel, inside Megatron-Core's DDP when gradients are wanted
    optimizer: Any = None
    scheduler: Any = None
    version: int = 0  # bumped by every optimizer step and every load
    reference: Any = None  # a second PolicyModel, or the policy's base seen through its adapters
    ledger: Ledger = field(default_factory=Ledger)
    pipeline_use: PipelineUse = field(default_factory=PipelineUse)  # since the last window opened
    lockstep: Agreement | None = None  # where experts are shared by several dp replicas
    routing: RoutingTotals = field(default_factory=RoutingTotals)  # of the window

    core = staticmethod(unwrap)
    """The model without its DDP wrapper."""

    @property
    def precision(self) -> Precision:
        """What the model computes in."""
        return Precision.of(self.config)

    def identity(self, prefix_ids: Sequence[int], version: int | None = None) -> Identity:
        """What a prefix of these tokens would be captured for, now (or at another model version)."""
        layout, core = self.runtime.layout, self.core(self.model)
        version, adapters = self.version if version is None else version, core.adapters
        return Identity(
            model_version=version,
            adapter_version=0 if adapters is None else version,
            model=self.arch.fingerprint() + ("" if adapters is None else f", {adapters.spec}"),
            tokens=hash_tokens(prefix_ids),
            start=0,
            count=len(prefix_ids),
            attention=describe_attention(self.arch),
            rope=f"{self.arch.rope.to_dict()}, positions {self.arch.positions}",
            precision=f"{self.precision}{', same bits' if core.same_bits else ''}",
            routing=routing_policy(self.arch, self.config),
            layout=f"tp{layout.tp} cp{layout.cp} pp{layout.pp} ep{layout.ep} sp{int(core.config.sequence_parallel)}",
        )

    def new_state(
        self,
        branches: int,
        *,
        reserve: Mapping[int, int] | None = None,
        log: bool = False,
        keep_from: int | None = None,
    ) -> SequenceState:
        """An empty state of the model's attention kind; see `SequenceState`.

        ``keep_from``: what a later sweep of tokens from this position on needs is kept, where that is more than the
        layers themselves need (own-layer keys and values, snapshots).
        """
        lastkv = self.arch.lastkv
        if lastkv is None:
            return SequenceState(branches, 0, reserve, log, keep_from)
        return LastKVState(
            branches, 0, reserve, log, clock=Clock(lastkv.chunk_size), blended=lastkv.blend,
            last_layer=self.arch.last_attention_layer, keep_from=keep_from,
        )  # fmt: skip

    def together(self, states: Sequence[SequenceState]) -> SequenceState | Together:
        """Open states of the model's attention kind as one flat list of branches, for `advance`."""
        if len(states) == 1:
            return states[0]
        return Together(states) if self.arch.lastkv is None else LastKVTogether(states)

    def zero_grad(self) -> None:
        """Clear the gradient buffers, if there are any."""
        if hasattr(self.model, "zero_grad_buffer"):
            self.model.zero_grad_buffer()
        if self.optimizer is not None:
            self.optimizer.zero_grad()

    def gradients_finite(self) -> bool:
        """Whether every element of this rank's gradient buffers is finite."""
        return all(all_finite(buffer.grad_data) for buffer in gradient_buffers(self.model))

    def parameters_finite(self) -> bool:
        """Whether every element of this rank's parameters and weight buffers is finite."""
        core = self.core(self.model)
        return all(all_finite(x) for x in (*core.parameters(), *core.buffers()) if x.is_floating_point())

    def step(self) -> StepResult:
        """Optimizer step with the accumulated gradient; the model version moves. `UpdateWindow.step` calls it."""
        lr = max(group["lr"] for group in self.optimizer.param_groups)
        _, grad_norm, _ = self.optimizer.step()
        self.scheduler.step(increment=1)
        self.version += 1
        self.measure_run_bytes()
        return StepResult(float(grad_norm or 0.0), float(lr))

    def measure_run_bytes(self) -> None:
        """Bytes of parameters, gradient buffers, optimizer state and the reference model on this rank."""
        ddp = self.model if hasattr(self.model, "ddp_config") else None
        parts: dict[str, list[torch.Tensor]] = {
            "parameters": list(self.core(self.model).parameters()),
            "gradients": [] if ddp is None else [buffer.grad_data for buffer in gradient_buffers(ddp)],
            "optimizer": [],
            # With adapters the reference is the policy's base.
            "reference": []
            if self.reference is None or self.reference.adapters is not None
            else list(self.reference.parameters()),
        }
        if self.optimizer is not None:
            parts["optimizer"] += [t for _, state in self.optimizer.state.items() for t in _tensors(state)]
            parts["optimizer"] += [p for group in self.optimizer.param_groups for p in group["params"]]
        self.ledger.parts = bytes_by_part(parts)
        self.ledger.run = sum(self.ledger.parts.values())


def _tensors(state: Any) -> Iterator[torch.Tensor]:
    for value in state.values():
        if isinstance(value, torch.Tensor):
            yield value
