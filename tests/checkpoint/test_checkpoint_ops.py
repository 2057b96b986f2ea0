"""Claim: every conversion op gives the Megatron shard of any tp rank, and its derived inverse gives the
sources back.

Why the tests show it: shards are compared with an independent statement of Megatron-Core's layouts
(reshape, cat and chunk over the full tensors), and `from_shards` of all shards is compared bit by bit with
the sources, over random sizes and every tp. Not shown: that Megatron-Core's modules read the shards as we
lay them out (the score tests show that).
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lrl.layers import conversion as ops
from megatron_lrl.layers.gdn import rows as gdn
from megatron_lrl.layers.softmax.rows import InterleaveQkv

sizes = st.integers(1, 4)


def _numbered(*shape: int) -> torch.Tensor:
    """A tensor whose elements are all different, so that a misplaced one shows."""
    return torch.arange(1, 1 + torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


def _check(op: ops.Op, sources: list[torch.Tensor], tp: int, expected: Callable[[int], torch.Tensor]) -> None:
    sources = [source + 10_000.0 * i for i, source in enumerate(sources)]
    width = torch.Size(n for i, n in enumerate(sources[0].shape) if i != op.axis)
    shards = [op.to_shard(sources, rank, tp, width) for rank in range(tp)]
    for rank, shard in enumerate(shards):
        torch.testing.assert_close(shard, expected(rank), rtol=0, atol=0)
        assert shard.shape == op.shard_shape(rank, tp, width)
    back = op.from_shards(shards, [source.shape for source in sources])
    for found, source in zip(back, sources, strict=True):
        assert torch.equal(found, source)


@settings(max_examples=40, deadline=None)
@given(groups_per_rank=sizes, tp=sizes, ratio=sizes, head_dim=st.integers(1, 3), bias=st.booleans())
def test_qkv_is_interleaved_per_group(
    groups_per_rank: int, tp: int, ratio: int, head_dim: int, bias: bool
) -> None:
    groups = groups_per_rank * tp
    tail = () if bias else (3,)
    q, k, v = (_numbered(n * head_dim, *tail) for n in (groups * ratio, groups, groups))

    def expected(rank: int) -> torch.Tensor:
        parts = [(t + 10_000.0 * i).reshape(groups, -1, *tail) for i, t in enumerate((q, k, v))]
        return torch.cat(parts, dim=1).reshape(-1, *tail).chunk(tp)[rank]

    _check(InterleaveQkv(groups * ratio, groups, head_dim), [q, k, v], tp, expected)


@settings(max_examples=40, deadline=None)
@given(groups_per_rank=sizes, tp=sizes, ratio=sizes, head_dim=st.integers(1, 3))
def test_gated_queries_come_apart_per_group(groups_per_rank: int, tp: int, ratio: int, head_dim: int) -> None:
    """The source alternates a head's queries and its gate; a group holds all its queries, then all its gates."""
    groups = groups_per_rank * tp
    q, k, v = (_numbered(n * head_dim, 3) for n in (2 * groups * ratio, groups, groups))

    def expected(rank: int) -> torch.Tensor:
        heads = q.view(groups, ratio, 2, head_dim, 3)
        kv = [(t + 10_000.0 * i).view(groups, head_dim, 3) for i, t in ((1, k), (2, v))]
        parts = [heads[:, :, 0].flatten(1, 2), heads[:, :, 1].flatten(1, 2), *kv]
        return torch.cat(parts, dim=1).flatten(0, 1).chunk(tp)[rank]

    _check(InterleaveQkv(groups * ratio, groups, head_dim, gated=True), [q, k, v], tp, expected)


gdn_sizes = {
    "keys_per_rank": st.integers(1, 2),
    "tp": st.sampled_from([1, 2, 4]),
    "ratio": st.integers(1, 3),
    "key_dim": st.integers(1, 3),
    "value_dim": st.integers(1, 3),
}


def _gdn(
    keys_per_rank: int, tp: int, ratio: int, key_dim: int, value_dim: int
) -> tuple[gdn.GdnHeads, int, int]:
    keys = keys_per_rank * tp
    return gdn.GdnHeads(keys, keys * ratio, key_dim, value_dim), keys * key_dim, keys * ratio * value_dim


def _per_rank(tensors: list[torch.Tensor], rank: int, tp: int) -> torch.Tensor:
    """Each tensor's part of a rank, one after the other."""
    return torch.cat([tensor.chunk(tp)[rank] for tensor in tensors])


@settings(max_examples=40, deadline=None)
@given(**gdn_sizes)
def test_flat_recurrent_inputs_are_cut_by_head(tp: int, **sizes: int) -> None:
    heads, keys, values = _gdn(tp=tp, **sizes)
    qkv, z = _numbered(2 * keys + values, 3), _numbered(values, 3)
    b, a = _numbered(heads.value_heads, 3), _numbered(heads.value_heads, 3)
    parts = [*qkv.split([keys, keys, values]), z + 10_000.0, b + 20_000.0, a + 30_000.0]
    _check(gdn.GdnInputFlat(heads), [qkv, z, b, a], tp, lambda rank: _per_rank(parts, rank, tp))


