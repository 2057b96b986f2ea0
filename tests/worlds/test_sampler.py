"""Claim: the sampler draws from the distribution it reports, that distribution is the policy that replay scores, and
what is drawn depends on nothing but seed, update, group, response and place.

Why the tests show it: every sampled token's log-probability is compared with `score` of the recorded file and with
transformers, in all ten worlds, whose samples must be the same ids; the ratio that the loss sees before a first step
is within 1e-4 of 1. Under top-p, transformers' logits give the nucleus and its probabilities. `draw` is followed over
an even grid of uniforms, where frequencies must equal probabilities, and tested with a chi-square over hashed uniforms.
A stop id must cut each response where it first comes and leave every other token as it was, while finished branches
leave the batch.
Not shown: that the uniforms of different keys are independent beyond the chi-square; bfloat16.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import ONE, WORLDS, World, run_world
from oracle import hf_oracle
from oracle.compare import max_difference

from megatron_lrl.models.head import of_targets
from megatron_lrl.rollout.sampling import draw, uniform

BAR, RATIO_BAR = 2e-5, 1e-4
MODEL, VOCAB = "qwen3", 131
SAMPLING = {
    "rollout__group_size": 4,
    "rollout__max_new_tokens": 9,
    "rollout__seed": 3,
    "rollout__temperature": 0.8,
}


def in_world(world: World) -> str:
    return world.name


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    number = random.Random(4)
    ids = [[number.randrange(VOCAB) for _ in range(length)] for length in (37, 11, 1)]
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_text("".join(json.dumps({"id": f"p{i}", "prompt_ids": x}) + "\n" for i, x in enumerate(ids)))
    return path


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def by_response(groups: list[dict[str, Any]], key: str) -> list[list[list[Any]]]:
    return [[response[key] for response in group["responses"]] for group in groups]


def generate_and_score(
    world: World, answers: Any, prompts: Path, folder: Path, **settings: Any
) -> tuple[list[dict[str, Any]], list[list[list[float]]]]:
    """The sampled groups, and the log-probabilities that the `score` verb gives them."""
    sampled, scored = folder / "sampled.jsonl", folder / "scored.jsonl"
    case = answers.case(MODEL, "mixed", sampled, "generate", **{**SAMPLING, **settings})
    cases = [
        {**case, "prompts": str(prompts)},
        {**case, "verb": "score", "trajectories": str(sampled), "out": str(scored)},
    ]
    run_world(world, "worlds.ranks:run_verbs", cases=cases)
    return records(sampled), [record["logprobs"] for record in records(scored)]


@pytest.fixture(scope="module")
def alone(
    answers: Any, prompts: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[dict[str, Any]], list[list[list[float]]]]:
    """Samples and scores of one rank."""
    return generate_and_score(ONE, answers, prompts, tmp_path_factory.mktemp("alone"))


@pytest.mark.parametrize("world", WORLDS, ids=in_world)
def test_sampled_logprobs_are_those_of_replay(
    world: World, answers: Any, prompts: Path, alone: Any, tmp_path: Path, report: Any
) -> None:
    groups, scored = alone if world == ONE else generate_and_score(world, answers, prompts, tmp_path)
    assert by_response(groups, "ids") == by_response(alone[0], "ids")
    sampled = by_response(groups, "logprobs")
    distance = max_difference(scored, sampled)
    model = hf_oracle.score(answers.hf(MODEL), groups, 0.8)
    to_oracle = max_difference(sampled, model)
    report("sampler against replay, against transformers", f"{distance:.2e}, {to_oracle:.2e}")
    assert distance <= BAR and to_oracle <= BAR

    number = random.Random(1)
    for response in (response for group in groups for response in group["responses"]):
        response["advantage"] = number.uniform(-1, 1)
    name = answers.add(f"sampled-{world.name}", groups)
    case = answers.case(MODEL, name, tmp_path / "unused", contract="response_only", rollout__temperature=0.8)
    ranks = run_world(world, "worlds.ranks:measured", cases=[case])
    deviation = ranks[0][0]["ratio_deviation_max"]
    report("largest |ratio - 1| before the first step", deviation)
    assert 0.0 < deviation <= RATIO_BAR  # exactly 0 would mean the recorded log-probabilities were not read


OTHER_FAMILIES = [
    "qwen3_5",
    "qwen3_next",
    "qwen3_5_moe-vl",
    "qwen3_moe",
    "glm4_moe-groups",
    "glm4",
    "deepseek_v3",
]


@pytest.mark.parametrize(
    "world",
    [
        ONE,
        World(cp=2, pp=2),
        World(dp=2, ep=2),
        *(pytest.param(w, marks=pytest.mark.slow) for w in WORLDS[1:7]),
    ],
    ids=in_world,
)
def test_other_families_sample_what_replay_scores(
    world: World, answers: Any, prompts: Path, tmp_path: Path, report: Any
) -> None:
    """Mixtures, hybrids and GLM; unequal prompts lie on different replicas, which then decode in lockstep under ep.

    The tied 3:1 hybrid is left out: noise of one ulp in its weights moves its log-probabilities by 1.1e-5 (the others'
    by 3e-6), and sampler and replay differ by 2.7e-5 there.
    """
    models = [model for model in OTHER_FAMILIES if world.ep == 1 or model not in ("glm4", "qwen3_5")]
    cases = []
    for model in models:
        sampled, scored = tmp_path / f"{model}-sampled.jsonl", tmp_path / f"{model}-scored.jsonl"
        case = answers.case(model, "mixed", sampled, "generate", **SAMPLING)
        cases.append({**case, "prompts": str(prompts)})
        cases.append({**case, "verb": "score", "trajectories": str(sampled), "out": str(scored)})
    run_world(world, "worlds.ranks:run_verbs", cases=cases)
    for model in models:
        groups = records(tmp_path / f"{model}-sampled.jsonl")
        drawn = by_response(groups, "logprobs")
        replayed = [record["logprobs"] for record in records(tmp_path / f"{model}-scored.jsonl")]
        theirs = hf_oracle.score(answers.hf(model), groups, SAMPLING["rollout__temperature"])
        distances = max_difference(replayed, drawn), max_difference(drawn, theirs)
        report(f"{model}: sampler against replay, against transformers", "{:.1e}, {:.1e}".format(*distances))
        assert max(distances) <= BAR, model


def test_the_samples_are_worth_comparing(alone: Any) -> None:
    ids = [tuple(response) for group in by_response(alone[0], "ids") for response in group]
    assert len(ids) == 12 and len(set(ids)) == 12
    assert all(ids_of_one[-1] == 2 or len(ids_of_one) == 9 for ids_of_one in ids)
    assert all(2 not in ids_of_one[:-1] for ids_of_one in ids)  # 2 ends a sequence of the tiny models


@pytest.mark.parametrize("world", [ONE, World(tp=2, cp=2), World(cp=2, pp=2)], ids=in_world)
def test_top_p_reports_the_truncated_distribution(
    world: World, answers: Any, prompts: Path, tmp_path: Path, report: Any
) -> None:
    top_p = 0.6
    groups, scored = generate_and_score(world, answers, prompts, tmp_path, rollout__top_p=top_p)
    sampled = by_response(groups, "logprobs")
    model = hf_oracle.load(answers.hf(MODEL))
    expected = []
    for group in groups:
        of_group = []
        for response in group["responses"]:
            fed = torch.tensor([[*group["prompt_ids"], *response["ids"][:-1]]])
            with torch.no_grad():
                logits_SV = model(fed).logits[0, len(group["prompt_ids"]) - 1 :]
            of_group.append(
                [
                    nucleus_logprob(x / 0.8, token, top_p)
                    for x, token in zip(logits_SV, response["ids"], strict=True)
                ]
            )
        expected.append(of_group)
    distance = max_difference(sampled, expected)
    report("sampler against transformers' nucleus", distance)
    assert distance <= BAR
    assert max_difference(sampled, scored) > 0.1  # the policy itself is not truncated


def nucleus_logprob(logits_V: torch.Tensor, token: int, top_p: float) -> float:
    """Log-probability of a token in the smallest set of most probable tokens that reaches top_p, or -inf."""
    ranked = sorted(enumerate(logits_V.double().softmax(-1).tolist()), key=lambda item: -item[1])
    nucleus: dict[int, float] = {}
    for candidate, probability in ranked:
        nucleus[candidate] = probability
        if sum(nucleus.values()) >= top_p:
            break
    inside = torch.tensor(nucleus.get(token, 0.0), dtype=torch.float64)
    return float(torch.log(inside / sum(nucleus.values())))


@pytest.mark.parametrize(
    ("top_p", "kept"), [(1.0, [0, 1, 3, 4, 5]), (0.9, [1, 3, 4, 5]), (0.69, [1, 3]), (0.1, [3])]
)
def test_draw_follows_its_distribution_on_a_grid(top_p: float, kept: list[int]) -> None:
    probability_V = torch.tensor([0.05, 0.3, 0.0, 0.4, 0.13, 0.12], dtype=torch.float64)
    points = 20_000
    uniform_n = (torch.arange(points, dtype=torch.float64) + 0.5) / points
    logits_nV = probability_V.log().expand(points, -1)
    token_n, logprob_n = draw(logits_nV, uniform_n, top_p)
    entropy_n = of_targets(logits_nV.clone(), token_n, None)[
        1
    ]  # of the full distribution, as the head reports it
    nucleus_V = torch.zeros_like(probability_V)
    nucleus_V[kept] = probability_V[kept] / probability_V[kept].sum()
    share_V = token_n.bincount(minlength=6).double() / points
    assert torch.allclose(share_V, nucleus_V, atol=1.5 / points, rtol=0)
    assert torch.allclose(logprob_n, nucleus_V.log()[token_n], atol=1e-12)
    reported = {int(t): float(x) for t, x in zip(token_n, logprob_n.exp(), strict=True)}
    assert sum(reported.values()) == pytest.approx(1.0, abs=1e-12)
    full = -sum(p * torch.tensor(p).log().item() for p in probability_V.tolist() if p)
    assert torch.allclose(entropy_n, torch.full_like(entropy_n, full), atol=1e-6)


def test_tokens_without_probability_never_come() -> None:
    logits_V = torch.tensor([-torch.inf, 0.0, -torch.inf, 1.0, -torch.inf])
    edges_n = torch.tensor([0.0, 2.0**-53, 0.5, 1.0 - 2.0**-53], dtype=torch.float64)
    for top_p in (1.0, 0.99):
        token_n, logprob_n = draw(logits_V.expand(4, -1), edges_n, top_p)
        scored_n, entropy_n, _ = of_targets(logits_V.expand(4, -1).clone(), token_n, None)
        assert set(token_n.tolist()) == {1, 3}
        assert all(torch.isfinite(x).all() for x in (logprob_n, scored_n, entropy_n))


def test_hashed_uniforms_pass_a_chi_square(report: Any) -> None:
    """12 tokens, 24,000 draws over branches and places: 11 degrees of freedom, 37.4 is exceeded once in 10,000."""
    generator = torch.Generator().manual_seed(0)
    logits_V = torch.randn(12, generator=generator)
    keys = [(branch, index) for branch in range(40) for index in range(600)]
    uniform_n = torch.tensor([uniform(7, 2, "p0@5", *key) for key in keys], dtype=torch.float64)
    token_n, _ = draw(logits_V.expand(len(keys), -1), uniform_n, 1.0)
    expected_V = len(keys) * logits_V.double().softmax(-1)
    statistic = float(((token_n.bincount(minlength=12) - expected_V) ** 2 / expected_V).sum())
    report("chi-square, 11 degrees of freedom", statistic)
    assert statistic < 37.4
    key = (7, 2, "p0", 3, 4)
    others = [
        (8, 2, "p0", 3, 4),
        (7, 3, "p0", 3, 4),
        (7, 2, "p1", 3, 4),
        (7, 2, "p0", 4, 4),
        (7, 2, "p0", 3, 5),
    ]
    assert len({uniform(*k) for k in [key, *others]}) == 6 and uniform(*key) == uniform(*key)


@pytest.mark.parametrize("world", [ONE, World(cp=2), World(tp=2, pp=2)], ids=in_world)
def test_a_stop_id_ends_a_response_and_nothing_else(
    world: World, answers: Any, prompts: Path, tmp_path: Path, report: Any
) -> None:
    settings = {"rollout__group_size": 8, "rollout__max_new_tokens": 16, "rollout__temperature": 0.5}
    case = answers.case(MODEL, "mixed", tmp_path / "unused", **{**SAMPLING, **settings})
    for found in run_world(world, "worlds.ranks:stopped_samples", case={**case, "prompts": str(prompts)}):
        stop, lengths, distances = found["stop"], set(), []
        for (ids, logprobs), (cut_ids, cut_logprobs) in zip(found["free"], found["stopped"], strict=True):
            length = ids.index(stop) + 1 if stop in ids else 16
            assert len(ids) == 16 and cut_ids == ids[:length]
            distances.append(max_difference(cut_logprobs, logprobs[:length]))
            lengths.add(length)
        assert len(lengths) >= 4, lengths  # they do end one after another
        assert found["kept"] and found["kept"][-1] < 6, found["kept"]  # finished branches did leave
        assert max(distances) <= BAR, distances
    report(
        "branches left by compaction; largest change of a log-probability",
        f"{found['kept']}; {max(distances):.2e}",
    )
