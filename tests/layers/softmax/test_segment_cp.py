"""Claim: over 2 and 3 context-parallel ranks, each with its own share of keys and of new tokens, segment
attention equals dense attention on one machine, forward and backward.

Why the test shows it: every rank compares its slice of output and gradients, and its own blocks' adjoints,
with the float64 oracle over all ranks' keys to 1e-12. The cases hold ranks without blocks, ranks without
new tokens, ranks with neither, branches cut at every possible place, and blocks of different kinds on
different ranks.

Not shown: traffic volume; layouts beyond cp (tests/worlds).
"""

from __future__ import annotations

import pytest
from harness import World, run_world

from layers.softmax.segment_cases import Case, own, shared

CASES = {
    "balanced": Case([12], [[shared(6)], [shared(6)], [shared(6)]]),
    "adjoint": Case([12], [[shared(6, "adjoint")], [shared(5, "adjoint")], [shared(5, "adjoint")]]),
    "constant-here-adjoint-there": Case(
        [7], [[shared(4), shared(3, "adjoint")], [shared(5)], [shared(2, "adjoint")]]
    ),
    "only-rank-0-owns": Case([7, 3], [[shared(9, "adjoint"), own(0, 2, 4)], [], []]),
    "only-the-last-owns": Case([7, 3], [[], [shared(9, "adjoint")], [shared(9, "adjoint")]]),
    "one-token": Case([1], [[shared(4)], [shared(3)], [shared(3)]]),
    "one-token-one-owner": Case([1], [[], [shared(3, "adjoint")]]),
    "decode": Case(
        [1] * 5, [[shared(4), own(0, 2, 3)], [shared(4), own(2, 2, 3)], [shared(3), own(4, 1, 3)]]
    ),
    "ragged": Case(
        [3, 0, 8, 8, 1], [[shared(4, "adjoint"), own(0, 3, 2)], [own(3, 2, 2)], [shared(1, "adjoint")]]
    ),
    "live": Case([4, 6], [[shared(4), own(0, 1, 2, "live")], [own(1, 1, 3, "live")], [own(0, 2, 1, "live")]]),
    "padded": Case([3, 4], [[shared(2, "adjoint")], [shared(3, "adjoint")]], multiple=4),
    "one-kv-head": Case([5, 6], [[shared(5, "adjoint")], [shared(4, "adjoint")]], heads=3, kv_heads=1),
    "no-state": Case([2, 9], [[], [], []]),
}


@pytest.mark.parametrize("cp", [2, 3])
def test_equals_dense_attention_on_every_rank(cp: int) -> None:
    # Blocks listed for ranks beyond cp are not part of a case.
    cases = [Case(**{**case.plain(), "blocks": case.blocks[:cp]}).plain() for case in CASES.values()]
    for rank, results in enumerate(
        run_world(World(cp=cp), "layers.softmax.segment_cases:run_cases", cases=cases)
    ):
        for name, errors in zip(CASES, results, strict=True):
            for part, error in errors.items():
                assert error <= 1e-12, f"{name}, rank {rank}, {part}: relative L2 {error:.2e}"
