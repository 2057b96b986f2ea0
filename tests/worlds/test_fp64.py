"""Claim: in float64 every contract's gradient is right to 1e-10, and no step of it leaves float64.

Why the tests show it: the oracle is a plain float64 transformer that shares no code with the program (transformers
itself computes norms and RoPE in float32); agreement to 1e-10 leaves no room for a float32 operation, a missing term
or an approximation. A dispatch mode sees the result type of every operation of capture, replay, sweep and reduction,
backward passes included.
Not shown: more than one rank; CUDA.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from harness import ONE, run_world
from oracle.compare import compare_tensors
from oracle.tiny_models import CASES
from safetensors.torch import load_file

BAR = 1e-10
LIVE = 10
CONTRACTS = ["conventional", "response_only", "exact", "truncated"]


@pytest.fixture(scope="module")
def written(answers: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Path]:
    """The gradient file of each model and contract, all from one open runtime."""
    folder = tmp_path_factory.mktemp("fp64")
    outs = {(m, c): folder / f"{m}-{c}.safetensors" for m in CASES for c in CONTRACTS}
    run_world(ONE, "worlds.ranks:run_verbs", cases=[wide(answers, *key, out) for key, out in outs.items()])
    return outs


def wide(answers: Any, model: str, contract: str, out: Path) -> dict[str, Any]:
    """A float64 case of the mixed window."""
    return answers.case(model, "mixed", out, contract=contract, T=LIVE, model__dtype='"float64"')


@pytest.mark.parametrize("contract", CONTRACTS)
def test_grad_in_float64(
    contract: str, answers: Any, written: dict[tuple[str, str], Path], report: Any
) -> None:
    found = {}
    for model in CASES:
        oracle = answers.grad_fp64(
            model, "mixed", contract in ("response_only", "truncated"), LIVE if contract == "truncated" else 0
        )
        found[model] = compare_tensors(load_file(written[model, contract]), oracle)
    farthest = max(found, key=lambda model: found[model].rel_l2)
    report(f"farthest of {len(found)}: {farthest}", found[farthest])
    for model, comparison in found.items():
        comparison.require(BAR, BAR, model)


def test_no_operation_leaves_float64(answers: Any, tmp_path: Path, report: Any) -> None:
    models = ["llama-tied-llama3", "qwen2", "qwen3-tied-yarn"]
    asked = [(model, contract) for model in models for contract in CONTRACTS]
    cases = [wide(answers, *key, tmp_path / "unused") for key in asked]
    (found,) = run_world(ONE, "worlds.ranks:watched_grad", cases=cases)
    report("floating-point results seen", sum(watch["seen"] for watch in found))
    for key, watch in zip(asked, found, strict=True):
        assert watch["seen"] > 1000, key
        assert not watch["strangers"], (key, watch["strangers"])
