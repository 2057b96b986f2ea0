"""Claim: a recurrent layer's state is shared by forks without a copy, goes back to any logged advance, carries its
adjoint back through a sweep one state at a time, and owns only what it says.

Why the tests show it: a toy recurrence S' = a S + x, whose gradients are powers of a, is driven through the same calls
that a layer makes; adjoints, snapshots and byte counts are worked out by hand.
Not shown: Gated DeltaNet itself (tests/recurrent, tests/worlds/test_hybrid.py).

Legend: b branches, c channels, w kernel width, h heads, k and v head dims.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from megatron_lrl.layers.gdn.state import DeltaNetLayer, Snapshot
from megatron_lrl.layers.sequence import SequenceState

C, W, H, K, V = 3, 2, 2, 2, 2
STATE_BYTES = (C * (W - 1) + H * K * V) * 8
DECAY = 0.5


def feed(state: SequenceState, x: float | Tensor, lengths: Sequence[int] = (1,)) -> None:
    """One advance of layer 1: the state halves and grows by x; the tail becomes x."""
    x = torch.as_tensor(x, dtype=torch.float64)
    b = state.branches
    before = state.layer(1, DeltaNetLayer).read(x, b, lambda: Snapshot.zeros(x, (b, C, W - 1), (b, H, K, V)))
    tail = x.expand(b, C, W - 1).clone() + 0 * before.tail_bcw
    snapshot = Snapshot(tail, DECAY * before.state_bhkv + x)
    state.layer(1, DeltaNetLayer).commit(snapshot, keep=state.restarts_here)
    state.grow(lengths)


def value(state: SequenceState) -> list[float]:
    now = state.layer(1, DeltaNetLayer).now
    assert now is not None
    return [float(row.detach().flatten()[0]) for row in now.state_bhkv]


def captured(*xs: float, log: bool = True, **settings: int) -> SequenceState:
    state = SequenceState(log=log, **settings)
    for x in xs:
        feed(state, x)
    return state.freeze()


def test_forks_share_and_diverge() -> None:
    prefix = captured(1.0, 2.0, log=False)  # 2.5
    assert prefix.nbytes == STATE_BYTES
    fork = prefix.fork(3)
    assert fork.nbytes == 0
    feed(fork, 4.0, (1, 1, 1))
    assert value(fork) == [5.25] * 3
    assert value(prefix) == [2.5]
    fork.keep([0, 2])
    feed(fork, torch.tensor(0.0), (1, 1))
    assert value(fork) == [2.625] * 2
    assert fork.nbytes == 2 * STATE_BYTES


def test_going_back_needs_the_log() -> None:
    state = captured(1.0, 2.0, 4.0)
    assert state.nbytes == 3 * STATE_BYTES  # two snapshots and the newest; before the first there was nothing
    for number, expected in enumerate([8.0, 8.5, 9.25]):
        again = state.before(number)
        feed(again, 8.0)
        assert value(again) == [expected]
    assert (
        captured(1.0, 2.0, 4.0, keep_from=2).nbytes == 2 * STATE_BYTES
    )  # nothing will go back further than 2
    with pytest.raises(IndexError):
        captured(1.0, 2.0, log=False).before(1)


def test_the_adjoint_moves_back_through_a_sweep() -> None:
    """d(sum of S3) / dx_i = a^(2 - i) for the live advances, added up over two forks of two branches."""
    xs = [torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in (1.0, 2.0, 4.0)]
    state = captured(*(float(x.detach()) for x in xs), keep_from=1)
    assert state.enable_adjoints(torch.float64, live_from=1) == STATE_BYTES
    for _ in range(2):
        fork = state.fork(2, log=True)
        y = torch.zeros((), dtype=torch.float64, requires_grad=True)
        feed(fork, y, (1, 1))
        now = fork.layer(1, DeltaNetLayer).now
        assert now is not None
        now.state_bhkv.sum().backward()
    layer, elements = state.layer(1, DeltaNetLayer), H * K * V
    for number in (2, 1):
        again = state.before(number)
        feed(again, xs[number])
        now = again.layer(1, DeltaNetLayer).now
        assert now is not None
        adjoint = layer.take_adjoint(number, now, torch.device("cpu"))
        torch.autograd.backward(list(now), adjoint)
        assert xs[number].grad is not None
        # 2 forks x 2 branches, each of slope a
        assert float(xs[number].grad) == pytest.approx(4 * elements * DECAY ** (3 - number))
    constant = layer.take_adjoint(0, state.layer(1, DeltaNetLayer).now or (), torch.device("cpu"))
    assert len(constant) == 2 and not any(x.any() for x in constant)  # before the live limit
    assert sum(x.nbytes for x in layer.tensors()) == 3 * STATE_BYTES  # every adjoint was freed on the way


def test_coarse_snapshots_are_refilled() -> None:
    state = SequenceState(log=True)
    state.restarts = frozenset((0, 3, 6))
    for x in range(7):
        feed(state, float(x))
    fine = captured(*map(float, range(7)))
    assert state.nbytes == 3 * STATE_BYTES  # before 3, before 6, newest
    again = state.restart(3, 5)
    for x in (3.0, 4.0):
        feed(again, x)
    state.refill(again, 3)
    for number in (3, 4, 5, 6):
        theirs, ours = fine.before(number), state.before(number)
        feed(theirs, 1.0)
        feed(ours, 1.0)
        assert value(ours) == value(theirs)
    state.forget(4)
    assert state.nbytes == 2 * STATE_BYTES


def test_a_closed_state_is_poisoned_and_gone() -> None:
    prefix = captured(1.0)
    fork = prefix.fork(2)
    held = prefix.layer(1, DeltaNetLayer).now
    assert held is not None
    prefix.close(fill_nan=True)
    assert bool(held.state_bhkv.isnan().all())
    with pytest.raises(RuntimeError, match="stale"):
        feed(fork, 1.0, (1, 1))
