"""Claim: a token whose mask is 0 is fed and never scored; advantages may differ by token; terms of zero cost nothing.

Why the tests show it: the oracle runs every response alone through transformers and sums the loss over the tokens that
the mask leaves, with their own advantages; the window's responses hold tool output at their start, in the middle and
at their end, of one token and of most of them. Dropping the mask moves the gradient by far more than the bar. That zero
terms cost nothing is counted: tokens fed after sampling, in windows whose advantages are all or partly zero, against
the gradient of the same window.
Not shown: who writes such trajectories.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import ONE, World, run_world
from oracle.compare import compare_tensors
from oracle.trajectories import Group, window
from safetensors.torch import load_file

WORLDS = [ONE, World(tp=2, cp=2, pp=2), World(cp=2, dp=2)]
SHAPE = ((37, (9, 1, 7, 2)), (11, (13, 5)), (1, (4,)))
MASKS = {
    9: [0, 0, 1, 1, 0, 0, 0, 1, 1],
    7: [1, 1, 1, 0, 0, 0, 0],
    2: [0, 1],
    13: [1, *[0] * 11, 1],
    5: [1, 1, 0, 1, 1],
    4: [0, 0, 0, 1],
}


def masked_window() -> list[Group]:
    """Every response but the shortest has a mask; those of the first group one advantage a token."""
    groups = window(7, shape=SHAPE)
    for number, group in enumerate(groups):
        for response in group["responses"]:
            mask = MASKS.get(len(response["ids"]))
            if mask is None:
                continue
            response["mask"] = mask
            if number == 0:
                response["advantage"] = [response["advantage"] * (1 + i) / 3 for i in range(len(mask))]
    return groups


@pytest.mark.parametrize(
    "world",
    [
        *WORLDS,
        *(
            pytest.param(w, marks=pytest.mark.slow)
            for w in (
                World(tp=2),
                World(cp=2),
                World(pp=2),
                World(dp=2),
                World(tp=2, cp=2),
                World(cp=2, pp=2),
            )
        ),
    ],
    ids=lambda world: world.name,
)
def test_gradients_of_masked_windows(world: World, answers: Any, tmp_path: Path, report: Any) -> None:
    answers.add("masked", masked_window())
    answers.add("unmasked", [_without(group, "mask") for group in masked_window()])
    contracts = ("exact", "response_only", "conventional")
    outs = [tmp_path / f"{contract}.safetensors" for contract in contracts]
    cases = [answers.case("qwen2", "masked", o, contract=c) for c, o in zip(contracts, outs, strict=True)]
    run_world(world, "worlds.ranks:run_verbs", cases=cases)
    for contract, out in zip(contracts, outs, strict=True):
        oracle = answers.grad("qwen2", contract, "masked")
        found = compare_tensors(load_file(out), oracle)
        report(contract, found)
        found.require(1e-5, 1e-4)
        assert compare_tensors(answers.grad("qwen2", contract, "unmasked"), oracle).rel_l2 > 0.1


def test_masked_tokens_have_no_score(answers: Any, tmp_path: Path) -> None:
    """`score` writes null there, and elsewhere what it writes without a mask."""
    answers.add("masked", masked_window())
    answers.add("unmasked", [_without(group, "mask") for group in masked_window()])
    outs = [tmp_path / f"{name}.jsonl" for name in ("masked", "unmasked")]
    cases = [answers.case("llama", out.stem, out, verb="score") for out in outs]
    run_world(ONE, "worlds.ranks:run_verbs", cases=cases)
    masked, full = ([json.loads(line) for line in out.read_text().splitlines()] for out in outs)
    for group, ours, theirs in zip(masked_window(), masked, full, strict=True):
        for response, some, every in zip(
            group["responses"], ours["logprobs"], theirs["logprobs"], strict=True
        ):
            mask = response.get("mask", [1] * len(every))
            assert some == [value if one else None for value, one in zip(every, mask, strict=True)]


@pytest.mark.parametrize("world", [ONE, World(cp=2, dp=2)], ids=lambda world: world.name)
def test_terms_of_zero_cost_nothing(world: World, answers: Any, tmp_path: Path) -> None:
    groups = window(9, shape=SHAPE)
    for response in groups[0]["responses"][:2] + groups[1]["responses"]:
        response["advantage"] = 0.0
    answers.add("partly", groups)
    equal = [
        {**g, "responses": [{**_without(r, "advantage"), "reward": 0.3} for r in g["responses"]]}
        for g in groups
    ]
    answers.add("equal", equal)
    outs = [tmp_path / f"{name}.safetensors" for name in ("partly", "equal")]
    cases = [answers.case("qwen3", out.stem, out, contract="exact", K=1, Z=64) for out in outs]
    fed = run_world(world, "worlds.ranks:fed_tokens", cases=cases)
    replicas = [rank for rank in fed if rank["leads"]]
    # What is left: two responses and the prefix of the first group, one response of a group without a prefix.
    live = [7 + 2 + 2 * 36, 4]
    assert sum(rank["tokens"][0] for rank in replicas) == sum(live)
    assert sum(rank["tokens"][1] for rank in replicas) == 0
    compare_tensors(load_file(outs[0]), answers.grad("qwen3", "exact", "partly")).require(1e-5, 1e-4)
    assert all(not torch.any(gradient) for gradient in load_file(outs[1]).values())


def _without(record: dict[str, Any], key: str) -> dict[str, Any]:
    """The record, or its responses, without a key."""
    bare = {name: value for name, value in record.items() if name != key}
    if "responses" in bare:
        bare["responses"] = [_without(response, key) for response in bare["responses"]]
    return bare
