"""Claim: the two LastKV references agree, follow their definition, and can tell its variants apart.

Why the tests show it: one goes token by token with Python lists, the other chunk by chunk with matrices; they share
only projections, norms and MLP, which are those of `plain_fp64`. With C ≥ the sequence both are the full-attention
model. The scalar recurrence of the design has its numbers written out. Gradients of the chunk-parallel one are
compared with finite differences.
Not shown: anything of the package.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from oracle import lastkv_reference, plain_fp64
from oracle.compare import compare_tensors
from oracle.lastkv_reference import ChunkParallel, TokenByToken, make_gates
from oracle.tiny_models import CASES, write_case
from oracle.trajectories import window

GATES = make_gates(5, 4, 2)
IDS = torch.randint(0, 131, (23,), generator=torch.Generator().manual_seed(1)).tolist()


@pytest.mark.parametrize("case", CASES)
def test_the_references_agree(session_dir: Path, case: str, report) -> None:
    hf = write_case(session_dir / "hf", case)
    farthest = 0.0
    for chunk, blend in ((1, True), (3, True), (3, False), (16, True), (16, False)):
        one_by_one = TokenByToken(hf, GATES, chunk, blend).forward_all(IDS)
        found = ChunkParallel(hf, GATES, chunk, blend).forward_chunks(IDS)
        farthest = max(farthest, float((found - one_by_one).abs().max()))
    report("largest difference of a logit", farthest)
    assert farthest <= 1e-12


def test_a_chunk_that_never_fills_is_full_attention(session_dir: Path) -> None:
    hf = write_case(session_dir / "hf", "qwen3")
    full = plain_fp64.PlainModel(hf).forward(IDS)[0]
    assert float((TokenByToken(hf, GATES, len(IDS)).forward_all(IDS) - full).abs().max()) <= 1e-12
    assert float((TokenByToken(hf, GATES, len(IDS) - 1).forward_all(IDS) - full)[:-1].abs().max()) <= 1e-12


def test_every_rule_matters(session_dir: Path) -> None:
    """Another C, no blend, other gates: logits move by far more than rounding; the last layer's gate moves nothing."""
    hf = write_case(session_dir / "hf", "qwen3")
    base = TokenByToken(hf, GATES, 4).forward_all(IDS)
    for other in (
        TokenByToken(hf, GATES, 5),
        TokenByToken(hf, GATES, 4, blend=False),
        TokenByToken(hf, {**GATES, lastkv_reference.gate_name(1): torch.tensor([2.0, -0.5])}, 4),
    ):
        assert float((other.forward_all(IDS) - base).abs().max()) > 0.01
    last = {**GATES, lastkv_reference.gate_name(3): torch.tensor([9.0, -9.0])}
    # (1 - a) x + a x rounds, the rest is the same
    assert float((TokenByToken(hf, last, 4).forward_all(IDS) - base).abs().max()) <= 1e-12


def test_gradients_are_those_of_finite_differences(session_dir: Path) -> None:
    hf = write_case(session_dir / "hf", "qwen3")
    groups = window(3, shape=((7, (6, 2)),))
    gradient = lastkv_reference.grad(hf, GATES, groups, "exact", 3)
    names = [
        lastkv_reference.gate_name(0),
        "model.layers.2.self_attn.k_norm.weight",
        "model.layers.3.self_attn.v_proj.weight",
    ]

    def loss(shift: float, name: str) -> float:
        model = TokenByToken(hf, GATES, 3)
        model.weights[name] = model.weights[name].detach() + shift * torch.ones_like(model.weights[name])
        weight = 1 / sum(len(r["ids"]) for g in groups for r in g["responses"])
        parts = [
            -r["advantage"] * weight * model.score(g["prompt_ids"], r["ids"]).sum()
            for g in groups
            for r in g["responses"]
        ]
        return float(sum(parts))

    for name in names:
        slope = (loss(1e-5, name) - loss(-1e-5, name)) / 2e-5
        assert slope == pytest.approx(float(gradient[name].sum()), rel=1e-6, abs=1e-9), name


def test_the_contracts_lie_apart_and_meet_at_their_ends(session_dir: Path, report) -> None:
    hf = write_case(session_dir / "hf", "qwen3")
    groups = window(3, shape=((11, (9, 2)),))

    def grad(contract: str, live: int = 0) -> dict[str, torch.Tensor]:
        return lastkv_reference.grad(hf, GATES, groups, contract, 4, live=live)

    exact, constant = grad("exact"), grad("response_only")
    apart = compare_tensors(constant, exact)
    report("response_only against exact", apart)
    assert apart.rel_l2 > 0.1
    compare_tensors(grad("truncated", 0), constant).require(1e-14, 1e-14)
    compare_tensors(grad("truncated", 10), exact).require(1e-14, 1e-14)
    for other in (exact, constant):
        assert compare_tensors(grad("truncated", 4), other).rel_l2 > 0.01
    for gradient in (exact, constant):
        assert not gradient[lastkv_reference.gate_name(3)].any()
        assert all(bool(gradient[lastkv_reference.gate_name(i)].all()) for i in range(3))  # α is always live
    single = lastkv_reference.grad(hf, GATES, groups, "exact", 4, dtype=torch.float32)
    compare_tensors(single, exact).require(1e-5, 1e-4)
