"""Claim: in float64 every contract's gradient of the families beyond Llama is right to 1e-10 on one rank: mixtures of
experts, Gated DeltaNet hybrids with a swept recurrent state, GLM.

Why the tests show it: the oracle is a plain float64 implementation that runs the delta rule token by token and experts
one by one and shares no code with the program; a float32 operation or a missing edge (of the recurrent state, the
convolution's tail, a router) shows at 1e-7 and above.
Not shown: more than one rank (test_hybrid, test_moe), CUDA.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from harness import ONE, run_world
from oracle.compare import compare_tensors
from oracle.tiny_families import MORE_CASES
from safetensors.torch import load_file

BAR = 1e-10
LIVE = 10
CONTRACTS = ["conventional", "response_only", "exact", "truncated"]


@pytest.mark.parametrize("case", MORE_CASES)
def test_grad_in_float64(case: str, answers: Any, tmp_path: Path, report: Any) -> None:
    outs = {contract: tmp_path / f"{contract}.safetensors" for contract in CONTRACTS}
    cases = [
        answers.case(case, "mixed", out, contract=contract, T=LIVE, model__dtype='"float64"')
        for contract, out in outs.items()
    ]
    run_world(ONE, "worlds.ranks:run_verbs", cases=cases)
    found = {}
    for contract, out in outs.items():
        detached, live = contract in ("response_only", "truncated"), LIVE if contract == "truncated" else 0
        found[contract] = compare_tensors(load_file(out), answers.grad_fp64(case, "mixed", detached, live))
    contract, farthest = max(found.items(), key=lambda item: item[1].rel_l2)
    report(f"farthest: {contract}", farthest)
    for contract, comparison in found.items():
        comparison.require(BAR, BAR, contract)
