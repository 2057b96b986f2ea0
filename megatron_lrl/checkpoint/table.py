"""Conversion tables: Hugging Face tensors <-> Megatron-Core GPTModel parameters, one table per family.

A row (`table_rows.py`) is written once and serves import, export and gradients; here rows become entries of a
model: names, shapes and ops. Parameter names are those of the local spec; Transformer Engine fuses a norm into
the linear layer behind it and renames its weight, which `Entry.te_name` covers.

Symbols: L layers, H hidden, F feed-forward, N query heads, M key-value heads, D head dim, V vocabulary, E routed
experts, I their feed-forward size.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from megatron_lrl.checkpoint.ops import (
    Copy,
    FuseGateUp,
    GdnConvolution,
    GdnHeads,
    GdnInputFlat,
    GdnInputGrouped,
    InterleaveQkv,
    Op,
    PadVocabulary,
    Split,
)
from megatron_lrl.checkpoint.table_rows import TABLES, Kind, Row
from megatron_lrl.errors import UserError
from megatron_lrl.models.hf_config import GDN, Architecture

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
        for row in _rows(arch, layer):
            experts = arch.moe.num_experts if arch.moe is not None and "{e}" in row.name else 0
            for expert in range(experts) if experts else (None,):
                entries.append(_entry(arch, row, layer, expert, packed))
    final = "decoder.final_layernorm.weight"
    norm = Row(final, Kind.NORM, ())
    entries.append(
        Entry(final, final, None, (f"{arch.hf_prefix}norm.weight",), *_row(arch, norm.kind, False))
    )
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


def _rows(arch: Architecture, layer: int) -> Iterator[Row]:
    table = TABLES[arch.family]
    mixer = table.gdn if arch.mixers[layer] == GDN else table.attention
    for row in (*mixer, *(table.moe if arch.moe_layers[layer] else table.dense)):
        if _applies(arch, row.kind):
            yield row


def _applies(arch: Architecture, kind: Kind) -> bool:
    """Whether an optional tensor exists in this architecture."""
    match kind:
        case Kind.QKV_BIAS:
            return arch.qkv_bias
        case Kind.OUT_BIAS:
            return arch.attention_output_bias
        case Kind.HEAD_NORM:
            return arch.qk_norm
        case Kind.LASTKV_GATE:
            return arch.lastkv is not None
        case Kind.SANDWICH_NORM:
            return arch.sandwich_norms
        case Kind.ROUTER_BIAS:
            return arch.moe is not None and arch.moe.bias
        case Kind.SHARED_GATE_UP | Kind.SHARED_DOWN:
            return arch.moe is not None and arch.moe.shared_ffn_hidden_size > 0
        case Kind.SHARED_GATE:
            return arch.moe is not None and arch.moe.shared_gate
    return True


def _entry(arch: Architecture, row: Row, layer: int, expert: int | None, packed: bool) -> Entry:
    packed = packed and row.packed != ""
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
        *_row(arch, row.kind, packed),
        expert=expert,
        stacked=arch.moe.num_experts if packed and arch.moe is not None else 0,
        wide=row.kind in (Kind.GDN_HEADS, Kind.ROUTER_BIAS)
        or (row.kind is Kind.ROUTER and arch.moe is not None and arch.moe.wide_router),
        buffer=row.kind is Kind.ROUTER_BIAS,
    )


def _vocabulary(arch: Architecture) -> tuple[tuple[torch.Size, ...], Op]:
    return (torch.Size((arch.vocab_size, arch.hidden_size)),), PadVocabulary(arch.vocab_size)


def _row(arch: Architecture, kind: Kind, packed: bool) -> tuple[tuple[torch.Size, ...], Op]:
    """Shapes of a row's Hugging Face tensors, and its op."""
    if "GDN" in kind.name:
        return _gdn_row(arch, kind)
    hidden = arch.hidden_size
    kv_rows, q_rows = arch.num_kv_heads * arch.head_dim, arch.num_heads * arch.head_dim
    ffn = _ffn(arch, kind)
    qkv = InterleaveQkv(arch.num_heads, arch.num_kv_heads, arch.head_dim, arch.output_gate)
    gated_rows = q_rows * (2 if arch.output_gate else 1)
    experts = 0 if arch.moe is None else arch.moe.num_experts
    shapes: tuple[tuple[int, ...], ...]
    op: Op
    match kind:
        case Kind.NORM | Kind.SANDWICH_NORM | Kind.OUT_BIAS:
            shapes, op = ((hidden,),), Copy(hidden)
        case Kind.HEAD_NORM:
            shapes, op = ((arch.head_dim,),), Copy(arch.head_dim)
        case Kind.QKV:
            shapes, op = ((gated_rows, hidden), (kv_rows, hidden), (kv_rows, hidden)), qkv
        case Kind.QKV_BIAS:
            shapes, op = ((gated_rows,), (kv_rows,), (kv_rows,)), qkv
        case Kind.ATTENTION_OUT:
            shapes, op = ((hidden, q_rows),), Split(q_rows, along=1)
        case Kind.LASTKV_GATE:
            shapes, op = ((arch.num_kv_heads,),), Split(arch.num_kv_heads)
        case Kind.FUSED_GATE_UP:
            shapes, op = ((2 * ffn, hidden),), FuseGateUp(ffn, fused=True)
        case Kind.EXPERT_GATE_UP if packed:
            shapes, op = ((2 * ffn, hidden),), FuseGateUp(ffn, fused=True)
        case Kind.GATE_UP | Kind.EXPERT_GATE_UP | Kind.SHARED_GATE_UP:
            shapes, op = ((ffn, hidden), (ffn, hidden)), FuseGateUp(ffn)
        case Kind.DOWN | Kind.EXPERT_DOWN | Kind.SHARED_DOWN:
            shapes, op = ((hidden, ffn),), Split(ffn, along=1)
        case Kind.ROUTER:
            shapes, op = ((experts, hidden),), Copy(experts)
        case Kind.ROUTER_BIAS:
            shapes, op = ((experts,),), Copy(experts)
        case Kind.SHARED_GATE:
            shapes, op = ((1, hidden),), Copy(1)
        case _:
            raise KeyError(kind)
    return tuple(torch.Size(shape) for shape in shapes), op


