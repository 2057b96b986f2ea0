"""Hugging Face directory -> model parameters, or -> a Megatron distributed checkpoint."""

from __future__ import annotations

import json
from functools import reduce
from pathlib import Path

import torch

from megatron_lrl.checkpoint import publish
from megatron_lrl.checkpoint.binding import bind
from megatron_lrl.checkpoint.lastkv import DEFAULT_GATE_INIT, converted, has_gates, initialise_gates
from megatron_lrl.checkpoint.manifest import (
    Manifest,
    check_same_model,
    read_manifest,
    write_manifest,
)
from megatron_lrl.checkpoint.ops import Op
from megatron_lrl.checkpoint.safetensors_io import DTYPES, SafetensorsReader
from megatron_lrl.checkpoint.table import (
    HF_EMBEDDING,
    HF_HEAD,
    Entry,
    check_names,
    conversion_table,
    is_gate,
    is_recomputed,
)
from megatron_lrl.checkpoint.weights import load_weights, save_weights
from megatron_lrl.errors import UserError
from megatron_lrl.models.build import build_model, check_layout
from megatron_lrl.models.hf_config import Architecture, LastKVSpec, describe_rope, read_architecture
from megatron_lrl.runtime import DTYPES as RUN_DTYPES
from megatron_lrl.runtime import Runtime

_COMPARED_ROWS = 4096  # rows of embedding and head held at once while comparing them


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
        runtime.together(check_sources, reader, stored, compare_tied_head=runtime.is_main)
        runtime.together(_fill, model, arch, reader, runtime, skip_gates=gate_init is not None)
        if gate_init is not None:
            runtime.together(initialise_gates, model, gate_init, source_dtype(reader))


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
    if gate_init is None or has_gates(manifest):
        runtime.together(check_same_model, arch, manifest, ckpt_dir)
        load_weights(model, ckpt_dir, runtime)
    else:
        runtime.together(check_same_model, arch.with_lastkv(None), manifest, ckpt_dir)
        load_weights(model, ckpt_dir, runtime, skip=is_gate)
        runtime.together(initialise_gates, model, gate_init, manifest.dtype)
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
    runtime.together(lambda: publish.prepare(ckpt_dir) if runtime.is_main else None)
    try:
        if runtime.is_main:
            print(describe_rope(arch), flush=True)
        model = build_model(arch, runtime, RUN_DTYPES[manifest.dtype])
        new_gates = None if lastkv is None else DEFAULT_GATE_INIT if gate_init is None else gate_init
        load_hf_weights(model, arch, hf_dir, runtime, new_gates)
        partial = publish.incomplete_path(ckpt_dir)
        save_weights(model, partial, runtime)
        runtime.together(lambda: write_manifest(partial, manifest, hf_dir) if runtime.is_main else None)
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


def check_sources(reader: SafetensorsReader, arch: Architecture, compare_tied_head: bool = True) -> None:
    """Hold names, shapes and dtypes against the conversion table; UserError names file and tensor."""
    entries = conversion_table(arch)
    check_names(entries, (record.name for record in reader.layout.tensors), arch, str(reader.directory))
    for entry in entries:
        for name, shape in zip(entry.hf_names, entry.hf_shapes, strict=True):
            _check_tensor(reader, name, shape)
    if arch.tied and HF_HEAD in reader:
        _check_tensor(reader, HF_HEAD, torch.Size((arch.vocab_size, arch.hidden_size)))
        if compare_tied_head:
            _compare_tied_head(reader, arch.vocab_size)


def source_manifest(hf_dir: str | Path, arch: Architecture) -> Manifest:
    """The manifest of a Hugging Face directory, from its headers. Raises UserError as `check_sources`.

    A run that starts from the directory and saves checkpoints in another parameter dtype replaces `dtype`.
    """
    with SafetensorsReader(hf_dir) as reader:
        check_sources(reader, arch, compare_tied_head=False)
        recomputed = [record.name for record in reader.layout.tensors if is_recomputed(record.name)]
        return Manifest.of(arch, source_dtype(reader), reader.layout.without(recomputed))


def source_dtype(reader: SafetensorsReader) -> str:
    """The narrowest parameter dtype (a key of `runtime.DTYPES`) that holds every source tensor exactly."""
    records = [r for r in reader.layout.tensors if not is_recomputed(r.name)]
    wide = reduce(torch.promote_types, (DTYPES[record.dtype] for record in records))
    if wide == torch.float16:  # models do not compute in float16
        wide = torch.float32
    return next(name for name, dtype in RUN_DTYPES.items() if dtype == wide)


def _check_tensor(reader: SafetensorsReader, name: str, shape: torch.Size) -> None:
    record = reader.record(name)
    if record.dtype not in DTYPES:
        raise UserError(
            f"{reader.path(name)}: tensor {name} has dtype {record.dtype}; valid: {', '.join(DTYPES)}"
        )
    if record.shape != tuple(shape):
        raise UserError(
            f"{reader.path(name)}: tensor {name} has shape {list(record.shape)}; "
            f"config.json asks for {list(shape)}"
        )


def _compare_tied_head(reader: SafetensorsReader, vocab: int) -> None:
    embedding, head = reader.tensor(HF_EMBEDDING), reader.tensor(HF_HEAD)
    if reader.record(HF_EMBEDDING).dtype == reader.record(HF_HEAD).dtype:
        chunks = (slice(i, min(i + _COMPARED_ROWS, vocab)) for i in range(0, vocab, _COMPARED_ROWS))
        if all(torch.equal(embedding[(rows,)], head[(rows,)]) for rows in chunks):
            return
    raise UserError(
        f"{reader.path(HF_HEAD)}: tensor {HF_HEAD} differs from {HF_EMBEDDING}, but config.json says "
        "tie_word_embeddings = true"
    )


@torch.no_grad()
def _fill(
    model: torch.nn.Module, arch: Architecture, reader: SafetensorsReader, runtime: Runtime, skip_gates: bool
) -> None:
    binding = bind(model, arch)
    rank, size = runtime.tp_rank, runtime.layout.tp
    for entry, parameter in binding.pairs:
        if skip_gates and is_gate(entry.name):
            continue
        _copy(parameter, entry, reader, rank, size)
    if binding.tied_head is not None:
        embedding = next(entry for entry in binding.entries if entry.hf_names == (HF_EMBEDDING,))
        _copy(binding.tied_head, embedding, reader, rank, size)


def _copy(parameter: torch.Tensor, entry: Entry, reader: SafetensorsReader, rank: int, size: int) -> None:
    op: Op = entry.op
    shard = op.to_shard([reader.tensor(name) for name in entry.hf_names], rank, size, entry.width)
    if shard.shape != parameter.shape:
        raise ValueError(f"{entry.name}: shard {tuple(shard.shape)}, parameter {tuple(parameter.shape)}")
    parameter.copy_(shard)
