"""Conversion tables: Hugging Face tensors <-> Megatron-Core GPTModel parameters, one table per family.

A row is written once and serves import, export and gradients. Parameter names are those of the local spec;
Transformer Engine fuses a norm into the linear layer behind it and renames its weight, which
`Entry.te_name` covers.

Symbols: L layers, H hidden, F feed-forward, N query heads, M key-value heads, D head dim, V vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from megatron_lrl.checkpoint.ops import Copy, FuseGateUp, InterleaveQkv, Op, PadVocabulary, Split
from megatron_lrl.errors import UserError
from megatron_lrl.models.hf_config import Architecture

EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT_LAYER = "output_layer.weight"
HF_EMBEDDING = "model.embed_tokens.weight"
HF_HEAD = "lm_head.weight"

# Buffers that older exports stored and that are recomputed from config.json.
_RECOMPUTED = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")

# Row kinds: which op, and the shapes of the Hugging Face tensors.
_ROW_NORM, _ROW_HEAD_NORM, _ROW_QKV, _ROW_QKV_BIAS = "norm", "head_norm", "qkv", "qkv_bias"
_ROW_ATTENTION_OUT, _ROW_OUT_BIAS, _ROW_GATE_UP, _ROW_DOWN = "attention_out", "out_bias", "gate_up", "down"
_ROW_GATE = "lastkv_gate"

_QKV = tuple(f"self_attn.{x}_proj.weight" for x in "qkv")
_QKV_BIAS = tuple(f"self_attn.{x}_proj.bias" for x in "qkv")
_Row = tuple[str, str, str, tuple[str, ...]]  # local name, Transformer Engine name, kind, Hugging Face names

_BLOCK: tuple[_Row, ...] = (
    (
        "input_layernorm.weight",
        "self_attention.linear_qkv.layer_norm_weight",
        _ROW_NORM,
        ("input_layernorm.weight",),
    ),
    ("self_attention.linear_qkv.weight", "self_attention.linear_qkv.weight", _ROW_QKV, _QKV),
    (
        "self_attention.linear_proj.weight",
        "self_attention.linear_proj.weight",
        _ROW_ATTENTION_OUT,
        ("self_attn.o_proj.weight",),
    ),
    (
        "pre_mlp_layernorm.weight",
        "mlp.linear_fc1.layer_norm_weight",
        _ROW_NORM,
        ("post_attention_layernorm.weight",),
    ),
    (
        "mlp.linear_fc1.weight",
        "mlp.linear_fc1.weight",
        _ROW_GATE_UP,
        ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    ),
    ("mlp.linear_fc2.weight", "mlp.linear_fc2.weight", _ROW_DOWN, ("mlp.down_proj.weight",)),
)
_QKV_BIAS_ROW: _Row = (
    "self_attention.linear_qkv.bias",
    "self_attention.linear_qkv.bias",
    _ROW_QKV_BIAS,
    _QKV_BIAS,
)
_OUT_BIAS_ROW: _Row = (
    "self_attention.linear_proj.bias",
    "self_attention.linear_proj.bias",
    _ROW_OUT_BIAS,
    ("self_attn.o_proj.bias",),
)
_HEAD_NORM_ROWS: tuple[_Row, ...] = tuple(
    (
        f"self_attention.{x}_layernorm.weight",
        f"self_attention.{x}_layernorm.weight",
        _ROW_HEAD_NORM,
        (f"self_attn.{x}_norm.weight",),
    )
    for x in "qk"
)

_GATE_ROW: _Row = (
    "self_attention.core_attention.lastkv_gate",
    "self_attention.core_attention.lastkv_gate",
    _ROW_GATE,
    ("self_attn.lastkv_gate",),
)

# family -> rows of one layer; rows of biases and of the LastKV gate apply where the architecture has them.
TABLES: dict[str, tuple[_Row, ...]] = {
    "llama": (*_BLOCK, _QKV_BIAS_ROW, _OUT_BIAS_ROW, _GATE_ROW),
    "qwen2": (*_BLOCK, _QKV_BIAS_ROW, _GATE_ROW),
    "qwen3": (*_BLOCK, _QKV_BIAS_ROW, _OUT_BIAS_ROW, *_HEAD_NORM_ROWS, _GATE_ROW),
}
_GATE_NAME = re.compile(r"(^|\.)lastkv_gate$")


@dataclass(frozen=True)
class Entry:
    """One Megatron parameter and the Hugging Face tensors it is made of.

    Attributes:
        name: parameter of the whole model (global layer index), local spec.
        te_name: the same under the Transformer Engine spec.
        layer: 0-based global layer, None outside the layers.
        hf_names, hf_shapes: the sources in the op's order.
        op: the conversion.
    """

    name: str
    te_name: str
    layer: int | None
    hf_names: tuple[str, ...]
    hf_shapes: tuple[torch.Size, ...]
    op: Op

    @property
    def width(self) -> torch.Size:
        """Shape of a source without the op's axis."""
        shape = self.hf_shapes[0]
        return torch.Size((*shape[: self.op.axis], *shape[self.op.axis + 1 :]))


