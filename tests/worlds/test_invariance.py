"""Claim: how a window is executed does not change its gradient: responses at once, capture chunks, order of replay.

Why the tests show it: the same window runs with K = 1, 2 and G, with Z = 7, 64 and P, and with responses, groups or
both reversed in the file (advantages are recorded, so the window is the same sum); every two of the gradients are
compared: in float32 at most 1e-6 apart on one rank, in float64 at most 1e-12 in every world, so that nothing but
rounding depends on the execution. `truncated` at its two ends must give the very bits of `response_only` and `exact`.
Not shown: 1e-6 in float32 for the tied qwen3 model with YaRN (1.1e-6 under exact on one rank, 1.5e-6 on four) and for
several ranks (qwen2: 1.01e-6 on cp2-pp2). That model amplifies rounding: moving its embeddings' output by half a
float32 ulp moves transformers' gradient by 1.3e-6 to 1.4e-6, another attention implementation of transformers by
1.2e-6; all float32 gradients, theirs and ours, are 1.2e-6 to 1.3e-6 from float64's. So K and Z are invisible there only
if the forward pass is the same bit for bit; the test of half an ulp holds them to less than that noise. What depends
on them: matrix products of 1 to 3 rows, for which the CPU library sums in another order (without them 0.96e-6), and
where a chunk's attention is cut. Once one bit differs, all later roundings do. Computed in float64 between float32
tensors, forward products leave 0.73e-6, attention 0.90e-6, backward products 0.98e-6, all three 0.45e-6; norms,
activations and additions, and the sums of weights' gradients, change nothing (1.1e-6).
"""

from __future__ import annotations

from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from harness import ONE, World, run_world
from oracle import hf_oracle
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
    pair, distance = farthest(gradients(world, contract, dtype, model, answers, windows, tmp_path))
    report(f"farthest pair ({pair})", distance)
    assert 0.0 < distance <= bar, (pair, distance)  # 0: the settings reached nothing


Gradients = dict[str, dict[str, torch.Tensor]]


def gradients(
    world: World, contract: str, dtype: str, model: str, answers: Any, windows: dict[str, str], folder: Path
) -> Gradients:
    """The window's gradient by execution."""
    runs = [(name, "in order", settings) for name, settings in EXECUTIONS.items()]
    runs += [(f"{order} reversed", windows[order], EXECUTIONS["K2-Z7"]) for order in ORDERS]
    outs = {name: folder / f"{i}.safetensors" for i, (name, _, _) in enumerate(runs)}
    cases = [
        answers.case(model, file, outs[name], contract=contract, model__dtype=f'"{dtype}"', **settings)
        for name, file, settings in runs
    ]
    run_world(world, "worlds.ranks:run_verbs", cases=cases)
    return {name: load_file(out) for name, out in outs.items()}


def farthest(gradients: Gradients) -> tuple[str, float]:
    """The two executions whose gradients differ most, and by how much."""
    apart = {
        f"{a} | {b}": compare_tensors(gradients[a], gradients[b]).rel_l2
        for a, b in combinations(gradients, 2)
    }
    pair = max(apart, key=lambda name: apart[name])
    return pair, apart[pair]


def test_a_model_that_amplifies_rounding_moves_less_than_half_an_ulp_moves_it(
    answers: Any, windows: dict[str, str], tmp_path: Path, report: Any
) -> None:
    """The noise: transformers' gradient with the embeddings' output moved at random, the smallest of three draws."""
    model = "qwen3-tied-yarn"
    hf, groups = answers.hf(model), answers.groups[windows["in order"]]
    found = gradients(ONE, "exact", "float32", model, answers, windows, tmp_path)
    plain, exact = hf_oracle.grad_exact(hf, groups), answers.grad_fp64(model, windows["in order"], False)
    noise = []
    for draw in range(3):
        with mock.patch.object(hf_oracle, "load", partial(noisy, load=hf_oracle.load, draw=draw)):
            noise.append(compare_tensors(hf_oracle.grad_exact(hf, groups), plain).rel_l2)
    pair, distance = farthest(found)
    from_exact = [compare_tensors(gradient, exact).rel_l2 for gradient in found.values()]
    theirs = compare_tensors(plain, exact).rel_l2
    report(f"farthest pair ({pair}), half an ulp", f"{distance:.2e}, {min(noise):.2e} to {max(noise):.2e}")
    report(
        "from float64: ours, transformers'", f"{min(from_exact):.2e} to {max(from_exact):.2e}, {theirs:.2e}"
    )
    assert 0.0 < distance < min(noise)
    assert max(from_exact) <= 1.2 * theirs


def noisy(hf_dir: Path, *, load: Any, draw: int) -> Any:
    """The oracle's model; what an embedding gives is moved by half a float32 ulp at most, each id in its own way."""
    model = load(hf_dir)
    embedding = model.get_input_embeddings()
    shape, generator = embedding.weight.shape, torch.Generator().manual_seed(draw)
    factor_VH = 1 + 2.0**-24 * (2 * torch.rand(shape, generator=generator) - 1)
    embedding.register_forward_hook(lambda _module, args, output: output * factor_VH[args[0]])
    return model


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
