"""Claim: products of whole `ROWS` give a row the same bits whatever stands beside it, on one thread and several.

Why this shows it: rows of a batch are computed again as smaller batches, at other places, with the sizes of decoding
steps, chunks and remainders. Batches that are not filled up differ here at 9 to 11 rows on two threads.
Not shown: other processors; a run asks its own (`models.same_bits`).
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from megatron_lrl.layers.layout import ROWS, fill_rows


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("inputs", "outputs"), [(576, 1536), (1536, 576), (48, 131), (64, 4099)])
def test_rows_do_not_see_their_neighbours(
    inputs: int, outputs: int, dtype: torch.dtype, threads: int
) -> None:
    weight = (torch.randn(outputs, inputs) * 0.05).to(dtype)
    x = torch.randn(40 * ROWS, inputs).to(dtype)
    whole = torch.nn.functional.linear(x, weight)
    for rows in (*range(1, 4 * ROWS), 100, 255):
        for first in (0, 5):
            part = torch.nn.functional.linear(fill_rows(x[first : first + rows]), weight)[:rows]
            assert torch.equal(part, whole[first : first + rows]), f"{rows} rows from {first}"
