"""Claim: prefix.measure_omitted_every logs how far the contract's gradient is from the exact one, by kind of
parameter, and changes no update.

Why the tests show it: on one rank the logged numbers are recomputed from the two flat gradients; `train` is
run with and without the measurement, alone and in a world whose optimizer is sharded, and must export the
same weights bit by bit and log the same numbers otherwise; the sharded world's ratio is that of one rank.

Not shown: how large the ratio is on a real model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from cli.runs import Runs, require_equal_weights, run
from harness import ONE, World
from lifetimes.tiny import gradient, ids, tiny_run

from megatron_lrl.lifetimes.window import UpdateWindow
from megatron_lrl.rl.accumulate import WindowPlan, accumulate
from megatron_lrl.rl.omitted import exact_gradient, measures_omitted, omitted_metrics
from megatron_lrl.rl.stopwatch import Stopwatch
from megatron_lrl.rollout.types import Group, Response

OMITTED = "omitted/relative_l2_all"


@pytest.mark.parametrize("contract", ["response_only", "truncated"])
def test_the_numbers_are_those_of_the_two_gradients(contract: str, session_dir: Path) -> None:
    settings = [f"prefix.contract={contract}", "prefix.chunk_size=8", "prefix.truncate_tokens=5"]
    responses = tuple(Response(ids(n, 50 + n), advantage=a) for n, a in ((4, 1.0), (7, -0.5)))
    with tiny_run(session_dir, *settings) as opened:
        plan = WindowPlan([Group("g", ids(30, 3), responses)], opened.config)
        found = {}
        for name in ("exact", contract):
            with UpdateWindow(opened) as window:
                accumulate(window, plan, contract=name)
                window.reduce()
                found[name] = gradient(opened)
        exact = exact_gradient(opened, plan, Stopwatch())
        assert not gradient(opened).any(), "nothing of the measurement stays in the buffers"
        with UpdateWindow(opened) as window:
            accumulate(window, plan)
            window.reduce()
            metrics = omitted_metrics(opened, exact)
            assert torch.equal(gradient(opened), found[contract])
    ours, full = found[contract], found["exact"]
    assert metrics[OMITTED] == pytest.approx(float((full - ours).norm() / full.norm()), rel=1e-9)
    assert metrics["omitted/cosine_all"] == pytest.approx(
        float(ours @ full / ours.norm() / full.norm()), rel=1e-9
    )
    assert 0.01 < metrics[OMITTED] < 2
    assert metrics["omitted/relative_l2_embedding"] > 0 and "omitted/cosine_attention_out" in metrics


def test_when_it_measures(session_dir: Path) -> None:
    def updates(*settings: str) -> list[int]:
        with tiny_run(session_dir, *settings, gradients=False) as opened:
            return [number for number in range(6) if measures_omitted(opened.config, number)]

    assert updates("prefix.contract=response_only", "prefix.measure_omitted_every=3") == [0, 3]
    assert updates("prefix.contract=response_only") == []
    assert updates("prefix.contract=exact", "prefix.measure_omitted_every=1") == []


@pytest.fixture(scope="module")
def runs(session_dir: Path) -> Runs:
    root = session_dir / "omitted"
    root.mkdir()
    return Runs(root)


@pytest.mark.parametrize("world", [ONE, World(cp=2)], ids=lambda world: world.name)
def test_training_is_the_same_with_a_measurement(world: World, runs: Runs) -> None:
    settings = ["prefix.contract=response_only", f"parallel.cp={world.cp}", "train.groups_per_update=2"]
    plain, measured = f"plain-{world.name}", f"measured-{world.name}"
    run(
        runs.train(plain, *settings),
        runs.train(measured, *settings, "prefix.measure_omitted_every=2"),
        world=world,
    )
    run(runs.export(plain, 2), runs.export(measured, 2))
    require_equal_weights(runs.weights(plain, 2), runs.weights(measured, 2))
    records: list[dict[str, Any]] = runs.metrics(measured)
    assert [OMITTED in record for record in records] == [True, False]
    assert 0.01 < records[0][OMITTED] < 2
    for one, other in zip(records, runs.metrics(plain), strict=True):
        assert one["optimizer/grad_norm"] == other["optimizer/grad_norm"]
        assert one["bytes/replay"] == other["bytes/replay"] and one["bytes/group"] == other["bytes/group"]
        assert one["bytes_planned/run"] == one["bytes/run"]
    if world is not ONE:
        alone = runs.metrics(f"measured-{ONE.name}")[0]
        for name in (name for name in alone if name.startswith("omitted/")):
            assert records[0][name] == pytest.approx(alone[name], rel=1e-3), name