@settings(max_examples=40, deadline=None)
@given(**gdn_sizes)
def test_grouped_recurrent_inputs_are_cut_by_head(tp: int, **sizes: int) -> None:
    """The split is transformers' own (`fix_query_key_value_ordering`), on rows instead of features."""
    heads, keys, values = _gdn(tp=tp, **sizes)
    qkvz, ba = _numbered(2 * keys + 2 * values, 3), _numbered(2 * heads.value_heads, 3)
    wide = heads.ratio * heads.value_dim
    q, k, v, z = qkvz.view(heads.key_heads, -1, 3).split([heads.key_dim, heads.key_dim, wide, wide], dim=1)
    b, a = (ba + 10_000.0).view(heads.key_heads, -1, 3).split([heads.ratio, heads.ratio], dim=1)
    parts = [part.flatten(0, 1) for part in (q, k, v, z, b, a)]
    _check(gdn.GdnInputGrouped(heads), [qkvz, ba], tp, lambda rank: _per_rank(parts, rank, tp))


@settings(max_examples=30, deadline=None)
@given(**gdn_sizes)
def test_convolution_channels_are_cut_by_head(tp: int, **sizes: int) -> None:
    heads, keys, values = _gdn(tp=tp, **sizes)
    channels = _numbered(2 * keys + values, 1, 4)
    parts = list(channels.split([keys, keys, values]))
    _check(gdn.GdnConvolution(heads), [channels], tp, lambda rank: _per_rank(parts, rank, tp))


@settings(max_examples=30, deadline=None)
@given(part=sizes, tp=sizes)
def test_a_stored_pair_is_cut_like_two_tensors(part: int, tp: int) -> None:
    gate_up = _numbered(2 * part * tp, 3)
    gate, up = gate_up.chunk(2)
    _check(ops.FuseGateUp(part * tp, fused=True), [gate_up], tp, lambda rank: _per_rank([gate, up], rank, tp))


def test_sources_of_several_dtypes_meet_in_one_that_holds_both() -> None:
    gate, up = _numbered(4, 3).to(torch.bfloat16), _numbered(4, 3) + 1e-3
    shard = ops.FuseGateUp(4).to_shard([gate, up], 1, 2, torch.Size([3]))
    assert torch.equal(shard, torch.cat([gate[2:].float(), up[2:]]))


def test_only_a_whole_tensor_is_passed_on_without_a_copy() -> None:
    norm, weight = _numbered(4), _numbered(4, 2)
    assert ops.Copy(4).from_shards([norm], [norm.shape], copy=False)[0] is norm
    assert ops.Copy(4).from_shards([norm], [norm.shape])[0] is not norm
    halves = list(weight.chunk(2))
    assert torch.equal(ops.Split(4).from_shards(halves, [weight.shape], copy=False)[0], weight)
    padded = torch.cat([weight, torch.zeros(1, 2)])
    op = ops.PadVocabulary(4)
    assert torch.equal(op.from_shards([padded[:4]], [weight.shape], copy=False)[0], weight)


@settings(max_examples=30, deadline=None)
@given(part=sizes, tp=sizes)
def test_gate_and_up_are_fused_per_rank(part: int, tp: int) -> None:
    gate, up = _numbered(part * tp, 3), _numbered(part * tp, 3)
    _check(
        ops.FuseGateUp(part * tp),
        [gate, up],
        tp,
        lambda rank: torch.cat([gate.chunk(tp)[rank], (up + 10_000.0).chunk(tp)[rank]]),
    )


@settings(max_examples=60, deadline=None)
@given(vocab=st.integers(1, 17), tp=st.integers(1, 8))
def test_vocabulary_is_padded_with_zero_rows(vocab: int, tp: int) -> None:
    table = _numbered(vocab, 2)
    rows = -(-vocab // tp)
    padded = F.pad(table, (0, 0, 0, rows * tp - vocab))
    _check(ops.PadVocabulary(vocab), [table], tp, lambda rank: padded[rank * rows : (rank + 1) * rows])


@settings(max_examples=30, deadline=None)
@given(part=sizes, tp=sizes, along=st.integers(0, 1))
def test_split_cuts_either_axis(part: int, tp: int, along: int) -> None:
    weight = _numbered(part * tp, 5) if along == 0 else _numbered(5, part * tp)
    _check(ops.Split(part * tp, along), [weight], tp, lambda rank: weight.chunk(tp, dim=along)[rank])


@pytest.mark.parametrize("tp", [1, 2, 3])
def test_copy_is_whole_on_every_rank(tp: int) -> None:
    norm = _numbered(7)
    _check(ops.Copy(7), [norm], tp, lambda rank: norm)


def test_padding_never_reaches_the_inverse() -> None:
    op = ops.PadVocabulary(5)
    shards = [op.to_shard([_numbered(5, 2)], rank, 4, torch.Size([2])) for rank in range(4)]
    shards[2][1:] = float("nan")  # row 5 and all of rank 3 are padding
    shards[3][:] = float("nan")
    (back,) = op.from_shards(shards, [torch.Size([5, 2])])
    assert torch.equal(back, _numbered(5, 2))


@pytest.mark.parametrize(
    "op",
    [
        ops.Split(5),
        ops.FuseGateUp(5),
        InterleaveQkv(10, 5, 2),
        InterleaveQkv(5, 2, 4),
        gdn.GdnInputFlat(gdn.GdnHeads(3, 6, 2, 2)),
        gdn.GdnConvolution(gdn.GdnHeads(2, 5, 2, 2)),
    ],
)
def test_uneven_parts_are_refused(op: ops.Op) -> None:
    with pytest.raises(ValueError, match="does not divide"):
        op.pieces(0, 2)
