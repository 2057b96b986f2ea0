"""Run: everything that lives as long as the program: parameters, gradient buffers, optimizer state, groups."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megatron_lrl.checkpoint.hf_import import load_checkpoint_weights, load_hf_weights
from megatron_lrl.checkpoint.manifest import HF_FOLDER, read_checkpoint_architecture
from megatron_lrl.checkpoint.weights import all_finite
from megatron_lrl.errors import UserError
from megatron_lrl.experts.balance import update_router_bias
from megatron_lrl.experts.recorded import RoutingTotals, check_routing, routing_policy
from megatron_lrl.layers.kinds import describe_attention
from megatron_lrl.layers.lastkv.clock import Clock
from megatron_lrl.layers.lastkv.state import LastKVState
from megatron_lrl.layers.sequence import SequenceState
from megatron_lrl.lifetimes.identity import Identity, hash_tokens
from megatron_lrl.lifetimes.optim import build_optimizer, gradient_buffers, wrap_ddp
from megatron_lrl.lifetimes.window import UpdateWindow
from megatron_lrl.models.build import PolicyModel, check_layout, configured_model
from megatron_lrl.models.head import logits_rows
from megatron_lrl.models.hf_config import Architecture, LastKVSpec, describe_rope, read_architecture
from megatron_lrl.passes.ledger import Ledger, bytes_by_part
from megatron_lrl.passes.lockstep import Lockstep, check_lockstep, spans_replicas
from megatron_lrl.passes.schedule import PipelineUse
from megatron_lrl.runtime import Runtime
from megatron_lrl.settings import Config


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
    pipeline_use: PipelineUse = field(default_factory=PipelineUse)  # since the last window opened
    lockstep: Lockstep | None = None  # where experts are shared by several dp replicas
    routing: RoutingTotals = field(init=False)  # of the window

    def __post_init__(self) -> None:
        self.routing = RoutingTotals(self)

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
            attention=describe_attention(self.arch),
            rope=str(self.arch.rope.to_dict()),
            precision=self.config.model.dtype
            + (", float32 residuals" if core.config.fp32_residual_connection else ""),
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
        return all(all_finite(buffer.grad_data) for buffer in gradient_buffers(self.model))

    def parameters_finite(self) -> bool:
        """Whether every element of this rank's parameters and weight buffers is finite."""
        core = self.core(self.model)
        return all(all_finite(x) for x in (*core.parameters(), *core.buffers()) if x.is_floating_point())

    def step(self) -> StepResult:
        """Optimizer step with the accumulated gradient; the model version moves."""
        lr = max(group["lr"] for group in self.optimizer.param_groups)
        _, grad_norm, _ = self.optimizer.step()
        update_router_bias(self)
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
            "reference": [] if self.reference is None else list(self.reference.parameters()),
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


def read_model_architecture(config: Config) -> Architecture:
    """Architecture of the configured model, with the attention that the run gives it.

    A model of full attention becomes a LastKV one where the settings ask for it. Raises `UserError` as the readers
    do, and for settings that contradict a LastKV model.
    """
    if config.model.checkpoint is not None:
        folder = Path(config.model.checkpoint) / HF_FOLDER
        arch = read_checkpoint_architecture(config.model.checkpoint)[0]
    else:
        assert config.model.hf is not None
        folder = Path(config.model.hf)
        arch = read_architecture(folder)
    if arch.lastkv is not None:
        _check_lastkv(config, arch.lastkv, folder / "config.json")
    elif config.model.attention == "lastkv":
        arch = arch.with_lastkv(LastKVSpec(config.lastkv.chunk_size, config.lastkv.blend))
    return arch


def _check_lastkv(config: Config, lastkv: LastKVSpec, file: Path) -> None:
    """Raise `UserError` for a setting that contradicts what a LastKV model's config.json says."""
    if config.model.attention != "lastkv":
        raise UserError(
            f'model.attention = "{config.model.attention}", but {file} has lastkv = {json.dumps(lastkv.to_dict())}; '
            'valid for this model: "lastkv"'
        )
    for key, stored in lastkv.to_dict().items():
        wanted = getattr(config.lastkv, key)
        if key in config.lastkv.model_fields_set and wanted != stored:
            raise UserError(
                f"lastkv.{key} = {json.dumps(wanted)}, but {file} has lastkv.{key} = {json.dumps(stored)}, which is a "
                "property of the model; leave the setting out"
            )


def load_policy(config: Config, runtime: Runtime, arch: Architecture) -> PolicyModel:
    """The configured model with its weights, without gradient buffers.

    Where ``arch`` has LastKV gates and the source none, they start at ``lastkv.gate_init``.
    """
    gate_init = None if arch.lastkv is None else config.lastkv.gate_init
    model = configured_model(config, arch, runtime)
    if config.model.checkpoint is not None:
        load_checkpoint_weights(model, arch, config.model.checkpoint, runtime, gate_init)
    else:
        assert config.model.hf is not None
        load_hf_weights(model, arch, config.model.hf, runtime, gate_init)
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
    runtime.together(check_lockstep, config, arch, runtime.layout)
    runtime.together(check_routing, config, arch)
    if runtime.is_main:
        print(describe_rope(arch), flush=True)
        if arch.lastkv is not None:
            print(f"attention: {describe_attention(arch)}", flush=True)
        rows = logits_rows(config, arch.vocab_size, runtime.layout.tp)
        print(f"logits: of {rows} response tokens at a time (replay.logits_chunk)", flush=True)
    model: Any = load_policy(config, runtime, arch)
    run = Run(config, runtime, arch, model, version=1)
    if spans_replicas(runtime.layout):
        run.lockstep = Lockstep(run)
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
