"""Claim: what a token pays for attention under LastKV does not depend on how many chunks lie before it, neither in a
captured prefix nor in what a branch decoded itself; and reading neighbours as one block changes nothing.

Why the tests show it: kernel calls are counted while a fork decodes behind 4 and behind 12 captured chunks, and over
more than five chunks of its own; the decoded logits, in float64, are those of one advance of a logged state, whose
pages are never merged. Adjoints written through a joined block are read back page by page.
Not shown: seconds (tools/bench_lastkv.py); that logits follow the definition (test_lastkv_logits).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from layers.lastkv.tiny import LAYERS, lastkv_run, logits_head, token_ids, write_lastkv
from megatron_lrl.layers.advance import advance
from megatron_lrl.layers.layout import Piece
from megatron_lrl.layers.softmax import kernels
from megatron_lrl.layers.softmax.pages import Page, PageSlice, Shelf, enable_adjoints, joined
from megatron_lrl.lifetimes.window import UpdateWindow
from megatron_lrl.runtime import Runtime

CHUNK = 8


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Number of attention kernel calls so far."""
    count, plain = [0], kernels.attend

    def counted(*args: Any) -> Any:
        count[0] += 1
        return plain(*args)

    monkeypatch.setattr(kernels, "attend", counted)
    return count


@pytest.mark.parametrize("blend", [True, False], ids=["blend", "no-blend"])
def test_a_decoded_token_takes_as_many_calls_behind_any_number_of_chunks(
    blend: bool, runtime: Runtime, models: Path, calls: list[int]
) -> None:
    prefix, new = 12 * CHUNK + 3, 5 * CHUNK + 5
    ids = token_ids(prefix + new, 1)
    with lastkv_run(runtime, write_lastkv(models, "qwen3", CHUNK, blend), "prefix.chunk_size=20") as run:
        taken = {}
        with UpdateWindow(run) as window, torch.no_grad():
            for chunks in (4, 12):
                count = chunks * CHUNK + 3
                with window.prompt_group("g", ids[: count + 1], "response_only") as group:
                    fork, logits, per_token = group.fork(2), [], []
                    for token in ids[count : count + new]:
                        calls[0] = 0
                        logits.append(advance(run.model, fork, [[token], [token]], logits_head))
                        per_token.append(calls[0])
                    taken[chunks] = per_token
                    at_once = advance(
                        run.model, group.fork(2, log=True), [ids[count : count + new]] * 2, logits_head
                    )
            decoded = torch.cat([step[:, :1] for step in logits], dim=-1)
            # Rounds come one after another, in each of them branch after branch.
            first = [i for i, branch in enumerate(_branches(count, new)) if branch == 0]
            assert float((at_once[:, first] - decoded).abs().max()) < 1e-11
    assert taken[4] == taken[12]
    # History, blended previous and shared open, own, new; a chunk or history that both prefix and branch hold part of
    # takes one more.
    assert taken[12][1] == 4 * LAYERS and max(taken[12]) == 5 * LAYERS


def _branches(start: int, new: int) -> list[int]:
    """The branch of each column of an advance of two equal branches from ``start`` on."""
    columns, end = [], start + new
    while start < end:
        step = min(CHUNK - start % CHUNK, end - start)
        columns += [0] * step + [1] * step
        start += step
    return columns


def test_neighbours_on_a_shelf_are_one_block_with_one_adjoint() -> None:
    shelf, draw = Shelf(9), torch.Generator().manual_seed(0)
    parts = [torch.randn(1, 2, n, 4, generator=draw) for n in (3, 4, 2)]
    pages = [Page(Piece(0, 1, 0, x.shape[2]), x, -x, x.shape[2], i, shelf) for i, x in enumerate(parts)]
    apart = Page(Piece(0, 1, 0, 3), parts[0], parts[0], 3, 3, shelf)  # the shelf is full
    slices = [PageSlice(page, page.length, shared=True) for page in [*pages, apart]]
    whole, rest = joined(block for part in slices for block in part.blocks())
    assert torch.equal(whole.k_bhtd, torch.cat(parts, dim=2)) and torch.equal(whole.v_bhtd, -whole.k_bhtd)
    assert torch.equal(rest.k_bhtd, parts[0]) and rest.adjoint is None
    # The first page stays constant: it has no adjoint to share.
    assert enable_adjoints(pages, torch.float64, [3, 0, 0]) == 2 * 2 * 6 * 4 * 8
    constant, live = joined(block for part in slices[:3] for block in part.blocks())
    assert constant.adjoint is None and live.k_bhtd.shape[2] == 6 and live.adjoint is not None
    live.adjoint.dk_bhtd.copy_(torch.arange(6.0).view(1, 1, 6, 1).expand(1, 2, 6, 4))
    assert pages[1].adjoint is not None and pages[2].adjoint is not None
    assert pages[1].adjoint.dk_bhtd[0, 0, :, 0].tolist() == [0, 1, 2, 3]
    assert pages[2].adjoint.dk_bhtd[0, 0, :, 0].tolist() == [4, 5]
