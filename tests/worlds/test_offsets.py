"""Claim: where all scores of a query share an offset of hundreds, as in published models with biases on their keys,
no layout is farther from float64 than one rank is, under any contract.

Why the test shows it: the model's keys have biases of 60, its queries of 4, so that log-sum-exps reach hundreds and
their rounding is larger than that of the weights they stand for. A merge whose weights are not normalised in themselves
triples the distance of cp = 2. The reference is the plain float64 transformer; a world may be 1.3 times as far from it
as one rank. How far transformers is in float32 is reported, not held: it saves its probabilities, a flash backward
makes them anew from scores that round in proportion to the offset (one rank was up to 1.4 times as far).
Not shown: bfloat16; layer kinds without a softmax.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from harness import ONE, WORLDS, World, run_world
from oracle.compare import Comparison, compare_tensors
from oracle.trajectories import window
from safetensors.torch import load_file

CASE = "qwen2-offset"
MORE = 1.3
LIVE = 70
SHAPE = ((201, (9, 5, 14)), (201, (3, 11)))
CONTRACTS = ["conventional", "response_only", "exact", "truncated"]


class Offset:
    """The model, its window, and what one rank and float64 make of them."""

    def __init__(self, answers: Any, folder: Path) -> None:
        self.answers, self.folder = answers, folder
        answers.add("long", window(11, shape=SHAPE))
        self.one = self.distances(ONE)
        self.transformers = {
            c: compare_tensors(answers.grad(CASE, c, "long", LIVE), self.oracle(c)) for c in CONTRACTS
        }

    def distances(self, world: World) -> dict[str, Comparison]:
        """From float64, by contract."""
        outs = {c: self.folder / f"{world.name}-{c}.safetensors" for c in CONTRACTS}
        cases = [self.answers.case(CASE, "long", out, contract=c, Z=64, T=LIVE) for c, out in outs.items()]
        run_world(world, "worlds.ranks:run_verbs", cases=cases)
        return {c: compare_tensors(load_file(out), self.oracle(c)) for c, out in outs.items()}

    def oracle(self, contract: str) -> dict[str, torch.Tensor]:
        constant = contract in ("response_only", "truncated")
        live = LIVE if contract == "truncated" else 0
        return self.answers.grad_fp64(CASE, "long", constant, live)


@pytest.fixture(scope="module")
def offset(answers: Any, tmp_path_factory: pytest.TempPathFactory) -> Offset:
    return Offset(answers, tmp_path_factory.mktemp("offset"))


@pytest.mark.parametrize("world", WORLDS, ids=lambda world: world.name)
def test_no_world_is_farther_from_float64_than_one_rank(world: World, offset: Offset, report: Any) -> None:
    found = offset.one if world == ONE else offset.distances(world)
    for contract, comparison in found.items():
        times = comparison.rel_l2 / offset.one[contract].rel_l2
        report(f"{contract}: relative L2, times one rank's", f"{comparison.rel_l2:.1e} {times:.2f}")
    if world == ONE:
        for contract, comparison in offset.transformers.items():
            report(f"{contract}: transformers", comparison)
    for contract, comparison in found.items():
        one = offset.one[contract]
        assert comparison.rel_l2 <= MORE * one.rel_l2, f"{contract}: {comparison}; one rank {one}"
