"""Claim: with `prefix.snapshot_bytes`, `exact` and `truncated` keep own-layer keys and values of few LastKV chunks, run
the others forward once more, and give the same gradient to the last bit, in every kind of layout.

Why the tests show it: prompts of nine and sixteen chunks and a bit are swept with every chunk's own-layer keys and
values and with fewer, captured in pieces that divide C, exceed it and do neither, and truncated inside a chunk. Freed
pages are refused when read and poisoned at the end. Which pages stay is worked out by hand, bytes are those that the
state owns. The dense sweep itself is compared with the oracle in test_lastkv_grad, one coarse one here.
Not shown: what a further forward costs (tools/bench_lastkv.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import World, run_world
from oracle import lastkv_reference
from oracle.compare import compare_tensors
from oracle.trajectories import window, write_jsonl
from safetensors.torch import load_file

from layers.lastkv.tiny import LAYERS, VOCAB, lastkv_run, token_ids, write_lastkv
from megatron_lrl.errors import UserError
from megatron_lrl.layers.advance import advance
from megatron_lrl.lifetimes.window import UpdateWindow
from megatron_lrl.models.hf_config import read_architecture
from megatron_lrl.passes.restarts import kept_bytes, plan_restarts
from megatron_lrl.runtime import Layout, Runtime

C = 8
GROUPS = window(7, VOCAB, ((16 * C + 4, (3, C, 2 * C + 1)), (9 * C + 1, (2, 5)), (C, (4,))))


def settings(contract: str, capture: int, budget: int, live: int = 9 * C + 5) -> list[str]:
    return [
        "model.attention=lastkv",
        f"prefix.contract={contract}",
        f"prefix.truncate_tokens={live}",
        f"prefix.chunk_size={capture}",
        f"prefix.snapshot_bytes={budget}",
        "replay.concurrent=2",
        "replay.check_poison=true",
    ]


def chunk_bytes(hf: Path, layout: Layout, dtype: torch.dtype = torch.float32) -> int:
    """Own-layer keys and values of one chunk, on the rank that has most."""
    return kept_bytes(read_architecture(hf), layout, dtype).chunk


@pytest.mark.parametrize(
    "world",
    [World(), World(pp=2),
     *(pytest.param(w, marks=pytest.mark.slow) for w in (World(cp=2), World(tp=2, cp=2), World(cp=2, pp=2)))],
    ids=lambda world: world.name,
)  # fmt: skip
def test_fewer_restarts_change_no_bit(world: World, models: Path, tmp_path: Path, report: Any) -> None:
    hf = write_lastkv(models, "qwen3", C)
    one = chunk_bytes(hf, Layout(world.tp, world.cp, world.pp))
    # 17 chunks: a restart before every one, every second, every third.
    budgets = (0, 10 * one, 8 * one) if world == World() else (0, 8 * one)
    captures = {"exact": (7, 2 * C, C) if world == World() else (7,), "truncated": (7,)}
    trajectories, cases, outs = str(write_jsonl(tmp_path / "t.jsonl", GROUPS)), [], {}
    for contract, sizes in captures.items():
        for capture in sizes:
            for budget in budgets:
                out = outs[contract, capture, budget] = (
                    tmp_path / f"{contract}-{capture}-{budget}.safetensors"
                )
                case = {"verb": "grad", "hf": str(hf), "trajectories": trajectories, "out": str(out)}
                cases.append({**case, "settings": settings(contract, capture, budget)})
    run_world(world, "worlds.ranks:run_verbs", cases=cases)
    for contract, sizes in captures.items():
        for capture in sizes:
            dense, *coarse = (load_file(outs[contract, capture, budget]) for budget in budgets)
            for ours in coarse:
                assert all(torch.equal(ours[name], dense[name]) for name in dense), (contract, capture)
    expected = lastkv_reference.grad(hf, None, GROUPS, "exact", C, True, 0)
    comparison = compare_tensors(load_file(outs["exact", 7, budgets[-1]]), expected)
    report("exact with few restarts", comparison)
    comparison.require(1e-5, 1e-4)


def chunks_held(run: Any, group: Any) -> list[set[int]]:
    """By own layer, the chunks whose keys and values are there."""
    layers = [layer for number, layer in group.state.layers() if number != LAYERS]
    return [{page.chunk for page in layer.own if not page.dropped} for layer in layers]


@pytest.mark.parametrize(
    ("prefix", "contract", "chunks", "held"),
    [
        # 16 chunks and the open one: restarts before chunks 0, 3, 6, 9, 12 and 15; forks read the newest two.
        (16 * C + 3, "exact", 8, {2, 5, 8, 11, 14, 15, 16}),
        (16 * C, "exact", 7, {3, 7, 11, 14, 15}),
        # Live from the middle of chunk 7 on: that is a restart of its own, then before 8, 10, 12 and 14.
        (16 * C, "truncated", 6, {6, 7, 9, 11, 13, 14, 15}),
        (16 * C + 3, "exact", 0, set(range(17))),
    ],
)
def test_what_stays(
    prefix: int, contract: str, chunks: int, held: set[int], models: Path, runtime: Runtime, report: Any
) -> None:
    hf = write_lastkv(models, "llama", C)
    one = chunk_bytes(hf, Layout(), torch.float64)
    live = 8 * C + C // 2
    with lastkv_run(runtime, hf, *settings(contract, 5, chunks * one, live), gradients=True) as run:
        with UpdateWindow(run) as opened, opened.prompt_group("g", token_ids(prefix + 1, 1)) as group:
            assert chunks_held(run, group) == [held] * (LAYERS - 1)
            tokens = sum(min(C, prefix - C * chunk) for chunk in held)
            layers, itemsize = one // (C * (LAYERS - 1)), 8
            assert group.state is not None and layers * (LAYERS - 1) * C == one and itemsize == 8
            assert group.state.nbytes == layers * (prefix + (LAYERS - 1) * tokens)
            assert run.ledger.live["group"] == group.state.nbytes
            before = group.state.nbytes
            with torch.enable_grad():
                group.fork(1)
            group.sweep()
            assert chunks_held(run, group) == [held] * (LAYERS - 1)
            made_again = run.ledger.peak["group"] - before
            report("bytes kept, and more at the peak of the sweep", f"{before}, {made_again}")
            if chunks:
                spare = {chunk for chunk in held if chunk < (prefix - 1) // C - 1}
                assert len(spare) * one <= chunks * one
        assert run.ledger.live["group"] == 0


def test_a_dropped_page_is_not_read(models: Path, runtime: Runtime) -> None:
    hf = write_lastkv(models, "llama", C)
    chosen = settings("exact", C, 8 * chunk_bytes(hf, Layout(), torch.float64))
    with lastkv_run(runtime, hf, *chosen, gradients=True) as run, UpdateWindow(run) as opened:
        with opened.prompt_group("g", token_ids(16 * C + 1, 1)) as group:
            assert group.state is not None
            with pytest.raises(RuntimeError, match="chunk 1 were dropped"):
                advance(run.model, group.state.before(2), [[1]])


def parts_of(starts: Sequence[int], budget_chunks: int, hf: Path, live_from: int = 0) -> Any:
    arch = read_architecture(hf)
    budget = budget_chunks * chunk_bytes(hf, Layout())
    found = plan_restarts(starts, live_from, arch, Layout(), torch.float32, budget, "g")
    return [(part.advances, part.again) for part in found.parts]


def test_parts_and_what_they_run_again(models: Path) -> None:
    hf = write_lastkv(models, "qwen3", C)
    starts = [0, 5, 8, 13, 16, 24, 29, 32, 40]  # chunks 0 0 1 1 2 3 3 4 5
    assert parts_of(starts, 0, hf) == [(tuple(range(9)), ())]
    assert parts_of(starts, 6, hf) == [(tuple(range(9)), ())]
    # Every second: chunk 1's pages stay for the restart at 2, chunk 3's for that at 4; 4 and 5 are the newest.
    assert parts_of(starts, 4, hf) == [((0, 1, 2, 3), (0, 1)), ((4, 5, 6), (4,)), ((7, 8), ())]
    # From the middle of chunk 0: a part of its own.
    assert parts_of(starts, 5, hf, 5) == [((1,), ()), ((2, 3, 4), (2, 3)), ((5, 6, 7), (5, 6)), ((8,), ())]
    with pytest.raises(UserError, match="takes at least"):
        parts_of(starts, 3, hf)
