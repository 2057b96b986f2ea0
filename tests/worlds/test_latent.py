"""Claim: models with latent attention (MLA) give transformers' log-probabilities and gradients in every layout,
and keep one row a token: the bytes of the latent and the rotated key, not of heads.

Why the tests show it: as test_moe, for GLM-4.7-Flash and DeepSeek-V3, with and without a latent of the queries, with
neighbours and halves paired, with YaRN's temperature; transformers expands every key and value, the program none. Every
width differs from every other. Bytes are counted by hand from the widths. With tp = 2 the rotated key's gradient needs
the sum over both ranks' heads.
Not shown: sparse selection (DSA), published weights, CUDA.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from harness import ONE, WORLDS, World, run_world
from harness.worlds import EP_WORLDS
from oracle.compare import compare_tensors
from safetensors.torch import load_file

from worlds.test_moe import check

MODELS = ["glm4_moe_lite", "deepseek_v3", "deepseek_v3-direct"]
CONTRACTS = ["exact", "response_only", "conventional"]
EVERY = [*WORLDS, *EP_WORLDS]


def in_world(world: World) -> str:
    return world.name


@pytest.mark.parametrize("world", EVERY, ids=in_world)
def test_score_and_grad_are_those_of_transformers(
    world: World, answers: Any, tmp_path: Path, report: Any
) -> None:
    turn = EVERY.index(world)
    asked = [(model, CONTRACTS[(turn + i) % 3]) for i, model in enumerate(MODELS)]
    check(world, answers, tmp_path, asked, report)


@pytest.mark.slow
@pytest.mark.parametrize("world", EVERY, ids=in_world)
def test_every_model_and_contract_in_every_world(
    world: World, answers: Any, tmp_path: Path, report: Any
) -> None:
    check(world, answers, tmp_path, [(m, c) for m in MODELS for c in CONTRACTS], report)


@pytest.mark.parametrize("world", [ONE, World(tp=2)], ids=in_world)
def test_a_token_takes_one_row_for_keys_and_values(world: World, answers: Any) -> None:
    """4 layers of latent 24 and rotated key 8: 32 numbers a token and layer, on each tp rank; adjoints as many."""
    settings = [f"model.hf={answers.hf('glm4_moe_lite')}", "prefix.chunk_size=16"]
    ranks = run_world(
        world, "plan.plan_ranks:resident", settings=settings, contracts=["exact"], works=[[90, 13, 4, 2]]
    )
    rows = 4 * 89 * 32 * 4
    for rank in ranks:
        (found,) = rank["exact"]
        assert found["state"] == rows
        assert found["group"] == 2 * rows


def test_execution_changes_rounding_only(answers: Any, tmp_path: Path, report: Any) -> None:
    """In float64: other chunks, other numbers at once, kept graphs, cut responses."""
    ways: dict[str, dict[str, Any]] = {
        "plain": {},
        "Z = 7": {"Z": 7},
        "K = 1": {"K": 1},
        "kept graphs": {"prefix__keep_graph_bytes": 10**9},
        "some kept graphs": {"prefix__keep_graph_bytes": 200_000},
        "cut responses": {"replay__chunk_size": 3},
    }
    outs = {name: tmp_path / f"{name}.safetensors" for name in ways}
    cases = [
        answers.case("glm4_moe_lite", "mixed", outs[name], model__dtype='"float64"', **settings)
        for name, settings in ways.items()
    ]
    run_world(ONE, "worlds.ranks:run_verbs", cases=cases)
    for name, out in outs.items():
        comparison = compare_tensors(load_file(out), load_file(outs["plain"]))
        report(name, comparison)
        comparison.require(1e-12, 1e-12, name)
