"""The rows of the conversion tables that belong to no layer kind, and what families call differently.

A layer takes the rows of its token mixer (`layers.kinds`) and of its MLP; rows of optional tensors (biases, gates,
norms) apply where the architecture has them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from megatron_lrl.layers.architecture import Architecture
from megatron_lrl.layers.conversion import Copy, FuseGateUp, Made, Row, Split, norm
from megatron_lrl.layers.gdn import rows as gdn
from megatron_lrl.layers.gdn.sizes import GDN
from megatron_lrl.layers.kinds import KINDS
from megatron_lrl.layers.moe import rows as moe


def _gate_up(arch: Architecture) -> Made | None:
    width, hidden = arch.ffn_hidden_size, arch.hidden_size
    made = Made(((width, hidden), (width, hidden)), FuseGateUp(width))
    return None if arch.fused_gate_up else made


def _fused_gate_up(arch: Architecture) -> Made | None:
    width = arch.ffn_hidden_size
    made = Made(((2 * width, arch.hidden_size),), FuseGateUp(width, fused=True))
    return made if arch.fused_gate_up else None


def _down(arch: Architecture) -> Made:
    width = arch.ffn_hidden_size
    return Made(((arch.hidden_size, width),), Split(width, along=1))


def _sandwich(arch: Architecture) -> Made | None:
    return Made(((arch.hidden_size,),), Copy(arch.hidden_size)) if arch.sandwich_norms else None


_M = "mlp."

DENSE = (
    norm("pre_mlp_layernorm.weight", "post_attention_layernorm.weight", f"{_M}linear_fc1.layer_norm_weight"),
    Row(f"{_M}linear_fc1.weight", ("mlp.gate_proj.weight", "mlp.up_proj.weight"), _gate_up),
    Row(f"{_M}linear_fc1.weight", ("mlp.gate_up_proj.weight",), _fused_gate_up),
    Row(f"{_M}linear_fc2.weight", ("mlp.down_proj.weight",), _down),
    *(
        Row(f"{name}.weight", (f"{name}.weight",), _sandwich)
        for name in ("post_self_attn_layernorm", "post_mlp_layernorm")
    ),
)


@dataclass(frozen=True)
class Family:
    """What a family stores in its own way: rows of some layer kinds, and the name of its shared expert."""

    rows: Mapping[str, tuple[Row, ...]] = field(default_factory=dict)
    shared_expert: str = "shared_expert"


_FAMILIES = {
    "qwen3_next": Family({GDN: gdn.GROUPED}),
    **dict.fromkeys(("glm4_moe", "glm4_moe_lite", "deepseek_v3"), Family(shared_expert="shared_experts")),
}


def rows_of(arch: Architecture, layer: int) -> tuple[Row, ...]:
    """Rows of a layer (0-based), those of tensors that the model lacks included."""
    family, kind = _FAMILIES.get(arch.family, Family()), arch.mixers[layer]
    mixer = family.rows.get(kind) or KINDS[kind].rows
    return (*mixer, *(moe.rows(family.shared_expert) if arch.moe_layers[layer] else DENSE))
