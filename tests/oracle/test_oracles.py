"""Claim: the oracles are right, so agreement with them means something.

Why the tests show it: two implementations that share only the objective (transformers in fp32, the plain
one in fp64) agree to fp32 rounding for every family and option, under both gradient contracts; the plain
one's gradient agrees with fourth-order finite differences of its own loss to 1e-8; no operation of it
yields anything but fp64, and the watch that says so does find transformers' hidden fp32; the objective is
checked against numbers worked out by hand.
Not shown: models larger than a few thousand parameters, sequences near a model's last position.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from oracle import hf_oracle, plain_fp64, trajectories
from oracle.compare import compare_tensors, max_difference
from oracle.dtype_watch import FloatWatch
from oracle.objective import Objective, advantages, response_loss, token_weight
from oracle.tiny_families import MORE_CASES
from oracle.tiny_models import CASES, FAMILIES, ROPE_KINDS, make_hf_dir, write_case

WINDOWS = {"awkward": trajectories.AWKWARD, "one-token-prompt": trajectories.ONE_TOKEN_PROMPT}


@pytest.fixture(scope="module", params=CASES)
def hf_dir(request: pytest.FixtureRequest, session_dir: Path) -> Path:
    return write_case(session_dir / "hf", request.param)


@pytest.fixture(scope="module", params=[*CASES, *MORE_CASES])
def any_hf_dir(request: pytest.FixtureRequest, session_dir: Path) -> Path:
    return write_case(session_dir / "hf", request.param)


@pytest.mark.parametrize("window", WINDOWS)
def test_transformers_and_the_plain_model_agree(any_hf_dir: Path, window: str, report) -> None:
    groups = trajectories.window(3, shape=WINDOWS[window])
    distance = max_difference(
        hf_oracle.score(any_hf_dir, groups, 0.8), plain_fp64.score(any_hf_dir, groups, 0.8)
    )
    assert distance <= 2e-5
    full, constant = (
        grad(any_hf_dir, groups) for grad in (hf_oracle.grad_conventional, hf_oracle.grad_response_only)
    )
    conventional = compare_tensors(full, plain_fp64.grad(any_hf_dir, groups))
    response_only = compare_tensors(constant, plain_fp64.grad(any_hf_dir, groups, detach_prefix=True))
    report("score, fp32 transformers against fp64", f"{distance:.2e}")
    report("conventional gradient", conventional)
    report("response_only gradient", response_only)
    conventional.require(rel_l2=5e-6, worst=2e-5)
    response_only.require(rel_l2=5e-6, worst=2e-5)
    if window == "awkward":  # the tiny models can tell the contracts apart
        apart = compare_tensors(constant, full)
        report("response_only against conventional", apart)
        assert apart.cosine < 0.95 and apart.rel_l2 > 0.3


@pytest.mark.parametrize(
    "settings",
    [
        {"aggregate": "sequence", "temperature": 0.7},
        {"kl_coef": 0.3, "clip_low": 0.1, "clip_high": 0.3},
        {"advantage": "rloo", "kl_coef": 0.1, "aggregate": "sequence"},
    ],
    ids=lambda settings: "-".join(map(str, settings.values())),
)
def test_they_agree_under_every_setting_of_the_objective(session_dir: Path, settings: dict[str, Any]) -> None:
    hf_dir = write_case(session_dir / "hf", "qwen3")
    objective = Objective(**settings)
    plain = trajectories.window(5, advantages="advantage" not in settings)
    scores = hf_oracle.score(hf_dir, plain, objective.temperature)
    groups = trajectories.with_logprobs(plain, scores, shift=0.5, seed=1)
    reference = [[[x + 0.1 for x in response] for response in group] for group in scores]
    ours = hf_oracle.grad_response_only(hf_dir, groups, objective, reference)
    other = plain_fp64.grad(hf_dir, groups, objective, detach_prefix=True, reference=reference)
    compare_tensors(ours, other).require(rel_l2=5e-6, worst=2e-5)


@pytest.mark.parametrize("detach_prefix", [False, True], ids=["conventional", "response_only"])
def test_the_plain_gradient_is_the_slope_of_the_plain_loss(hf_dir: Path, detach_prefix: bool, report) -> None:
    """Along a random direction, by the five-point rule: its error is of order step⁴ and eps/step."""
    objective = Objective(kl_coef=0.2)
    plain = trajectories.window(11, shape=((11, (4, 1)), (1, (3, 6))))
    scores = plain_fp64.score(hf_dir, plain)
    groups = trajectories.with_logprobs(plain, scores, shift=0.4, seed=2)
    gradient = plain_fp64.grad(hf_dir, groups, objective, detach_prefix, reference=scores)

    model = plain_fp64.PlainModel(hf_dir)
    generator = torch.Generator().manual_seed(0)
    start = {name: w.detach().clone() for name, w in model.weights.items()}
    direction = {
        name: torch.randn(w.shape, generator=generator, dtype=torch.float64) / w.numel() ** 0.5
        for name, w in start.items()
    }
    with torch.no_grad():
        held = [  # the prefix at the unmoved weights, which is what response_only holds constant
            model.forward(g["prompt_ids"][:-1])[1] if detach_prefix and len(g["prompt_ids"]) > 1 else None
            for g in groups
        ]

        def loss_at(step: float) -> float:
            for name, w in model.weights.items():
                w.copy_(start[name] + step * direction[name])
            total = 0.0
            for number, group in enumerate(groups):
                for branch, (response, advantage) in enumerate(
                    zip(group["responses"], advantages(group, "grpo"), strict=True)
                ):
                    logprobs_R = model.logprobs(
                        group["prompt_ids"], response["ids"], prefix_state=held[number]
                    )
                    weight = token_weight(groups, len(response["ids"]), "token")
                    old_R, reference_R = response["logprobs"], scores[number][branch]
                    total += float(
                        response_loss(logprobs_R, advantage, weight, objective, old_R, reference_R)
                    )
            return total

        h = 1e-3
        slope = (loss_at(-2 * h) - 8 * loss_at(-h) + 8 * loss_at(h) - loss_at(2 * h)) / (12 * h)
    expected = sum(float((gradient[name] * direction[name]).sum()) for name in start)
    error = abs(slope - expected) / abs(expected)
    report("slope against gradient, relative", f"{error:.1e}")
    assert error <= 1e-8


def test_the_plain_model_is_fp64_in_every_operation(any_hf_dir: Path) -> None:
    model = plain_fp64.PlainModel(any_hf_dir)
    with FloatWatch(torch.float64) as watch:
        model.logprobs([5, 9, 2], [4, 7], temperature=0.7, detach_prefix=True).sum().backward()
    assert watch.seen > 100
    assert not watch.strangers, watch.strangers


def test_the_watch_finds_the_fp32_inside_transformers(session_dir: Path) -> None:
    model = hf_oracle.load(write_case(session_dir / "hf", "llama"), torch.float64)
    with FloatWatch(torch.float64) as watch:
        model(torch.tensor([[1, 2, 3]])).logits.sum().backward()
    assert any("float32" in stranger for stranger in watch.strangers)


def test_the_contracts_agree_without_a_prefix(session_dir: Path) -> None:
    hf_dir = write_case(session_dir / "hf", "qwen3")
    bare = trajectories.window(3, shape=((1, (3, 1, 8)),))
    same = compare_tensors(
        hf_oracle.grad_response_only(hf_dir, bare), hf_oracle.grad_conventional(hf_dir, bare)
    )
    same.require(rel_l2=5e-6, worst=5e-5)


@pytest.mark.parametrize("case", ["qwen3", "qwen3_next", "qwen3_5", "glm4_moe-groups", "glm4"])
def test_the_truncated_gradients_agree_and_lie_between_the_contracts(
    case: str, session_dir: Path, report
) -> None:
    hf_dir = write_case(session_dir / "hf", case)
    groups = trajectories.window(3)
    cut = hf_oracle.grad_truncated(hf_dir, groups, 10)  # live: the newest 10 of 36 prefix tokens, 10 of 10
    report("truncated gradient", compare_tensors(cut, plain_fp64.grad(hf_dir, groups, None, True, live=10)))
    compare_tensors(cut, plain_fp64.grad(hf_dir, groups, None, True, live=10)).require(5e-6, 2e-5)
    for other in (hf_oracle.grad_response_only, hf_oracle.grad_conventional):
        assert compare_tensors(cut, other(hf_dir, groups)).rel_l2 > 0.1
    all_live = hf_oracle.grad_truncated(hf_dir, groups, 36)
    compare_tensors(all_live, hf_oracle.grad_conventional(hf_dir, groups)).require(5e-6, 2e-5)
    none_live = hf_oracle.grad_truncated(hf_dir, groups, 0)
    compare_tensors(none_live, hf_oracle.grad_response_only(hf_dir, groups)).require(1e-12, 1e-12)


@pytest.mark.parametrize("kind", ROPE_KINDS)
def test_rope_frequencies_are_those_of_transformers(kind: str) -> None:
    config = FAMILIES["qwen3"][0](
        head_dim=16, max_position_embeddings=1024, rope_parameters=dict(ROPE_KINDS[kind])
    )
    ours, scale = plain_fp64.rope_frequencies(ROPE_KINDS[kind], 16)
    plain, _ = plain_fp64.rope_frequencies(ROPE_KINDS["default"], 16)
    if kind == "default":
        assert torch.allclose(ours, 10_000.0 ** (-torch.arange(8).double() / 8), rtol=1e-14)
        return
    theirs, their_scale = ROPE_INIT_FUNCTIONS[kind](config, "cpu")
    assert torch.allclose(ours, theirs.double(), rtol=1e-6)
    assert math.isclose(scale, their_scale, rel_tol=1e-12)
    stretch = plain / ours
    factor = ROPE_KINDS[kind]["factor"]
    if kind != "linear":  # all three bands are exercised
        assert (stretch < 1 + 1e-9).any() and (stretch > factor - 1e-9).any()
        assert ((stretch > 1.01) & (stretch < factor - 0.01)).any()


def test_the_cases_cover_every_option(session_dir: Path) -> None:
    for case, (family, variation) in CASES.items():
        tensors = load_file(write_case(session_dir / "hf", case) / "model.safetensors")
        assert ("lm_head.weight" in tensors) is not variation.get("tied", False)
        assert ("model.layers.3.self_attn.k_proj.bias" in tensors) is (family == "qwen2")
        assert ("model.layers.3.self_attn.k_norm.weight" in tensors) is (family == "qwen3")
        assert all(float(t.std()) > 0.01 for t in tensors.values())  # nothing is left at ones or zeros
        assert tensors["model.embed_tokens.weight"].shape[0] == 131
    assert {variation.get("rope", "default") for _, variation in CASES.values()} == set(ROPE_KINDS)
    for family in FAMILIES:
        assert {v.get("tied", False) for f, v in CASES.values() if f == family} == {False, True}


def test_a_sharded_directory_holds_the_same_model(session_dir: Path, tmp_path: Path) -> None:
    groups = trajectories.window(3)
    sharded = make_hf_dir(tmp_path / "sharded", "llama", 7, max_shard_size="20KB")
    assert len(list(sharded.glob("model-*.safetensors"))) > 2
    assert (sharded / "model.safetensors.index.json").exists()
    assert plain_fp64.score(sharded, groups) == plain_fp64.score(
        write_case(session_dir / "hf", "llama"), groups
    )


def test_advantages_and_weights_by_hand() -> None:
    group = {
        "responses": [{"ids": [0] * n, "reward": r} for n, r in ((1, 1.0), (3, 0.0), (4, 0.0), (2, 1.0))]
    }
    assert advantages(group, "grpo") == pytest.approx([1, -1, -1, 1], abs=3e-6)
    assert advantages(group, "dr_grpo") == pytest.approx([0.5, -0.5, -0.5, 0.5])
    assert advantages(group, "rloo") == pytest.approx([2 / 3, -2 / 3, -2 / 3, 2 / 3])
    assert token_weight([group], 3, "token") == 1 / 10
    assert token_weight([group], 3, "sequence") == 1 / 12


def test_the_surrogate_by_hand() -> None:
    """Ratios 1, 1.5 (clipped for A > 0), 0.5 (clipped for A < 0); a live token's slope is −ρ A weight."""
    objective = Objective(clip_low=0.2, clip_high=0.3)
    old = [-1.0, -2.0, -3.0]
    for advantage, loss, slopes in (
        (2.0, -2.0 * (1 + 1.3 + 0.5), [-2.0, 0.0, -1.0]),
        (-2.0, 2.0 * (1 + 1.5 + 0.8), [2.0, 3.0, 0.0]),
    ):
        current = torch.tensor([-1.0, -2.0 + math.log(1.5), -3.0 + math.log(0.5)], dtype=torch.float64)
        current.requires_grad_()
        value = response_loss(current, advantage, 0.5, objective, old)
        value.backward()
        assert value.item() == pytest.approx(0.5 * loss)
        assert current.grad is not None
        assert current.grad.tolist() == pytest.approx([0.5 * slope for slope in slopes])
    current = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
    value = response_loss(current, 0.0, 1.0, Objective(kl_coef=2.0), None, [-1.0 + math.log(3.0)])
    value.backward()
    assert value.item() == pytest.approx(2.0 * (3.0 - math.log(3.0) - 1.0))
    assert current.grad is not None
    assert current.grad.tolist() == pytest.approx([2.0 * (1.0 - 3.0)])


