"""Run: everything that lives as long as the program: parameters, gradient buffers, optimizer state, groups."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron_lrl.checkpoint.hf_import import load_checkpoint_weights, load_hf_weights
from megatron_lrl.checkpoint.manifest import read_checkpoint_architecture
from megatron_lrl.lastkv.clock import Clock
from megatron_lrl.lastkv.state import LastKVState
from megatron_lrl.lifetimes.identity import Identity, hash_tokens
from megatron_lrl.lifetimes.ledger import Ledger, storage_bytes
from megatron_lrl.lifetimes.optim import build_optimizer, wrap_ddp
from megatron_lrl.lifetimes.window import UpdateWindow
from megatron_lrl.models.build import PolicyModel, build_model, check_layout
from megatron_lrl.models.hf_config import Architecture, describe_rope, read_architecture
from megatron_lrl.runtime import DTYPES, Runtime
from megatron_lrl.settings import Config
from megatron_lrl.state import SequenceState


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step reports."""

    grad_norm: float  # global L2 norm before clipping
    lr: float


@dataclass
class Run:
    """The run-persistent lifetime. Open one with `open_run`."""

    config: Config
    runtime: Runtime
    arch: Architecture
    model: Any  # PolicyModel, inside Megatron-Core's DDP when gradients are wanted
    optimizer: Any = None
    scheduler: Any = None
    version: int = 0  # bumped by every optimizer step and every load
    reference: PolicyModel | None = None
    ledger: Ledger = field(default_factory=Ledger)

    @property
    def wide(self) -> torch.dtype:
        """Dtype of log-probabilities and reductions: float32, or float64 for a float64 model."""
        return torch.float64 if self.config.model.dtype == "float64" else torch.float32

    @staticmethod
    def core(model: Any) -> PolicyModel:
        """The model without its DDP wrapper."""
        return model.module if hasattr(model, "module") else model

    def identity(self, prefix_ids: Sequence[int], version: int | None = None) -> Identity:
        """What a prefix of these tokens would be captured for, now (or at another model version)."""
        layout, core = self.runtime.layout, self.core(self.model)
        return Identity(
            model_version=self.version if version is None else version,
            adapter_version=0,
            model=self.arch.fingerprint(),
            tokens=hash_tokens(prefix_ids),
            start=0,
            count=len(prefix_ids),
            attention=self.config.model.attention,
            rope=str(self.arch.rope.to_dict()),
            precision=self.config.model.dtype,
            routing="dense",
            layout=f"tp{layout.tp} cp{layout.cp} pp{layout.pp} sp{int(core.config.sequence_parallel)}",
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

        ``keep_from``: what a later sweep of tokens from this position on needs is kept, where that is more than
        attention itself needs (LastKV's own-layer keys and values).
        """
        lastkv = self.arch.lastkv
        if lastkv is None:
            return SequenceState(branches, 0, reserve, log)
        return LastKVState(
            branches, 0, reserve, log, clock=Clock(lastkv.chunk_size), blended=lastkv.blend,
            last_layer=self.arch.num_layers, keep_from=keep_from,
        )  # fmt: skip

    def update_window(self) -> UpdateWindow:
        """A new window at the current model version."""
        return UpdateWindow(self)

    def zero_grad(self) -> None:
        """Clear the gradient buffers, if there are any."""
        if hasattr(self.model, "zero_grad_buffer"):
            self.model.zero_grad_buffer()
        if self.optimizer is not None:
            self.optimizer.zero_grad()

    def gradients_finite(self) -> bool:
        """Whether every element of this rank's gradient buffers is finite."""
        return all(bool(torch.isfinite(buffer.grad_data).all()) for buffer in self.model.buffers)

    def step(self) -> StepResult:
        """Optimizer step with the accumulated gradient; the model version moves."""
        lr = max(group["lr"] for group in self.optimizer.param_groups)
        _, grad_norm, _ = self.optimizer.step()
        self.scheduler.step(increment=1)
        self.version += 1
        self.measure_run_bytes()
        return StepResult(float(grad_norm or 0.0), float(lr))

    def measure_run_bytes(self) -> None:
        """Bytes of parameters, gradient buffers, optimizer state and the reference model on this rank."""
        tensors = list(self.core(self.model).parameters())
        if self.reference is not None:
            tensors += self.reference.parameters()
        for buffer in getattr(self.model, "buffers", []) if hasattr(self.model, "ddp_config") else []:
            tensors.append(buffer.grad_data)
        if self.optimizer is not None:
            tensors += [t for _, state in self.optimizer.state.items() for t in _tensors(state)]
            tensors += [p for group in self.optimizer.param_groups for p in group["params"]]
        self.ledger.run = storage_bytes(tensors)


def _tensors(state: Any) -> Iterator[torch.Tensor]:
    for value in state.values():
        if isinstance(value, torch.Tensor):
            yield value


def read_model_architecture(config: Config) -> Architecture:
    """Architecture of the configured model. Raises `UserError` as the readers do."""
    if config.model.checkpoint is not None:
        return read_checkpoint_architecture(config.model.checkpoint)[0]
    assert config.model.hf is not None
    return read_architecture(config.model.hf)


def load_policy(config: Config, runtime: Runtime, arch: Architecture) -> PolicyModel:
    """The configured model with its weights, without gradient buffers."""
    model = build_model(arch, runtime, DTYPES[config.model.dtype], config.parallel.sequence_parallel)
    if config.model.checkpoint is not None:
        load_checkpoint_weights(model, arch, config.model.checkpoint, runtime)
    else:
        assert config.model.hf is not None
        load_hf_weights(model, arch, config.model.hf, runtime)
    return model


@contextmanager
def open_run(
    config: Config, runtime: Runtime, *, gradients: bool = False, optimizer: bool = False
) -> Iterator[Run]:
    """Load the model and open the run-persistent lifetime.

    Args:
        gradients: gradient buffers (all ranks hold the reduced gradient of their shard).
        optimizer: an optimizer, sharded over dp and cp; implies gradients.

    Raises `UserError` for a layout or checkpoint that does not fit.
    """
    arch = runtime.together(read_model_architecture, config)
    runtime.together(check_layout, arch, runtime.layout)
    if runtime.is_main:
        print(describe_rope(arch), flush=True)
    model: Any = load_policy(config, runtime, arch)
    run = Run(config, runtime, arch, model, version=1)
    if optimizer and config.loss.kl_coef > 0:
        run.reference = load_policy(config, runtime, arch).requires_grad_(False)
    if gradients or optimizer:
        shard = optimizer and runtime.groups.dp_cp.size() > 1
        run.model = wrap_ddp(model, runtime, shard)
        if optimizer:
            run.optimizer, run.scheduler = build_optimizer(run.model, config, shard)
    run.measure_run_bytes()
    try:
        yield run
    finally:
        run.model = run.optimizer = run.reference = None
