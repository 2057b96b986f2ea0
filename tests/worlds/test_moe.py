"""Claim: models with experts give transformers' log-probabilities and gradients in every parallel layout, also where
one copy of the experts lies on several data-parallel replicas, which then take their passes in lockstep.

Why the tests show it: the verbs' own code runs in the worlds of dense models and in four with expert parallelism (over
dp, over cp, with tp, with pp), for softmax and sigmoid routers, groups of experts, shared experts, dense layers among
sparse ones, packed and single experts, and GLM-4's dense sandwich layers; transformers runs each response by itself.
Prompts of 37, 11 and 1 tokens and 3 groups on 2 replicas make the replicas' passes differ in number and kind. Routing
ties are excluded: the margin between the chosen and the next expert is measured and lies far above rounding. After a
step parameters and the gradient's norm are those of one rank; a failure of one replica reaches the others.
Not shown: bfloat16; NCCL; Transformer Engine's grouped experts; many experts.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from harness import ONE, WORLDS, RankFailure, World, run_world
from harness.worlds import EP_WORLDS
from oracle import hf_oracle
from oracle.compare import compare_tensors, max_difference
from safetensors.torch import load_file

BAR, REL_L2, WORST, MARGIN = 2e-5, 1e-5, 1e-4, 1e-4
WIDE_EP_WORLDS = [
    World(cp=2, dp=2, ep=4),
    World(tp=2, cp=2, ep=2),
    World(cp=2, dp=2, ep=2),
    World(dp=4, ep=2),
]
MODELS = ["qwen3_moe", "qwen3_moe-sparse", "glm4_moe", "glm4_moe-groups", "glm4", "qwen3_next"]
CONTRACTS = ["conventional", "response_only", "exact"]
ASKED = [
    ("qwen3_moe", "exact"),
    ("glm4_moe-groups", "exact"),
    ("glm4_moe", "response_only"),
    ("qwen3_moe-sparse", "conventional"),
]


def in_world(world: World) -> str:
    return world.name


def models_of(world: World, models: list[str]) -> list[str]:
    """Dense models have no experts to spread."""
    return [model for model in models if world.ep == 1 or model != "glm4"]


def check(world: World, answers: Any, folder: Path, asked: list[tuple[str, str]], report: Any) -> None:
    """`score` of each model and `grad` of each (model, contract) in one launch, against transformers."""
    models = sorted({model for model, _ in asked})
    scored = {model: folder / f"{model}.jsonl" for model in models}
    graded = {(model, contract): folder / f"{model}-{contract}.safetensors" for model, contract in asked}
    cases = [answers.case(model, "mixed", out, "score") for model, out in scored.items()]
    cases += [
        answers.case(model, "mixed", out, contract=contract) for (model, contract), out in graded.items()
    ]
    run_world(world, "worlds.ranks:run_verbs", cases=cases)
    for model, out in scored.items():
        ours = [json.loads(line)["logprobs"] for line in out.read_text().splitlines()]
        distance = max_difference(ours, answers.score(model, "mixed"))
        assert distance <= BAR, (model, distance)
    found = {
        f"{model} {contract}": compare_tensors(load_file(out), answers.grad(model, contract))
        for (model, contract), out in graded.items()
    }
    name, farthest = max(found.items(), key=lambda item: item[1].rel_l2)
    report(f"farthest of {len(found)}: {name}", farthest)
    for name, comparison in found.items():
        comparison.require(REL_L2, WORST, name)


@pytest.mark.parametrize("world", [ONE, *EP_WORLDS], ids=in_world)
def test_score_and_grad_are_those_of_transformers(
    world: World, answers: Any, tmp_path: Path, report: Any
) -> None:
    check(world, answers, tmp_path, ASKED if world.ep > 1 else [*ASKED, ("glm4", "exact")], report)


@pytest.mark.slow
@pytest.mark.parametrize("world", [*WORLDS, *EP_WORLDS, *WIDE_EP_WORLDS], ids=in_world)
def test_every_model_and_contract_in_every_world(
    world: World, answers: Any, tmp_path: Path, report: Any
) -> None:
    asked = [(model, contract) for model in models_of(world, MODELS) for contract in CONTRACTS]
    check(world, answers, tmp_path, asked, report)


def test_no_token_is_near_a_tie(answers: Any, report: Any) -> None:
    """Rounding is below 1e-5; no token of the windows is so close to other experts."""
    margins = {
        model: hf_oracle.routing_margin(answers.hf(model), answers.groups["mixed"])
        for model in MODELS
        if model != "glm4"
    }
    report("smallest routing margin", min(margins.values()))
    assert all(margin > MARGIN for margin in margins.values()), margins


@pytest.mark.parametrize("world", [World(dp=2, ep=2), World(pp=2, dp=2, ep=2)], ids=in_world)
def test_rounds_of_lastkv_keep_step(world: World, answers: Any, tmp_path: Path, report: Any) -> None:
    """Responses that cross LastKV boundaries take several passes each; the gradient is that of one rank."""
    asked = {"model__attention": '"lastkv"', "lastkv__chunk_size": 5, "Z": 7}
    found: dict[str, Any] = {}
    for where in (ONE, world):
        outs = {contract: tmp_path / f"{where.name}-{contract}" for contract in ("response_only", "exact")}
        cases = [answers.case("glm4_moe", "mixed", out, contract=key, **asked) for key, out in outs.items()]
        run_world(where, "worlds.ranks:run_verbs", cases=cases)
        found[where.name] = {key: load_file(out) for key, out in outs.items()}
    for contract, ours in found[world.name].items():
        comparison = compare_tensors(ours, found["one"][contract])
        report(contract, comparison)
        comparison.require(REL_L2, WORST, contract)
    assert compare_tensors(found["one"]["exact"], found["one"]["response_only"]).rel_l2 > 0.1


STEP = {"optimizer__lr": 0.1, "optimizer__eps": 1.0, "optimizer__clip_grad": 0.5, "Z": 13, "K": 2}


def stepped(world: World, answers: Any, folder: Path, model: str, **settings: Any) -> tuple[list[Any], Any]:
    """Every rank's findings of one optimizer step, and the parameters after it."""
    out = folder / f"{world.name}-{model}"
    case = answers.case(model, "mixed", out, contract="exact", **{**STEP, **settings})
    ranks = run_world(world, "worlds.moe_ranks:step", cases=[{**case, "moved": str(out)}])
    return [rank[0] for rank in ranks], load_file(out)