def test_the_comparison_notices_what_it_must() -> None:
    oracle = {"a": torch.tensor([3.0, 4.0]), "b": torch.tensor([0.0, 12.0])}
    exact = compare_tensors(oracle, oracle)
    assert (exact.rel_l2, exact.worst_rel_l2, exact.max_abs) == (0.0, 0.0, 0.0)
    assert exact.cosine == pytest.approx(1.0)
    off = compare_tensors({"a": torch.tensor([3.0, 4.5]), "b": oracle["b"]}, oracle)
    assert off.rel_l2 == pytest.approx(0.5 / 13) and off.worst_name == "a"
    assert off.worst_rel_l2 == pytest.approx(0.1) and off.max_abs == pytest.approx(0.5)
    with pytest.raises(AssertionError, match="bars are"):
        off.require(rel_l2=0.1, worst=0.09)
    with pytest.raises(AssertionError, match="missing"):
        compare_tensors({"a": oracle["a"]}, oracle)
    with pytest.raises(AssertionError, match="unexpected"):
        compare_tensors({**oracle, "c": oracle["a"]}, oracle)
    with pytest.raises(AssertionError, match="shape"):
        compare_tensors({"a": oracle["a"][None], "b": oracle["b"]}, oracle)
    broken = compare_tensors({"a": torch.tensor([math.nan, 4.0]), "b": oracle["b"]}, oracle)
    with pytest.raises(AssertionError, match="worst a nan"):
        broken.require(rel_l2=1e9, worst=1e9)
    with pytest.raises(AssertionError, match="zero everywhere"):
        compare_tensors(oracle, {name: torch.zeros(2) for name in oracle})
    assert math.isnan(max_difference([[1.0, math.nan]], [[1.0, 2.0]]))
    with pytest.raises(AssertionError, match="nesting"):
        max_difference([[1.0]], [[1.0, 2.0]])
