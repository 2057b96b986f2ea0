"""Conversion rows of latent attention. Heads are cut over tp, latents and what makes them are whole on every rank."""

from __future__ import annotations

from megatron_lrl.layers.architecture import Architecture
from megatron_lrl.layers.conversion import Copy, Made, Row, Split, norm
from megatron_lrl.layers.mla.sizes import sizes_of


def _q_down(arch: Architecture) -> Made | None:
    rank = sizes_of(arch).query_rank
    return Made(((rank, arch.hidden_size),), Copy(rank)) if rank else None


def _q_norm(arch: Architecture) -> Made | None:
    rank = sizes_of(arch).query_rank
    return Made(((rank,),), Copy(rank)) if rank else None


def _q_up(arch: Architecture) -> Made | None:
    spec = sizes_of(arch)
    rows = arch.num_heads * spec.query
    return Made(((rows, spec.query_rank),), Split(rows)) if spec.query_rank else None


def _q(arch: Architecture) -> Made | None:
    spec = sizes_of(arch)
    rows = arch.num_heads * spec.query
    return None if spec.query_rank else Made(((rows, arch.hidden_size),), Split(rows))


def _kv_down(arch: Architecture) -> Made:
    row = sizes_of(arch).row
    return Made(((row, arch.hidden_size),), Copy(row))


def _kv_norm(arch: Architecture) -> Made:
    latent = sizes_of(arch).latent
    return Made(((latent,),), Copy(latent))


def _kv_up(arch: Architecture) -> Made:
    spec = sizes_of(arch)
    rows = arch.num_heads * spec.expanded
    return Made(((rows, spec.latent),), Split(rows))


def _out(arch: Architecture) -> Made:
    columns = arch.num_heads * sizes_of(arch).value
    return Made(((arch.hidden_size, columns),), Split(columns, along=1))


_A, _HF = "self_attention.", "self_attn."

ROWS = (
    norm("input_layernorm.weight", "input_layernorm.weight"),
    Row(f"{_A}linear_q_down.weight", (f"{_HF}q_a_proj.weight",), _q_down),
    Row(f"{_A}q_norm.weight", (f"{_HF}q_a_layernorm.weight",), _q_norm),
    Row(f"{_A}linear_q_up.weight", (f"{_HF}q_b_proj.weight",), _q_up),
    Row(f"{_A}linear_q_up.weight", (f"{_HF}q_proj.weight",), _q),
    Row(f"{_A}linear_kv_down.weight", (f"{_HF}kv_a_proj_with_mqa.weight",), _kv_down),
    Row(f"{_A}kv_norm.weight", (f"{_HF}kv_a_layernorm.weight",), _kv_norm),
    Row(f"{_A}linear_kv_up.weight", (f"{_HF}kv_b_proj.weight",), _kv_up),
    Row(f"{_A}linear_proj.weight", (f"{_HF}o_proj.weight",), _out),
)

__all__ = ["ROWS"]
