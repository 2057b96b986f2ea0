"""Claim: with rollout.record_routing a trajectory holds the experts and weights that the sampler gave each fed response
token; replay measures where it routes otherwise, and with replay.use_recorded_routing evaluates the recorded policy.

Why the tests show it: records of sampled responses are compared with what transformers' routers decide in a forward
over the full sequence, on one rank and in worlds that cut tokens (tp, cp), layers (pp) and experts (ep). A file whose
records were changed in known places must be measured as changed exactly there, and, if used, give the log-probabilities
and the gradient that transformers gives when its routers are made to decide so. The auxiliary loss is compared with its
formula on transformers' logits, the bias update with counts of transformers' choices.
Not shown: that training with records helps; records of samplers other than the built-in one.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import ONE, World, run_world
from oracle import hf_oracle, routing
from oracle.compare import compare_tensors, max_difference
from oracle.trajectories import window
from safetensors import safe_open
from safetensors.torch import load_file

from megatron_lrl.experts.record import Routing

BAR, REL_L2, WORST = 2e-5, 1e-5, 1e-4
WORLDS = [ONE, World(dp=2, ep=2), World(tp=2, cp=2), World(pp=2, dp=2, ep=2)]  # WORLDS[1::2] cut experts
SAMPLING = {
    "rollout__group_size": 3,
    "rollout__max_new_tokens": 6,
    "rollout__seed": 3,
    "rollout__record_routing": "true",
}
EXPERTS = 8


def in_world(world: World) -> str:
    return world.name


def sampled(world: World, answers: Any, folder: Path, model: str) -> list[dict[str, Any]]:
    """Groups of 3 prompts of unequal length, sampled with their routing."""
    prompts, out = folder / "prompts.jsonl", folder / f"{model}.jsonl"
    asked = [{"id": g["id"], "prompt_ids": g["prompt_ids"]} for g in window(9, shape=SHAPE)]
    prompts.write_text("".join(json.dumps(record) + "\n" for record in asked))
    case = {**answers.case(model, "mixed", out, "generate", **SAMPLING), "prompts": str(prompts)}
    run_world(world, "worlds.ranks:run_verbs", cases=[case])
    return [json.loads(line) for line in out.read_text().splitlines()]


SHAPE = ((23, (1,)), (9, (1,)), (1, (1,)))


def records_of(groups: list[dict[str, Any]]) -> list[list[routing.Record]]:
    return [[Routing.from_json(r["routing"]).tensors() for r in group["responses"]] for group in groups]


def by_expert(record: routing.Record) -> routing.Record:
    """The same record with each token's experts in ascending order."""
    order = record[0].argsort(-1)
    return record[0].gather(-1, order), record[1].gather(-1, order)


SOME = [
    ("qwen3_moe", ONE),
    ("glm4_moe-groups", World(pp=2, dp=2, ep=2)),
    *(pytest.param("qwen3_moe", world, marks=pytest.mark.slow) for world in WORLDS[1:]),
    *(pytest.param("glm4_moe-groups", world, marks=pytest.mark.slow) for world in WORLDS[:3]),
]


@pytest.mark.parametrize(("model", "world"), SOME)
def test_records_are_what_transformers_decides(
    model: str, world: World, answers: Any, tmp_path: Path
) -> None:
    groups = sampled(world, answers, tmp_path, model)
    expected = routing.decided(answers.hf(model), groups)
    lengths = [len(r["ids"]) for g in groups for r in g["responses"]]
    assert len(lengths) == 9 and max(lengths) == 6
    for group, of_group, others in zip(groups, records_of(groups), expected, strict=True):
        for response, record, other in zip(group["responses"], of_group, others, strict=True):
            assert record[0].shape[0] == len(response["ids"])
            if model == "qwen3_moe":  # transformers sorts them too
                assert torch.equal(record[0], other[0])
            (experts, weights), (their_experts, their_weights) = by_expert(record), by_expert(other)
            assert torch.equal(experts, their_experts)
            torch.testing.assert_close(weights, their_weights, rtol=0, atol=BAR)
    assert groups[0]["responses"][0]["routing"]["layers"] == (
        [0, 1, 2, 3] if model == "qwen3_moe" else [1, 2, 3]
    )


@pytest.fixture(scope="module")
def changed(answers: Any) -> tuple[str, list[list[routing.Record]], float, float]:
    """A window with records, some of them changed: its name, the records, the share and size of the changes."""
    groups = window(11, shape=((23, (1, 7, 2)), (11, (5, 4)), (1, (3,))))
    records = routing.decided(answers.hf("qwen3_moe"), groups)
    draw = torch.Generator().manual_seed(0)
    pairs = differing = 0
    largest = 0.0
    for of_group in records:
        for i, (expert_RLk, weight_RLk) in enumerate(of_group):
            other_RL = torch.rand(expert_RLk.shape[:2], generator=draw) < 0.25
            taken = torch.zeros(*expert_RLk.shape[:2], EXPERTS).scatter(-1, expert_RLk, 1.0)
            free = (taken + torch.rand(taken.shape, generator=draw) * 0.5).argmin(-1)
            expert_RLk = expert_RLk.clone()
            expert_RLk[..., 1] = torch.where(other_RL, free, expert_RLk[..., 1])
            shift = 0.1 * torch.rand(weight_RLk.shape, generator=draw)
            of_group[i] = expert_RLk, weight_RLk + shift
            pairs, differing = pairs + other_RL.numel(), differing + int(other_RL.sum())
            largest = max(largest, float(shift[~other_RL].max()))
    for group, of_group in zip(groups, records, strict=True):
        for response, record in zip(group["responses"], of_group, strict=True):
            response["routing"] = Routing.of((0, 1, 2, 3), *record).to_json()
    assert 10 < differing < pairs // 2
    return answers.add("changed-routing", groups), records, differing / pairs, largest


