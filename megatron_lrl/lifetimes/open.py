"""Opening a run: what the settings ask for is read, checked, built and loaded."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megatron_lrl.adapters.adapt import AdapterSpec, Base, adapt, initial
from megatron_lrl.adapters.peft import read_spec, tensors_of
from megatron_lrl.adapters.table import chosen_modules
from megatron_lrl.checkpoint.hf_import import load_checkpoint_weights, load_hf_weights
from megatron_lrl.checkpoint.manifest import HF_FOLDER, read_checkpoint_architecture
from megatron_lrl.errors import UserError
from megatron_lrl.layers.kinds import describe_attention
from megatron_lrl.layers.moe.routing import check_routing
from megatron_lrl.lifetimes.ledger import Ledger, process_bytes
from megatron_lrl.lifetimes.optim import build_optimizer, wrap_ddp
from megatron_lrl.lifetimes.run import Run
from megatron_lrl.models.build import PolicyModel, check_layout, configured_model
from megatron_lrl.models.head import logits_rows
from megatron_lrl.models.hf_config import Architecture, LastKVSpec, describe_rope, read_architecture
from megatron_lrl.models.same_bits import check_same_bits, keep_same_bits, settle_same_bits
from megatron_lrl.passes.lockstep import Lockstep, check_lockstep, spans_replicas
from megatron_lrl.precision import DTYPES, accumulate_dtype
from megatron_lrl.runtime import Runtime
from megatron_lrl.settings import Config


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
    if (positions := config.model.max_positions) is None:
        return arch
    if positions <= arch.max_positions:
        raise UserError(
            f"model.max_positions = {positions}: the model has {arch.max_positions} of its own; valid: more, or unset"
        )
    return replace(arch, stretched=positions)


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


def adapter_spec(config: Config, arch: Architecture) -> AdapterSpec | None:
    """What the settings' adapter is; None: every parameter is trained. Raises `UserError` as the readers do."""
    settings = config.adapter
    if settings.path is not None:
        spec = read_spec(settings.path)
    elif settings.on:
        modules = chosen_modules(arch, settings.targets, settings.experts)
        spec = AdapterSpec(settings.rank, settings.alpha, modules)
    else:
        return None
    spec.weights(arch)
    return spec


def adapter_dtype(config: Config) -> torch.dtype | None:
    """Of A and B; None: that of the weights."""
    return accumulate_dtype(DTYPES[config.model.dtype]) if config.adapter.dtype == "float32" else None


def add_adapters(
    model: PolicyModel, config: Config, arch: Architecture, runtime: Runtime, spec: AdapterSpec
) -> None:
    """Freeze the model and put an adapter beside its weights, as it starts by the settings; collective."""
    settings = config.adapter
    adapters = adapt(model, arch, spec, runtime, adapter_dtype(config))
    if settings.path is None:
        adapters.fill(initial(settings.init, config.train.seed))
        return

    def read(path: str) -> None:
        with tensors_of(path) as given:
            adapters.fill(given)

    runtime.together(read, settings.path)


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
    runtime.together(check_same_bits, config, arch, runtime)
    runtime.together(check_lockstep, config, arch, runtime.layout)
    runtime.together(check_routing, config, arch)
    spec = runtime.together(adapter_spec, config, arch)
    if runtime.is_main:
        print(describe_rope(arch), flush=True)
        if spec is not None:
            print(f"adapter: {spec}, {len(spec.modules)} projections; the base is frozen", flush=True)
        if arch.lastkv is not None:
            print(f"attention: {describe_attention(arch)}", flush=True)
        rows = logits_rows(config, arch.vocab_size, runtime.layout.tp)
        print(f"logits: of {rows} response tokens at a time (replay.logits_chunk)", flush=True)
    libraries = process_bytes()
    model: Any = load_policy(config, runtime, arch)
    if spec is not None:
        add_adapters(model, config, arch, runtime, spec)
    said = settle_same_bits(config, arch, runtime, model)
    if said and runtime.is_main:
        print(said, flush=True)
    run = Run(config, runtime, arch, model, version=1, ledger=Ledger(libraries=libraries))
    if spans_replicas(runtime.layout):
        run.lockstep = Lockstep(run)
    if config.loss.kl_coef > 0 and model.adapters is not None:
        run.reference = Base(model)
    elif optimizer and config.loss.kl_coef > 0:
        run.reference = load_policy(config, runtime, arch).requires_grad_(False)
        if not model.same_bits and run.reference.same_bits:
            keep_same_bits(run.reference, False)
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
