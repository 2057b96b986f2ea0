"""Claim: memory follows the design: the live graph does not grow with the group (G) or, in `exact`, with the prompt
(P); resident bytes are those of the keys and values, and the adjoint's are as many again.

Why the tests show it: autograd's saved-for-backward bytes are counted at their peak over replay and sweep, each
storage once, on every rank; responses of equal length are replayed one at a time for G = 2 and G = 8, and prompts of
65, 129 and 257 tokens with the same chunk size. Replaying more at once and the conventional contract must show more
bytes, so the meter is not blind. Resident bytes are compared with a formula worked out by hand.
Not shown: allocator peaks, bytes of activations that autograd does not save, optimizer state.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from harness import ONE, World, run_world
from oracle.trajectories import window

MODEL, LAYERS, KV_HEADS, HEAD_DIM, FLOAT_BYTES = "qwen3", 4, 2, 16, 4
RESPONSE = 9
WORLDS = [ONE, World(cp=2), World(pp=2), World(tp=2, cp=2)]


def in_world(world: World) -> str:
    return world.name


def measure(
    world: World, answers: Any, asked: list[tuple[int, int, dict[str, Any]]]
) -> list[list[dict[str, Any]]]:
    """For each (prompt length, G, settings) what every rank measured."""
    cases = []
    for prompt, size, settings in asked:
        name = answers.add(f"P{prompt}-G{size}", window(1, shape=((prompt, (RESPONSE,) * size),)))
        cases.append(answers.case(MODEL, name, Path("unused"), **settings))
    ranks = run_world(world, "worlds.ranks:measured", cases=cases)
    return [list(of_case) for of_case in zip(*ranks, strict=True)]


def peaks(found: list[dict[str, Any]]) -> list[int]:
    """Saved-for-backward bytes of each rank at their peak."""
    return [rank["peak"]["replay"] for rank in found]


def equal_within_one_percent(first: list[int], second: list[int]) -> bool:
    return all(abs(a - b) <= 0.01 * max(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("contract", ["response_only", "exact"])
@pytest.mark.parametrize("world", WORLDS, ids=in_world)
def test_the_live_graph_does_not_grow_with_the_group(
    world: World, contract: str, answers: Any, report: Any
) -> None:
    one_at_a_time = {"contract": contract, "K": 1, "Z": 7}
    two, eight, together, conventional = measure(
        world,
        answers,
        [
            (65, 2, one_at_a_time),
            (65, 8, one_at_a_time),
            (65, 8, {**one_at_a_time, "K": 8}),
            (65, 2, {"contract": "conventional", "K": 1}),
        ],
    )
    report(
        "G = 2, G = 8, G = 8 at once, conventional, rank 0",
        [peaks(x)[0] for x in (two, eight, together, conventional)],
    )
    assert equal_within_one_percent(peaks(two), peaks(eight)), (peaks(two), peaks(eight))
    # two pipeline stages have two responses in flight on the first, so eight at once are four times as much
    assert all(a > 3 * b > 0 for a, b in zip(peaks(together), peaks(eight), strict=True))
    assert all(a > 3 * b for a, b in zip(peaks(conventional), peaks(two), strict=True))


@pytest.mark.parametrize("world", WORLDS, ids=in_world)
def test_the_exact_contract_is_flat_in_the_prompt(world: World, answers: Any, report: Any) -> None:
    found = measure(world, answers, [(p, 2, {"contract": "exact", "K": 1, "Z": 32}) for p in (65, 129, 257)])
    report("saved bytes at P = 65, 129, 257, rank 0", [peaks(x)[0] for x in found])
    assert equal_within_one_percent(peaks(found[0]), peaks(found[1]))
    assert equal_within_one_percent(peaks(found[0]), peaks(found[2]))


@pytest.mark.parametrize("world", WORLDS, ids=in_world)
def test_resident_bytes_are_keys_and_values(world: World, answers: Any, report: Any) -> None:
    """A rank holds a contiguous share of each chunk: under sequence parallelism a multiple of tp, for its own heads
    and layers. `exact` holds an adjoint of the same shape in float32; `truncated` one of the live tokens only.
    """
    prefix, size = 64, 7
    chunks = [size] * (prefix // size) + [prefix % size]
    constant, exact = measure(
        world, answers, [(prefix + 1, 2, {"contract": c, "Z": size}) for c in ("response_only", "exact")]
    )
    tokens_by_cp = {}
    for place, (held, with_adjoint) in enumerate(zip(constant, exact, strict=True)):
        share = [-(-n // (world.cp * world.tp)) * world.tp for n in chunks]
        tokens = sum(max(0, min(s, n - held["cp_rank"] * s)) for s, n in zip(share, chunks, strict=True))
        tokens_by_cp[held["cp_rank"]] = tokens
        bytes_a_token = 2 * (KV_HEADS // world.tp) * HEAD_DIM * FLOAT_BYTES * (LAYERS // world.pp)
        assert held["peak"]["group"] == tokens * bytes_a_token, place
        assert with_adjoint["peak"]["group"] == 2 * tokens * bytes_a_token, place
    assert sum(tokens_by_cp.values()) == prefix  # over cp nothing is held twice
    report("resident bytes by rank", [rank["peak"]["group"] for rank in constant])
