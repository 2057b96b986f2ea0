"""Claim: with an adapter, log-probabilities are those of the merged model and the gradient of every A and B is that of
plain autograd, under every contract, in every layout, for dense, mixed and hybrid models, experts included.

Why the tests show it: the oracle has no low-rank product: transformers runs the merged model, W + s B A, and the
gradient of A and B follows from that of W by the chain rule. Fused projections are adapted in part (q and v without
k), a bias stands beside some, GLM-4's gate and up are one projection, experts have an A and a B each, and the rank
divides nothing. `grad` writes nothing of the base.
Not shown: dropout, which is refused a meaning here; CUDA.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from harness import ONE, WORLDS, World, run_world
from harness.worlds import EP_WORLDS
from oracle import hf_oracle, lora
from oracle.compare import compare_tensors, max_difference
from safetensors.torch import load_file

BAR, REL_L2, WORST, FP64 = 2e-5, 1e-5, 1e-4, 1e-10
LIVE = 9
LEAVES = {
    "qwen2": ("q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"),
    "glm4": ("k_proj", "o_proj", "gate_up_proj", "down_proj"),
    "deepseek_v3": ("q_b_proj", "kv_b_proj", "o_proj", "down_proj"),
    "qwen3_moe": ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "down_proj"),
    "qwen3_next": ("q_proj", "in_proj_qkvz", "in_proj_ba", "out_proj", "gate_proj", "down_proj"),
    "qwen3_5": ("in_proj_qkv", "in_proj_z", "in_proj_a", "out_proj", "k_proj", "up_proj"),
}
CONTRACTS = ["exact", "response_only", "conventional", "truncated"]


def in_world(world: World) -> str:
    return world.name


class Adapted:
    """A model's adapter, its merged model, and what transformers says of that; made once a session."""

    def __init__(self, answers: Any, case: str) -> None:
        self.answers, self.case, hf = answers, case, answers.hf(case)
        root = answers.root / "adapted"
        experts = case == "qwen3_moe"
        self.adapter, self.merged = root / case, root / f"{case}-merged"
        if not self.merged.exists():
            lora.write_adapter(hf, self.adapter, LEAVES[case], experts=experts)
            lora.merged(hf, self.adapter, self.merged)
        self.groups = answers.groups["mixed"]

    def asked(self, out: Path, verb: str = "grad", **settings: Any) -> dict[str, Any]:
        path = json.dumps(str(self.adapter))
        return self.answers.case(self.case, "mixed", out, verb, adapter__path=path, **settings)

    def grad(self, contract: str) -> dict[str, Any]:
        if contract == "truncated":
            found = hf_oracle.grad_truncated(self.merged, self.groups, LIVE, None, None)
        else:
            found = getattr(hf_oracle, f"grad_{contract}")(self.merged, self.groups, None, None)
        return lora.chain(found, self.adapter)


def asked_in(world: World) -> list[tuple[str, str]]:
    """Every model, each under another contract; which one takes turns over the worlds. Dense ones have no experts."""
    turn = [*WORLDS, *EP_WORLDS].index(world)
    models = ["qwen3_moe", "qwen3_next"] if world.ep > 1 else list(LEAVES)
    if world.size == 8:  # half of them: eight ranks take long
        models = ["deepseek_v3", "qwen3_moe", "qwen3_next"]
    pairs = [(model, CONTRACTS[(turn + i) % 4]) for i, model in enumerate(models)]
    # Cut prefixes of recurrent layers are transformers' own matter; they have the exact one.
    return [(m, "exact" if c == "truncated" and m in ("qwen3_next", "qwen3_5") else c) for m, c in pairs]


@pytest.mark.parametrize("world", [*WORLDS, *EP_WORLDS], ids=in_world)
def test_score_and_grad_are_those_of_the_merged_model(
    world: World, answers: Any, tmp_path: Path, report: Any
) -> None:
    asked = asked_in(world)
    adapted = {model: Adapted(answers, model) for model, _ in asked}
    graded = {(m, c): tmp_path / f"{m}-{c}.safetensors" for m, c in asked}
    scored = tmp_path / "scored.jsonl"
    cases = [adapted[m].asked(out, contract=c, T=LIVE) for (m, c), out in graded.items()]
    run_world(world, "worlds.ranks:run_verbs", cases=[*cases, adapted["qwen3_next"].asked(scored, "score")])
    ours = [json.loads(line)["logprobs"] for line in scored.read_text().splitlines()]
    merged = adapted["qwen3_next"]
    assert max_difference(ours, hf_oracle.score(merged.merged, merged.groups)) <= BAR
    found = {
        f"{m} {c}": compare_tensors(load_file(out), adapted[m].grad(c)) for (m, c), out in graded.items()
    }
    name, farthest = max(found.items(), key=lambda item: item[1].rel_l2)
    report(f"farthest of {len(found)}: {name}", farthest)
    for name, comparison in found.items():
        comparison.require(REL_L2, WORST, name)


def test_fp64_on_one_rank(answers: Any, tmp_path: Path, report: Any) -> None:
    """Against a plain float64 model with the merged weights, which are float64 here too."""
    from oracle import plain_fp64

    adapted = Adapted(answers, "qwen2")
    wide = tmp_path / "wide"
    lora.merged(adapted.answers.hf("qwen2"), adapted.adapter, wide, widen=True)
    outs = {c: tmp_path / f"{c}.safetensors" for c in ("exact", "response_only")}
    cases = [
        adapted.asked(out, contract=contract, model__dtype='"float64"') for contract, out in outs.items()
    ]
    run_world(ONE, "worlds.ranks:run_verbs", cases=cases)
    for contract, out in outs.items():
        oracle = plain_fp64.grad(wide, adapted.groups, None, contract == "response_only")
        comparison = compare_tensors(load_file(out), lora.chain(oracle, adapted.adapter))
        report(f"{contract}, float64", comparison)
        comparison.require(FP64, FP64, contract)
