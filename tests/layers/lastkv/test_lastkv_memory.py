"""Claim: a prefix keeps last-layer keys and values of every token once and own-layer ones of the previous and the open
chunk only, so a model of L layers keeps about L times less than under full attention; `exact` saves no more
for its backward when the prompt grows.

Why the tests show it: resident bytes are measured on the storage that the state owns (spare capacity included) and
compared, to the byte, with a formula worked out by hand, for prefixes that end before, on and after a boundary and
for capture chunks that divide nothing; the full-attention state of the same model is measured beside it. Saved bytes
are autograd's own, counted at their peak over replay and sweep.
Not shown: allocator peaks; what `exact` keeps resident for its sweep (own-layer keys and values of all live chunks
and the adjoints), which does grow with the prompt.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from harness import ONE, World, run_world
from oracle.tiny_models import make_hf_dir
from oracle.trajectories import window, write_jsonl

from layers.lastkv.tiny import lastkv_run, token_ids, write_lastkv
from megatron_lrl.lifetimes.window import UpdateWindow
from megatron_lrl.runtime import Runtime

LAYERS, CHUNK = 16, 32
TOKEN_BYTES = 2 * 1 * 8 * 4  # K and V, one KV head of 8, float32


@pytest.fixture(scope="module")
def deep(models: Path) -> Path:
    """A narrow model of 16 layers."""
    return make_hf_dir(
        models / "deep", "llama", 3, layers=LAYERS, hidden=16, intermediate=16, heads=2, kv_heads=1, head_dim=8,
        max_positions=32768,
    )  # fmt: skip


def resident(runtime: Runtime, hf: Path, prefix: int, size: int, chunk: int | None) -> int:
    """Bytes of the captured prefix; `chunk`: C, or full attention."""
    attention = ["model.attention=full"] if chunk is None else [f"lastkv.chunk_size={chunk}"]
    settings = [
        "model.dtype=float32",
        "prefix.contract=response_only",
        f"prefix.chunk_size={size}",
        *attention,
    ]
    with lastkv_run(runtime, hf, *settings) as run, UpdateWindow(run) as opened:
        with opened.prompt_group("g", token_ids(prefix + 1, 1)) as group:
            assert group.state is not None
            measured = group.state.nbytes
            assert run.ledger.live["group"] == measured
            storages = {
                t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in group.state.tensors()
            }
            assert sum(storages.values()) == measured
        assert run.ledger.live["group"] == 0
    return measured


def by_hand(prefix: int, chunk: int) -> int:
    """The last layer keeps every token; each other layer the previous full chunk (if any) and the open one."""
    kept = prefix % chunk + (chunk if prefix >= chunk else 0)
    if prefix and prefix % chunk == 0:
        # nothing of the new chunk was fed yet: the one before the full chunk goes when it is
        kept = min(prefix, 2 * chunk)
    return (prefix + (LAYERS - 1) * kept) * TOKEN_BYTES


@pytest.mark.parametrize("size", [20, 64])
def test_resident_bytes_are_those_of_the_formula(
    size: int, deep: Path, runtime: Runtime, report: Any
) -> None:
    for prefix in (CHUNK - 1, CHUNK, 4 * CHUNK - 1, 4 * CHUNK, 4 * CHUNK + 1, 32 * CHUNK + 9):
        ours = resident(runtime, deep, prefix, size, CHUNK)
        assert ours == by_hand(prefix, CHUNK), prefix
    full = resident(runtime, deep, prefix, size, None)
    assert full == LAYERS * prefix * TOKEN_BYTES
    expected = LAYERS * prefix / (prefix + (LAYERS - 1) * (CHUNK + prefix % CHUNK))
    report(f"full / LastKV at P - 1 = {prefix}, C = {CHUNK}, {LAYERS} layers", full / ours)
    assert full / ours == pytest.approx(expected)


@pytest.mark.slow
def test_at_16384_tokens_and_chunks_of_512(deep: Path, runtime: Runtime, report: Any) -> None:
    prefix = 16383
    ours, full = (resident(runtime, deep, prefix, 2048, chunk) for chunk in (512, None))
    report("resident bytes, full attention's, ratio", f"{ours} {full} {full / ours:.2f}")
    assert ours == by_hand(prefix, 512) and full == LAYERS * prefix * TOKEN_BYTES


@pytest.mark.parametrize("world", [ONE, World(pp=2)], ids=lambda world: world.name)
def test_exact_saves_no_more_for_a_longer_prompt(
    world: World, models: Path, tmp_path: Path, report: Any
) -> None:
    hf, cases = write_lastkv(models, "qwen3", 16), []
    for prompt, contract in ((66, "exact"), (130, "exact"), (258, "exact"), (258, "conventional")):
        groups = window(1, shape=((prompt, (20, 20)),))
        cases.append(
            {
                "hf": str(hf),
                "trajectories": str(write_jsonl(tmp_path / f"{prompt}.jsonl", groups)),
                "settings": [
                    "model.attention=lastkv",
                    f"prefix.contract={contract}",
                    "prefix.chunk_size=24",
                    "replay.concurrent=1",
                ],
            }
        )
    for rank, found in enumerate(run_world(world, "worlds.ranks:measured", cases=cases)):
        short, middle, long, conventional = (one["peak"]["replay"] for one in found)
        report(
            f"rank {rank}: saved bytes at P = 66, 130, 258, conventional", [short, middle, long, conventional]
        )
        assert short > 0
        assert abs(middle - short) <= 0.01 * short and abs(long - short) <= 0.01 * short
        if world == ONE:  # a pipelined conventional pass goes round by round
            assert conventional > 3 * long


def test_a_released_prefix_is_poisoned(runtime: Runtime, models: Path) -> None:
    with lastkv_run(runtime, write_lastkv(models, "qwen3", 3)) as run, UpdateWindow(run) as opened:
        group = opened.prompt_group("g", token_ids(12, 1))
        with group:
            assert group.state is not None
            kept = list(group.state.tensors())
            assert all(bool(torch.isfinite(tensor).all()) for tensor in kept)
            fork = group.fork(1)
        assert all(bool(torch.isnan(tensor).all()) for tensor in kept)
        with pytest.raises(RuntimeError, match="stale state"):
            fork.layer(1)
