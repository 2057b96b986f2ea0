"""Conversion rows of a mixture of experts.

Symbols: E routed experts, I their feed-forward size, H hidden size.
"""

from __future__ import annotations

from megatron_lrl.layers.architecture import Architecture, MoESpec
from megatron_lrl.layers.conversion import Copy, FuseGateUp, Made, Row, Split, norm


def _spec(arch: Architecture) -> MoESpec:
    if arch.moe is None:
        raise ValueError("a mixture of experts without its sizes")
    return arch.moe


def _gate_up(arch: Architecture) -> Made:
    width, hidden = _spec(arch).ffn_hidden_size, arch.hidden_size
    return Made(((width, hidden), (width, hidden)), FuseGateUp(width))


def _packed_gate_up(arch: Architecture) -> Made:
    width = _spec(arch).ffn_hidden_size
    return Made(((2 * width, arch.hidden_size),), FuseGateUp(width, fused=True))


def _down(arch: Architecture) -> Made:
    width = _spec(arch).ffn_hidden_size
    return Made(((arch.hidden_size, width),), Split(width, along=1))


def _router(arch: Architecture) -> Made:
    experts = _spec(arch).num_experts
    return Made(((experts, arch.hidden_size),), Copy(experts))


def _router_bias(arch: Architecture) -> Made | None:
    spec = _spec(arch)
    return Made(((spec.num_experts,),), Copy(spec.num_experts)) if spec.bias else None


def _shared_gate_up(arch: Architecture) -> Made | None:
    width, hidden = _spec(arch).shared_ffn_hidden_size, arch.hidden_size
    return Made(((width, hidden), (width, hidden)), FuseGateUp(width)) if width else None


def _shared_down(arch: Architecture) -> Made | None:
    width = _spec(arch).shared_ffn_hidden_size
    return Made(((arch.hidden_size, width),), Split(width, along=1)) if width else None


def _shared_gate(arch: Architecture) -> Made | None:
    return Made(((1, arch.hidden_size),), Copy(1)) if _spec(arch).shared_gate else None


_M = "mlp."
_EXPERT, _TE_EXPERT = f"{_M}experts.local_experts.{{e}}.", f"{_M}experts."


def rows(shared: str) -> tuple[Row, ...]:
    """Rows of a layer whose shared expert is called `shared`."""
    return (
        # The router reads it too: no spec fuses it.
        norm("pre_mlp_layernorm.weight", "post_attention_layernorm.weight"),
        Row(f"{_M}router.weight", ("mlp.gate.weight",), _router, wide=lambda a: _spec(a).wide_router),
        Row(
            f"{_M}router.expert_bias",
            ("mlp.gate.e_score_correction_bias",),
            _router_bias,
            wide=lambda _: True,
            buffer=True,
        ),
        Row(
            f"{_EXPERT}linear_fc1.weight",
            ("mlp.experts.{e}.gate_proj.weight", "mlp.experts.{e}.up_proj.weight"),
            _gate_up,
            te_name=f"{_TE_EXPERT}linear_fc1.weight{{e}}",
            packed="mlp.experts.gate_up_proj",
            made_packed=_packed_gate_up,
        ),
        Row(
            f"{_EXPERT}linear_fc2.weight",
            ("mlp.experts.{e}.down_proj.weight",),
            _down,
            te_name=f"{_TE_EXPERT}linear_fc2.weight{{e}}",
            packed="mlp.experts.down_proj",
            made_packed=_down,
        ),
        Row(
            f"{_M}shared_experts.linear_fc1.weight",
            (f"mlp.{shared}.gate_proj.weight", f"mlp.{shared}.up_proj.weight"),
            _shared_gate_up,
        ),
        Row(f"{_M}shared_experts.linear_fc2.weight", (f"mlp.{shared}.down_proj.weight",), _shared_down),
        Row(f"{_M}shared_experts.gate_weight", ("mlp.shared_expert_gate.weight",), _shared_gate),
    )
