"""Claim: saved-for-backward bytes count each storage once and nothing that lives elsewhere; the peak of a
replay does not grow with the group, and resident bytes are what the shapes say.

Why the tests show it: small graphs are counted by hand, with shared storages, views, excluded tensors and a
backward that frees them; a group of 8 is replayed beside a group of 2 with K = 1; resident bytes are
derived from the model's sizes.

Not shown: the allocator's own peak (tools/bench_replay measures it).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lifetimes.tiny import branches, ids, mean_loss, tiny_run
from megatron_lrl.lifetimes.ledger import Ledger, SavedBytes, storage_bytes
from megatron_lrl.lifetimes.run import Run
from megatron_lrl.lifetimes.window import UpdateWindow
from megatron_lrl.lifetimes.work import batches_of, work_of

FLOAT = 4


def test_a_small_graph_counted_by_hand() -> None:
    x = torch.randn(10, requires_grad=True)
    y = torch.randn(10, requires_grad=True)
    with SavedBytes().measure() as meter:
        product = x * y  # saves x and y
        assert meter.live == 2 * 10 * FLOAT
        square = product * product  # saves product, twice
        assert meter.live == 3 * 10 * FLOAT
        result = square.exp()  # saves its own output
        assert meter.live == 4 * 10 * FLOAT
        result.sum().backward()
    assert meter.live == 0, "the backward frees what was saved"
    assert meter.peak == 4 * 10 * FLOAT


def test_a_storage_counts_once_and_whole_however_it_is_viewed() -> None:
    base = torch.randn(6, 5, requires_grad=True)
    with SavedBytes().measure() as meter:
        kept = [base[:2] * base[2:4], base.t().exp() * 2]
        # The first product saves two views of base, exp saves its own output of 30 floats.
        assert meter.live == 2 * 30 * FLOAT
        del kept
    assert meter.live == 0, "a graph that is dropped without a backward is freed too"
    assert meter.peak == 2 * 30 * FLOAT


def test_excluded_tensors_and_their_views_do_not_count() -> None:
    weight, x = torch.randn(8, 8, requires_grad=True), torch.randn(3, 8, requires_grad=True)
    with SavedBytes([weight]).measure() as meter:
        result = x @ weight.t()
        assert meter.live == 3 * 8 * FLOAT
        result.sum().backward()
    assert meter.live == 0


def test_gradients_are_the_same_under_measurement() -> None:
    x = torch.linspace(-1, 1, 7, dtype=torch.float64, requires_grad=True)
    (plain,) = torch.autograd.grad((x.exp() * x).sum(), x)
    with SavedBytes().measure():
        (measured,) = torch.autograd.grad((x.exp() * x).sum(), x)
    assert torch.equal(plain, measured)


def test_live_bytes_and_peaks_of_a_ledger() -> None:
    ledger = Ledger(run=7)
    ledger.add("group", 100)
    ledger.add("group", -100)
    ledger.observe_peak("replay", 30)
    ledger.observe_peak("replay", 20)
    assert ledger.live == {"window": 0, "group": 0, "replay": 0}
    metrics = ledger.metrics()
    assert (metrics["bytes/run"], metrics["bytes/group"], metrics["bytes/replay"]) == (7.0, 100.0, 30.0)
    assert metrics.get("bytes/process", metrics.get("bytes/allocator_peak", 0.0)) > 0
    assert metrics.get("bytes/process_peak", 0.0) >= metrics.get("bytes/process", 0.0)
    assert "bytes/output" not in metrics  # nothing was written
    ledger.add("group", 5)
    ledger.start_window()
    assert ledger.peak == {"window": 0, "group": 5, "replay": 0}


def test_storage_bytes_counts_storages() -> None:
    x = torch.zeros(10)
    assert storage_bytes([x, x[:3], x.view(2, 5), torch.zeros(2)]) == 12 * FLOAT


@pytest.fixture(scope="module")
def run(session_dir: Path) -> Iterator[Run]:
    with tiny_run(session_dir, "prefix.chunk_size=8", "model.dtype=float32") as run:
        yield run


def peaks(run: Run, contract: str, group_size: int, concurrent: int, prompt: int = 40) -> dict[str, int]:
    responses = branches([9] * group_size)
    batches = batches_of(responses, concurrent)
    with UpdateWindow(run) as window:
        window.fix(branch.key for branch in responses)
        with window.prompt_group("g", ids(prompt, 1), contract) as group:
            window.replay(group, work_of(batches, [mean_loss(0.1)] * len(batches)))
        window.reduce()
    assert run.ledger.live == {"window": 0, "group": 0, "replay": 0}
    return dict(run.ledger.peak)


@pytest.mark.parametrize("contract", ["conventional", "response_only", "exact"])
def test_the_peak_of_a_replay_does_not_grow_with_the_group(run: Run, contract: str, report) -> None:
    two, eight = (peaks(run, contract, size, 1)["replay"] for size in (2, 8))
    report(f"{contract}, saved bytes at G = 2 and G = 8", f"{two} {eight}")
    assert two > 0
    assert abs(eight - two) <= 0.01 * two


def test_the_peak_of_a_replay_grows_with_the_responses_at_once(run: Run) -> None:
    one, four = (peaks(run, "response_only", 4, k)["replay"] for k in (1, 4))
    assert 3.5 * one < four < 4.5 * one


def test_the_peak_of_a_replay_does_not_grow_with_the_prompt(run: Run) -> None:
    """response_only: not at all; exact: one chunk's graph, the same for any number of chunks."""
    for contract in ("response_only", "exact"):
        short, long = (peaks(run, contract, 2, 1, prompt)["replay"] for prompt in (41, 321))
        assert abs(long - short) <= 0.01 * short
    short, long = (peaks(run, "conventional", 2, 1, prompt)["replay"] for prompt in (41, 321))
    assert long > 4 * short


def test_resident_bytes_follow_from_the_shapes(run: Run) -> None:
    arch = run.arch
    state = 39 * 2 * arch.num_layers * arch.num_kv_heads * arch.head_dim * FLOAT
    assert peaks(run, "conventional", 2, 1)["group"] == 0
    assert peaks(run, "response_only", 2, 1)["group"] == state
    assert peaks(run, "exact", 2, 1)["group"] == 2 * state


def test_run_bytes_are_parameters_and_gradient_buffers(run: Run) -> None:
    parameters = storage_bytes(run.core(run.model).parameters())
    buffers = sum(buffer.grad_data.nbytes for buffer in run.model.buffers)
    assert run.ledger.run == parameters + buffers
