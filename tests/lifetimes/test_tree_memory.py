"""Claim: saved-for-backward bytes of a window are those of one chunk's graph, however long a response and however deep
its tree: dense, hybrid and LastKV.

Why the tests show it: the peaks over all graphs of a window are compared, to 1%, between responses of 32 and 128 tokens
at one replay.chunk_size, and between trees of 2 and 8 levels whose nodes are as long as a chunk; without the chunks the
longer response takes several times as much. Resident state, which grows with what is remembered, is counted apart.
Not shown: P and G (test_ledger.py); memory of the process (tools/bench_longest.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lifetimes.tiny import ids, mean_loss, tiny_run
from megatron_lrl.lifetimes.contributions import BranchKey
from megatron_lrl.lifetimes.ledger import Ledger
from megatron_lrl.lifetimes.run import Run
from megatron_lrl.lifetimes.window import UpdateWindow
from megatron_lrl.lifetimes.work import Branch, tree_work

CHUNK, PROMPT = 8, 17
KINDS = {
    "dense": ("qwen3",),
    "hybrid": ("qwen3_5",),
    "lastkv": ("qwen3", "model.attention=lastkv", f"lastkv.chunk_size={CHUNK}"),
}


@pytest.fixture(scope="module", params=KINDS)
def run(request: Any, session_dir: Path) -> Iterator[Run]:
    case, *settings = KINDS[request.param]
    folder = session_dir / "tree-memory"
    folder.mkdir(exist_ok=True)
    common = [f"prefix.chunk_size={CHUNK}", "model.dtype=float32", "prefix.contract=exact"]
    with tiny_run(folder, *common, *settings, case=case) as run:
        yield run


@contextmanager
def saved_bytes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Peaks of saved-for-backward bytes, without what is resident beside them."""
    found: list[int] = []
    plain = Ledger.observe_peak

    def noting(ledger: Ledger, lifetime: str, nbytes: int) -> None:
        found.append(nbytes)
        plain(ledger, lifetime, nbytes)

    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "observe_peak", noting)
        yield found


def peak(run: Run, monkeypatch: pytest.MonkeyPatch, responses: list[tuple[int, ...]], chunk: int) -> int:
    """Of a window of these responses to one prompt."""
    config = run.config
    replay = config.replay.model_copy(update={"chunk_size": chunk})
    run.config = config.model_copy(update={"replay": replay})
    branches = [Branch(BranchKey("g", i), response) for i, response in enumerate(responses)]
    work = tree_work(branches, 1, CHUNK // 2, lambda batch: mean_loss(0.1))
    try:
        with saved_bytes(monkeypatch) as found, UpdateWindow(run) as window:
            window.fix(branch.key for branch in branches)
            with window.prompt_group("g", ids(PROMPT, 1)) as group:
                window.replay(group, work)
            window.reduce()
    finally:
        run.config = config
    assert run.ledger.live == {"window": 0, "group": 0, "replay": 0}
    return max(found)


def test_flat_in_the_response(run: Run, monkeypatch: pytest.MonkeyPatch, report: Any) -> None:
    short, long = ([ids(4 * n * CHUNK, 5), ids(4 * n * CHUNK, 6)] for n in (1, 4))
    chunked = [peak(run, monkeypatch, responses, CHUNK) for responses in (short, long)]
    report("saved bytes at R = 32 and R = 128", chunked)
    assert abs(chunked[1] - chunked[0]) <= 0.01 * chunked[0]
    if run.arch.lastkv is None:  # else it is swept by its own chunks
        assert peak(run, monkeypatch, long, 0) > 4 * chunked[1]


def test_flat_in_the_depth(run: Run, monkeypatch: pytest.MonkeyPatch, report: Any) -> None:
    trunk = ids(8 * CHUNK, 7)

    def comb(depth: int) -> list[tuple[int, ...]]:
        """At every level one response leaves the trunk for a chunk of its own."""
        return [(*trunk[: level * CHUNK], *ids(CHUNK, 20 + level)) for level in range(1, depth + 1)] + [
            trunk[: depth * CHUNK] + ids(CHUNK, 40)
        ]

    flat = [peak(run, monkeypatch, comb(depth), CHUNK) for depth in (2, 8)]
    report("saved bytes of 2 and 8 levels", flat)
    assert abs(flat[1] - flat[0]) <= 0.01 * flat[0]
