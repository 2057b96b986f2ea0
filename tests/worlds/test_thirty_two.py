"""Claim: the layouts that clusters run, 32 ranks as tp4·cp4·pp2 and with ep = 4, score and differentiate as one rank
does, train, survive a killed rank bit-equal, and go on in another layout.

Why the tests show it: 32 real processes run the verbs' own code over gloo on tiny models whose heads and experts the
layout cuts to one on a rank: dense, mixture, hybrid and latent; transformers is the oracle of scores and gradients. A
rank of the training run is killed with SIGKILL and the same command goes on; the exported weights are those of a run
that nothing disturbed, to the bit, and to rounding those of one rank.
Not shown: more than one machine, NCCL, any speed: ranks outnumber cores by far. Forked, they take some 3 GiB in all.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cli.runs import Runs, relative_l2, require_equal_weights, run
from harness import RankFailure, World, run_world
from oracle import hf_oracle
from oracle.compare import compare_tensors, max_difference
from oracle.tiny_models import make_hf_dir
from oracle.trajectories import write_jsonl
from safetensors.torch import load_file

pytestmark = pytest.mark.slow
DENSE, SPARSE = World(tp=4, cp=4, pp=2), World(tp=4, cp=4, pp=2, ep=4)
BAR, REL_L2, WORST = 2e-5, 1e-5, 1e-4
LONG_S = 900.0
MODELS: dict[str, tuple[World, str, dict[str, Any]]] = {
    "dense": (DENSE, "qwen3", {"heads": 8, "kv_heads": 4}),
    "hybrid": (
        DENSE,
        "qwen3_5",
        {
            "heads": 8, "kv_heads": 4, "linear_num_key_heads": 16, "linear_num_value_heads": 16,
            "linear_key_head_dim": 4, "linear_value_head_dim": 4,
        },
    ),
    "mixture": (SPARSE, "qwen3_moe", {"heads": 8, "kv_heads": 4}),
    "latent": (SPARSE, "deepseek_v3", {"heads": 4}),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_score_and_grad_are_those_of_transformers(
    name: str, answers: Any, session_dir: Path, tmp_path: Path, report: Any
) -> None:
    world, family, fields = MODELS[name]
    hf = make_hf_dir(session_dir / f"thirty-two-{name}", family, 5, **fields)
    groups = answers.groups["mixed"]
    file = write_jsonl(tmp_path / "groups.jsonl", groups)
    graded = {c: tmp_path / f"{c}.safetensors" for c in ("exact", "response_only")}
    scored = tmp_path / "scored.jsonl"
    shared = {"hf": str(hf), "trajectories": str(file)}
    settings = ["prefix.chunk_size=13", "replay.concurrent=2", "replay.check_poison=true"]
    cases = [{**shared, "verb": "score", "out": str(scored), "settings": settings}]
    cases += [
        {**shared, "verb": "grad", "out": str(out), "settings": [*settings, f"prefix.contract={contract}"]}
        for contract, out in graded.items()
    ]
    run_world(world, "worlds.ranks:run_verbs", cases=cases, timeout_s=LONG_S)
    ours = [json.loads(line)["logprobs"] for line in scored.read_text().splitlines()]
    distance = max_difference(ours, hf_oracle.score(hf, groups))
    report("scores, largest difference", distance)
    assert distance <= BAR
    for contract, out in graded.items():
        oracle = getattr(hf_oracle, f"grad_{contract}")(hf, groups, None, None)
        comparison = compare_tensors(load_file(out), oracle)
        report(contract, comparison)
        comparison.require(REL_L2, WORST, contract)


def test_training_survives_a_kill_and_goes_on_in_another_layout(tmp_path: Path, report: Any) -> None:
    runs = Runs(tmp_path, heads=4, kv_heads=4)
    settings = ["train.groups_per_update=2", "train.save_every=1", "rollout.temperature=0.7"]
    places = DENSE.overrides
    run(runs.train("whole", *settings, *places), runs.export("whole", 2), world=DENSE, timeout_s=LONG_S)
    words = runs.train("killed", *settings, *places)
    with pytest.raises(RankFailure):
        run_world(
            DENSE, "cli.kill_ranks:run", arguments=words, rank=21, kind="forward", at=24, timeout_s=LONG_S
        )
    run(words, runs.export("killed", 2), world=DENSE, timeout_s=LONG_S)
    require_equal_weights(runs.weights("killed", 2), runs.weights("whole", 2))
    run(runs.train("whole", *settings, "train.updates=3", "parallel.tp=2"), world=World(tp=2, dp=2))
    run(runs.train("alone", *settings, "train.updates=3"), runs.export("alone", 3), runs.export("whole", 3))
    distance = relative_l2(runs.weights("whole", 3), runs.weights("alone", 3))
    report("weights after 3 updates, 32 ranks and then 4, against one", distance)
    assert distance < 1e-4
