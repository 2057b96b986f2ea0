"""Claim: `PolicyRouter` gives the experts and weights of transformers' routers, in float32, bfloat16 and float64.

Why the tests show it: transformers' own router modules of Qwen3-MoE, Qwen3-Next and GLM-4.5 get the same weights and
inputs, with groups of experts, biases, scales, with and without normalisation; random scores have no ties. Gradients of
input and weight are compared too. In float64 the reference is transformers' formula at 1e-12.
Not shown: ties; kernels other than torch's.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Glm4MoeConfig, Qwen3MoeConfig
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from megatron_lrl import platform_cpu
from megatron_lrl.layers.architecture import MoESpec

platform_cpu.install()

from megatron_lrl.layers.moe.router import PolicyRouter  # noqa: E402

HIDDEN, EXPERTS, ROWS = 24, 16, 57
SOFTMAX = [MoESpec(EXPERTS, 4, 8), MoESpec(EXPERTS, 3, 8, normalise=False), MoESpec(EXPERTS, 1, 8)]
SIGMOID = [
    MoESpec(EXPERTS, 4, 8, score="sigmoid", bias=True, wide_router=True),
    MoESpec(EXPERTS, 3, 8, score="sigmoid", bias=True, wide_router=True, groups=4, top_groups=2, scale=2.5),
    MoESpec(EXPERTS, 2, 8, score="sigmoid", bias=True, wide_router=True, normalise=False, scale=1.5),
]
DTYPES = [torch.float32, torch.bfloat16]


def ours(spec: MoESpec, dtype: torch.dtype, weight: torch.Tensor, bias: torch.Tensor) -> PolicyRouter:
    config = SimpleNamespace(
        num_moe_experts=EXPERTS,
        hidden_size=HIDDEN,
        params_dtype=dtype,
        sequence_parallel=False,
        add_bias_linear=False,
        calculate_per_token_loss=True,
        perform_initialization=False,
    )
    groups = SimpleNamespace(tp=None, cp=None, tp_cp=None, tp_dp_cp=None)
    router = PolicyRouter(config, groups, spec=spec)
    with torch.no_grad():
        router.weight.copy_(weight)
        if spec.bias:
            router.expert_bias.copy_(bias)
    return router


def theirs(spec: MoESpec, dtype: torch.dtype, weight: torch.Tensor, bias: torch.Tensor) -> torch.nn.Module:
    router: Any
    if spec.score == "softmax":
        router = Qwen3MoeTopKRouter(
            Qwen3MoeConfig(
                hidden_size=HIDDEN,
                num_experts=EXPERTS,
                num_experts_per_tok=spec.top_k,
                norm_topk_prob=spec.normalise,
            )
        ).to(dtype)
    else:
        router = Glm4MoeTopkRouter(
            Glm4MoeConfig(
                hidden_size=HIDDEN,
                n_routed_experts=EXPERTS,
                num_experts_per_tok=spec.top_k,
                norm_topk_prob=spec.normalise,
                n_group=spec.groups,
                topk_group=spec.top_groups,
                routed_scaling_factor=spec.scale,
            )
        )
    with torch.no_grad():
        router.weight.copy_(weight)
        if spec.bias:
            router.e_score_correction_bias.copy_(bias)
    return router


def drawn() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(2)
    shapes = ((ROWS, 1, HIDDEN), (EXPERTS, HIDDEN), (EXPERTS,), (ROWS, EXPERTS))
    hidden, weight, bias, slope = (torch.randn(shape, generator=draw) for shape in shapes)
    return hidden, weight / HIDDEN**0.5, 0.3 * bias, slope


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("spec", [*SOFTMAX, *SIGMOID], ids=range(6))
def test_experts_weights_and_gradients_are_those_of_transformers(spec: MoESpec, dtype: torch.dtype) -> None:
    hidden, weight, bias, slope = drawn()
    mine, other = ours(spec, dtype, weight, bias), theirs(spec, dtype, weight, bias)
    inputs = [hidden.to(dtype).requires_grad_() for _ in range(2)]
    probs, chosen = mine(inputs[0])
    _, weights, experts = other(inputs[1])
    expected = torch.zeros(ROWS, EXPERTS, dtype=weights.dtype).scatter(1, experts, weights)
    assert torch.equal(chosen, torch.zeros(ROWS, EXPERTS, dtype=torch.bool).scatter(1, experts, True))
    assert probs.dtype == weights.dtype and mine.weight.dtype == other.weight.dtype
    torch.testing.assert_close(probs, expected, rtol=1e-6, atol=1e-7)
    (probs * slope).sum().backward()
    (expected * slope).sum().backward()
    bar = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad, **bar)
    torch.testing.assert_close(mine.weight.grad, other.weight.grad, **bar)


@pytest.mark.parametrize("spec", [SOFTMAX[0], SIGMOID[1]], ids=("softmax", "sigmoid"))
def test_float64_is_float64_throughout(spec: MoESpec) -> None:
    hidden, weight, bias, _ = (x.double() for x in drawn())
    with torch.no_grad():
        probs, chosen = ours(spec, torch.float64, weight, bias)(hidden)
        narrow, _ = ours(spec, torch.float32, weight.float(), bias.float())(hidden.float())
    logits = hidden.squeeze(1) @ weight.t()
    scores = logits.softmax(-1) if spec.score == "softmax" else logits.sigmoid()
    weights = torch.where(chosen, scores, 0)
    weights = weights / weights.sum(-1, keepdim=True) * spec.scale
    assert probs.dtype == torch.float64 and bool((chosen.sum(-1) == spec.top_k).all())
    assert float((probs - weights).abs().max()) < 1e-12
    assert float((probs - narrow.double()).abs().max()) > 1e-10  # float32 inside would be this far off


def test_only_experts_of_the_best_groups_are_chosen() -> None:
    spec = SIGMOID[1]
    hidden, weight, bias, _ = drawn()
    _, chosen = ours(spec, torch.float32, weight, bias)(hidden)
    groups = chosen.unflatten(-1, (spec.groups, -1)).any(-1).sum(-1)
    assert int(groups.max()) <= spec.top_groups
    _, free = ours(SIGMOID[0], torch.float32, weight, bias)(hidden)
    assert int(free.unflatten(-1, (spec.groups, -1)).any(-1).sum(-1).max()) > spec.top_groups
