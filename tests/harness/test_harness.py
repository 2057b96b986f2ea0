"""Claim: a world gives every rank's result or an error naming the guilty rank, and leaves no process behind.

Why the tests show it: ranks add numbers over gloo, so a result proves that the group was really formed with
the size and the ranks it claims; failures are provoked on a rank other than 0 while the rest wait inside a
collective, which is where a naive harness hangs; after a timeout the ranks' own process ids are looked up.
Not shown: nccl worlds beyond the `gpu` test, machines without fork, a fork server killed between two jobs
by the system.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch

from harness import WORLDS, RankFailure, World, run_world
from harness.spawn import server
from harness.worlds import COVERING, EP_WORLDS, left_out


@pytest.mark.parametrize("world", WORLDS, ids=lambda world: world.name)
def test_every_rank_answers_with_its_own_result(world: World) -> None:
    results = run_world(world, "harness.cases:total", cases=[1.0, 0.25])
    weight = world.size * (world.size + 1) / 2
    assert [result["rank"] for result in results] == list(range(world.size))
    for result in results:
        assert result["size"] == world.size
        assert result["name"] == world.name
        assert torch.equal(result["sums"], torch.tensor([weight, 0.25 * weight], dtype=torch.float64))


def test_what_the_default_run_leaves_out() -> None:
    one, two, four = World(), World(cp=2), World(tp=2, cp=2)
    assert left_out([one]) == set()
    assert left_out([one, two, four]) == {two}  # a test without a covering world keeps one of several ranks
    assert left_out([one, two, World(cp=2, dp=2), four]) == {two, four}
    assert left_out([*WORLDS, *EP_WORLDS]) == {*WORLDS, *EP_WORLDS} - {*COVERING}
    for axis in World._fields:
        assert any(getattr(world, axis) > 1 for world in COVERING)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_raises_is_reported_with_its_traceback(rank: int) -> None:
    start = time.monotonic()
    with pytest.raises(RankFailure, match="the seeded failure") as caught:
        run_world(World(cp=2, dp=2), "harness.cases:misbehave", rank=rank, how="raise")
    assert caught.value.rank == rank
    assert not caught.value.timed_out
    assert 'raise ValueError("the seeded failure")' in str(caught.value)
    assert f"rank {rank} is about to raise" in str(caught.value)
    assert time.monotonic() - start < 60  # not the 300 s of the timeout


def test_a_rank_that_leaves_without_a_result_has_failed() -> None:
    with pytest.raises(RankFailure) as caught:
        run_world(World(cp=2), "harness.cases:misbehave", rank=1, how="leave")
    assert caught.value.rank == 1
    assert "left no traceback" in str(caught.value)


def test_a_hanging_rank_is_killed_and_shows_where_it_stood(tmp_path: Path) -> None:
    with pytest.raises(RankFailure) as caught:
        run_world(World(tp=2), "harness.cases:process_ids", rank=1, path=str(tmp_path / "id"), timeout_s=5)
    assert caught.value.timed_out
    assert "ranks [0, 1] did not finish in 5 s" in str(caught.value)
    assert "in misbehave" in str(caught.value)  # the stack of the sleeping rank
    ids = [int(path.read_text()) for path in tmp_path.iterdir()]
    assert len(ids) == 2
    for pid in ids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_missing_target_is_reported() -> None:
    with pytest.raises(RankFailure, match="no_such_function"):
        run_world(World(), "harness.cases:no_such_function")


def test_the_server_outlives_failures() -> None:
    first = server()
    with pytest.raises(RankFailure):
        run_world(World(), "harness.cases:misbehave", rank=0, how="raise")
    assert server() is first
    assert run_world(World(), "harness.cases:threads") == [1]


def test_an_interrupted_test_does_not_hand_its_verdict_to_the_next(tmp_path: Path) -> None:
    def interrupt(*_: object) -> None:
        raise TimeoutError("interrupted")

    previous = signal.signal(signal.SIGALRM, interrupt)
    first = server()
    try:
        signal.setitimer(signal.ITIMER_REAL, 4.0)
        with pytest.raises(TimeoutError):
            run_world(World(cp=2), "harness.cases:process_ids", rank=1, path=str(tmp_path / "id"))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, previous)
    assert run_world(World(), "harness.cases:threads") == [1]
    assert server() is not first
    ids = [int(path.read_text()) for path in tmp_path.iterdir()]
    assert len(ids) == 2
    assert not [pid for pid in ids if is_running(pid)]


def is_running(pid: int) -> bool:
    """Whether the process exists and is not a zombie that nobody has collected yet."""
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_start_up_is_paid_once(report) -> None:
    run_world(World(), "harness.cases:threads")
    start = time.monotonic()
    run_world(World(tp=2, cp=2), "harness.cases:total", cases=[1.0])
    seconds = time.monotonic() - start
    report("fork server start (imports), s", server().ready_s)
    report("world of 4 ranks after that, s", seconds)
    assert seconds < max(10.0, server().ready_s)


@pytest.mark.gpu
def test_cuda_ranks_are_fresh_interpreters_on_their_own_device() -> None:
    results = run_world(World(), "harness.cases:cuda_total", device="cuda", cases=[1.0, 3.0])
    assert results == [{"device": 0, "sums": [1.0, 3.0]}]