def _ffn(arch: Architecture, kind: Kind) -> int:
    """Feed-forward size of a row's MLP."""
    if arch.moe is not None and "EXPERT" in kind.name:
        return arch.moe.ffn_hidden_size
    if arch.moe is not None and "SHARED" in kind.name:
        return arch.moe.shared_ffn_hidden_size
    return arch.ffn_hidden_size


def _gdn_row(arch: Architecture, kind: Kind) -> tuple[tuple[torch.Size, ...], Op]:
    """As `_row`, for the tensors of a Gated DeltaNet layer."""
    spec, hidden = arch.gdn, arch.hidden_size
    if spec is None:
        raise ValueError("a Gated DeltaNet layer without its sizes")
    heads = GdnHeads(spec.key_heads, spec.value_heads, spec.key_dim, spec.value_dim)
    keys, values = spec.key_heads * spec.key_dim, spec.value_heads * spec.value_dim
    per_head = spec.value_heads
    shapes: tuple[tuple[int, ...], ...]
    op: Op
    match kind:
        case Kind.GDN_FLAT:
            rows = (2 * keys + values, values, per_head, per_head)
            shapes, op = tuple((n, hidden) for n in rows), GdnInputFlat(heads)
        case Kind.GDN_GROUPED:
            shapes = ((2 * keys + 2 * values, hidden), (2 * per_head, hidden))
            op = GdnInputGrouped(heads)
        case Kind.GDN_CONVOLUTION:
            shapes, op = ((2 * keys + values, 1, spec.conv_kernel),), GdnConvolution(heads)
        case Kind.GDN_HEADS:
            shapes, op = ((per_head,),), Split(per_head)
        case Kind.GDN_NORM:
            shapes, op = ((spec.value_dim,),), Copy(spec.value_dim)
        case Kind.GDN_OUT:
            shapes, op = ((hidden, values),), Split(values, along=1)
        case _:
            raise KeyError(kind)
    return tuple(torch.Size(shape) for shape in shapes), op
