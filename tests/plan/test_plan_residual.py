"""Claim: a plan of a bfloat16 model with a float32 residual stream says what a run takes: everything that lives longer
than a graph to the byte, and unchanged by the setting; graphs, which grow by it, within 10%.

Why the test shows it: a window is run and measured on every rank of four worlds under each contract, and compared with
the plan of the rank's stage and with the plan without the setting.

Not shown: other families and LastKV (test_plan_families, test_plan_lastkv: nothing there depends on the stream).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from harness import World, run_world
from oracle.tiny_models import make_hf_dir

from megatron_lrl.config import load_config
from megatron_lrl.models.hf_config import read_architecture
from megatron_lrl.plan.bytes import Work, open_plan_of_stage, stages_that_differ

CONTRACTS = ("exact", "response_only", "conventional")
WORK = (90, 13, 4, 2)
SETTINGS = ("prefix.chunk_size=16", "replay.concurrent=2", "model.dtype=bfloat16")
EXACT = ("parameters", "gradients", "optimizer", "reference", "state", "group")
WORLDS = [
    World(),
    World(pp=2),
    *(pytest.param(w, marks=pytest.mark.slow) for w in (World(tp=2), World(cp=2))),
]


@pytest.fixture(scope="module")
def hf(session_dir: Path) -> Path:
    return make_hf_dir(session_dir / "plan-residual", "qwen3", 3, layers=6)


@pytest.mark.parametrize("world", WORLDS, ids=lambda world: world.name)
def test_planned_bytes_are_measured_bytes(world: World, hf: Path, report: Any) -> None:
    settings = [f"model.hf={hf}", *SETTINGS, "model.residual_dtype=float32"]
    ranks = run_world(
        world, "plan.plan_ranks:measured", settings=settings, contracts=list(CONTRACTS), work=list(WORK)
    )
    arch, worst = read_architecture(hf), 0.0
    planned: dict[str, list[Any]] = {}
    for stage in stages_that_differ(world.pp):
        for residual in ("float32", "model"):
            config = load_config(
                "/dev/null", [*settings, *world.overrides, f"model.residual_dtype={residual}"]
            )
            with open_plan_of_stage(config, arch, world.size, stage) as plan:
                planned[residual] = [plan.bytes_of(Work(*WORK), c, recorded=True) for c in CONTRACTS]
        mine = [rank for rank in ranks if rank["stage"] == stage]
        for i, contract in enumerate(CONTRACTS):
            wide, narrow = planned["float32"][i], planned["model"][i]
            found = {**vars(wide), "group": wide.groups}
            for name in EXACT:
                assert found[name] == mine[0][contract][name], (contract, name)
                assert found[name] == {**vars(narrow), "group": narrow.groups}[name], (contract, name)
            assert wide.replay > narrow.replay, contract
            worst = max(worst, *(abs(wide.replay / rank[contract]["replay"] - 1) for rank in mine))
            report(f"{contract}, stage {stage}: graphs with / without", wide.replay / narrow.replay)
    report("largest relative error of planned graphs", worst)
    assert worst <= 0.1
