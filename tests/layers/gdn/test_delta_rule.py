"""Claim: the block form, the one-token form and any cut of the tokens are the same function as the token-by-token
definition, forward and backward; padding leaves the state alone; saved bytes are those of the inputs.

Why the tests show it: outputs, final states and all six gradients are compared with plain autograd through the literal
reference in float64, at lengths on both sides of a block and of a segment; float32 is compared with that float64
answer. transformers' own function is a second, independent oracle.
Not shown: flash-linear-attention's kernels (not run: they need a GPU).

Legend: b sequences, t tokens, n key heads, h value heads, k key dim, v value dim.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_lrl.layers.gdn import delta_rule
from megatron_lrl.layers.gdn.convolution import causal_convolution
from megatron_lrl.layers.gdn.delta_rule import gated_delta_rule
from megatron_lrl.layers.gdn.reference import delta_rule_reference
from megatron_lrl.lifetimes.ledger import SavedBytes

B, N, H, K, V = 2, 2, 4, 8, 6
LENGTHS = [1, 7, 63, 64, 65, 513, 600]


def inputs(tokens: int, dtype: torch.dtype = torch.float64, seed: int = 3) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    q, k, v = normal(B, tokens, N, K), normal(B, tokens, N, K), normal(B, tokens, H, V)
    g = -torch.nn.functional.softplus(normal(B, tokens, H)) * 0.2
    beta = normal(B, tokens, H).sigmoid()
    return [x.to(dtype) for x in (q, k, v, g, beta, normal(B, H, K, V))]


def with_gradients(rule: Any, tensors: list[Tensor]) -> list[Tensor]:
    """Output, state and the gradient of a fixed random functional of both."""
    leaves = [x.clone().requires_grad_() for x in tensors]
    out, state = rule(*leaves)
    draw = torch.Generator().manual_seed(11)
    weights = [torch.randn(x.shape, generator=draw, dtype=torch.float64).to(x.dtype) for x in (out, state)]
    total = (out * weights[0]).sum() + (state * weights[1]).sum()
    return [out.detach(), state.detach(), *torch.autograd.grad(total, leaves)]


def worst(found: list[Tensor], expected: list[Tensor]) -> float:
    """Largest relative L2 distance over the tensors."""
    return max(
        float((a.double() - b.double()).norm() / b.double().norm())
        for a, b in zip(found, expected, strict=True)
    )


@pytest.mark.parametrize("tokens", LENGTHS)
def test_blocks_are_the_definition(tokens: int, report: Any) -> None:
    expected = with_gradients(delta_rule_reference, inputs(tokens))
    distance = worst(with_gradients(gated_delta_rule, inputs(tokens)), expected)
    narrow = worst(with_gradients(gated_delta_rule, inputs(tokens, torch.float32)), expected)
    report(f"t={tokens}: fp64 {distance:.1e}, fp32 {narrow:.1e}", None)
    assert distance <= 1e-12
    assert narrow <= 2e-5


@pytest.mark.parametrize("size", [1, 7, 64, 200])
def test_cuts_change_nothing(size: int) -> None:
    tokens = inputs(200)
    expected = with_gradients(gated_delta_rule, tokens)

    def cut(*given: Tensor) -> tuple[Tensor, Tensor]:
        *parts, state = given
        outputs = []
        for piece in zip(*(x.split(size, dim=1) for x in parts), strict=True):
            out, state = gated_delta_rule(*piece, state)
            outputs.append(out)
        return torch.cat(outputs, dim=1), state

    assert worst(with_gradients(cut, tokens), expected) <= 1e-12


def test_one_token_steps_without_a_graph() -> None:
    *parts, state = inputs(70)
    expected, last = gated_delta_rule(*parts, state)
    with torch.no_grad():
        for t in range(70):
            out, state = gated_delta_rule(*(x[:, t : t + 1] for x in parts), state)
            torch.testing.assert_close(out, expected[:, t : t + 1], rtol=0, atol=1e-12)
    torch.testing.assert_close(state, last, rtol=0, atol=1e-12)


def test_padding_leaves_the_state_alone() -> None:
    *parts, state = inputs(40)
    short = [x[:, :23] for x in parts]
    _, expected = gated_delta_rule(*short, state)
    parts[3][:, 23:], parts[4][:, 23:] = 0, 0
    assert torch.equal(gated_delta_rule(*parts, state)[1], expected) or (
        worst([gated_delta_rule(*parts, state)[1]], [expected]) <= 1e-14
    )


def test_transformers_computes_the_same() -> None:
    from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

    q, k, v, g, beta, state = inputs(150, torch.float32)
    theirs, last = torch_chunk_gated_delta_rule(
        q, k, v, g=g, beta=beta, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    ours = gated_delta_rule(q, k, v, g, beta, state)
    assert worst(list(ours), [theirs, last]) <= 2e-6


def test_only_inputs_are_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward: the inputs' bytes. Backward: one segment's graph more, whatever the number of segments."""
    peaks = []
    for segments in (2, 6):
        leaves = [x.requires_grad_() for x in inputs(segments * delta_rule._SEGMENT, torch.float32)]
        meter = SavedBytes()
        with meter.measure():
            out, _ = gated_delta_rule(*leaves)
            held = meter.live
            assert held == sum(x.untyped_storage().nbytes() for x in leaves)
            out.sum().backward()
        peaks.append(meter.peak - held)
    assert peaks[1] <= peaks[0] * 1.01 + 6 * leaves[-1].nbytes


@pytest.mark.parametrize("lengths", [[9, 9, 9], [9, 4, 1], [2, 9, 0]])
def test_convolution_by_parts_and_ragged(lengths: list[int]) -> None:
    draw = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(*s, generator=draw, dtype=torch.float64) for s in ((3, 9, 5), (5, 1, 4)))
    tail = torch.randn(3, 5, 3, generator=draw, dtype=torch.float64)
    y, last = causal_convolution(x, weight, tail, lengths)
    for b, length in enumerate(lengths):
        seen = torch.cat([tail[b], x[b].T], dim=1)[:, : 3 + length]
        assert torch.equal(last[b], seen[:, -3:])
        for t in range(length):
            expected = torch.nn.functional.silu((seen[:, t : t + 4] * weight[:, 0]).sum(-1))
            torch.testing.assert_close(y[b, t], expected, rtol=0, atol=1e-12)
    if lengths[0] == lengths[-1]:
        first, middle = causal_convolution(x[:, :2], weight, tail, [2, 2, 2])
        second, end = causal_convolution(x[:, 2:], weight, middle, [7, 7, 7])
        torch.testing.assert_close(torch.cat([first, second], dim=1), y, rtol=0, atol=1e-12)
        assert torch.equal(end, last)
