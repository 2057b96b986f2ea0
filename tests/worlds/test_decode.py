"""Claim: groups that decode together sample the ids, log-probabilities and routing that each samples alone, however few
fit a budget, in every layout and with every layer kind.

Why the tests show it: group after group is the slow reference; the same prompts go through one flat list of branches,
and through a budget of a group and a half, where groups wait and enter when others end; a stop id staggers the ends.
Prompts of 1 to 37 tokens stand at different places of LastKV chunks. The branches of every step are counted, so that
a sampler that did not decode together would show. float64.
Not shown: seconds (tools/bench_decode.py); that what is sampled alone is the policy (test_sampler.py).
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from harness import ONE, World, run_world
from layers.lastkv.tiny import write_lastkv

SLOW = [World(tp=2), World(cp=2), World(pp=2), World(dp=2), World(dp=2, ep=2)]
WORLDS = [ONE, World(cp=2, pp=2), *(pytest.param(w, marks=pytest.mark.slow) for w in SLOW)]
KINDS = {"qwen3": False, "qwen3_5": False, "qwen3_moe": True, "lastkv": False}  # whether routing is recorded
GROUP, LONGEST, VOCAB = 4, 7, 131


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    number = random.Random(7)
    ids = [[number.randrange(VOCAB) for _ in range(length)] for length in (37, 11, 1, 12)]
    path = tmp_path_factory.mktemp("decode") / "prompts.jsonl"
    path.write_text("".join(json.dumps({"id": f"p{i}", "prompt_ids": x}) + "\n" for i, x in enumerate(ids)))
    return path


@pytest.mark.parametrize("world", WORLDS, ids=lambda world: world.name)
def test_together_samples_what_each_group_samples_alone(
    world: World, answers: Any, prompts: Path, tmp_path: Path, report: Any
) -> None:
    kinds = ["qwen3_moe"] if world.ep > 1 else ["qwen3_5", "lastkv"] if world.size > 2 else list(KINDS)
    cases = []
    for kind, recorded in KINDS.items():
        case = answers.case(
            "qwen3" if kind == "lastkv" else kind,
            "mixed",
            tmp_path / "unused",
            model__dtype="float64",
            rollout__group_size=GROUP,
            rollout__max_new_tokens=LONGEST,
            rollout__seed=3,
            rollout__record_routing=str(recorded).lower(),
        )
        if kind == "lastkv":
            case["hf"] = str(write_lastkv(answers.root, "qwen3", 5))
            case["settings"].append("model.attention=lastkv")
        if kind in kinds:
            cases.append({**case, "prompts": str(prompts)})
    ranks = run_world(world, "worlds.decode_ranks:decoded", cases=cases)
    groups = 4 // world.dp
    for of_rank in ranks:
        for kind, ways in zip(kinds, of_rank, strict=True):
            alone, together, small = ways["alone"], ways["together"], ways["small"]
            worst = 0.0
            for way in (together, small):
                for theirs, ours in zip(alone["responses"], way["responses"], strict=True):
                    for (ids, logprobs, routing), (own_ids, own_logprobs, own_routing) in zip(
                        theirs, ours, strict=True
                    ):
                        assert own_ids == ids and own_routing == routing, (kind, way["branches"])
                        worst = max(
                            [worst, *(abs(a - b) for a, b in zip(logprobs, own_logprobs, strict=True))]
                        )
                assert way["entropies"] == pytest.approx(alone["entropies"], rel=1e-9)
            report(f"{kind}: branches together, small budget", f"{together['branches']}, {small['branches']}")
            report(f"{kind}: log-probabilities, bubble alone and together",
                   f"{worst:.1e}, {alone['bubble']:.2f}, {together['bubble']:.2f}")  # fmt: skip
            assert worst <= 1e-12
            assert max(alone["branches"]) == GROUP
            assert together["branches"][0] == groups * GROUP
            assert max(small["branches"]) < groups * GROUP and len(small["branches"]) > LONGEST
            if world.pp > 1:  # one micro-batch at a time would leave half of it idle
                assert max(alone["bubble"], together["bubble"]) < 0.5
