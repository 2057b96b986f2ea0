"""Claim: `train` runs models with experts over data-parallel replicas that share them, with recorded routing, a
reference model and a router bias that moves; stopped and resumed it is the run that was not.

Why the tests show it: GRPO on three groups over two replicas makes them sample, score and replay unequal numbers of
passes; metrics must be finite, the routing mismatch of sampler and replay measured, and weights and metrics of a
run in two parts bit-equal to those of one run. The router's biases, which are no parameters, must have moved and be
exported.
Not shown: that the bias evens the load.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from harness import ONE, World
from oracle.tiny_models import make_hf_dir
from safetensors.torch import load_file

from cli.runs import Runs, require_continuous, require_equal_weights, require_same, run

SETTINGS = [
    "train.groups_per_update=3",
    "loss.kl_coef=0.05",
    "rollout.record_routing=true",
    "moe.router_bias_update_rate=0.01",
    "moe.aux_loss_coef=0.001",
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    runs = Runs(tmp_path_factory.mktemp("experts"))
    shutil.rmtree(runs.model)
    make_hf_dir(runs.model, "glm4_moe", 11, layers=2, max_positions=128)
    return runs


@pytest.mark.parametrize("world", [World(dp=2, ep=2), World(tp=2, dp=2, ep=2)], ids=lambda world: world.name)
def test_a_run_in_two_parts_is_one_run(world: World, runs: Runs) -> None:
    whole, halves = f"whole-{world.name}", f"halves-{world.name}"
    settings = [*SETTINGS, *world.overrides]
    run(
        runs.train(whole, *settings, "train.updates=4"),
        runs.train(halves, *settings, "train.updates=2"),
        runs.train(halves, *settings, "train.updates=4"),
        runs.export(whole, 4),
        runs.export(halves, 4),
        world=world,
    )
    require_continuous(runs.metrics(halves), 4)
    require_same(runs.computed(halves), runs.computed(whole))
    ours, theirs = runs.weights(halves, 4), runs.weights(whole, 4)
    require_equal_weights(ours, theirs)
    before = load_file(Path(runs.model) / "model.safetensors")
    for name in (n for n in ours if n.endswith("e_score_correction_bias")):
        moved = (ours[name] - before[name]).abs()
        assert float(moved.max()) > 0.005 and float(moved.max()) < 0.0401
    assert not torch.equal(ours["model.layers.1.mlp.gate.weight"], before["model.layers.1.mlp.gate.weight"])
    for record in runs.metrics(whole):
        assert 0.0 <= record["routing/mismatch"] <= 0.02 and record["routing/weight_difference_max"] <= 1e-4


def test_recorded_routing_trains_like_the_routers_own(runs: Runs) -> None:
    """Before a step the record is what the router decides: the first update is the same to rounding."""
    settings = ["train.updates=1", "rollout.record_routing=true"]
    run(
        runs.train("own", *settings),
        runs.train("recorded", *settings, "replay.use_recorded_routing=true"),
        world=ONE,
    )
    own, recorded = runs.metrics("own")[0], runs.metrics("recorded")[0]
    assert recorded["optimizer/grad_norm"] == pytest.approx(own["optimizer/grad_norm"], rel=1e-4)
    assert recorded["ratio/max_deviation_before_step"] <= 1e-4
