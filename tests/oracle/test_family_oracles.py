"""Claim: the oracles are right for what is special of mixtures of experts, Gated DeltaNet hybrids and GLM.

Why the tests show it: test_oracles holds transformers against the plain model in every family; here the plain one's
gradient is the slope of its own loss. Routing ties are excluded by construction and measured: the smallest margin of
any choice of experts is far above the rounding.
Not shown: transformers' fused kernels, which need a GPU.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from oracle import hf_oracle, plain_fp64, trajectories
from oracle.compare import compare_tensors, max_difference
from oracle.tiny_families import EXPERTS, HYBRID_CASES, MOE_CASES, MORE_CASES, pack_experts, unpack_experts
from oracle.tiny_models import make_hf_dir, write_case

WINDOWS = {"awkward": trajectories.AWKWARD, "one-token-prompt": trajectories.ONE_TOKEN_PROMPT}


@pytest.mark.parametrize("case", [c for c in MORE_CASES if c in MOE_CASES or "moe" in c or "next" in c])
def test_no_choice_of_experts_is_close(case: str, session_dir: Path, report) -> None:
    hf_dir = write_case(session_dir / "hf", case)
    margin = min(hf_oracle.routing_margin(hf_dir, trajectories.window(3, shape=s)) for s in WINDOWS.values())
    report("smallest routing margin", f"{margin:.1e}")
    assert 1e-4 <= margin < 1.0


def test_the_margin_is_that_of_the_chosen(session_dir: Path) -> None:
    """A router whose rows 0 and 1 are equal ties whenever it takes one of the two as its last."""
    hf_dir = write_case(session_dir / "hf", "qwen3_moe")
    groups = trajectories.window(3)
    model = hf_oracle.load(hf_dir)
    for layer in model.model.layers:
        layer.mlp.gate.weight.data[1] = layer.mlp.gate.weight.data[0]
    tied = session_dir / "tied-router"
    model.save_pretrained(tied)
    assert hf_oracle.routing_margin(tied, groups) <= 1e-6
    assert hf_oracle.routing_margin(write_case(session_dir / "hf", "glm4"), groups) == float("inf")


@pytest.mark.parametrize("case", ["glm4_moe-groups", "qwen3_5_moe-vl"])
@pytest.mark.parametrize("detach_prefix", [False, True], ids=["conventional", "response_only"])
def test_the_plain_gradient_is_the_slope_of_the_plain_loss(
    case: str, detach_prefix: bool, session_dir: Path, report
) -> None:
    """Along a random direction, of the summed log-probabilities; the step changes no choice of experts."""
    model = plain_fp64.PlainModel(write_case(session_dir / "hf", case))
    group = trajectories.window(11, shape=((11, (4,)),))[0]
    prompt, response = group["prompt_ids"], group["responses"][0]["ids"]
    model.logprobs(prompt, response, detach_prefix=detach_prefix).sum().backward()
    draw = torch.Generator().manual_seed(0)
    start = {name: w.detach().clone() for name, w in model.weights.items() if w.requires_grad}
    direction = {
        n: torch.randn(w.shape, generator=draw).double() / w.numel() ** 0.5 for n, w in start.items()
    }
    expected = sum(float((model.weights[n].grad * d).sum()) for n, d in direction.items())  # type: ignore[operator]
    with torch.no_grad():
        held = model.forward(prompt[:-1])[1] if detach_prefix else None

        def sum_at(step: float) -> float:
            for name, at in start.items():
                model.weights[name].copy_(at + step * direction[name])
            return float(model.logprobs(prompt, response, prefix_state=held).sum())

        h = 2e-5
        slope = (sum_at(-2 * h) - 8 * sum_at(-h) + 8 * sum_at(h) - sum_at(2 * h)) / (12 * h)
    error = abs(slope - expected) / abs(expected)
    report("slope against gradient, relative", f"{error:.1e}")
    assert error <= 1e-7


def test_the_cases_cover_what_the_families_can_do(session_dir: Path) -> None:
    tensors = {
        case: load
        for case in MORE_CASES
        for load in [load_file(write_case(session_dir / "hf", case) / "model.safetensors")]
    }
    for case, held in tensors.items():
        family, variation = MORE_CASES[case]
        assert all(float(t.float().std()) > 0.01 for t in held.values() if t.numel() > 1), case
        assert ("lm_head.weight" in held) is not variation.get("tied", False)
        if case in MOE_CASES or "moe" in family or family == "qwen3_next":
            assert any(n.endswith("experts.gate_up_proj") for n in held) is variation.get("packed", False)
            assert any(
                n.endswith(f"experts.{EXPERTS - 1}.up_proj.weight") for n in held
            ) is not variation.get("packed", False)
        assert any("visual" in n for n in held) is variation.get("wrapper", False)
    names = {case: "\n".join(held) for case, held in tensors.items()}
    assert "mtp.fc.weight" in names["qwen3_next"] and "layers.4.eh_proj" in names["glm4_moe"]
    assert "q_norm" in names["glm4_moe"] and "q_norm" not in names["glm4_moe-groups"]
    assert "q_proj.bias" in names["glm4_moe-groups"] and "o_proj.bias" not in names["glm4_moe-groups"]
    assert {v.get("packed", False) for _, v in MOE_CASES.values()} == {False, True}
    assert {f for f, _ in HYBRID_CASES.values()} == {"qwen3_next", "qwen3_5", "qwen3_5_moe"}


def test_a_directory_may_be_packed_sharded_and_narrow(session_dir: Path, tmp_path: Path) -> None:
    """Storage changes nothing; bfloat16 files keep the router's bias in float32, as published ones do."""
    one = write_case(session_dir / "hf", "glm4_moe")
    many = make_hf_dir(
        tmp_path / "many", "glm4_moe", 7, use_qk_norm=True, mtp=True, packed=True, max_shard_size="20KB"
    )
    assert len(list(many.glob("model-*.safetensors"))) > 2
    held = {n: t for f in many.glob("*.safetensors") for n, t in load_file(f).items()}
    plain = load_file(one / "model.safetensors")
    assert held.keys() == pack_experts(plain).keys() and unpack_experts(held).keys() == plain.keys()
    assert all(torch.equal(tensor, plain[name]) for name, tensor in unpack_experts(held).items())
    groups = trajectories.window(3)
    assert max_difference(plain_fp64.score(many, groups), plain_fp64.score(one, groups)) <= 1e-12
    packed = hf_oracle.grad_conventional(many, groups)
    compare_tensors(unpack_experts(packed), hf_oracle.grad_conventional(one, groups)).require(5e-6, 2e-5)
    narrow = make_hf_dir(tmp_path / "narrow", "glm4_moe", 7, mtp=True, dtype=torch.bfloat16)
    dtypes = {n: t.dtype for n, t in load_file(narrow / "model.safetensors").items()}
    wide = {n for n, dtype in dtypes.items() if dtype == torch.float32}
    assert wide == {n for n in dtypes if n.endswith("e_score_correction_bias")} and len(wide) == 4
    assert set(dtypes.values()) == {torch.float32, torch.bfloat16}
