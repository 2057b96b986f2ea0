"""Claim: replay evaluates the very policy that sampled, whatever the boundary: log-probabilities within 2e-5, the
whole distributions within a KL of 1e-8, in every layout. The check can fail: a sampler that ends the open chunk at
the prompt's end is caught.

Why the tests show it: the distributions that the sampler drew from, one token at a time, and those of the replay pass
that carries the gradient, a round at a time, are recorded at every position in the heads themselves and compared
token by token; the ids must be the same in all worlds. Prompts of C−1, C, C+1, 2C, 2C+1 and a non-multiple, 2C + 2
tokens a response, so each crosses two boundaries; the oracle's log-probabilities are held against both.
Not shown: bfloat16, top-p (a property of the sampler alone).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from harness import ONE, WORLDS, World, run_world
from oracle.compare import max_difference
from oracle.lastkv_reference import TokenByToken

from layers.lastkv.tiny import token_ids, write_lastkv

LOGPROB_BAR, KL_BAR = 2e-5, 1e-8
CHUNK, MODEL, GROUP_SIZE = 4, "llama", 3
LENGTHS = (CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 2 * CHUNK + 1, 2 * CHUNK + 3)


def in_world(world: World) -> str:
    return world.name


def case(models: Path, blend: bool = True, **more: Any) -> dict[str, Any]:
    return {
        "hf": str(write_lastkv(models, MODEL, CHUNK, blend)),
        "prompts": [list(token_ids(length, 50 + length)) for length in LENGTHS],
        "settings": [
            "model.attention=lastkv",
            "prefix.contract=exact",
            "prefix.chunk_size=3",
            "replay.concurrent=1",
            "replay.check_poison=true",
            f"rollout.group_size={GROUP_SIZE}",
            f"rollout.max_new_tokens={2 * CHUNK + 2}",
            "rollout.seed=3",
        ],
        **more,
    }


def whole(ranks: list[dict[str, Any]], which: str) -> dict[tuple[int, int], torch.Tensor]:
    """All ranks' distributions by (branch, position)."""
    merged = {}
    for rank in ranks:
        for place, row in zip(rank[which]["places"], rank[which]["table"], strict=True):
            merged[tuple(place)] = row
    return merged


def compared(ranks: list[dict[str, Any]]) -> tuple[float, float, float]:
    """Largest KL(sampler ‖ replay) of a position, difference of any log-probability, and of a sampled one."""
    sampler, replay = whole(ranks, "sampler_seen"), whole(ranks, "replay_seen")
    assert set(sampler) == set(replay) and sampler
    kl = max(float((p.exp() * (p - replay[place])).sum()) for place, p in sampler.items())
    apart = max(float((p - replay[place]).abs().max()) for place, p in sampler.items())
    return kl, apart, max_difference(ranks[0]["scored"], ranks[0]["sampled"])


@pytest.fixture(scope="module")
def alone(models: Path) -> list[list[dict[str, Any]]]:
    """One rank's results, with and without blending."""
    return run_world(
        ONE, "layers.lastkv.ranks:sample_and_replay", cases=[case(models), case(models, blend=False)]
    )[0]


@pytest.mark.parametrize(
    "world", [*WORLDS[:-1], pytest.param(WORLDS[-1], marks=pytest.mark.slow)], ids=in_world
)
def test_replay_evaluates_the_policy_that_sampled(
    world: World, models: Path, alone: Any, report: Any
) -> None:
    ranks = (
        [alone]
        if world == ONE
        else run_world(world, "layers.lastkv.ranks:sample_and_replay", cases=[case(models)])
    )
    farthest = (0.0, 0.0, 0.0)
    for number in range(len(LENGTHS)):
        of_prompt = [rank[0][number] for rank in ranks]
        assert of_prompt[0]["ids"] == alone[0][number]["ids"]
        found = compared(of_prompt)
        farthest = tuple(max(pair) for pair in zip(farthest, found, strict=True))
    kl, apart, scored = farthest
    report("KL, any log-probability, sampled ones", f"{kl:.1e} {apart:.1e} {scored:.1e}")
    assert kl <= KL_BAR and apart <= LOGPROB_BAR and scored <= LOGPROB_BAR


@pytest.mark.parametrize("blend", [True, False])
def test_both_are_the_definitions_policy(blend: bool, models: Path, alone: Any, report: Any) -> None:
    hf = write_lastkv(models, MODEL, CHUNK, blend)
    oracle = TokenByToken(hf, None, CHUNK, blend)
    worst = 0.0
    for number, length in enumerate(LENGTHS):
        one = alone[0 if blend else 1][number]
        for ids, sampled in zip(one["ids"], one["sampled"], strict=True):
            expected = oracle.score(token_ids(length, 50 + length), ids).tolist()
            worst = max(worst, max_difference(sampled, expected))
    report("sampler against the token-by-token reference", worst)
    assert worst <= LOGPROB_BAR
    assert {len(ids) for one in alone[0] for ids in one["ids"]} >= {2 * CHUNK + 2}  # boundaries were crossed


@pytest.mark.parametrize("world", [ONE, World(cp=2)], ids=in_world)
def test_ending_the_chunk_at_the_prompts_end_is_another_policy(
    world: World, models: Path, report: Any
) -> None:
    ranks = run_world(
        world, "layers.lastkv.ranks:sample_and_replay", cases=[case(models, end_chunk_at_prompt=True)]
    )
    for number, length in enumerate(LENGTHS):
        kl, apart, scored = compared([rank[0][number] for rank in ranks])
        report(f"prompt of {length}: KL, log-probability", f"{kl:.1e} {apart:.1e}")
        if (length - 1) % CHUNK == 0:  # the prefix ends on a boundary: the wrong clock is the right one
            assert kl <= KL_BAR and scored <= LOGPROB_BAR
        else:
            assert kl > 1000 * KL_BAR and apart > 100 * LOGPROB_BAR and scored > LOGPROB_BAR
