"""Hugging Face directory -> model parameters, or -> a Megatron distributed checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from megatron_lrl.checkpoint import publish
from megatron_lrl.checkpoint.binding import Binding, bind
from megatron_lrl.checkpoint.lastkv import (
    DEFAULT_GATE_INIT,
    converted,
    describe_start,
    empty_history,
    gate_logit,
    has_gates,
    initialise_gates,
)
from megatron_lrl.checkpoint.manifest import (
    Manifest,
    check_same_model,
    read_manifest,
    require_weights,
    write_manifest,
)
from megatron_lrl.checkpoint.safetensors_io import SafetensorsReader
from megatron_lrl.checkpoint.sources import Sources
from megatron_lrl.checkpoint.streaming import build_meta_model, save_streamed
from megatron_lrl.checkpoint.table import EMBEDDING, Entry, holds_packed_experts, is_gate
from megatron_lrl.checkpoint.weights import load_weights
from megatron_lrl.errors import UserError, writing
from megatron_lrl.models.build import check_layout
from megatron_lrl.models.hf_config import Architecture, LastKVSpec, describe_rope, read_architecture
from megatron_lrl.precision import DTYPES as RUN_DTYPES
from megatron_lrl.runtime import Runtime, unwrap


def load_hf_weights(
    model: torch.nn.Module,
    arch: Architecture,
    hf_dir: str | Path,
    runtime: Runtime,
    gate_init: float | None = None,
) -> None:
    """Fill this rank's parameters from a Hugging Face directory, reading only the slices it holds.

    Collective over the world: a failure on one rank is raised on all. Values are cast to the parameters'
    dtype. `gate_init`: alpha of a LastKV model's gates where the directory holds a model of full attention;
    None: the directory must hold gates if `arch` has them.

    Raises:
        UserError: missing, damaged, left-over, wrongly shaped or wrongly typed tensor; a stored head of a
        tied model that
            differs from the embedding.
    """
    with runtime.together(SafetensorsReader, hf_dir) as reader:
        if gate_init is None or runtime.together(read_architecture, hf_dir).lastkv is not None:
            gate_init, stored = None, arch
        else:
            stored = arch.with_lastkv(None)
        sources = runtime.together(_checked_sources, reader, stored, runtime)
        runtime.together(_fill, model, arch, sources, runtime, skip_gates=gate_init is not None)
        if gate_init is not None:
            runtime.together(initialise_gates, model, gate_init, sources.dtype())
            _start_history(model, arch, runtime, sources.packed)
        unwrap(model).packed_experts = sources.packed


def load_checkpoint_weights(
    model: torch.nn.Module,
    arch: Architecture,
    ckpt_dir: str | Path,
    runtime: Runtime,
    gate_init: float | None = None,
) -> Manifest:
    """Fill this rank's parameters from a checkpoint that `import` or `train` wrote in any layout; collective.

    `gate_init` as in `load_hf_weights`.

    Raises:
        UserError: no checkpoint there, damaged, or of another model.
    """
    manifest = runtime.together(read_manifest, ckpt_dir)
    if unwrap(model).adapters is None:
        runtime.together(require_weights, manifest, ckpt_dir)
    if gate_init is None or has_gates(manifest):
        runtime.together(check_same_model, arch, manifest, ckpt_dir)
        load_weights(model, ckpt_dir, runtime)
    else:
        runtime.together(check_same_model, arch.with_lastkv(None), manifest, ckpt_dir)
        load_weights(model, ckpt_dir, runtime, skip=is_gate)
        runtime.together(initialise_gates, model, gate_init, manifest.dtype)
        _start_history(model, arch, runtime, packed=False)
    unwrap(model).packed_experts = holds_packed_experts((t.name for t in manifest.layout.tensors), arch)
    return manifest


def import_checkpoint(
    hf_dir: str | Path,
    ckpt_dir: str | Path,
    runtime: Runtime,
    lastkv: LastKVSpec | None = None,
    gate_init: float | None = None,
) -> Architecture:
    """Convert a Hugging Face directory to a Megatron distributed checkpoint that loads in any layout;
    collective.

    Weights are stored in the narrowest parameter dtype that holds every source tensor exactly, so `export`
    gives the same bits back. The directory appears only when it is complete.

    Args:
        lastkv: makes a model of full attention a LastKV one; a LastKV model must be of this very kind.
        gate_init: alpha of the gates that the conversion adds, 0.1 if None.

    Raises:
        UserError: as `load_hf_weights`; a target that exists or is not writable; a layout that does not fit
        the model; a LastKV model of another kind than `lastkv`, or `gate_init` for gates that exist.
    """
    hf_dir, ckpt_dir = Path(hf_dir), Path(ckpt_dir)
    stored = runtime.together(read_architecture, hf_dir)
    runtime.together(check_layout, stored, runtime.layout)
    arch = stored
    if lastkv is not None:
        runtime.together(_check_conversion, stored, lastkv, gate_init, hf_dir)
        arch = stored.with_lastkv(lastkv)
    manifest = converted(runtime.together(source_manifest, hf_dir, stored), arch)
    runtime.together(lambda: publish.prepare(ckpt_dir, hf_dir) if runtime.is_main else None)
    try:
        if runtime.is_main:
            print(describe_rope(arch), flush=True)
        new_gates = None if lastkv is None else DEFAULT_GATE_INIT if gate_init is None else gate_init
        partial = publish.incomplete_path(ckpt_dir)
        _stream(arch, stored, manifest, hf_dir, partial, runtime, new_gates)

        def describe() -> None:
            if runtime.is_main:
                with writing(partial):
                    write_manifest(partial, manifest, hf_dir, arch)

        runtime.together(describe)
        runtime.together(lambda: publish.publish(ckpt_dir) if runtime.is_main else None)
    finally:
        if runtime.is_main:
            publish.discard(ckpt_dir)
    return arch


def _check_conversion(
    stored: Architecture, lastkv: LastKVSpec, gate_init: float | None, hf_dir: Path
) -> None:
    if stored.lastkv is None:
        return
    if stored.lastkv != lastkv:
        raise UserError(
            f"{hf_dir / 'config.json'}: a LastKV model already, with lastkv = {json.dumps(stored.lastkv.to_dict())}; "
            f"it cannot become one with {json.dumps(lastkv.to_dict())}: import it without --lastkv-chunk"
        )
    if gate_init is not None:
        raise UserError(
            f"{hf_dir / 'config.json'}: a LastKV model already, whose gates are stored; "
            "import it without --lastkv-gate-init"
        )


def source_manifest(hf_dir: str | Path, arch: Architecture) -> Manifest:
    """The manifest of a Hugging Face directory, from its headers. Raises UserError as `Sources.check`.

    A run that starts from the directory and saves checkpoints in another parameter dtype replaces `dtype`.
    """
    with SafetensorsReader(hf_dir) as reader:
        sources = Sources(reader, arch)
        sources.check(compare_tied_head=False)
        return Manifest.of(arch, sources.dtype(), sources.layout())


def ep_place(runtime: Runtime) -> tuple[int, int]:
    """This rank's place among the expert-parallel ranks, and their number: `bind`'s `ep`."""
    size = runtime.layout.ep
    return (runtime.groups.ep.rank() if size > 1 else 0), size


def _checked_sources(reader: SafetensorsReader, arch: Architecture, runtime: Runtime) -> Sources:
    sources = Sources(reader, arch)
    sources.check(compare_tied_head=runtime.is_main)
    return sources


def _stream(
    arch: Architecture,
    stored: Architecture,
    manifest: Manifest,
    hf_dir: Path,
    partial: Path,
    runtime: Runtime,
    new_gates: float | None,
) -> None:
    """Write the weights of a directory of model `stored` as those of model `arch`, one parameter at a time."""
    with runtime.together(SafetensorsReader, hf_dir) as reader:
        sources = runtime.together(_checked_sources, reader, stored, runtime)
        if runtime.is_main and sources.widened:
            print("FP8 weights are widened to bfloat16; `export` writes them so", flush=True)
        model = runtime.together(build_meta_model, arch, runtime, RUN_DTYPES[manifest.dtype])
        entries = _by_parameter(bind(model, arch, ep_place(runtime), sources.packed))
        gate = None
        if new_gates is not None and stored.lastkv is None:
            gate = runtime.together(gate_logit, new_gates, sources.dtype())
            if runtime.is_main:
                print(describe_start(arch), flush=True)

        def values(parameter: torch.Tensor) -> torch.Tensor:
            entry = entries[id(parameter)]
            if gate is not None and is_gate(entry.name):
                return torch.full(parameter.shape, gate, dtype=parameter.dtype)
            shard = sources.shard(entry, runtime.tp_rank, runtime.layout.tp)
            if gate is not None:
                empty_history(entry, shard, arch, runtime.tp_rank, runtime.layout.tp)
            return shard

        runtime.together(save_streamed, model, partial, runtime, values)


def _start_history(model: torch.nn.Module, arch: Architecture, runtime: Runtime, packed: bool) -> None:
    """The history of a model that became LastKV while it was loaded starts empty."""
    for entry, parameter in bind(model, arch, ep_place(runtime), packed).pairs:
        empty_history(entry, parameter.data, arch, runtime.tp_rank, runtime.layout.tp)
    if runtime.is_main:
        print(describe_start(arch), flush=True)


def _by_parameter(binding: Binding) -> dict[int, Entry]:
    """`id` of a parameter -> its entry; a tied head's is the embedding's."""
    entries = {id(parameter): entry for entry, parameter in binding.pairs}
    if binding.tied_head is not None:
        entries[id(binding.tied_head)] = next(e for e in binding.entries if e.name == EMBEDDING)
    return entries


@torch.no_grad()
def _fill(
    model: torch.nn.Module, arch: Architecture, sources: Sources, runtime: Runtime, skip_gates: bool
) -> None:
    binding = bind(model, arch, ep_place(runtime), sources.packed)
    entries = _by_parameter(binding)
    tied = [] if binding.tied_head is None else [binding.tied_head]
    for parameter in (*(parameter for _, parameter in binding.pairs), *tied):
        entry = entries[id(parameter)]
        if skip_gates and is_gate(entry.name):
            continue
        shard = sources.shard(entry, runtime.tp_rank, runtime.layout.tp)
        if shard.shape != parameter.shape:
            raise ValueError(f"{entry.name}: shard {tuple(shard.shape)}, parameter {tuple(parameter.shape)}")
        parameter.copy_(shard)
