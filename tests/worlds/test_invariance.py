"""Claim: how a window is executed does not change its gradient: responses at once, capture chunks, order of replay.

Why the tests show it: the same window runs with K = 1, 2 and G, with Z = 7, 64 and P, and with responses, groups or
both reversed in the file (advantages are recorded, so the window is the same sum); every two of the gradients are
compared: in float32 at most 1e-6 apart on one rank, in float64 at most 1e-12 in every world, so that nothing but
rounding depends on the execution. `truncated` at its two ends must give the very bits of `response_only` and `exact`.
Not shown: 1e-6 in float32 for the tied qwen3 model with YaRN (1.1e-6 under exact on one rank, 1.5e-6 on four) and for
several ranks (qwen2: 1.01e-6 on cp2-pp2). Those gradients are 1.2e-6 from the float64 ones however they are computed
(transformers' own: 1.3e-6). It is the rounding inside float32 matrix products: with those in float64 between float32
tensors they differ by 0.6e-6, with float64 attention by 0.9e-6, with both by 0.5e-6; accumulating the gradient buffers
in float64 changes nothing (1.09e-6 both ways).
"""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import ONE, World, run_world
from oracle.compare import compare_tensors
from oracle.trajectories import window
from safetensors.torch import load_file

BAR = 1e-6
GROUP, LONGEST = 3, 70
SHAPE = ((LONGEST, (5, 1, 9)), (11, (3, 8, 4)))
EXECUTIONS = {
    "K1-Z7": {"K": 1, "Z": 7},
    "K2-Z7": {"K": 2, "Z": 7},
    "KG-Z7": {"K": GROUP, "Z": 7},
    "K1-Z64": {"K": 1, "Z": 64},
    "K2-ZP": {"K": 2, "Z": LONGEST},
    "KG-ZP": {"K": GROUP, "Z": LONGEST},
    "logits in pieces": {"K": GROUP, "Z": 64, "replay__logits_chunk": 3},
}
ORDERS = ["responses", "groups", "both"]
# exact replays as response_only does and sweeps as well: in worlds of several ranks it stands for both
PLACES = [
    (ONE, "response_only"), (ONE, "exact"), (World(tp=2, cp=2), "exact"), (World(cp=2, pp=2), "exact"),
]  # fmt: skip


def in_world(world: World) -> str:
    return world.name


@pytest.fixture(scope="module")
def windows(answers: Any) -> dict[str, str]:
    """Names of the window in each order."""
    plain = window(9, shape=SHAPE)
    turned = [{**group, "responses": group["responses"][::-1]} for group in plain]
    answers.add("in order", plain)
    for name, groups in zip(ORDERS, (turned, plain[::-1], turned[::-1]), strict=True):
        answers.add(name, groups)
    return {"in order": "in order", **{name: name for name in ORDERS}}


@pytest.mark.parametrize(
    ("world", "contract", "dtype", "model", "bar"),
    [
        *((ONE, contract, "float32", "qwen2", BAR) for contract in ("response_only", "exact")),
        *((world, contract, "float64", "qwen3-tied-yarn", 1e-12) for world, contract in PLACES),
    ],
    ids=lambda x: x.name if isinstance(x, World) else str(x),
)
def test_execution_does_not_change_the_gradient(
    world: World,
    contract: str,
    dtype: str,
    model: str,
    bar: float,
    answers: Any,
    windows: dict[str, str],
    tmp_path: Path,
    report: Any,
) -> None:
    pair, distance = farthest(world, contract, dtype, model, answers, windows, tmp_path)
    report(f"farthest pair ({pair})", distance)
    assert 0.0 < distance <= bar, (pair, distance)  # 0: the settings reached nothing


def farthest(
    world: World, contract: str, dtype: str, model: str, answers: Any, windows: dict[str, str], folder: Path
) -> tuple[str, float]:
    """The two executions whose gradients differ most, and by how much."""
    runs = [(name, "in order", settings) for name, settings in EXECUTIONS.items()]
    runs += [(f"{order} reversed", windows[order], EXECUTIONS["K2-Z7"]) for order in ORDERS]
    outs = {name: folder / f"{i}.safetensors" for i, (name, _, _) in enumerate(runs)}
    cases = [
        answers.case(model, file, outs[name], contract=contract, model__dtype=f'"{dtype}"', **settings)
        for name, file, settings in runs
    ]
    run_world(world, "worlds.ranks:run_verbs", cases=cases)
    gradients = {name: load_file(out) for name, out in outs.items()}
    apart = {
        f"{a} | {b}": compare_tensors(gradients[a], gradients[b]).rel_l2
        for a, b in combinations(gradients, 2)
    }
    pair = max(apart, key=lambda name: apart[name])
    return pair, apart[pair]


@pytest.mark.parametrize("world", [ONE, World(tp=2, cp=2)], ids=in_world)
def test_truncation_ends_in_the_other_contracts_bit_for_bit(
    world: World, answers: Any, windows: dict[str, str], tmp_path: Path
) -> None:
    settings: dict[str, dict[str, Any]] = {
        "response_only": {"contract": "response_only"},
        "none": {"contract": "truncated", "T": 0},
        "exact": {"contract": "exact"},
        "all": {"contract": "truncated", "T": LONGEST - 1},
        "more": {"contract": "truncated", "T": 10_000},
    }
    outs = {name: tmp_path / f"{name}.safetensors" for name in settings}
    cases = [answers.case("llama", "in order", outs[name], **settings[name]) for name in settings]
    run_world(world, "worlds.ranks:run_verbs", cases=cases)
    got = {name: load_file(out) for name, out in outs.items()}
    assert compare_tensors(got["exact"], got["response_only"]).rel_l2 > 0.1
    for name, same in (("none", "response_only"), ("all", "exact"), ("more", "exact")):
        differing = [tensor for tensor in got[same] if not torch.equal(got[name][tensor], got[same][tensor])]
        assert got[name].keys() == got[same].keys() and not differing, (name, differing)
