"""Claim: a layout that does not fit the number of ranks is refused, naming the keys and the numbers of ranks
that fit, before Megatron-Core builds any group.

Why the tests show it: the worlds that fit are found by enumerating world = tp cp pp dp, not by the
divisibility rule under test; the order is seen by asking Megatron-Core whether its parallel state exists
after the refusal. Not shown: bringing up more than one rank, which the tests in worlds do; that Megatron-Core
accepts every world that the rule for ep accepts, since no supported model has experts.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from megatron_lrl.errors import UserError
from megatron_lrl.runtime import (
    Layout,
    _check_devices,
    _fresh_store,
    check_world,
    init_runtime,
    lost_connection,
    runtime_scope,
    shutdown_runtime,
)


@given(tp=st.integers(1, 5), cp=st.integers(1, 3), pp=st.integers(1, 5), world=st.integers(1, 64))
def test_worlds_that_fit_are_accepted_and_no_others(tp: int, cp: int, pp: int, world: int) -> None:
    layout = Layout(tp=tp, cp=cp, pp=pp)
    if any(tp * cp * pp * dp == world for dp in range(1, world + 1)):
        check_world(layout, world)
    else:
        with pytest.raises(UserError, match=f"need a multiple of {tp * cp * pp} ranks"):
            check_world(layout, world)


@pytest.mark.parametrize(
    ("layout", "world", "expected"),
    [
        (
            Layout(cp=2, pp=2),
            6,
            "parallel.tp = 1, parallel.cp = 2, parallel.pp = 2 need a multiple of 4 ranks, but the "
            "world has 6; launch so many or change the layout",
        ),
        (Layout(tp=4), 2, "need a multiple of 4 ranks, but the world has 2"),
        (Layout(), 0, "need a multiple of 1 ranks, but the world has 0"),
        (
            Layout(tp=2, cp=2, ep=4),
            4,
            "parallel.tp = 2, parallel.pp = 1, parallel.ep = 4 need a multiple of 8 ranks, but the "
            "world has 4: experts are spread over the ranks of parallel.cp and data parallelism, here 2; parallel.ep "
            "must divide that",
        ),
    ],
)
def test_the_message_names_the_keys_and_the_valid_multiple(layout: Layout, world: int, expected: str) -> None:
    with pytest.raises(UserError) as caught:
        check_world(layout, world)
    assert expected in str(caught.value)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch):
    """One process outside of any launcher; afterwards no process group is left."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    assert not dist.is_initialized()
    yield
    shutdown_runtime()


@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(cp=2), Layout(pp=3), Layout(ep=2)])
def test_a_layout_that_does_not_fit_is_refused_before_groups_exist(alone: None, layout: Layout) -> None:
    from megatron.core import parallel_state

    with pytest.raises(UserError, match="but the world has 1"):
        init_runtime(layout)
    assert not parallel_state.model_parallel_is_initialized()


def test_a_process_can_start_anew_after_a_refusal(alone: None) -> None:
    with pytest.raises(UserError, match="but the world has 1"):
        with runtime_scope(Layout(tp=2)):
            pytest.fail("the block must not run")
    assert not dist.is_initialized()
    with runtime_scope(Layout()) as runtime:
        assert (runtime.world_size, runtime.dp, runtime.is_main) == (1, 1, True)
    assert not dist.is_initialized()


def test_a_restarted_world_shares_a_store_without_the_keys_of_the_dead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The agent's store stays; of the start in between only two ranks got as far as greeting rank 0."""
    agent = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(agent.port))
    with ThreadPoolExecutor(3) as pool:
        for start in range(3):
            stores = list(pool.map(_fresh_store, range(3), [3] * 3))
            assert not any(store.check(["address"]) for store in stores)
            stores[start].set("address", str(start))
            assert [store.get("address") for store in stores] == [str(start).encode()] * 3
            for rank in (1, 2):
                agent.set(f"megatron_lrl/hello/{rank}", f"dead-{start}-{rank}")


GLOO = "[../third_party/gloo/gloo/transport/tcp/"
GONE = [
    f"{GLOO}pair.cc:547] Connection closed by peer [127.0.0.1]:53127",
    f"{GLOO}pair.cc:538] Read error [127.0.0.1]:9: Connection reset by peer",
    f"{GLOO}unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation to complete",
    f"{GLOO}unbound_buffer.cc:133] Application timeout caused pair closure",
    "NCCL error: remote process exited\nncclRemoteError: A call failed possibly due to ...",
    "[c10d] recvValue failed: Connection was likely closed. Did the remote server shutdown or crash?",
]


@pytest.mark.parametrize("message", GONE)
def test_a_lost_connection_is_told_without_the_libraries_words(
    message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    told = lost_connection(RuntimeError(message))
    assert told == "rank 0 lost its connection to rank 1, which was killed, failed or does not answer"
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert "another rank" in str(lost_connection(RuntimeError(message)))
    monkeypatch.delenv("RANK")
    monkeypatch.delenv("WORLD_SIZE")
    with pytest.raises(SystemExit, match="1"), runtime_scope(Layout()):
        raise RuntimeError(message)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: rank 0 lost its connection") and line.endswith(
        "start the same command again"
    )


def test_other_errors_are_not_taken_for_one() -> None:
    for error in (
        RuntimeError("CUDA out of memory"),
        ValueError(GONE[0]),
        RuntimeError("gloo does not do that"),
    ):
        assert lost_connection(error) is None
    with pytest.raises(RuntimeError, match="of our own"), runtime_scope(Layout()):
        raise RuntimeError("of our own")


def test_ranks_that_would_share_a_gpu_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    _check_devices(1)  # not torchrun: each rank may be shown a device of its own
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    _check_devices(0)
    with pytest.raises(UserError, match="2 ranks on a machine that shows 1 CUDA device: "):
        _check_devices(1)
