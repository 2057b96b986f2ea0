"""Claim: with an adapter the plan says what a run then takes; buffers and optimizer are the adapter's alone, the base
has no gradient, and a window saves less than one that trains every parameter.

Why the tests show it: as `test_plan.py`, measured on every rank of three worlds; the sizes of A and B are counted by
hand; saved bytes of the same window are compared with full training's.
Not shown: time (tools/bench_lora.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from harness import ONE, World, run_world
from oracle.tiny_models import make_hf_dir

from megatron_lrl.config import load_config
from megatron_lrl.models.hf_config import read_architecture
from megatron_lrl.plan.bytes import Work, open_plan_of_stage, stages_that_differ

CONTRACTS = ("exact", "response_only")
WORK = (90, 13, 4, 2)
SETTINGS = ("prefix.chunk_size=16", "replay.concurrent=2", "loss.kl_coef=0.1")
ADAPTER = ("adapter.rank=3", 'adapter.targets=["q_proj", "v_proj", "down_proj"]')
EXACT = ("parameters", "gradients", "optimizer", "reference", "state", "group")


@pytest.fixture(scope="module")
def hf(session_dir: Path) -> Path:
    return make_hf_dir(session_dir / "plan-adapter", "qwen3", 3, layers=4)


@pytest.mark.parametrize("world", [ONE, World(tp=2, pp=2), World(cp=2, dp=2)], ids=lambda world: world.name)
def test_planned_bytes_are_measured_bytes(world: World, hf: Path, report: Any) -> None:
    settings = [f"model.hf={hf}", *SETTINGS, *ADAPTER]
    ranks = run_world(
        world, "plan.plan_ranks:measured", settings=settings, contracts=list(CONTRACTS), work=list(WORK)
    )
    config = load_config("/dev/null", [*settings, *world.overrides])
    arch, worst = read_architecture(hf), 0.0
    for stage in stages_that_differ(world.pp):
        with open_plan_of_stage(config, arch, world.size, stage) as plan:
            planned = {c: plan.bytes_of(Work(*WORK), c, recorded=True) for c in CONTRACTS}
        for rank in (rank for rank in ranks if rank["stage"] == stage):
            for contract in CONTRACTS:
                found = {**vars(planned[contract]), "group": planned[contract].groups}
                assert all(rank[contract][name] <= 1.01 * found[name] for name in EXACT), (contract, rank)
                worst = max(worst, abs(planned[contract].replay / rank[contract]["replay"] - 1))
                assert found["reference"] == 0  # the policy's own base
    report("largest relative error of planned graphs", worst)
    assert worst <= 0.1


def test_buffers_are_the_adapters_alone(hf: Path, report: Any) -> None:
    """Rank 3: A [3, i] and B [o, 3] of q, v and down in 4 layers, 4 bytes each, and twice that of moments."""
    arch = read_architecture(hf)
    h, f, q, kv = (
        arch.hidden_size,
        arch.ffn_hidden_size,
        arch.num_heads * arch.head_dim,
        arch.num_kv_heads * arch.head_dim,
    )
    count = 4 * 3 * ((h + q) + (h + kv) + (f + h))
    found = {}
    for name, more in (("full", ()), ("adapter", ADAPTER)):
        config = load_config("/dev/null", [f"model.hf={hf}", *SETTINGS[:2], *more])
        with open_plan_of_stage(config, arch, 1, 0) as plan:
            found[name] = plan.bytes_of(Work(*WORK), "exact", recorded=True)
    ours, full = found["adapter"], found["full"]
    padding = 1 << 12
    assert 4 * count <= ours.gradients <= 4 * count + padding
    assert 8 * count <= ours.optimizer <= 8 * count + padding  # a float32 parameter is its own master
    assert ours.parameters == full.parameters + 4 * count
    report(
        "saved bytes of a replay and of a sweep, adapter / full",
        f"{ours.replay_graph / full.replay_graph:.2f}, {ours.sweep_graph / full.sweep_graph:.2f}",
    )
    assert ours.replay_graph < full.replay_graph and ours.sweep_graph < full.sweep_graph