@pytest.mark.parametrize(
    "world",
    [ONE, World(tp=2, cp=2), *(pytest.param(w, marks=pytest.mark.slow) for w in WORLDS[1::2])],
    ids=str,
)
def test_records_are_measured_and_used(
    world: World, answers: Any, changed: Any, tmp_path: Path, report: Any
) -> None:
    name, records, share, largest = changed
    groups, hf = answers.groups[name], answers.hf("qwen3_moe")
    use = {"replay__use_recorded_routing": "true"}
    outs = {key: tmp_path / key for key in ("plain", "exact", "conventional", "scored")}
    cases = [
        answers.case("qwen3_moe", name, outs["plain"], contract="exact"),
        answers.case("qwen3_moe", name, outs["exact"], contract="exact", **use),
        answers.case("qwen3_moe", name, outs["conventional"], contract="conventional", **use),
        answers.case("qwen3_moe", name, outs["scored"], "score", **use),
    ]
    run_world(world, "worlds.ranks:run_verbs", cases=cases)
    plain = answers.grad("qwen3_moe", "exact", name)
    compare_tensors(load_file(outs["plain"]), plain).require(REL_L2, WORST, "measured only")
    scores, expected = routing.score_and_grad(hf, groups, records)
    assert compare_tensors(expected, plain).rel_l2 > 0.1  # the records matter
    ours = [json.loads(line)["logprobs"] for line in outs["scored"].read_text().splitlines()]
    distance = max_difference(ours, scores)
    report("recorded routing, log-probability", distance)
    assert distance <= BAR
    for key in ("exact", "conventional"):
        found = compare_tensors(load_file(outs[key]), expected)
        report(f"recorded routing, {key}", found)
        found.require(REL_L2, WORST, key)
    metadata = safe_open(outs["plain"], "pt").metadata()
    assert float(metadata["routing/mismatch"]) == pytest.approx(share, abs=1e-12)
    assert float(metadata["routing/weight_difference_max"]) == pytest.approx(largest, abs=1e-5)
    # Under the recorded experts later layers see other tokens: the router's own choice moves further away.
    assert float(safe_open(outs["exact"], "pt").metadata()["routing/mismatch"]) >= share / 2


def test_a_missing_record_is_named(answers: Any, tmp_path: Path) -> None:
    case = answers.case("qwen3_moe", "mixed", tmp_path / "out", replay__use_recorded_routing="true")
    with pytest.raises(Exception, match="response 0 of group 'g0' has no recorded routing"):
        run_world(ONE, "worlds.ranks:run_verbs", cases=[case])


@pytest.mark.parametrize(
    ("model", "world"),
    [
        ("qwen3_moe", World(tp=2, dp=2, ep=2)),
        ("glm4_moe-groups", ONE),
        pytest.param("glm4_moe-groups", World(tp=2, cp=2), marks=pytest.mark.slow),
        pytest.param("qwen3_moe", World(cp=2, pp=2), marks=pytest.mark.slow),
    ],
)
def test_the_auxiliary_loss_is_its_formula(
    model: str, world: World, answers: Any, tmp_path: Path, report: Any
) -> None:
    coefficient = 0.3
    outs = [tmp_path / "exact", tmp_path / "conventional"]
    cases = [
        answers.case(model, "mixed", out, contract=out.name, moe__aux_loss_coef=coefficient) for out in outs
    ]
    run_world(world, "worlds.ranks:run_verbs", cases=cases)
    loss = answers.grad(model, "exact")
    balance = routing.balance_grad(answers.hf(model), answers.groups["mixed"], coefficient)
    expected = {key: loss[key] + balance[key] for key in loss}
    assert compare_tensors(loss, expected).rel_l2 > 0.01
    for out in outs:
        found = compare_tensors(load_file(out), expected)
        report(out.name, found)
        found.require(REL_L2, WORST, out.name)


@pytest.mark.parametrize("world", [ONE, World(tp=2, dp=2, ep=2)], ids=in_world)
def test_the_bias_follows_the_load(world: World, answers: Any, tmp_path: Path) -> None:
    rate, model, groups = 0.125, "glm4_moe", answers.groups["mixed"]
    case = answers.case(
        model, "mixed", tmp_path / "grad", moe__router_bias_update_rate=rate, optimizer__lr=1e-9
    )
    ranks = run_world(world, "worlds.moe_ranks:step", cases=[{**case, "moved": str(tmp_path / "moved")}])
    before = dict(enumerate(routing.routers(hf_oracle.load(answers.hf(model))), 1))
    records = [record for of_group in routing.decided(answers.hf(model), groups) for record in of_group]
    for layer, router in before.items():
        load_E = sum(
            torch.bincount(expert_RLk[:, layer - 1].flatten(), minlength=EXPERTS) for expert_RLk, _ in records
        )
        expected = router.e_score_correction_bias + rate * torch.sign(load_E.double().mean() - load_E).float()
        for rank in ranks:
            torch.testing.assert_close(torch.tensor(rank[0]["bias"][layer]), expected, rtol=0, atol=1e-6)
