"""Conversion rows of softmax attention, and the op of its fused projection.

Symbols: N query heads, M key-value heads, r = N / M, D head dim, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_lrl.layers.architecture import Architecture
from megatron_lrl.layers.conversion import Copy, Made, Op, Piece, Row, Split, divide, norm


@dataclass(frozen=True)
class InterleaveQkv(Op):
    """q [N·D, …], k [M·D, …], v [M·D, …] -> [q × r, k, v] per group; a rank holds M / size groups.

    `gated`: q is [N·2D, …], for each head its query rows and then its output gate's; a group becomes
    [q × r, gate × r, k, v].
    """

    heads: int
    groups: int
    head_dim: int
    gated: bool = False

    def pieces(self, rank: int, size: int) -> tuple[Piece, ...]:
        part, ratio = divide(self.groups, size), divide(self.heads, self.groups)
        pieces = []
        for group in range(rank * part, (rank + 1) * part):
            heads = range(group * ratio, (group + 1) * ratio)
            if self.gated:
                starts = [2 * head * self.head_dim for head in heads]
                starts += [start + self.head_dim for start in starts]
                pieces += [Piece(0, start, start + self.head_dim) for start in starts]
            else:
                pieces.append(Piece(0, heads.start * self.head_dim, heads.stop * self.head_dim))
            rows = (group * self.head_dim, (group + 1) * self.head_dim)
            pieces += [Piece(1, *rows), Piece(2, *rows)]
        return tuple(pieces)


def _qkv(arch: Architecture) -> Made:
    q_rows, kv_rows, hidden = _q_rows(arch), arch.num_kv_heads * arch.head_dim, arch.hidden_size
    return Made(((q_rows, hidden), (kv_rows, hidden), (kv_rows, hidden)), _interleave(arch))


def _qkv_bias(arch: Architecture) -> Made | None:
    kv_rows = arch.num_kv_heads * arch.head_dim
    return Made(((_q_rows(arch),), (kv_rows,), (kv_rows,)), _interleave(arch)) if arch.qkv_bias else None


def _out(arch: Architecture) -> Made:
    rows = arch.num_heads * arch.head_dim
    return Made(((arch.hidden_size, rows),), Split(rows, along=1))


def _out_bias(arch: Architecture) -> Made | None:
    return Made(((arch.hidden_size,),), Copy(arch.hidden_size)) if arch.attention_output_bias else None


def _head_norm(arch: Architecture) -> Made | None:
    return Made(((arch.head_dim,),), Copy(arch.head_dim)) if arch.qk_norm else None


def _gate(arch: Architecture) -> Made | None:
    """LastKV's."""
    return None if arch.lastkv is None else Made(((arch.num_kv_heads,),), Split(arch.num_kv_heads))


def _q_rows(arch: Architecture) -> int:
    return arch.num_heads * arch.head_dim * (2 if arch.output_gate else 1)


def _interleave(arch: Architecture) -> InterleaveQkv:
    return InterleaveQkv(arch.num_heads, arch.num_kv_heads, arch.head_dim, arch.output_gate)


_A = "self_attention."
_QKV = tuple(f"self_attn.{x}_proj" for x in "qkv")

ROWS = (
    norm("input_layernorm.weight", "input_layernorm.weight", f"{_A}linear_qkv.layer_norm_weight"),
    Row(f"{_A}linear_qkv.weight", tuple(f"{x}.weight" for x in _QKV), _qkv),
    Row(f"{_A}linear_proj.weight", ("self_attn.o_proj.weight",), _out),
    Row(f"{_A}core_attention.lastkv_gate", ("self_attn.lastkv_gate",), _gate),
    Row(f"{_A}linear_qkv.bias", tuple(f"{x}.bias" for x in _QKV), _qkv_bias),
    Row(f"{_A}linear_proj.bias", ("self_attn.o_proj.bias",), _out_bias),
    *(Row(f"{_A}{x}_layernorm.weight", (f"self_attn.{x}_norm.weight",), _head_norm) for x in "qk"),
)