@pytest.fixture(scope="module")
def alone(answers: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """One rank's step, with eps = 1: a step is then a smooth function of the gradient."""
    return stepped(ONE, answers, tmp_path_factory.mktemp("alone"), "glm4_moe")


@pytest.mark.parametrize("world", [World(dp=2, ep=2), World(tp=2, dp=2, ep=2)], ids=in_world)
def test_a_step_is_that_of_one_rank(
    world: World, answers: Any, tmp_path: Path, alone: Any, report: Any
) -> None:
    """Norm and clipping over dense and expert parameters, the sharded optimizer, comparisons over expert shards."""
    (one,), expected = alone
    ranks, parameters = stepped(world, answers, tmp_path, "glm4_moe")
    before = load_file(answers.hf("glm4_moe") / "model.safetensors")
    assert one["norm"] > STEP["optimizer__clip_grad"]  # it is clipped
    moved = {name: tensor - before[name] for name, tensor in parameters.items()}
    compare_tensors(moved, {name: tensor - before[name] for name, tensor in expected.items()}).require(
        1e-4, 1e-2
    )
    for rank in ranks:
        assert rank["norm"] == pytest.approx(one["norm"], rel=1e-5)
        assert rank["twice"] == pytest.approx(0.5, rel=1e-6) and rank["version"] == 2
        for kind, (distance, norm) in rank["same"].items():
            assert distance == 0.0 and norm == pytest.approx(one["same"][kind][1], rel=1e-4), kind
    assert {"experts", "router", "qkv", "norms"} <= one["same"].keys()
    total = sum(rank["bytes"]["optimizer"] for rank in ranks)
    report("optimizer bytes of all ranks over one rank's", total / one["bytes"]["optimizer"])
    # experts are cut over ep, everything over the optimizer's shards: nothing is held twice but padding
    assert total <= 1.2 * one["bytes"]["optimizer"]
    dense = [rank["bytes"]["parameters"] for rank in ranks]
    assert all(n < one["bytes"]["parameters"] for n in dense)


def test_a_failure_of_one_replica_reaches_the_other(answers: Any) -> None:
    world = World(dp=2, ep=2)
    case = answers.case("qwen3_moe", "mixed", Path("unused"))
    ranks = run_world(world, "worlds.moe_ranks:failing_replica", case=case, user=False)
    assert ranks == ["RankFailure: rank 1 failed: ValueError: no such thing", "ValueError: no such thing"]
    ranks = run_world(world, "worlds.moe_ranks:failing_replica", case=case, user=True)
    assert ranks == ["UserError: no such thing"] * 2


def test_a_branch_that_is_not_finite_is_named_alone(answers: Any) -> None:
    """Although its tokens reach the other replica's experts, and the other replica's gradients with them."""
    groups = answers.groups["mixed"]
    fed = [t for g in groups for t in (*g["prompt_ids"], *(t for r in g["responses"] for t in r["ids"][:-1]))]
    token = next(t for t in groups[1]["responses"][1]["ids"][:-1] if fed.count(t) == 1)
    case = answers.case("qwen3_moe", "mixed", Path("unused"), contract="response_only")
    world, rank = World(dp=2, ep=2), "worlds.moe_ranks:named_nonfinite"
    names = run_world(world, rank, case=case, token=token)
    assert names[0] == names[1] and "g1" in names[0] and "," not in names[0], names
    assert run_world(world, rank, case=case, token=None) == ["no branch alone, only their sum"] * 2


REFUSED = [
    ("glm4", World(dp=2, ep=2), {}, "parallel.ep = 2, but the model is dense"),
    ("qwen3_moe", World(dp=3, ep=3), {}, "must divide the model's experts (8)"),
    ("qwen3_moe", World(dp=2, ep=2), {"prefix__keep_graph_bytes": 1000}, "prefix.keep_graph_bytes = 1000"),
    (
        "qwen3_moe",
        World(dp=2, ep=2),
        {"model__attention": '"lastkv"', "contract": "conventional"},
        'the contract "conventional" with LastKV',
    ),
    (
        "qwen3_moe",
        World(tp=2),
        {"parallel__sequence_parallel": "false"},
        "parallel.sequence_parallel = false",
    ),
    (
        "glm4",
        ONE,
        {"rollout__record_routing": "true"},
        "rollout.record_routing = true, but the model is dense",
    ),
    ("qwen3_moe", ONE, {"moe__router_bias_update_rate": 0.1}, "the model's routers have no bias"),
]


@pytest.mark.every_world
@pytest.mark.parametrize(("model", "world", "settings", "message"), REFUSED, ids=[r[3][:24] for r in REFUSED])
def test_what_cannot_work_is_refused(
    model: str, world: World, settings: dict[str, Any], message: str, answers: Any, tmp_path: Path
) -> None:
    case = answers.case(model, "mixed", tmp_path / "out", **settings)
    with pytest.raises(RankFailure) as raised:
        run_world(world, "worlds.ranks:run_verbs", cases=[case])
    assert message in str(raised.value) and "UserError" in str(raised.value)
