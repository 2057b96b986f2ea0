"""Claim: the blend is (1 − α) own + α last per KV head, and its backward gives α, live tensors and adjoints the
gradients that plain autograd gives.

Why the tests show it: the same expression is written out in torch and differentiated by autograd, in float64; own and
last differ, so exchanging them or a head shows. A constant block must receive nothing, α always.
Not shown: what the model does with the blend (test_lastkv_logits, test_lastkv_grad).
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_lrl.layers.lastkv.blend import blend
from megatron_lrl.layers.softmax.segment import Adjoint, Block

SHAPE = (2, 3, 5, 4)  # branches, KV heads, tokens, head dim


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(*(shape or SHAPE), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def plain(own: Tensor, last: Tensor, alpha_h: Tensor) -> Tensor:
    return (1 - alpha_h[:, None, None]) * own + alpha_h[:, None, None] * last


def expected(own: list[Tensor], last: list[Tensor], alpha_h: Tensor, up: list[Tensor]) -> list[Tensor]:
    """Gradients of alpha, own k, own v, last k, last v by autograd."""
    leaves = [x.detach().requires_grad_() for x in (alpha_h, *own, *last)]
    alpha, ok, ov, lk, lv = leaves
    total = (plain(ok, lk, alpha) * up[0]).sum() + (plain(ov, lv, alpha) * up[1]).sum()
    return list(torch.autograd.grad(total, leaves))


@pytest.mark.parametrize("kind", ["live", "adjoint", "constant"])
def test_values_and_gradients(kind: str) -> None:
    own, last, up = ([draw(seed), draw(seed + 1)] for seed in (1, 3, 5))
    alpha_h = torch.sigmoid(draw(7, 3)).requires_grad_()
    adjoints = [Adjoint(torch.zeros(SHAPE).double(), torch.zeros(SHAPE).double()) for _ in range(2)]
    given = [x.clone().requires_grad_(kind == "live") for x in (*own, *last)]
    with_adjoint = adjoints if kind == "adjoint" else [None, None]
    mixed = blend(
        Block(given[0], given[1], False, 0, with_adjoint[0]),
        Block(given[2], given[3], False, 0, with_adjoint[1]),
        alpha_h,
    )
    torch.testing.assert_close(mixed.k_bhtd, plain(own[0], last[0], alpha_h), rtol=0, atol=1e-14)
    torch.testing.assert_close(mixed.v_bhtd, plain(own[1], last[1], alpha_h), rtol=0, atol=1e-14)
    assert (mixed.shared, mixed.branch, mixed.live) == (False, 0, True)
    ((mixed.k_bhtd * up[0]).sum() + (mixed.v_bhtd * up[1]).sum()).backward()
    dalpha, *dx = expected(own, last, alpha_h, up)
    torch.testing.assert_close(alpha_h.grad, dalpha, rtol=1e-12, atol=1e-12)
    if kind == "live":
        for x, gradient in zip(given, dx, strict=True):
            torch.testing.assert_close(x.grad, gradient, rtol=1e-13, atol=1e-13)
    buffers = [adjoints[0].dk_bhtd, adjoints[0].dv_bhtd, adjoints[1].dk_bhtd, adjoints[1].dv_bhtd]
    for buffer, gradient in zip(buffers, dx, strict=True):
        torch.testing.assert_close(
            buffer, gradient if kind == "adjoint" else torch.zeros_like(gradient), rtol=1e-13, atol=1e-13
        )


def test_adjoints_add_up() -> None:
    """Two readers of one block, as two branches of a group: their gradients add."""
    own, last = Block(draw(1), draw(2)), Block(draw(3), draw(4))
    adjoint = Adjoint(torch.zeros(SHAPE).double(), torch.zeros(SHAPE).double())
    own = Block(own.k_bhtd, own.v_bhtd, adjoint=adjoint)
    alpha_h = torch.full((3,), 0.25, dtype=torch.float64, requires_grad=True)
    for _ in range(2):
        blend(own, last, alpha_h).k_bhtd.sum().backward()
    torch.testing.assert_close(adjoint.dk_bhtd, torch.full(SHAPE, 1.5).double())
    assert not adjoint.dv_bhtd.any()


@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_the_ends_are_exact(alpha: float) -> None:
    own, last = Block(draw(1), draw(2)), Block(draw(3), draw(4))
    with torch.no_grad():
        mixed = blend(own, last, torch.full((3,), alpha, dtype=torch.float64))
    whole = own if alpha == 0 else last
    assert torch.equal(mixed.k_bhtd, whole.k_bhtd) and torch.equal(mixed.v_bhtd, whole.v_bhtd)
