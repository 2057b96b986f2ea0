"""Claim: prefix.keep_graph_bytes saves the sweep's second forward of the newest chunks, within its budget, and
changes no gradient.

Why the tests show it: exact and truncated gradients in float64 are compared with those without kept graphs
for budgets that hold no chunk, some and all; forwards of the model are counted; the bytes of what is kept
are measured and held against the budget, and are gone when the group closes.

Not shown: the gain in seconds (tools/bench_replay).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from harness import World, run_world
from lifetimes.tiny import tiny_run

from megatron_lrl.config import load_config
from megatron_lrl.errors import UserError
from megatron_lrl.lifetimes.run import Run
from passes.kept_ranks import LENGTHS, PROMPT, Window, exact_window

CHUNKS = 5  # of 8 tokens and a last one of 4


@pytest.fixture(scope="module")
def run(session_dir: Path) -> Iterator[Run]:
    with tiny_run(session_dir, "prefix.chunk_size=8") as run:
        yield run


def with_settings(run: Run, budget: int, truncate: int = 8192) -> None:
    prefix = run.config.prefix.model_copy(update={"keep_graph_bytes": budget, "truncate_tokens": truncate})
    run.config = run.config.model_copy(update={"prefix": prefix})


def require_same(one: Window, other: Window, contract: str) -> None:
    """Bit-equal under exact. Where the live part begins inside a page, a kept chunk reads the page in two pieces."""
    if contract == "exact":
        assert torch.equal(one.gradient, other.gradient)
    assert (one.gradient - other.gradient).norm() <= 1e-13 * other.gradient.norm()


@pytest.mark.parametrize(("contract", "truncate"), [("exact", 0), ("truncated", 13)])
def test_the_gradient_is_the_same_and_the_newest_chunks_are_not_fed_twice(
    run: Run, contract: str, truncate: int
) -> None:
    live = CHUNKS if contract == "exact" else 3  # 13 newest of 36 tokens: one of a chunk's 8, then 8 and 4
    with_settings(run, 0, truncate)
    plain = exact_window(run, contract)
    assert plain.forwards == CHUNKS + len(LENGTHS) + live + (contract == "truncated")
    with_settings(run, 1 << 40, truncate)
    everything = exact_window(run, contract)
    assert everything.forwards == plain.forwards - live
    require_same(everything, plain, contract)
    assert run.ledger.live["group"] == 0
    with_settings(run, everything.kept - 1, truncate)
    some = exact_window(run, contract)
    assert plain.forwards - live < some.forwards < plain.forwards
    assert 0 < some.kept < everything.kept
    require_same(some, plain, contract)
    with_settings(run, 1, truncate)
    nothing = exact_window(run, contract)
    assert nothing.forwards == plain.forwards and nothing.kept == 0
    require_same(nothing, plain, contract)


@pytest.mark.parametrize("share", [0.4, 0.6, 0.8])
def test_kept_bytes_stay_within_the_budget(run: Run, share: float) -> None:
    with_settings(run, 1 << 40)
    everything = exact_window(run, "exact").kept
    with_settings(run, int(share * everything))
    kept = exact_window(run, "exact").kept
    assert share / 2 * everything < kept <= share * everything


@pytest.mark.parametrize("world", [World(tp=2), World(cp=2)], ids=lambda world: world.name)
def test_in_worlds(world: World, session_dir: Path) -> None:
    for plain, kept, forwards_plain, forwards_kept in run_world(
        world, "passes.kept_ranks:compare", folder=str(session_dir)
    ):
        assert torch.equal(plain, kept)
        assert forwards_kept < forwards_plain


def test_a_pipeline_is_refused() -> None:
    with pytest.raises(UserError, match=r"prefix\.keep_graph_bytes = 5 needs parallel\.pp = 1"):
        load_config("/dev/null", ["model.hf=x", "prefix.keep_graph_bytes=5", "parallel.pp=2"])
    assert PROMPT == 4 + (CHUNKS - 1) * 8 + 1
