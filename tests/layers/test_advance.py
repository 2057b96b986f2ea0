"""Claim: `advance` computes the model at the state's position, and cutting a feed into pieces changes
nothing.

Why the tests show it: final hidden states, turned into logits, are compared in float64 with a plain
transformer that has no state (tests/oracle/plain_fp64), to 1e-10; the same tokens are fed at once, in
ragged pieces, token by token, and as forks of a prefix, with branches that stand still.

Not shown: gradients (tests/lifetimes), several ranks (tests/worlds).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from lifetimes.tiny import ids, tiny_run
from oracle.plain_fp64 import PlainModel
from torch import Tensor

from megatron_lrl.layers.advance import advance
from megatron_lrl.layers.sequence import SequenceState
from megatron_lrl.lifetimes.run import Run
from megatron_lrl.models.head import all_rows, output_weight

VOCAB = 131


@pytest.fixture(scope="module")
def run(session_dir: Path) -> Iterator[Run]:
    with tiny_run(session_dir, gradients=False) as run:
        yield run


@pytest.fixture(scope="module")
def plain(session_dir: Path, run: Run) -> PlainModel:
    return PlainModel(session_dir / "qwen3")


def logits(hidden_smh: Tensor, layout: Any, model: Any) -> Tensor:
    """Logits of every new token."""
    return (all_rows(hidden_smh, model) @ output_weight(model).t())[: layout.tokens, :VOCAB]


def feed(run: Run, state: SequenceState, steps: Sequence[Sequence[Sequence[int]]]) -> list[Tensor]:
    """Advance step by step; each branch's logits, joined."""
    found: list[list[Tensor]] = [[] for _ in range(state.branches)]
    with torch.no_grad():
        for tokens in steps:
            flat = advance(run.model, state, tokens, logits)
            for rows, part in zip(found, flat.split([len(t) for t in tokens]), strict=True):
                rows.append(part)
    return [torch.cat(rows) for rows in found]


def expected(plain: PlainModel, sequence: Sequence[int]) -> Tensor:
    with torch.no_grad():
        return plain.forward(sequence)[0]


def close(ours: Tensor, oracle: Tensor) -> None:
    assert ours.shape == oracle.shape
    assert float((ours - oracle).abs().max()) < 1e-10


@pytest.mark.parametrize("pieces", [(23,), (1,) * 23, (7, 7, 7, 2), (1, 21, 1), (22, 1)], ids=str)
def test_pieces_equal_the_whole(run: Run, plain: PlainModel, pieces: tuple[int, ...]) -> None:
    sequence = ids(sum(pieces), 3)
    cuts = [sum(pieces[:i]) for i in range(len(pieces) + 1)]
    steps = [[sequence[low:high]] for low, high in pairwise(cuts)]
    state = SequenceState()
    (ours,) = feed(run, state, steps)
    close(ours, expected(plain, sequence))
    assert state.counts == [len(sequence)]


def test_branches_of_different_length_some_of_them_still(run: Run, plain: PlainModel) -> None:
    prompt = ids(11, 4)
    prefix = SequenceState()
    feed(run, prefix, [[prompt]])
    full = [ids(9, 5), ids(2, 6), ids(6, 7)]
    steps = [
        [full[0][:3], full[1][:1], ()],
        [full[0][3:4], (), full[2][:4]],
        [(), full[1][1:], full[2][4:5]],
        [full[0][4:], (), full[2][5:]],
    ]
    state = prefix.freeze().fork(3)
    for branch, ours in enumerate(feed(run, state, steps)):
        close(ours, expected(plain, (*prompt, *full[branch]))[len(prompt) :])
    assert state.counts == [20, 13, 17]


def test_decoding_forks_of_a_prefix_captured_in_chunks_without_a_head(run: Run, plain: PlainModel) -> None:
    """Without a head the last layer stops at its keys and values: what is resident must be the same."""
    prompt, tails = ids(17, 8), [ids(70, 9), ids(70, 10)]
    prefix = SequenceState(reserve={0: 17})
    with torch.no_grad():
        for chunk in (prompt[:5], prompt[5:16], prompt[16:]):
            hidden = advance(run.model, prefix, [chunk])
            assert hidden.shape == (0, 1, run.arch.hidden_size)
    state = prefix.freeze().fork(2)
    found = feed(run, state, [[[tail[i]] for tail in tails] for i in range(70)])
    for tail, ours in zip(tails, found, strict=True):
        close(ours, expected(plain, (*prompt, *tail))[len(prompt) :])


def test_branches_that_are_dropped_leave_the_others_alone(run: Run, plain: PlainModel) -> None:
    prompt, tails = ids(5, 11), [ids(8, 12 + i) for i in range(4)]
    prefix = SequenceState()
    feed(run, prefix, [[prompt]])
    state = prefix.freeze().fork(4)
    found = [[part] for part in feed(run, state, [[[tail[i]] for tail in tails] for i in range(3)])]
    state.keep([0, 2, 3])
    for branch, part in zip((0, 2, 3), feed(run, state, [[tails[b][3:6] for b in (0, 2, 3)]]), strict=True):
        found[branch].append(part)
    state.keep([1])
    found[2] += feed(run, state, [[tails[2][6:]]])
    for branch, fed in enumerate((6, 3, 8, 6)):
        close(torch.cat(found[branch]), expected(plain, (*prompt, *tails[branch][:fed]))[len(prompt) :])
    with pytest.raises(ValueError, match=r"branches to keep must ascend within 0\.\.0"):
        state.keep([1])


def test_a_logged_state_can_be_advanced_again_from_any_of_its_advances(run: Run, plain: PlainModel) -> None:
    sequence, cuts = ids(20, 20), [0, 6, 7, 15, 20]
    state = SequenceState(log=True)
    feed(run, state, [[sequence[low:high]] for low, high in pairwise(cuts)])
    whole = expected(plain, sequence)
    for number in reversed(range(4)):
        again = state.before(number)
        assert again.counts == [cuts[number]]
        (ours,) = feed(run, again, [[sequence[cuts[number] :]]])
        close(ours, whole[cuts[number] :])
    assert state.counts == [20]
    state.close()
    with pytest.raises(RuntimeError, match="stale state"):
        again.layer(1)


@pytest.mark.parametrize("tokens", [[], [()], [(1,), (2,)]], ids=["no-branch", "no-token", "two-branches"])
def test_tokens_must_fit_the_branches(run: Run, tokens: list[Any]) -> None:
    state = SequenceState()
    with pytest.raises(ValueError, match="expected tokens for 1 branches"):
        advance(run.model, state, tokens)
    assert state.counts == [0]


def test_a_state_that_failed_half_way_cannot_be_read_again(run: Run) -> None:
    state = SequenceState()
    feed(run, state, [[ids(3, 1)]])

    def broken(*_: Any) -> Tensor:
        raise ArithmeticError("the head fell off")

    with pytest.raises(ArithmeticError, match="fell off"), torch.no_grad():
        advance(run.model, state, [ids(2, 2)], broken)
    with pytest.raises(RuntimeError, match="stale state"):
        advance(run.model, state, [ids(2, 2)])


def test_the_model_runs_only_through_advance(run: Run) -> None:
    with pytest.raises((RuntimeError, AttributeError)), torch.no_grad():
        run.model(input_ids=torch.ones(1, 3, dtype=torch.long), position_ids=None, attention_mask=None)
