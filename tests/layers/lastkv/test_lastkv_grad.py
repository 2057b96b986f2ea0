"""Claim: under LastKV `grad` gives the gradient of plain autograd, gates included, under every contract and in every
parallel layout.

Why the tests show it: the oracle keeps the whole graph of a chunk-parallel forward pass; what a contract holds constant
is detached there row by row. Prompts and responses sit around the boundaries (`around_boundaries`), capture chunks are
smaller and larger than C and divide nothing, truncation cuts inside a chunk. The contracts lie far apart on these
models. On one rank in float64 the bar leaves room for rounding only.
Not shown: a step; bfloat16; CUDA.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from harness import WORLDS, World, run_world
from oracle import lastkv_reference
from oracle.compare import Comparison, compare_tensors
from oracle.trajectories import Group, write_jsonl
from safetensors.torch import load_file

from layers.lastkv.tiny import around_boundaries, lastkv_run, records_of, write_lastkv
from megatron_lrl.checkpoint.hf_export import gather_hf_tensors, parameter_gradient
from megatron_lrl.lifetimes.window import UpdateWindow
from megatron_lrl.rl.accumulate import WindowPlan, accumulate
from megatron_lrl.runtime import Runtime

BAR_64, BAR_32, WORST_32 = 1e-10, 1e-5, 1e-4
LAST_GATE = lastkv_reference.gate_name(3)

# model, C, blend, contract, T, Z, K
Asked = tuple[str, int, bool, str, int, int, int]
ALONE: list[Asked] = [
    ("qwen3", 1, True, "exact", 0, 7, 3),
    ("qwen3", 3, True, "conventional", 0, 7, 2),
    ("qwen3", 3, False, "exact", 0, 2, 2),
    ("llama-tied-llama3", 16, True, "exact", 0, 7, 3),
    ("qwen2", 16, True, "response_only", 0, 64, 2),
    ("qwen3-tied-yarn", 16, True, "truncated", 1, 7, 2),
    ("qwen3", 16, False, "truncated", 19, 40, 3),
    ("qwen3", 3, True, "truncated", 4, 5, 1),
    ("llama", 64, True, "exact", 0, 7, 2),
]
SPREAD: list[Asked] = [
    ("qwen3", 3, True, "conventional", 0, 7, 2),
    ("qwen2", 3, True, "exact", 0, 7, 2),
    ("llama-tied-llama3", 5, False, "exact", 0, 64, 3),
    ("qwen3", 5, True, "response_only", 0, 3, 3),
    ("qwen3-tied-yarn", 3, True, "truncated", 4, 5, 2),
]


def in_world(world: World) -> str:
    return world.name


def named(asked: Asked) -> str:
    model, chunk, blend, contract, live, *_ = asked
    return f"{model}-C{chunk}-{contract}{live or ''}{'' if blend else '-no-blend'}"


def window_of(chunk: int) -> list[Group]:
    return around_boundaries(min(chunk, 16))


@pytest.fixture(scope="module")
def oracle(models: Path) -> Any:
    """The oracle's gradient of a case, each computed once."""
    known: dict[tuple[Any, ...], dict[str, torch.Tensor]] = {}

    def answer(asked: Asked, groups: list[Group]) -> dict[str, torch.Tensor]:
        model, chunk, blend, contract, live, _, _ = asked
        key = (model, chunk, blend, contract, live, len(groups))
        if key not in known:
            hf = write_lastkv(models, model, chunk, blend)
            known[key] = lastkv_reference.grad(hf, None, groups, contract, chunk, blend, live)
        return known[key]

    return answer


def settings_of(asked: Asked) -> list[str]:
    _, _, _, contract, live, capture, concurrent = asked
    return [
        "model.attention=lastkv",
        "replay.check_poison=true",
        f"prefix.contract={contract}",
        f"prefix.truncate_tokens={live}",
        f"prefix.chunk_size={capture}",
        f"replay.concurrent={concurrent}",
    ]


def check_gates(ours: dict[str, torch.Tensor], blend: bool) -> None:
    """The last layer's gate, and without blending every gate, gets exactly nothing; the others something."""
    for name, gradient in ours.items():
        if name.endswith("lastkv_gate"):
            assert bool(gradient.any()) is (blend and name != LAST_GATE), name


@pytest.mark.parametrize("asked", ALONE, ids=named)
def test_grad_in_float64(asked: Asked, runtime: Runtime, models: Path, oracle: Any, report: Any) -> None:
    model, chunk, blend, *_ = asked
    hf = write_lastkv(models, model, chunk, blend)
    with lastkv_run(runtime, hf, *settings_of(asked), gradients=True) as run, UpdateWindow(run) as window:
        accumulate(window, WindowPlan(records_of(window_of(chunk)), run.config))
        window.reduce()
        ours = {n: g.clone() for n, g in gather_hf_tensors(run.model, run.arch, runtime, parameter_gradient)}
    comparison = compare_tensors(ours, oracle(asked, window_of(chunk)))
    report("gradient", comparison)
    comparison.require(BAR_64, BAR_64)
    if chunk < 64:  # else nothing is ever blended
        check_gates(ours, blend)


@pytest.mark.parametrize(
    "world", [*WORLDS[:-1], pytest.param(WORLDS[-1], marks=pytest.mark.slow)], ids=in_world
)
def test_grad_in_every_world(world: World, models: Path, oracle: Any, tmp_path: Path, report: Any) -> None:
    cases, outs = [], []
    for i, asked in enumerate(SPREAD):
        model, chunk, blend, *_ = asked
        outs.append(tmp_path / f"{i}.safetensors")
        groups = write_jsonl(tmp_path / f"C{chunk}.jsonl", window_of(chunk)[1::2])
        cases.append(
            {
                "verb": "grad",
                "hf": str(write_lastkv(models, model, chunk, blend)),
                "trajectories": str(groups),
                "out": str(outs[-1]),
                "settings": settings_of(asked),
            }
        )
    run_world(world, "worlds.ranks:run_verbs", cases=cases)
    found: dict[str, tuple[Comparison, Comparison]] = {}
    for asked, out in zip(SPREAD, outs, strict=True):
        ours, expected = load_file(out), oracle(asked, window_of(asked[1])[1::2])
        check_gates(ours, asked[2])
        gates = [name for name in expected if name.endswith("lastkv_gate")] if asked[2] else list(expected)
        found[f"{asked[0]} C{asked[1]} {asked[3]}"] = (
            compare_tensors(ours, expected),
            compare_tensors({n: ours[n] for n in gates}, {n: expected[n] for n in gates}),
        )
    name = max(found, key=lambda n: found[n][0].rel_l2)
    report(f"farthest: {name}", found[name][0])
    name = max(found, key=lambda n: found[n][1].rel_l2)
    report(f"farthest gates: {name}", found[name][1])
    for name, (whole, gates_alone) in found.items():
        whole.require(BAR_32, WORST_32, name)
        gates_alone.require(BAR_32, WORST_32, f"{name}, gates")


def test_the_contracts_lie_apart(models: Path) -> None:
    hf, groups = write_lastkv(models, "qwen3", 3), window_of(3)[3:]
    exact, cut, constant = (
        lastkv_reference.grad(hf, None, groups, contract, 3, live=2)
        for contract in ("exact", "truncated", "response_only")
    )
    for first, second in ((cut, exact), (constant, exact), (constant, cut)):
        assert compare_tensors(first, second).rel_l2 > 0.01
