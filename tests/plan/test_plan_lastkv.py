"""Claim: under LastKV a plan says to the byte what a prompt's state and adjoint take on each pipeline stage, under each
contract, whatever part of a chunk the prompt ends with and however few own-layer keys and values a sweep keeps
(prefix.snapshot_bytes); and what a replay's graphs take within 10%.

Why the tests show it: windows are run on every rank of four worlds, with prompts that end before, on and after a
boundary, inside a chunk and inside the first one, captured in chunks that divide C, exceed it and do neither, and
compared with the plan of the rank's stage. What a plan says of 16 layers, P = 16,384 and C = 512 is compared with a
count by hand (tests/layers/lastkv/test_lastkv_memory.py measures a capture at that size against the same count).

Not shown: what else a plan says (test_plan), temporaries inside a layer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from harness import World, run_world
from oracle.tiny_models import make_hf_dir

from megatron_lrl.config import load_config
from megatron_lrl.lifetimes.open import read_model_architecture
from megatron_lrl.passes.restarts import kept_bytes
from megatron_lrl.plan.bytes import Work, open_plan_of_stage, stages_that_differ
from megatron_lrl.runtime import Layout

CONTRACTS = ("response_only", "exact", "truncated")
C, LIVE = 16, 21
RESPONSE, GROUP, CONCURRENT = 13, 4, 2
WORLDS = [World(), World(cp=2), World(pp=2), World(cp=2, pp=2)]
CAPTURE = {World(): (16, 7, 24), World(cp=2): (24,), World(pp=2): (7,), World(cp=2, pp=2): (16,)}
QUICK = (("one", 7, 4), ("cp2-pp2", 16, 4))
RESTARTS = (0, 4)
"""Chunks whose own-layer keys and values `prefix.snapshot_bytes` has room for: all, or as few as six chunks need."""
PROMPTS = (90, 81, 97, 40, 10)
"""Prefixes one token shorter: inside chunk 5; 5 chunks; 6 chunks; inside chunk 2; inside chunk 0."""


@pytest.fixture(scope="module")
def hf(session_dir: Path) -> Path:
    return make_hf_dir(session_dir / "plan-lastkv", "qwen3", 3, layers=6)


@pytest.mark.parametrize(
    ("world", "capture", "chunks"),
    [
        pytest.param(
            world,
            capture,
            chunks,
            marks=() if (world.name, capture, chunks) in QUICK else pytest.mark.slow,
            id=f"{world.name}-Z{capture}-{chunks or 'all'}",
        )
        for world in WORLDS
        for capture in CAPTURE[world]
        for chunks in RESTARTS
    ],
)
def test_planned_bytes_are_measured_bytes(
    world: World, capture: int, chunks: int, hf: Path, report: Any
) -> None:
    settings = [f"model.hf={hf}", "model.attention=lastkv", f"lastkv.chunk_size={C}"]
    settings += [
        f"prefix.chunk_size={capture}",
        f"prefix.truncate_tokens={LIVE}",
        f"replay.concurrent={CONCURRENT}",
    ]
    arch = read_model_architecture(load_config("/dev/null", settings))
    budget = chunks * kept_bytes(arch, Layout(world.tp, world.cp, world.pp), torch.float32).chunk
    settings += [f"prefix.snapshot_bytes={budget}"]
    works = [[prompt, RESPONSE, GROUP, CONCURRENT] for prompt in PROMPTS]
    ranks = run_world(
        world, "plan.plan_ranks:resident", settings=settings, contracts=list(CONTRACTS), works=works
    )
    config, worst = load_config("/dev/null", [*settings, *world.overrides]), 0.0
    for stage in stages_that_differ(world.pp):
        with open_plan_of_stage(config, arch, world.size, stage) as plan:
            planned = {
                contract: [plan.bytes_of(Work(*work), contract, recorded=True) for work in works]
                for contract in CONTRACTS
            }
        mine = [rank for rank in ranks if rank["stage"] == stage]
        assert len(mine) == world.size // world.pp
        for contract in CONTRACTS:
            for i, one in enumerate(planned[contract]):
                found = [rank[contract][i] for rank in mine]
                # The plan is that of the stage's first rank, whose share of the prompt is the largest.
                where = (contract, PROMPTS[i], stage)
                assert (one.state, one.groups) == (found[0]["state"], found[0]["group"]), where
                assert (one.adjoint == 0) == (contract == "response_only"), where
                assert all(other["group"] <= one.groups for other in found), where
                worst = max(worst, *(abs(one.replay / other["replay"] - 1) for other in found))
    report("largest relative error of planned graphs", worst)
    assert worst <= 0.1


def test_planned_state_of_a_long_prompt_by_hand(session_dir: Path, report: Any) -> None:
    layers, prompt, chunk = 16, 16_384, 512
    token = 2 * 1 * 8 * 4  # K and V, one KV head of 8, float32
    hf = make_hf_dir(
        session_dir / "plan-deep", "llama", 3, layers=layers, hidden=16, intermediate=16, heads=2, kv_heads=1,
        head_dim=8, max_positions=32768,
    )  # fmt: skip
    planned = {}
    for attention in ("full", "lastkv"):
        settings = [f"model.hf={hf}", f"model.attention={attention}", f"lastkv.chunk_size={chunk}"]
        config = load_config("/dev/null", settings)
        with open_plan_of_stage(config, read_model_architecture(config), 1, 0) as plan:
            planned[attention] = plan.resident(prompt, "response_only")[0]
    prefix = prompt - 1
    assert planned["full"] == layers * prefix * token
    assert planned["lastkv"] == (prefix + (layers - 1) * (chunk + prefix % chunk)) * token
    report("full attention's state / LastKV's", planned["full"] / planned["lastkv"])


def test_planned_sweep_of_a_long_prompt_by_hand(session_dir: Path, report: Any) -> None:
    """32 chunks, own-layer keys and values of at most 11 for the sweep: a restart before every 4th."""
    layers, prompt, chunk = 16, 16_384, 512
    token = 2 * 1 * 8 * 4
    hf = make_hf_dir(
        session_dir / "plan-sweep", "llama", 3, layers=layers, hidden=16, intermediate=16, heads=2, kv_heads=1,
        head_dim=8, max_positions=32768,
    )  # fmt: skip
    settings = [f"model.hf={hf}", "model.attention=lastkv", f"lastkv.chunk_size={chunk}"]
    found = {}
    for chunks in RESTARTS[0], 11:
        budget = chunks * (layers - 1) * chunk * token
        config = load_config("/dev/null", [*settings, f"prefix.snapshot_bytes={budget}"])
        with open_plan_of_stage(config, read_model_architecture(config), 1, 0) as plan:
            found[chunks] = (*plan.resident(prompt, "exact"), plan.refilled(prompt, "exact"))
    prefix = prompt - 1
    # The newest two chunks, of which the last lacks a token, and the last chunks before restarts 4, 8 ... 28.
    few = (prefix + (layers - 1) * (2 * chunk - 1 + 7 * chunk)) * token
    adjoint = (prefix + (layers - 1) * 2 * chunk) * token
    assert found[0] == (layers * prefix * token, adjoint, 0)
    assert found[11] == (few, adjoint, 3 * (layers - 1) * chunk * token)
    full = 2 * layers * prefix * token
    report(
        "full attention's state and adjoint / LastKV's, all and few", [full / sum(found[n]) for n in (0, 11)]
    )
