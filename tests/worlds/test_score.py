"""Claim: `score` gives transformers' log-probabilities, in every parallel layout and for every kind of model.

Why the tests show it: the verb's own code writes its file in each of the ten worlds, for each tiny model (three
families, tied and untied, every RoPE kind), for prompts of 37, 11 and 1 tokens captured in chunks of 13 and
responses of 1 to 13 tokens replayed two at a time; transformers runs each full sequence by itself. The bar, 2e-5
of a log-probability, is fp32 rounding; a wrong neighbour, position or shard moves them by far more.
Not shown: bfloat16, CUDA kernels, models wider than 32.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from harness import WORLDS, World, run_world
from oracle.compare import max_difference
from oracle.tiny_models import CASES

BAR = 2e-5
TEMPERATURE = ("qwen2", 0.7)


@pytest.mark.parametrize("world", WORLDS, ids=lambda world: world.name)
def test_score_is_that_of_transformers(world: World, answers: Any, tmp_path: Path, report: Any) -> None:
    asked = [*((case, 1.0) for case in CASES), TEMPERATURE]
    outs = [tmp_path / f"{i}.jsonl" for i in range(len(asked))]
    cases = [
        answers.case(case, "mixed", out, "score", rollout__temperature=temperature)
        for (case, temperature), out in zip(asked, outs, strict=True)
    ]
    run_world(world, "worlds.ranks:run_verbs", cases=cases)
    worst = {}
    for (case, temperature), out in zip(asked, outs, strict=True):
        records = [json.loads(line) for line in out.read_text().splitlines()]
        assert [record["id"] for record in records] == ["g0", "g1", "g2"]
        ours = [record["logprobs"] for record in records]
        worst[case, temperature] = max_difference(ours, answers.score(case, "mixed", temperature))
    report("max difference of a log-probability", max(worst.values()))
    assert all(distance <= BAR for distance in worst.values()), worst
