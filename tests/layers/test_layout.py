"""Claim: a plan covers every visible (query, key) pair exactly once and no other pair, whatever the
lengths, the branches, the resident blocks and the context-parallel size.

Why the tests show it: the kernel calls of all ranks are counted into a matrix of queries by keys, and the
matrix is compared with the mask that `reference.dense_attention` really applies (read off from its output
by feeding it zero scores and one-hot values), for random branch lengths including 0, ragged and batched
blocks, empty ranks and padding.

Not shown: that the kernels compute what a task says (test_kernels, test_segment).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle.dense_attention import dense_attention

from megatron_lrl.layers.layout import NEW, ROWS, BlockShape, TokenLayout


class Case(NamedTuple):
    lengths: tuple[int, ...]
    cp: int
    multiple: int
    blocks: tuple[tuple[BlockShape, ...], ...]  # of each rank
    same_bits: bool = False


@st.composite
def case(draw: st.DrawFn) -> Case:
    lengths = draw(st.lists(st.integers(0, 7), min_size=1, max_size=6).filter(any))
    cp, multiple = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    branch = st.integers(0, len(lengths) - 1)

    @st.composite
    def block(draw: st.DrawFn) -> BlockShape:
        if draw(st.booleans()):
            return BlockShape(True, 0, 1, draw(st.integers(0, 4)))
        first = draw(branch)
        return BlockShape(False, first, draw(st.integers(1, len(lengths) - first)), draw(st.integers(0, 4)))

    blocks = tuple(tuple(draw(st.lists(block(), max_size=4))) for _ in range(cp))
    return Case(tuple(lengths), cp, multiple, blocks, draw(st.booleans()))


@pytest.fixture(autouse=True, scope="module")
def small_tiles() -> Iterator[None]:
    """Tiles of 3 keys: some branches cross several, others share one."""
    with mock.patch("megatron_lrl.layers.layout.TILE", 3):
        yield


def layouts(case: Case) -> list[TokenLayout]:
    starts = tuple(100 + 10 * i for i in range(len(case.lengths)))
    return [
        TokenLayout(starts, case.lengths, case.cp, rank, case.multiple, case.same_bits)
        for rank in range(case.cp)
    ]


def covered(case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """How often each (query, key) pair is covered by all ranks' plans, and every key's branch and position.

    Keys stand in columns: each rank's blocks row by row, then the new tokens in their flat order.
    """
    ranks = layouts(case)
    sizes = [shape.branches * shape.length for blocks in case.blocks for shape in blocks]
    new = sum(sizes)
    count = torch.zeros(ranks[0].padded, new + ranks[0].padded, dtype=torch.int64)
    column = 0
    branch_t: list[int] = []
    for layout, blocks in zip(ranks, case.blocks, strict=True):
        firsts = []
        for shape in blocks:
            firsts.append(column)
            column += shape.branches * shape.length
            for row in range(shape.branches):
                branch_t += [-1 if shape.shared else shape.branch + row] * shape.length
        for task in layout.plan(blocks):
            columns = new + layout.key_slots if task.source == NEW else torch.arange(firsts[task.source], new)
            for i in range(task.branches):
                q = task.q_start + i * task.q_len
                k = task.k_start + i * task.k_len
                ones = torch.ones(task.q_len, task.k_len, dtype=torch.int64)
                count[q : q + task.q_len, columns[k : k + task.k_len]] += ones.tril() if task.causal else ones
    position_t = [0] * new
    for i, length in enumerate(case.lengths):
        branch_t += [i] * length
        position_t += list(range(ranks[0].starts[i], ranks[0].starts[i] + length))
    return count, torch.tensor(branch_t), torch.tensor(position_t)


def visible_to_dense_attention(
    q_positions: torch.Tensor, k_positions: torch.Tensor, q_branch: torch.Tensor, k_branch: torch.Tensor
) -> torch.Tensor:
    """The mask `dense_attention` applies: with zero scores and one-hot values its output shows who was
    seen.
    """
    s, t = len(q_positions), len(k_positions)
    zeros = torch.zeros(s, 1, t, dtype=torch.float64), torch.zeros(t, 1, t, dtype=torch.float64)
    values = torch.eye(t, dtype=torch.float64).unsqueeze(1)
    return dense_attention(*zeros, values, q_positions, k_positions, q_branch, k_branch, 1.0).squeeze(1) > 0


@settings(max_examples=150, deadline=None)
@given(case())
def test_every_visible_pair_is_covered_exactly_once(case: Case) -> None:
    count, k_branch, k_positions = covered(case)
    layout = layouts(case)[0]
    tokens = layout.tokens
    new = len(k_branch) - tokens
    expected = visible_to_dense_attention(k_positions[new:], k_positions, k_branch[new:], k_branch)
    assert torch.equal(count[:tokens, : new + tokens], expected.long())
    assert not count[tokens:].any(), "padding slots are nobody's queries"
    assert not count[:, new + tokens :].any(), "padding slots are nobody's keys"


@settings(max_examples=100, deadline=None)
@given(case())
def test_slices_of_all_ranks_are_the_flat_list_and_its_positions(case: Case) -> None:
    ranks = layouts(case)
    tokens, device = ranks[0].tokens, torch.device("cpu")
    flat = torch.arange(1, tokens + 1)
    joined = torch.cat([layout.slice_local(flat, fill=-7) for layout in ranks])
    assert torch.equal(joined[:tokens], flat)
    assert (joined[tokens:] == -7).all()
    expected = [
        start + i for start, length in zip(ranks[0].starts, case.lengths, strict=True) for i in range(length)
    ]
    positions = torch.cat([layout.positions(device) for layout in ranks])
    assert positions[:tokens].tolist() == expected
    assert positions.dtype == torch.int64
    assert {layout.local_slots % case.multiple for layout in ranks} == {0}
    assert sum(layout.local_tokens for layout in ranks) == tokens
    if case.same_bits:
        assert ranks[0].local_slots % ROWS == 0
    else:
        assert ranks[0].padded - tokens < case.cp * case.multiple, "padding is less than one unit"


@settings(max_examples=100, deadline=None)
@given(case())
def test_dealt_keys_belong_to_their_positions(case: Case) -> None:
    """Each rank has the keys of the blocks that are its turn, and every token sees the older ones of them."""
    for layout in layouts(case._replace(same_bits=True)):
        positions = torch.cat(
            [torch.arange(s, s + n) for s, n in zip(layout.starts, case.lengths, strict=True)]
        )
        mine = positions // 3 % case.cp == layout.cp_rank
        assert sorted(layout.key_slots.tolist()) == mine.nonzero().flatten().tolist()
        assert layout.keys == int(mine.sum())
        for branch, (start, length) in enumerate(zip(layout.starts, case.lengths, strict=True)):
            below = [
                sum(p // 3 % case.cp == layout.cp_rank for p in range(start + i + 1)) for i in range(length)
            ]
            assert list(layout.visible(branch)) == below


@settings(max_examples=100, deadline=None)
@given(case())
def test_pieces_tile_each_rank_and_never_mix_lengths(case: Case) -> None:
    for layout in layouts(case):
        slot = 0
        for piece in layout.pieces:
            assert piece.start == slot
            slot += piece.branches * piece.length
            if piece.branches > 1:
                whole = layout.lengths[piece.branch : piece.branch + piece.branches]
                assert len(set(whole)) == 1 and (layout.dealt or whole[0] == piece.length)
        assert slot == (layout.keys if layout.dealt else layout.local_tokens)


@pytest.mark.parametrize(
    ("lengths", "cp", "tasks"),
    [
        ((1,) * 12, 1, 1),  # a decode step of 12 branches is one kernel call
        ((4, 4, 4), 1, 1),
        ((4, 0, 4), 1, 2),
        ((8,), 2, 3),  # causal on either rank, and rank 1's queries over rank 0's keys
    ],
)
def test_neighbours_of_equal_length_share_a_kernel_call(lengths: Sequence[int], cp: int, tasks: int) -> None:
    ranks = [TokenLayout((0,) * len(lengths), tuple(lengths), cp, rank) for rank in range(cp)]
    assert sum(len(layout.plan([])) for layout in ranks) == tasks
