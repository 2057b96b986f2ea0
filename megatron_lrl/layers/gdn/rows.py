"""Conversion rows of Gated DeltaNet layers, and the ops that keep a rank's heads together.

Symbols: n key heads of d dims, m value heads of e dims, w = m / n, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megatron_lrl.layers.architecture import Architecture
from megatron_lrl.layers.conversion import Copy, Made, Op, Piece, Row, Split, divide, norm
from megatron_lrl.layers.gdn.sizes import GDNSpec, sizes_of


@dataclass(frozen=True)
class GdnHeads:
    """Heads of a Gated DeltaNet layer: n key heads of d dims, m = n·w value heads of e dims."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int

    @property
    def ratio(self) -> int:
        """w, value heads per key head."""
        return divide(self.value_heads, self.key_heads)

    def of_rank(self, rank: int, size: int) -> range:
        """The key heads of a tp rank; their value heads go with them."""
        part = divide(self.key_heads, size)
        return range(rank * part, (rank + 1) * part)


@dataclass(frozen=True)
class GdnInputFlat(Op):
    """qkv [2nd + me, H], z [me, H], b [m, H], a [m, H] -> per rank [q; k; v; z; b; a] of its heads."""

    heads: GdnHeads

    def pieces(self, rank: int, size: int) -> tuple[Piece, ...]:
        h, mine = self.heads, self.heads.of_rank(rank, size)
        values = (mine.start * h.ratio, mine.stop * h.ratio)
        z = (values[0] * h.value_dim, values[1] * h.value_dim)
        return (*_qkv_pieces(h, mine), Piece(1, *z), Piece(2, *values), Piece(3, *values))


@dataclass(frozen=True)
class GdnInputGrouped(Op):
    """qkvz [n·(2d + 2we), H], ba [n·2w, H], both by key head -> per rank [q; k; v; z; b; a] of its heads.

    A key head's rows are [q (d); k (d); v (w·e); z (w·e)] and [b (w); a (w)].
    """

    heads: GdnHeads

    def pieces(self, rank: int, size: int) -> tuple[Piece, ...]:
        h = self.heads
        wide, narrow = h.ratio * h.value_dim, h.ratio
        parts = [(0, 0, h.key_dim), (0, h.key_dim, h.key_dim), (0, 2 * h.key_dim, wide)]
        parts += [(0, 2 * h.key_dim + wide, wide), (1, 0, narrow), (1, narrow, narrow)]
        rows = (2 * h.key_dim + 2 * wide, 2 * narrow)  # of one key head, in each source
        return tuple(
            Piece(source, head * rows[source] + start, head * rows[source] + start + length)
            for source, start, length in parts
            for head in h.of_rank(rank, size)
        )


@dataclass(frozen=True)
class GdnConvolution(Op):
    """Channels [2nd + me, 1, kernel] = [q; k; v] -> per rank [q; k; v] of its heads."""

    heads: GdnHeads

    def pieces(self, rank: int, size: int) -> tuple[Piece, ...]:
        return _qkv_pieces(self.heads, self.heads.of_rank(rank, size))


def _qkv_pieces(h: GdnHeads, mine: range) -> tuple[Piece, ...]:
    """Rows of some key heads and of their value heads in a tensor [q; k; v]."""
    keys, values = h.key_heads * h.key_dim, h.ratio * h.value_dim
    q = (mine.start * h.key_dim, mine.stop * h.key_dim)
    v = (2 * keys + mine.start * values, 2 * keys + mine.stop * values)
    return (Piece(0, *q), Piece(0, keys + q[0], keys + q[1]), Piece(0, *v))


def _flat(arch: Architecture) -> Made:
    spec, hidden = sizes_of(arch), arch.hidden_size
    rows = (spec.conv_channels, spec.values, spec.value_heads, spec.value_heads)
    return Made(tuple((n, hidden) for n in rows), GdnInputFlat(_heads(spec)))


def _grouped(arch: Architecture) -> Made:
    spec, hidden = sizes_of(arch), arch.hidden_size
    rows = (spec.conv_channels + spec.values, 2 * spec.value_heads)
    return Made(tuple((n, hidden) for n in rows), GdnInputGrouped(_heads(spec)))


def _convolution(arch: Architecture) -> Made:
    spec = sizes_of(arch)
    return Made(((spec.conv_channels, 1, spec.conv_kernel),), GdnConvolution(_heads(spec)))


def _per_head(arch: Architecture) -> Made:
    heads = sizes_of(arch).value_heads
    return Made(((heads,),), Split(heads))


def _out_norm(arch: Architecture) -> Made:
    width = sizes_of(arch).value_dim
    return Made(((width,),), Copy(width))


def _out(arch: Architecture) -> Made:
    values = sizes_of(arch).values
    return Made(((arch.hidden_size, values),), Split(values, along=1))


def _heads(spec: GDNSpec) -> GdnHeads:
    return GdnHeads(spec.key_heads, spec.value_heads, spec.key_dim, spec.value_dim)


_A = "self_attention."


def _rows(made: Callable[[Architecture], Made], inputs: tuple[str, ...]) -> tuple[Row, ...]:
    """Rows of a layer with these input projections."""
    return (
        norm("input_layernorm.weight", "input_layernorm.weight", f"{_A}in_proj.layer_norm_weight"),
        Row(f"{_A}in_proj.weight", tuple(f"linear_attn.in_proj_{x}.weight" for x in inputs), made),
        Row(f"{_A}conv1d.weight", ("linear_attn.conv1d.weight",), _convolution),
        Row(f"{_A}A_log", ("linear_attn.A_log",), _per_head, wide=lambda _: True),
        Row(f"{_A}dt_bias", ("linear_attn.dt_bias",), _per_head, wide=lambda _: True),
        Row(f"{_A}out_norm.weight", ("linear_attn.norm.weight",), _out_norm),
        Row(f"{_A}out_proj.weight", ("linear_attn.out_proj.weight",), _out),
    )


GROUPED = _rows(_grouped, ("qkvz", "ba"))
"""Projections stored by key head."""
FLAT = _rows(_flat, ("qkv", "z", "b", "a"))
"""Projections stored one behind the other."""