def conversion_table(arch: Architecture) -> tuple[Entry, ...]:
    """All parameters of the model, embedding first, output layer last; a tied output layer has no entry."""
    entries = [
        Entry(EMBEDDING, EMBEDDING, None, (HF_EMBEDDING,), *_vocabulary(arch)),
    ]
    for layer in range(arch.num_layers):
        for name, te_name, kind, hf_names in TABLES[arch.family]:
            if (
                (kind == _ROW_QKV_BIAS and not arch.qkv_bias)
                or (kind == _ROW_OUT_BIAS and not arch.attention_output_bias)
                or (kind == _ROW_GATE and arch.lastkv is None)
            ):
                continue
            shapes, op = _row(arch, kind)
            prefix = f"decoder.layers.{layer}."
            full = tuple(f"model.layers.{layer}.{hf_name}" for hf_name in hf_names)
            entries.append(Entry(prefix + name, prefix + te_name, layer, full, shapes, op))
    final = "decoder.final_layernorm.weight"
    entries.append(Entry(final, final, None, ("model.norm.weight",), *_row(arch, _ROW_NORM)))
    if not arch.tied:
        entries.append(Entry(OUTPUT_LAYER, OUTPUT_LAYER, None, (HF_HEAD,), *_vocabulary(arch)))
    return tuple(entries)


def check_names(entries: Iterable[Entry], found: Iterable[str], arch: Architecture, source: str) -> None:
    """Every tensor must be mapped and every mapped tensor present.

    A tied model may store its head too. Raises UserError naming `source` and the first tensors at fault.
    """
    present = set(found)
    expected = {name for entry in entries for name in entry.hf_names}
    if missing := sorted(expected - present):
        raise UserError(f"{source}: {len(missing)} tensor(s) missing, first: {', '.join(missing[:3])}")
    extra = present - expected - ({HF_HEAD} if arch.tied else set())
    if left_over := sorted(name for name in extra if not is_recomputed(name)):
        raise UserError(
            f"{source}: {len(left_over)} tensor(s) left over that a {arch.family} model of this config.json "
            f"does not have, first: {', '.join(left_over[:3])}"
        )


def is_recomputed(name: str) -> bool:
    """True for buffers that carry no weights and are recomputed from config.json."""
    return _RECOMPUTED.fullmatch(name) is not None


def is_gate(name: str) -> bool:
    """True for a LastKV gate, by its name in Hugging Face files, in the model or in a checkpoint."""
    return _GATE_NAME.search(name) is not None


def _vocabulary(arch: Architecture) -> tuple[tuple[torch.Size, ...], Op]:
    return (torch.Size((arch.vocab_size, arch.hidden_size)),), PadVocabulary(arch.vocab_size)


def _row(arch: Architecture, kind: str) -> tuple[tuple[torch.Size, ...], Op]:
    """Shapes of a row's Hugging Face tensors, and its op."""
    hidden, ffn = arch.hidden_size, arch.ffn_hidden_size
    q_rows, kv_rows = arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
    qkv = InterleaveQkv(arch.num_heads, arch.num_kv_heads, arch.head_dim)
    shapes: tuple[tuple[int, ...], ...]
    op: Op
    match kind:
        case "norm" | "out_bias":
            shapes, op = ((hidden,),), Copy(hidden)
        case "head_norm":
            shapes, op = ((arch.head_dim,),), Copy(arch.head_dim)
        case "qkv":
            shapes, op = ((q_rows, hidden), (kv_rows, hidden), (kv_rows, hidden)), qkv
        case "qkv_bias":
            shapes, op = ((q_rows,), (kv_rows,), (kv_rows,)), qkv
        case "attention_out":
            shapes, op = ((hidden, q_rows),), Split(q_rows, along=1)
        case "gate_up":
            shapes, op = ((ffn, hidden), (ffn, hidden)), FuseGateUp(ffn)
        case "down":
            shapes, op = ((hidden, ffn),), Split(ffn, along=1)
        case "lastkv_gate":
            shapes, op = ((arch.num_kv_heads,),), Split(arch.num_kv_heads)
        case _:
            raise KeyError(kind)
    return tuple(torch.Size(shape) for shape in shapes), op
