"""Claim: resident state is shared by forks without a copy, grows by appending, and cannot be read once it
is dead.

Why the tests show it: storage addresses tell a copy from a view; block counts and byte counts are derived
by hand; a closed state raises, and a view somebody kept reads NaN; what `attend` returns from grown state
is compared with dense attention over everything fed so far.

Not shown: the model around the state (test_advance), several ranks (tests/lifetimes).

Legend: m new slots, H query heads, h KV heads, d head dim.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle.dense_attention import dense_attention
from torch import Tensor

from megatron_lrl.layers.layout import TokenLayout
from megatron_lrl.layers.sequence import Phase, SequenceState
from megatron_lrl.layers.softmax.kv import KVLayer

H, KV, D = 4, 2, 8
LAYERS = (1, 2)


class Feed:
    """Feeds random tokens to a state, as `advance` would, and remembers all of them for the dense oracle."""

    def __init__(self, state: SequenceState, history: list[list[Tensor]] | None = None) -> None:
        self.state = state
        # Of each branch, [k, v] of all tokens of every layer: rows of [t, 2, layers, h, d].
        self.rows = history if history is not None else [[] for _ in range(state.branches)]
        self.draw = torch.Generator().manual_seed(5)

    def fork(self, branches: int) -> Feed:
        child = Feed(self.state.fork(branches), [list(self.rows[0]) for _ in range(branches)])
        child.draw.manual_seed(6)
        return child

    def __call__(self, lengths: Sequence[int], live: bool = False) -> float:
        """Feed ``lengths[i]`` tokens to branch i. Returns the largest error of the attention's output."""
        self.state.check_open()
        layout = TokenLayout(tuple(self.state.counts), tuple(lengths))
        kv = torch.randn(layout.tokens, 2, len(LAYERS), KV, D, generator=self.draw, dtype=torch.float64)
        kv.requires_grad_(live)
        q = torch.randn(layout.tokens, H, D, generator=self.draw, dtype=torch.float64)
        for rows, part in zip(self.rows, kv.detach().split(list(lengths)), strict=True):
            rows.append(part)
        error = 0.0
        for i, number in enumerate(LAYERS):
            ours = self.state.layer(number, KVLayer).attend(q, kv[:, 0, i], kv[:, 1, i], layout, 0.3, None)
            error = max(error, float((ours - self.dense(q, layout, i)).abs().max()))
        self.state.grow(layout.lengths)
        return error

    def dense(self, q: Tensor, layout: TokenLayout, i: int) -> Tensor:
        history = [torch.cat(rows) for rows in self.rows]
        kv = torch.cat(history)
        q_branch = [b for b, n in enumerate(layout.lengths) for _ in range(n)]
        q_position = [len(history[b]) - n + j for b, n in enumerate(layout.lengths) for j in range(n)]
        k_branch = [b for b, rows in enumerate(history) for _ in rows]
        k_position = [j for rows in history for j in range(len(rows))]
        indices = (torch.tensor(x) for x in (q_position, k_position, q_branch, k_branch))
        return dense_attention(q, kv[:, 0, i], kv[:, 1, i], *indices, 0.3)


def prefix(tokens: int = 7, reserve: int = 0) -> Feed:
    feed = Feed(SequenceState(reserve={0: reserve} if reserve else None))
    feed([tokens])
    feed.state.freeze()
    return feed


def addresses(layer: KVLayer) -> set[int]:
    return {block.k_bhtd.untyped_storage().data_ptr() for block in layer.blocks()}


