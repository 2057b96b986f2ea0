"""Conversion tables: Hugging Face tensors <-> Megatron-Core GPTModel parameters.

A row (of a layer kind, or of `table_rows.py`) is written once and serves import, export and gradients; here rows
become entries of a model: names, shapes and ops. Parameter names are those of the local spec; Transformer Engine
fuses a norm into the linear layer behind it and renames its weight, which `Entry.te_name` covers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from megatron_lrl.checkpoint.table_rows import rows_of
from megatron_lrl.errors import UserError
from megatron_lrl.layers.architecture import Architecture
from megatron_lrl.layers.conversion import Copy, Made, Op, PadVocabulary, Row

EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT_LAYER = "output_layer.weight"
HF_HEAD = "lm_head.weight"

# Buffers that older exports stored and that are recomputed from config.json.
_RECOMPUTED = re.compile(r"model\.(language_model\.)?(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")
_GATE_NAME = re.compile(r"(^|\.)lastkv_gate$")
_PACKED_NAME = re.compile(r"(^|\.)layers\.\d+\.mlp\.experts\.(gate_up_proj|down_proj)$")


@dataclass(frozen=True)
class Entry:
    """One Megatron parameter and the Hugging Face tensors it is made of.

    Attributes:
        name: parameter of the whole model (global layer index, global expert number), local spec.
        te_name: the same under the Transformer Engine spec.
        layer: 0-based global layer, None outside the layers.
        hf_names, hf_shapes: the sources in the op's order, as the op sees them.
        op: the conversion.
        expert: number of the routed expert it belongs to, None outside routed experts.
        stacked: 0, or the number of experts that each source holds along a leading axis, of which this entry is
            made of number `expert`: a stored shape is (stacked, *hf_shape).
        wide: the model keeps it in float32 whatever its parameter dtype.
        buffer: not a parameter: it has no gradient.
    """

    name: str
    te_name: str
    layer: int | None
    hf_names: tuple[str, ...]
    hf_shapes: tuple[torch.Size, ...]
    op: Op
    expert: int | None = None
    stacked: int = 0
    wide: bool = False
    buffer: bool = False

    @property
    def width(self) -> torch.Size:
        """Shape of a source without the op's axis."""
        shape = self.hf_shapes[0]
        return torch.Size((*shape[: self.op.axis], *shape[self.op.axis + 1 :]))

    @property
    def stored_shapes(self) -> tuple[torch.Size, ...]:
        """Shapes of the sources in the files."""
        if not self.stacked:
            return self.hf_shapes
        return tuple(torch.Size((self.stacked, *shape)) for shape in self.hf_shapes)

    @property
    def part(self) -> int | None:
        """Which part of its sources, along their leading axis, the entry is made of; None: the whole of them."""
        return self.expert if self.stacked else None


def conversion_table(arch: Architecture, packed: bool = False) -> tuple[Entry, ...]:
    """All parameters of the model, embedding first, output layer last; a tied output layer has no entry.

    `packed`: files hold the routed experts of a layer in one tensor each for gate and up and for down.
    """
    entries = [Entry(EMBEDDING, EMBEDDING, None, (embedding_name(arch),), *_vocabulary(arch))]
    for layer in range(arch.num_layers):
        for row in rows_of(arch, layer):
            as_packed = packed and row.made_packed is not None
            made = row.made_packed(arch) if packed and row.made_packed is not None else row.made(arch)
            if made is None:
                continue
            experts = arch.moe.num_experts if arch.moe is not None and "{e}" in row.name else 0
            for expert in range(experts) if experts else (None,):
                entries.append(_entry(arch, row, made, layer, expert, as_packed))
    final = "decoder.final_layernorm.weight"
    whole = Made(((arch.hidden_size,),), Copy(arch.hidden_size))
    entries.append(Entry(final, final, None, (f"{arch.hf_prefix}norm.weight",), *_sized(whole)))
    if not arch.tied:
        entries.append(Entry(OUTPUT_LAYER, OUTPUT_LAYER, None, (HF_HEAD,), *_vocabulary(arch)))
    return tuple(entries)


def embedding_name(arch: Architecture) -> str:
    """The embedding's name in Hugging Face files."""
    return f"{arch.hf_prefix}embed_tokens.weight"


def stored_shapes(entries: Iterable[Entry]) -> dict[str, torch.Size]:
    """Name -> shape of every Hugging Face tensor of a table, in its order."""
    return {
        name: shape
        for entry in entries
        for name, shape in zip(entry.hf_names, entry.stored_shapes, strict=True)
    }


def check_names(entries: Iterable[Entry], found: Iterable[str], arch: Architecture, source: str) -> None:
    """Every tensor must be mapped or carried along, and every mapped tensor present.

    A tied model may store its head too. Raises UserError naming `source` and the first tensors at fault.
    """
    present = set(found)
    expected = {name for entry in entries for name in entry.hf_names}
    if missing := sorted(expected - present):
        raise UserError(f"{source}: {len(missing)} tensor(s) missing, first: {', '.join(missing[:3])}")
    extra = present - expected - ({HF_HEAD} if arch.tied else set())
    if left_over := sorted(name for name in extra if not (is_recomputed(name) or is_carried(name, arch))):
        raise UserError(
            f"{source}: {len(left_over)} tensor(s) left over that a {arch.family} model of this config.json "
            f"does not have, first: {', '.join(left_over[:3])}"
        )


def is_recomputed(name: str) -> bool:
    """True for buffers that carry no weights and are recomputed from config.json."""
    return _RECOMPUTED.fullmatch(name) is not None


def is_carried(name: str, arch: Architecture) -> bool:
    """True for tensors that are stored and exported but are no part of the model."""
    return any(re.fullmatch(pattern, name) for pattern in arch.carried)


def is_gate(name: str) -> bool:
    """True for a LastKV gate, by its name in Hugging Face files, in the model or in a checkpoint."""
    return _GATE_NAME.search(name) is not None


def holds_packed_experts(names: Iterable[str], arch: Architecture) -> bool:
    """Whether a directory's tensors are routed experts packed by layer."""
    return any(_PACKED_NAME.search(name) and not is_carried(name, arch) for name in names)


def _entry(arch: Architecture, row: Row, made: Made, layer: int, expert: int | None, packed: bool) -> Entry:
    number = "" if expert is None else str(expert)
    name, te_name = (
        f"decoder.layers.{layer}." + text.replace("{e}", number)
        for text in (row.name, row.te_name or row.name)
    )
    hf_names = (row.packed,) if packed else tuple(text.replace("{e}", number) for text in row.hf_names)
    return Entry(
        name,
        te_name,
        layer,
        tuple(f"{arch.hf_prefix}layers.{layer}.{hf_name}" for hf_name in hf_names),
        *_sized(made),
        expert=expert,
        stacked=arch.moe.num_experts if packed and arch.moe is not None else 0,
        wide=row.wide(arch),
        buffer=row.buffer,
    )


def _vocabulary(arch: Architecture) -> tuple[tuple[torch.Size, ...], Op]:
    return (torch.Size((arch.vocab_size, arch.hidden_size)),), PadVocabulary(arch.vocab_size)


def _sized(made: Made) -> tuple[tuple[torch.Size, ...], Op]:
    return tuple(torch.Size(shape) for shape in made.shapes), made.op
