"""The rows of the conversion tables: which Hugging Face tensors make which parameter, one table per family.

A family's table has parts: rows of attention layers, of Gated DeltaNet layers, of dense and of mixture-of-experts
MLPs. A layer takes the parts of its kind; rows of optional tensors (biases, gates, norms) apply where the
architecture has them. `{e}` in a name stands for the number of a routed expert.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import NamedTuple


class Kind(Enum):
    """What a row is: `table.py` gives each kind its op, its shapes and the condition under which it applies."""

    NORM = auto()
    SANDWICH_NORM = auto()
    HEAD_NORM = auto()
    QKV = auto()
    QKV_BIAS = auto()
    ATTENTION_OUT = auto()
    OUT_BIAS = auto()
    LASTKV_GATE = auto()
    GATE_UP = auto()
    FUSED_GATE_UP = auto()
    DOWN = auto()
    GDN_FLAT = auto()
    GDN_GROUPED = auto()
    GDN_CONVOLUTION = auto()
    GDN_HEADS = auto()
    GDN_NORM = auto()
    GDN_OUT = auto()
    ROUTER = auto()
    ROUTER_BIAS = auto()
    EXPERT_GATE_UP = auto()
    EXPERT_DOWN = auto()
    SHARED_GATE_UP = auto()
    SHARED_DOWN = auto()
    SHARED_GATE = auto()


class Row(NamedTuple):
    """One parameter of a layer: names of the local and of the Transformer Engine spec, and its sources."""

    name: str
    kind: Kind
    hf_names: tuple[str, ...]
    te_name: str = ""  # where it differs
    packed: str = ""  # the one source that holds all experts, in files that store them packed


class Table(NamedTuple):
    """One family's rows, by the kind of a layer's mixer and MLP."""

    attention: tuple[Row, ...]
    dense: tuple[Row, ...]
    moe: tuple[Row, ...] = ()
    gdn: tuple[Row, ...] = ()


_A, _M = "self_attention.", "mlp."

_GATE = Row(f"{_A}core_attention.lastkv_gate", Kind.LASTKV_GATE, ("self_attn.lastkv_gate",))
_QKV_BIAS = Row(f"{_A}linear_qkv.bias", Kind.QKV_BIAS, tuple(f"self_attn.{x}_proj.bias" for x in "qkv"))
_OUT_BIAS = Row(f"{_A}linear_proj.bias", Kind.OUT_BIAS, ("self_attn.o_proj.bias",))
_HEAD_NORMS = tuple(
    Row(f"{_A}{x}_layernorm.weight", Kind.HEAD_NORM, (f"self_attn.{x}_norm.weight",)) for x in "qk"
)
_ATTENTION = (
    Row(
        "input_layernorm.weight",
        Kind.NORM,
        ("input_layernorm.weight",),
        te_name=f"{_A}linear_qkv.layer_norm_weight",
    ),
    Row(f"{_A}linear_qkv.weight", Kind.QKV, tuple(f"self_attn.{x}_proj.weight" for x in "qkv")),
    Row(f"{_A}linear_proj.weight", Kind.ATTENTION_OUT, ("self_attn.o_proj.weight",)),
    _GATE,
)

_PRE_MLP_NORM = Row(
    "pre_mlp_layernorm.weight",
    Kind.NORM,
    ("post_attention_layernorm.weight",),
    te_name=f"{_M}linear_fc1.layer_norm_weight",
)
_DOWN = Row(f"{_M}linear_fc2.weight", Kind.DOWN, ("mlp.down_proj.weight",))
_DENSE = (
    _PRE_MLP_NORM,
    Row(f"{_M}linear_fc1.weight", Kind.GATE_UP, ("mlp.gate_proj.weight", "mlp.up_proj.weight")),
    _DOWN,
)
_DENSE_FUSED = (
    _PRE_MLP_NORM,
    Row(f"{_M}linear_fc1.weight", Kind.FUSED_GATE_UP, ("mlp.gate_up_proj.weight",)),
    _DOWN,
)
_SANDWICH = tuple(
    Row(f"{name}.weight", Kind.SANDWICH_NORM, (f"{name}.weight",))
    for name in ("post_self_attn_layernorm", "post_mlp_layernorm")
)

_EXPERT, _TE_EXPERT = f"{_M}experts.local_experts.{{e}}.", f"{_M}experts."
_EXPERTS = (
    Row(
        f"{_EXPERT}linear_fc1.weight",
        Kind.EXPERT_GATE_UP,
        ("mlp.experts.{e}.gate_proj.weight", "mlp.experts.{e}.up_proj.weight"),
        te_name=f"{_TE_EXPERT}linear_fc1.weight{{e}}",
        packed="mlp.experts.gate_up_proj",
    ),
    Row(
        f"{_EXPERT}linear_fc2.weight",
        Kind.EXPERT_DOWN,
        ("mlp.experts.{e}.down_proj.weight",),
        te_name=f"{_TE_EXPERT}linear_fc2.weight{{e}}",
        packed="mlp.experts.down_proj",
    ),
)


def _moe(shared: str) -> tuple[Row, ...]:
    """Rows of a mixture of experts whose shared expert is called `shared`."""
    return (
        _PRE_MLP_NORM._replace(te_name=""),  # the router reads it too: no spec fuses it
        Row(f"{_M}router.weight", Kind.ROUTER, ("mlp.gate.weight",)),
        Row(f"{_M}router.expert_bias", Kind.ROUTER_BIAS, ("mlp.gate.e_score_correction_bias",)),
        *_EXPERTS,
        Row(
            f"{_M}shared_experts.linear_fc1.weight",
            Kind.SHARED_GATE_UP,
            (f"mlp.{shared}.gate_proj.weight", f"mlp.{shared}.up_proj.weight"),
        ),
        Row(f"{_M}shared_experts.linear_fc2.weight", Kind.SHARED_DOWN, (f"mlp.{shared}.down_proj.weight",)),
        Row(f"{_M}shared_experts.gate_weight", Kind.SHARED_GATE, ("mlp.shared_expert_gate.weight",)),
    )


def _gdn(kind: Kind, inputs: tuple[str, ...]) -> tuple[Row, ...]:
    """Rows of a Gated DeltaNet layer with these input projections."""
    return (
        Row(
            "input_layernorm.weight",
            Kind.NORM,
            ("input_layernorm.weight",),
            te_name=f"{_A}in_proj.layer_norm_weight",
        ),
        Row(f"{_A}in_proj.weight", kind, tuple(f"linear_attn.in_proj_{x}.weight" for x in inputs)),
        Row(f"{_A}conv1d.weight", Kind.GDN_CONVOLUTION, ("linear_attn.conv1d.weight",)),
        Row(f"{_A}A_log", Kind.GDN_HEADS, ("linear_attn.A_log",)),
        Row(f"{_A}dt_bias", Kind.GDN_HEADS, ("linear_attn.dt_bias",)),
        Row(f"{_A}out_norm.weight", Kind.GDN_NORM, ("linear_attn.norm.weight",)),
        Row(f"{_A}out_proj.weight", Kind.GDN_OUT, ("linear_attn.out_proj.weight",)),
    )


_GDN_GROUPED = _gdn(Kind.GDN_GROUPED, ("qkvz", "ba"))
_GDN_FLAT = _gdn(Kind.GDN_FLAT, ("qkv", "z", "b", "a"))
_BIASES = (_QKV_BIAS, _OUT_BIAS)

TABLES: dict[str, Table] = {
    "llama": Table((*_ATTENTION, *_BIASES), _DENSE),
    "qwen2": Table((*_ATTENTION, _QKV_BIAS), _DENSE),
    "qwen3": Table((*_ATTENTION, *_BIASES, *_HEAD_NORMS), _DENSE),
    "qwen3_moe": Table((*_ATTENTION, *_BIASES, *_HEAD_NORMS), _DENSE, _moe("shared_expert")),
    "qwen3_next": Table((*_ATTENTION, *_BIASES, *_HEAD_NORMS), _DENSE, _moe("shared_expert"), _GDN_GROUPED),
    "qwen3_5": Table((*_ATTENTION, *_BIASES, *_HEAD_NORMS), _DENSE, (), _GDN_FLAT),
    "qwen3_5_moe": Table((*_ATTENTION, *_BIASES, *_HEAD_NORMS), _DENSE, _moe("shared_expert"), _GDN_FLAT),
    "glm4": Table((*_ATTENTION, _QKV_BIAS), (*_DENSE_FUSED, *_SANDWICH)),
    "glm4_moe": Table((*_ATTENTION, _QKV_BIAS, *_HEAD_NORMS), _DENSE, _moe("shared_experts")),
}