def test_a_fork_shares_the_prefix_and_owns_its_tail() -> None:
    base = prefix()
    before = base.state.nbytes
    assert before == len(LAYERS) * 2 * 7 * KV * D * 8  # k and v of 7 float64 tokens
    one, two = base.fork(3), base.fork(2)
    assert one([2, 2, 2]) < 1e-12
    assert two([1, 4]) < 1e-12
    shared = addresses(base.state.layer(1, KVLayer))
    assert shared < addresses(one.state.layer(1, KVLayer))
    assert addresses(one.state.layer(1, KVLayer)) & addresses(two.state.layer(1, KVLayer)) == shared
    assert base.state.nbytes == before, "a fork costs its prefix nothing"
    assert one.state.counts == [9, 9, 9]
    assert two.state.counts == [8, 11]
    owned = {t.untyped_storage().data_ptr() for t in two.state.tensors()}
    assert not owned & shared


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 9),
    st.integers(1, 4).flatmap(
        lambda branches: st.lists(
            st.lists(st.integers(0, 4), min_size=branches, max_size=branches).filter(any),
            min_size=1,
            max_size=5,
        )
    ),
)
def test_any_sequence_of_ragged_growth_reads_everything_fed_before(
    tokens: int, steps: list[list[int]]
) -> None:
    feed = prefix(tokens).fork(len(steps[0]))
    for lengths in steps:
        assert feed(lengths) < 1e-12
    assert feed.state.counts == [tokens + sum(n) for n in zip(*steps, strict=True)]


def test_live_growth_keeps_the_graph_and_reads_the_same() -> None:
    feed = prefix().fork(2)
    assert feed([3, 3], live=True) < 1e-12
    assert feed([1, 2], live=True) < 1e-12
    assert all(block.k_bhtd.requires_grad for block in feed.state.layer(1, KVLayer).blocks()[1:])
    assert feed.state.layer(1, KVLayer).newest is not None


def test_decoding_fills_few_blocks_in_place() -> None:
    feed = prefix().fork(5)
    seen = []
    for _ in range(140):
        assert feed([1] * 5) < 1e-12
        seen.append(len(feed.state.layer(1, KVLayer).blocks()) - 1)
    assert seen[-1] == 3, "64, 64, 128, ...: blocks double"
    assert seen[:64] == [1] * 64
    own = feed.state.layer(1, KVLayer).blocks()[1:]
    assert sum(block.k_bhtd.shape[2] for block in own) == 140
    assert feed.state.nbytes <= 2 * 2 * len(LAYERS) * 5 * 140 * KV * D * 8, "at most half is spare"


def test_a_reserved_capture_lies_in_one_block() -> None:
    feed = Feed(SequenceState(reserve={0: 20}))
    for tokens in (8, 8, 4):
        assert feed([tokens]) < 1e-12
    (block,) = feed.state.layer(1, KVLayer).blocks()
    assert block.k_bhtd.shape[2] == 20
    assert feed.state.nbytes == len(LAYERS) * 2 * 20 * KV * D * 8


def test_lifecycle() -> None:
    feed = Feed(SequenceState())
    assert feed.state.phase is Phase.OPEN
    with pytest.raises(ValueError, match="fork a frozen state of one branch, not a open one"):
        feed.state.fork(2)
    feed([3])
    feed.state.freeze()
    with pytest.raises(RuntimeError, match="frozen: fork it"):
        feed([1])
    child = feed.fork(2)
    child([1, 1])
    with pytest.raises(ValueError, match="one branch"):
        child.state.freeze().fork(2)
    with pytest.raises(ValueError, match="at least one branch"):
        SequenceState(0)


def test_closing_a_prefix_kills_its_forks() -> None:
    base = prefix()
    child = base.fork(2)
    child([1, 1])
    base.state.close()
    assert base.state.nbytes == 0
    for read in (
        lambda: base.state.layer(1, KVLayer),
        lambda: list(base.state.layers()),
        lambda: base.state.fork(1),
        lambda: child.state.layer(1, KVLayer),
        lambda: child([1, 1]),
        lambda: child.state.freeze(),
    ):
        with pytest.raises(RuntimeError, match="stale state"):
            read()
    base.state.close()  # closing twice is harmless


def test_poison_reaches_every_view_that_somebody_kept() -> None:
    base = prefix(5, reserve=9)
    child = base.fork(2)
    kept = child.state.layer(1, KVLayer).blocks()[0]
    assert torch.isfinite(kept.k_bhtd).all()
    base.state.close(fill_nan=True)
    assert kept.k_bhtd.isnan().all()
    assert kept.v_bhtd.isnan().all()


def test_without_poison_a_kept_view_is_left_alone() -> None:
    base = prefix()
    kept = (
        base.state.layer(1, KVLayer).blocks()[0].k_bhtd.clone(),
        base.state.layer(1, KVLayer).blocks()[0].k_bhtd,
    )
    base.state.close()
    assert torch.equal(*kept)
