"""Claim: on a CUDA device segment attention has the numbers of dense attention in float64 on the CPU, forward and
backward, through every kernel path: flash (bfloat16, float16), tiles (float32, float64, odd head dims).

Why the tests show it: cases are compared as in `test_segment`, with adjoint buffers that start from a constant; they
cover multi-query and grouped heads, head dims 64, 128 and 256, lengths of one, primes and one beside the kernels'
tiles, prefixes before causal runs, ragged branches and empty segments. The delta rule and its convolution run the same
way, through flash-linear-attention where it is installed.
Not shown: several devices (`harness` and `worlds` with `device="cuda"`), speed.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from layers.softmax.segment_cases import Case, errors, own, shared
from megatron_lrl.layers.gdn.convolution import causal_convolution
from megatron_lrl.layers.gdn.delta_rule import gated_delta_rule
from megatron_lrl.layers.gdn.reference import delta_rule_reference

pytestmark = pytest.mark.gpu

CASES = {
    "one-token": Case([1], [[]]),
    "capture": Case([127], [[shared(513, "adjoint")]], heads=8, kv_heads=1),
    "offset": Case([65], [[shared(63), shared(1, "adjoint")]], heads=8, kv_heads=2),
    "decode": Case([1] * 5, [[shared(129), own(0, 5, 3), own(0, 5, 1)]], heads=6, kv_heads=2),
    "ragged": Case([3, 1, 0, 31, 31], [[shared(257, "adjoint"), own(0, 2, 2, "adjoint"), own(2, 3, 4)]]),
    "live": Case([4, 2], [[shared(33, "live"), own(0, 2, 3, "live")]]),
    "empty": Case([4, 2], [[shared(0), own(0, 2, 0), shared(5)]]),
    "padded": Case([3, 4], [[shared(9, "adjoint")]], multiple=8),
    "no-groups": Case([33, 33], [[shared(64, "adjoint")]], heads=3, kv_heads=3),
}
# As in test_segment: four roundings of the dtype bound what meets in one gradient.
BARS = {"bfloat16": 4 * 2.0**-8, "float16": 4 * 2.0**-11, "float32": 3e-6, "float64": 1e-12}


@pytest.mark.parametrize("head_dim", [64, 128, 256, 20])
@pytest.mark.parametrize("dtype", BARS)
@pytest.mark.parametrize("name", CASES)
def test_segment_attention_equals_dense_attention(name: str, dtype: str, head_dim: int) -> None:
    case = Case(**{**CASES[name].plain(), "dtype": dtype, "head_dim": head_dim, "device": "cuda"})
    for part, error in errors(case).items():
        assert error <= BARS[dtype], f"{part}: relative L2 {error:.2e}"


def _inputs(tokens: int, dtype: torch.dtype) -> tuple[list[torch.Tensor], torch.Tensor]:
    make = torch.Generator().manual_seed(tokens)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=make, dtype=torch.float64)

    b, n, h, k, v = 2, 2, 4, 64, 64
    q, key, value = draw(b, tokens, n, k), draw(b, tokens, n, k), draw(b, tokens, h, v)
    g, beta, state = -draw(b, tokens, h).abs() / 8, draw(b, tokens, h).sigmoid(), draw(b, h, k, v) / 8
    rounded = [x.to(dtype).double() for x in (q, key, value)]
    return [*rounded, g.float().double(), beta.to(dtype).double(), state.float().double()], draw(
        b, tokens, h, v
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("tokens", [1, 7, 64, 65, 600])
def test_the_delta_rule_equals_its_definition(tokens: int, dtype: torch.dtype, report: Any) -> None:
    """float64 on the CPU, token by token, against the device: outputs, last state and all gradients."""
    inputs, weight = _inputs(tokens, dtype)
    leaves = [x.clone().requires_grad_() for x in inputs]
    out, state = delta_rule_reference(*leaves)
    ((out * weight).sum() + state.square().sum()).backward()
    kinds = [dtype, dtype, dtype, torch.float32, dtype, torch.float32]
    ours = [x.to("cuda", kind).requires_grad_() for x, kind in zip(inputs, kinds, strict=True)]
    found, last = gated_delta_rule(*ours)
    ((found.double() * weight.cuda()).sum() + last.double().square().sum()).backward()
    bar = 3e-2 if dtype == torch.bfloat16 else 1e-5  # half: 2^-8, through products of several hundred tokens
    pairs = [(found, out), (last, state), *((x.grad, y.grad) for x, y in zip(ours, leaves, strict=True))]
    worst = max(float((a.double().cpu() - b).norm() / b.norm()) for a, b in pairs)
    report(f"delta rule, {tokens} tokens, {dtype}", worst)
    assert worst <= bar
    with torch.no_grad():  # the decode kernel, and blocks without a graph
        again, behind = gated_delta_rule(*(x.detach() for x in ours))
    assert float((again.double().cpu() - out.detach()).norm() / out.norm()) <= bar
    assert float((behind.double().cpu() - state.detach()).norm() / state.norm()) <= bar


def test_float32_is_not_computed_in_tensorfloat32() -> None:
    from megatron_lrl.runtime import full_float32

    full_float32()
    x, weight, tail = torch.randn(2, 65, 96), torch.randn(96, 1, 4), torch.randn(2, 96, 3)
    expected, _ = causal_convolution(x.double(), weight.double(), tail.double(), [65, 65])
    found, _ = causal_convolution(x.cuda(), weight.cuda(), tail.cuda(), [65, 65])
    assert float((found.double().cpu() - expected).norm() / expected.norm()) < 1e-6
