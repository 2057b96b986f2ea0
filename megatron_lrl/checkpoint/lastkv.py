"""A dense model becomes a LastKV one: new gates, the key in config.json, room for the gates in its files.

The same on the way into a checkpoint (`import --lastkv-chunk`) and when a run loads a dense model with
model.attention = "lastkv". Gates are parameters: logits of alpha, one per layer and KV head. Their initial value is
rounded to the source's dtype either way, and the history starts empty, so both ways give the same model.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import replace

import torch

from megatron_lrl.checkpoint.manifest import Manifest
from megatron_lrl.checkpoint.safetensors_io import DTYPE_NAMES, FileLayout, TensorRecord
from megatron_lrl.checkpoint.table import Entry, conversion_table, is_gate
from megatron_lrl.errors import UserError
from megatron_lrl.models.hf_config import ATTENTION, Architecture
from megatron_lrl.precision import DTYPES as RUN_DTYPES

_HISTORY = re.compile(r"\.self_attn\.[kv]_proj\.(weight|bias)$")
DEFAULT_GATE_INIT = 0.1  # alpha of new gates


def has_gates(manifest: Manifest) -> bool:
    """True if the weights described are a LastKV model's."""
    return "lastkv" in manifest.architecture


def converted(manifest: Manifest, arch: Architecture) -> Manifest:
    """The manifest of a model that became `arch`: with gates, if it is LastKV and its source was not.

    Each gate is stored in the manifest's dtype and in the file of its layer's output projection.
    """
    if arch.lastkv is None or has_gates(manifest):
        return manifest
    layout = _with_gates(manifest.layout, arch, DTYPE_NAMES[RUN_DTYPES[manifest.dtype]])
    return Manifest.of(arch, manifest.dtype, layout)


@torch.no_grad()
def initialise_gates(model: torch.nn.Module, gate_init: float, dtype: str) -> None:
    """Set this rank's gates to logit(`gate_init`), rounded to `dtype` (a key of `RUN_DTYPES`).

    Raises UserError unless 0 < gate_init < 1.
    """
    logit = gate_logit(gate_init, dtype)
    for name, parameter in model.named_parameters():
        if is_gate(name):
            parameter.fill_(logit)


def gate_logit(gate_init: float, dtype: str) -> float:
    """logit(`gate_init`) rounded to `dtype` (a key of `RUN_DTYPES`). Raises UserError unless 0 < gate_init < 1."""
    if not 0 < gate_init < 1:
        raise UserError(f"gate_init = {gate_init:g}: alpha at initialisation must be > 0 and < 1")
    return torch.logit(torch.tensor(gate_init, dtype=torch.float64)).to(RUN_DTYPES[dtype]).item()


def describe_start(arch: Architecture) -> str:
    """What a model just converted is, for people."""
    return (
        f"LastKV: the keys and values of layer {_history_layer(arch)}, which all layers read as their history, start "
        'at zero. The model is no longer the original: uptrain it on text first (train.objective = "lm"). Expect: '
        "examples/lastkv went from 1.91 nats a token to 4.17 by the conversion, and to 1.67 with 66,000 tokens of its "
        "own kind; recall from the history takes more than that"
    )


@torch.no_grad()
def empty_history(entry: Entry, shard: torch.Tensor, arch: Architecture, rank: int, size: int) -> None:
    """Zero the rows of a tp rank's parameter that make the history: keys and values of the last attention layer.

    They mean nothing to the other layers of a model of full attention. At zero, the history takes a part of the
    attention and adds nothing, until it learns to (examples/lastkv has the measurements).
    """
    if entry.layer != _history_layer(arch):
        return
    offset = 0
    for piece in entry.op.pieces(rank, size):
        if piece.source is not None and _HISTORY.search(entry.hf_names[piece.source]):
            shard.narrow(entry.op.axis, offset, piece.length).zero_()
        offset += piece.length


def _history_layer(arch: Architecture) -> int:
    return max(layer for layer, mixer in enumerate(arch.mixers) if mixer == ATTENTION)


def _output_projection(gate: str) -> str:
    """The tensor beside which a gate is stored."""
    return gate.removesuffix("lastkv_gate") + "o_proj.weight"


def _with_gates(layout: FileLayout, arch: Architecture, dtype: str) -> FileLayout:
    files = {record.name: record.file for record in layout.tensors}
    gates = [
        TensorRecord(name, files[_output_projection(name)], dtype, tuple(shape))
        for entry in conversion_table(arch)
        for name, shape in zip(entry.hf_names, entry.hf_shapes, strict=True)
        if is_gate(name)
    ]
    tensors = [
        record
        for file in dict.fromkeys(files.values())
        for record in _aligned(
            [record for record in layout.tensors if record.file == file],
            [record for record in gates if record.file == file],
        )
    ]
    added = {
        "total_size": sum(gate.nbytes for gate in gates),
        "total_parameters": sum(math.prod(gate.shape) for gate in gates),
    }
    totals = {
        key: value + added[key] if key in added and isinstance(value, int) else value
        for key, value in layout.index_metadata.items()
    }
    return replace(layout, tensors=tuple(tensors), index_metadata=totals)


def _aligned(held: list[TensorRecord], gates: Iterable[TensorRecord]) -> list[TensorRecord]:
    """One file's tensors with the gates behind the last of at least their element size.

    A tensor's data must start at a multiple of its element size, which files keep by descending size.
    """
    gates = list(gates)
    if not gates:
        return held
    width = gates[0].alignment
    wide = [i for i, record in enumerate(held) if record.alignment >= width]
    place = wide[-1] + 1 if wide else 0
    return [*held[:place], *gates, *held[place:]]
