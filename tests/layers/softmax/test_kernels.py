"""Claim: every fast kernel equals the reference, forward and backward, in float32, float64 and bfloat16,
and the backward of a part with the merged output and log-sum-exp is that part's share of the whole
softmax's gradient.

Why the tests show it: the truth is plain autograd through a dense softmax over the concatenated keys in
float64 (over the same, already rounded inputs); lengths are 1, one less and one more than the kernels' own
tiles, and primes; query heads come in groups of 1, 3 and 5 over stride-0 keys. Tolerances follow from the
unit roundoff u of the dtype, see `TOLERANCE`.

Not shown: other devices than the one the tests run on; the `gpu` tests repeat the claims there.
"""

from __future__ import annotations

import pytest
import torch
from oracle import dense_attention as reference
from torch import Tensor

from megatron_lrl.layers.softmax import kernels
from megatron_lrl.precision import accumulate_dtype

# Relative L2. float64: a few hundred roundings of 1.1e-16. float32: of 6e-8, over up to 1,025 keys. bfloat16 keeps 8
# significant bits, u = 2^-8: probabilities, the output and each gradient are rounded once each (and dO, O enter delta
# rounded), so two to three roundings meet in each result; 3 u bounds them all.
TOLERANCE = {torch.float64: 1e-13, torch.float32: 3e-6, torch.bfloat16: 3 * 2.0**-8}
DTYPES = list(TOLERANCE)
TILE = 64  # smallest tile of `constant_backward`
CAUSAL = [1, 7, 31, 32, 33, 127, 513]
PAIRS = [(1, 1), (1, 511), (1, 512), (1, 513), (33, TILE - 1), (32, TILE), (31, TILE + 1), (13, 1), (5, 1025)]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def inputs(
    n: int, q: int, h: int, s: int, t: int, d: int, dtype: torch.dtype, device: str = "cpu"
) -> list[Tensor]:
    """q, k, v, dO; spread so that probabilities are neither flat nor one-hot."""
    make = torch.Generator().manual_seed(100 * s + t)
    shapes = [(n, q, s, d), (n, h, t, d), (n, h, t, d), (n, q, s, d)]
    return [torch.randn(shape, generator=make, dtype=torch.float64).to(device, dtype) for shape in shapes]


def truth(q: Tensor, k: Tensor, v: Tensor, do: Tensor, causal: bool, scale: float) -> list[Tensor]:
    """o, lse, dq, dk, dv in float64 by autograd; k and v already carry the query heads."""
    leaves = [x.double().detach().requires_grad_() for x in (q, k, v)]
    scores = leaves[0] @ leaves[1].transpose(-1, -2) * scale
    if causal:
        later = torch.arange(k.shape[2]) > torch.arange(q.shape[2]).unsqueeze(1)
        scores = scores.masked_fill(later.to(scores.device), float("-inf"))
    o = scores.softmax(-1) @ leaves[2]
    o.backward(do.double())
    return [o.detach(), scores.logsumexp(-1).detach(), *(leaf.grad for leaf in leaves)]


def check(ours: Tensor, oracle: Tensor, dtype: torch.dtype, name: str, floor: float = 1e-30) -> None:
    error = float((ours.double() - oracle).norm() / oracle.norm().clamp_min(floor))
    assert error <= TOLERANCE[dtype], f"{name}: relative L2 {error:.2e}"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("g", [1, 3, 5])
@pytest.mark.parametrize("length", CAUSAL)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_causal_runs_with_stride_0_keys(dtype: torch.dtype, length: int, g: int, device: str) -> None:
    q, k, v, do = inputs(2, g, 1, length, length, 16, dtype, device)
    k, v = k.expand_as(q), v.expand_as(q)
    o, lse, *grads = truth(q, k, v, do, True, 0.25)
    for module in (kernels, reference):
        ours, ours_lse = module.attend(q, k, v, True, 0.25)
        assert ours.dtype == dtype
        assert ours_lse.dtype == accumulate_dtype(dtype)
        check(ours, o, dtype, "o")
        check(ours_lse, lse, dtype, "lse")
        # The floor: where a query sees one key only, dq and dk are zero and only rounding is left.
        parts = module.attend_backward(do, q, k, v, ours, ours_lse, True, 0.25)
        for name, part, grad in zip(("dq", "dk", "dv"), parts, grads, strict=True):
            check(part, grad, dtype, name, floor=float(do.double().norm()))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("s", "t"), PAIRS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_parts_merge_to_the_whole_forward_and_backward(
    dtype: torch.dtype, s: int, t: int, device: str
) -> None:
    q, k, v, do = inputs(1, 2, 2, s, t + 3, 32, dtype, device)
    o, lse, dq, dk, dv = truth(q, k, v, do, False, 0.2)
    wide = accumulate_dtype(dtype)
    for module in (kernels, reference):
        total = torch.zeros_like(dq)
        partial = [
            module.attend(q, k[:, :, cut], v[:, :, cut], False, 0.2) for cut in (slice(0, t), slice(t, t + 3))
        ]
        merged_lse = torch.logaddexp(partial[0][1], partial[1][1])
        merged = sum(x.to(wide) * (x_lse - merged_lse).exp().unsqueeze(-1) for x, x_lse in partial).to(dtype)
        check(merged, o, dtype, "o")
        check(merged_lse, lse, dtype, "lse")
        for cut in (slice(0, t), slice(t, t + 3)):
            part = module.attend_backward(do, q, k[:, :, cut], v[:, :, cut], merged, merged_lse, False, 0.2)
            total += part[0].double()
            check(part[1], dk[:, :, cut], dtype, "dk", floor=float(dk.norm()))
            check(part[2], dv[:, :, cut], dtype, "dv", floor=float(dv.norm()))
        check(total, dq, dtype, "dq")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("s", "t"), PAIRS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tile_bytes", [1, 8 << 20], ids=["many-tiles", "one-tile"])
def test_the_backward_of_constant_keys_gives_the_same_dq(
    dtype: torch.dtype, s: int, t: int, tile_bytes: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(kernels._TILE_BYTES, device, tile_bytes)  # 1: the smallest tile, TILE keys
    q, k, v, do = inputs(2, 3, 3, s, t, 16, dtype, device)
    o, lse, dq, _, _ = truth(q, k, v, do, False, 0.25)
    wide = accumulate_dtype(dtype)
    ours = kernels.constant_backward(do, q, k, v, o.to(dtype), lse.to(wide), 0.25)
    assert ours.dtype == wide
    check(ours, dq, dtype, "dq", floor=float(do.double().norm()))


def test_float32_scores_are_not_computed_in_less() -> None:
    """A score difference of 1e-5 between two keys survives in the log-sum-exp of float32."""
    q, k, v, _ = inputs(1, 1, 1, 1, 2, 8, torch.float32)
    q[:], k[:], v[:] = 0, 0, 0
    q[..., 0], k[0, 0, 1, 0] = 1.0, 1e-5
    _, lse = kernels.attend(q, k, v, False, 1.0)
    expected = torch.tensor([0.0, 1e-5], dtype=torch.float64).logsumexp(0)
    assert abs(float(lse) - float(expected)) < 2e-7
