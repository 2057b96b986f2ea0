"""Claim: the clock of LastKV is integer arithmetic on fed tokens, and nothing else moves a boundary.

Why the tests show it: its functions are compared with a counter that takes one token at a time, for random C, starts
and lengths (hypothesis); the example of the design is written out. Cutting a run of tokens anywhere (a micro-batch, a
prompt's or a response's end) must give the same chunks.
Not shown: that the layers follow the clock (test_lastkv_logits).
"""

from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lrl.layers.lastkv.clock import Clock

SIZES = st.integers(1, 40)
COUNTS = st.integers(0, 400)
QUICK = settings(deadline=None, max_examples=40)


def counted(size: int, tokens: int) -> tuple[int, int, list[int]]:
    """Open chunk, tokens in it and boundaries passed, after feeding tokens one by one."""
    chunk = phase = 0
    passed = []
    for fed in range(1, tokens + 1):
        phase += 1
        if phase == size:
            chunk, phase = chunk + 1, 0
            passed.append(fed)
    return chunk, phase, passed


def test_512_and_600_tokens() -> None:
    clock = Clock(512)
    assert (clock.chunk(600), clock.phase(600), clock.to_boundary(600)) == (1, 88, 424)
    assert 600 + clock.to_boundary(600) == 1024
    assert clock.boundaries(0, 600) == [512]
    assert clock.rounds([600], [424]) == [(424,)]
    assert clock.rounds([600], [425]) == [(424,), (1,)]
    assert clock.chunk(1023) == 1 and clock.chunk(1024) == 2 and clock.phase(1024) == 0


@given(SIZES, COUNTS)
@QUICK
def test_it_counts_as_a_counter_does(size: int, tokens: int) -> None:
    clock = Clock(size)
    chunk, phase, passed = counted(size, tokens)
    assert (clock.chunk(tokens), clock.phase(tokens)) == (chunk, phase)
    assert clock.to_boundary(tokens) == size - phase
    assert clock.boundaries(0, tokens) == [b for b in passed if b < tokens]
    assert clock.boundaries(0, tokens + 1) == passed


@given(SIZES, COUNTS, st.lists(st.integers(0, 120), min_size=1, max_size=4))
@QUICK
def test_rounds_lose_no_token_and_cross_no_boundary(size: int, start: int, lengths: list[int]) -> None:
    clock = Clock(size)
    rounds = clock.rounds([start] * len(lengths), lengths)
    assert all(any(step) for step in rounds)
    assert [sum(step[i] for step in rounds) for i in range(len(lengths))] == lengths
    for branch in range(len(lengths)):
        position = start
        for step in rounds:
            n = step[branch]
            assert n == 0 or clock.chunk(position) == clock.chunk(position + n - 1)
            position += n
    # branches of one start keep step: whoever is fed in a round starts it at the same position
    fed = [0] * len(lengths)
    for step in rounds:
        assert len({start + done for done, n in zip(fed, step, strict=True) if n}) <= 1
        fed = [done + n for done, n in zip(fed, step, strict=True)]


@given(SIZES, st.lists(st.integers(1, 60), min_size=1, max_size=6))
@QUICK
def test_where_a_run_is_cut_does_not_matter(size: int, parts: list[int]) -> None:
    clock = Clock(size)
    position, ends = 0, [0]
    for part in parts:
        for (step,) in clock.rounds([position], [part]):
            position += step
            ends.append(position)
    boundaries = set(range(0, position + 1, size))
    assert boundaries <= set(ends)  # every boundary ends a round, wherever the parts end
    assert {end for end in ends if clock.phase(end) == 0} == boundaries
    (whole,) = zip(*clock.rounds([0], [position]), strict=True)
    assert set(accumulate(whole)) == (boundaries - {0}) | {position}


@pytest.mark.parametrize("size", [0, -1])
def test_a_chunk_holds_at_least_one_token(size: int) -> None:
    with pytest.raises(ValueError, match="at least one token"):
        Clock(size)
