"""Claim: `invariant.attend` gives a token the same bits in any company, and the right numbers.

Why the test shows it: windows of 1, 2 and 9 tokens anywhere in a sequence of nearly three tiles, alone and as three
branches, over keys that come as a shared prefix, own pages and new tokens cut at different places, are compared with
`torch.equal` to the whole sequence at once; the whole sequence with a float64 softmax. The same windows in products
of fewer rows than `ROWS` differ in float32, so the comparison can fail.
Not shown: other machines' kernels (`probe_same_bits` asks them at start); CUDA.
"""

from __future__ import annotations

import pytest
import torch

from megatron_lrl.layers.layout import TokenLayout
from megatron_lrl.layers.softmax import invariant
from megatron_lrl.layers.softmax.invariant import TILE, Source, attend
from megatron_lrl.layers.softmax.segment import _of_ranks

TOKENS = 2 * TILE + 188
STARTS = (0, 1, 5, 100, TILE - 2, TILE - 1, TILE, TILE + 1, 500, 2 * TILE - 1, 2 * TILE, 600, TOKENS - 9)
SHAPES = [(8, 2, 2), (16, 1, 4), (64, 3, 3), (128, 2, 1)]


def inputs(d: int, h: int, g: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = ((1, h, TOKENS, g, d), (1, h, TOKENS, d), (1, h, TOKENS, d))
    q, k, v = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return q, k, v


def differing(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> int:
    """How many windows are not, bit by bit, what the whole sequence gives."""
    scale, wrong = q.shape[-1] ** -0.5, 0
    whole, lse = attend(q, [Source(k, v)], range(1, TOKENS + 1), scale)
    for start in STARTS:
        for length in (1, 2, 9):
            for branches in (1, 3):
                end, prefix = start + length, max(0, start - 37)
                cuts = [(0, prefix, 1), (prefix, start, branches), (start, end, branches)]
                sources = [
                    Source(*(x[:, :, low:high].expand(rows, -1, -1, -1) for x in (k, v)))
                    for low, high, rows in cuts
                    if low < high
                ]
                queries = q[:, :, start:end].expand(branches, -1, -1, -1, -1)
                o, part = attend(queries, sources, range(start + 1, end + 1), scale)
                same = (o == whole[:, :, start:end]).all() and (part == lse[:, :, start:end]).all()
                wrong += not same
    return wrong


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("d", "h", "g"), SHAPES)
def test_a_token_has_the_same_bits_in_any_company(d: int, h: int, g: int, dtype: torch.dtype) -> None:
    assert differing(*inputs(d, h, g, dtype)) == 0


def test_too_few_rows_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(invariant, "fill_rows", lambda x, dim: x)
    assert differing(*inputs(64, 3, 3, torch.float32)) > 0


@pytest.mark.parametrize(("d", "h", "g"), SHAPES)
def test_equals_a_float64_softmax(d: int, h: int, g: int) -> None:
    q, k, v = inputs(d, h, g, torch.float32)
    o, lse = attend(q, [Source(k, v)], range(1, TOKENS + 1), d**-0.5)
    scores = torch.einsum("nhsgd,nhtd->nhsgt", q.double(), k.double()) * d**-0.5
    hidden = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1).view(1, 1, TOKENS, 1, TOKENS)
    scores = scores.masked_fill(hidden, float("-inf"))
    right = torch.einsum("nhsgt,nhtd->nhsgd", scores.softmax(-1), v.double())
    assert float((o - right).norm() / right.norm()) < 1e-6
    assert float((lse - scores.logsumexp(-1)).abs().max()) < 1e-5


def over_ranks(cp: int, start: int, end: int, *qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens from ``start`` to ``end`` over keys that lie on the ranks that own them, merged as ranks do."""
    q, k, v = qkv
    parts = []
    for rank in range(cp):
        layout = TokenLayout((start,), (end - start,), cp, rank, same_bits=True)
        mine = [p for p in range(end) if p // TILE % cp == rank]
        sources = [Source(k[:, :, mine], v[:, :, mine])]
        parts.append(attend(q[:, :, start:end], sources, layout.visible(0), q.shape[-1] ** -0.5))
    return _of_ranks(*(torch.stack(x) for x in zip(*parts, strict=True)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cp", [2, 3])
def test_ranks_merge_to_the_same_bits(cp: int, dtype: torch.dtype) -> None:
    """Also for tokens of which some ranks see no key."""
    q, k, v = inputs(16, 2, 2, dtype)
    whole, lse = over_ranks(cp, 0, TOKENS, q, k, v)
    alone, lse_alone = attend(q, [Source(k, v)], range(1, TOKENS + 1), 0.25)
    assert float((whole - alone).norm() / alone.norm()) < (1e-6 if dtype == torch.float32 else 1e-2)
    assert float((lse - lse_alone).abs().max()) < 1e-5
    for start in STARTS:
        for length in (1, 9):
            o, part = over_ranks(cp, start, start + length, q, k, v)
            assert torch.equal(o, whole[:, :, start : start + length])
            assert torch.equal(part, lse[:, :, start : start + length])


def test_missing_keys_are_an_error() -> None:
    q, k, v = inputs(8, 2, 2, torch.float32)
    with pytest.raises(ValueError, match="10 keys are needed"):
        attend(q[:, :, :4], [Source(k[:, :, :9], v[:, :, :9])], range(7, 11), 1.0)
