"""Claim: segment attention over any mixture of blocks equals dense attention over all keys, forward and
backward, and a block's gradient goes where the block says: nowhere, added to its adjoint, or along its
graph.

Why the tests show it: the oracle is one masked softmax with plain autograd that knows neither segments nor
kernels; at float64 both agree to 1e-12 relative, a hundred times below what a dropped or doubled key would
cause. Adjoint buffers start from a constant, so an overwrite shows; padding slots get a random dO, so a
leak shows.

Not shown: several ranks (test_segment_cp), the layers around it (tests/lifetimes, tests/checks).
"""

from __future__ import annotations

import pytest
import torch

from layers.softmax.segment_cases import Case, errors, own, shared
from megatron_lrl.layers.layout import TokenLayout
from megatron_lrl.layers.softmax.segment import Block, _of_ranks, segment_attention

CASES = {
    "one-token": Case([1], [[]]),
    "capture": Case([13], [[shared(29)]]),
    "capture-adjoint": Case([13], [[shared(29, "adjoint")]]),
    "no-prefix": Case([5, 5, 3], [[]]),
    "two-shared-blocks": Case([7], [[shared(11), shared(600, "adjoint")]]),
    "decode": Case([1] * 5, [[shared(9), own(0, 5, 3), own(0, 5, 1)]]),
    "decode-without-prefix": Case([1] * 5, [[own(0, 5, 3)]]),
    "ragged": Case([3, 1, 0, 8, 8], [[shared(9), own(0, 2, 2), own(2, 3, 4)]]),
    "ragged-adjoint": Case([3, 1, 8], [[shared(17, "adjoint"), own(0, 3, 2, "adjoint")]]),
    "live-own": Case([4, 4], [[shared(9, "adjoint"), own(0, 2, 3, "live")]]),
    "live-ragged": Case([4, 2], [[shared(9), own(0, 2, 3, "live"), own(1, 1, 2, "live")]]),
    "live-shared": Case([4, 2], [[shared(9, "live"), shared(3, "adjoint")]]),
    "empty-blocks": Case([4, 2], [[shared(0), own(0, 2, 0), shared(5)]]),
    "only-some-branches-have-blocks": Case([2, 2, 2], [[own(1, 1, 4, "adjoint")]]),
    "no-groups": Case([6, 6], [[shared(9, "adjoint")]], heads=3, kv_heads=3),
    "one-kv-head": Case([6, 5], [[shared(9, "adjoint"), own(0, 2, 1)]], heads=5, kv_heads=1),
    "padded": Case([3, 4], [[shared(9, "adjoint")]], multiple=5),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_dense_attention_in_float64(name: str) -> None:
    for part, error in errors(CASES[name]).items():
        assert error <= 1e-12, f"{part}: relative L2 {error:.2e}"


# u is 6e-8 and 2^-8. Queries, keys, values, dO and O enter the backward rounded to bfloat16, the partial outputs of
# up to three segments are rounded before they merge: four roundings bound what meets in one gradient.
@pytest.mark.parametrize(("dtype", "bar"), [("float32", 2e-6), ("bfloat16", 4 * 2.0**-8)])
@pytest.mark.parametrize("name", CASES)
def test_lower_precision_stays_within_its_rounding(name: str, dtype: str, bar: float) -> None:
    case = Case(**{**CASES[name].plain(), "dtype": dtype})
    for part, error in errors(case).items():
        assert error <= bar, f"{part}: relative L2 {error:.2e}"


def test_weights_of_ranks_add_up_to_one() -> None:
    """At offsets of hundreds; a row that one rank saw, and one that none did, keep their bits."""
    generator = torch.Generator().manual_seed(2)
    lse = 700 + 2 * torch.randn(3, 500, generator=generator)
    lse[1:, 0], lse[:, 1] = float("-inf"), float("-inf")
    o, merged = _of_ranks(torch.ones(3, 500, 1), lse)
    seen = o[:, 0].index_select(0, torch.tensor([0, *range(2, 500)]))
    assert float((seen - 1).abs().max()) <= 2.0**-22 and o[0] == 1 and o[1] == 0
    assert merged[0] == lse[0, 0] and merged[1] == float("-inf")
    against = (lse.double()[:, 2:].softmax(0) - (lse - merged).exp().double()[:, 2:]).sum(0)
    assert float(against.abs().max()) > 2.0**-17  # what exp(lse_part - lse) misses


def test_without_autograd_no_graph_is_made() -> None:
    layout = TokenLayout((3,), (2,))
    q, k, v = (torch.randn(2, 2, 4, requires_grad=True) for _ in range(3))
    block = Block(torch.randn(1, 2, 3, 4), torch.randn(1, 2, 3, 4))
    with torch.no_grad():
        assert not segment_attention(q, k, v, layout, [block], 0.5).requires_grad
    assert segment_attention(q, k, v, layout, [block], 0.5).requires_grad


def test_resident_blocks_are_not_saved_for_backward() -> None:
    """The graph of a replay holds nothing whose size grows with the prefix."""
    layout = TokenLayout((3,), (2,))
    q, k, v = (torch.randn(2, 2, 4, requires_grad=True) for _ in range(3))
    blocks = [Block(torch.randn(1, 2, 5000, 4), torch.randn(1, 2, 5000, 4))]
    sizes: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (sizes.append(x.numel()), x)[1], lambda x: x):
        segment_attention(q, k, v, layout, blocks, 0.5)
    assert sizes
    assert max(sizes) <= 2 * 2 * 4
