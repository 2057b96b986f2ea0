"""Tiny LastKV models as Hugging Face directories, windows whose lengths sit around boundaries, and runs over them."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from oracle import lastkv_reference, tiny_models
from oracle.trajectories import Group, window
from safetensors.torch import load_file, save_file

from megatron_lrl.config import load_config
from megatron_lrl.lifetimes.open import open_run
from megatron_lrl.lifetimes.run import Run
from megatron_lrl.rollout import types
from megatron_lrl.runtime import Runtime

VOCAB, LAYERS, KV_HEADS = 131, 4, 2  # of `tiny_models.CASES`


def write_lastkv(root: Path, case: str, chunk: int, blend: bool = True) -> Path:
    """One of `tiny_models.CASES` as a LastKV model: gates among its tensors, C and blend in its config.json."""
    path = root / f"lastkv-{case}-C{chunk}{'' if blend else '-no-blend'}"
    if path.exists():
        return path
    source = tiny_models.write_case(root, case)
    shutil.copytree(source, path)
    config = json.loads((path / "config.json").read_text())
    config["lastkv"] = {"chunk_size": chunk, "blend": blend}
    (path / "config.json").write_text(json.dumps(config))
    tensors = load_file(source / "model.safetensors")
    tensors |= lastkv_reference.make_gates(5, LAYERS, KV_HEADS)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def around_boundaries(chunk: int, seed: int = 3) -> list[Group]:
    """Prompts of C−1, C, C+1, 2C, 2C+1 and 2C + C/2 tokens; responses whose last fed token stands before, on and
    after a boundary, that end inside the open chunk, and that cross several."""
    shape = []
    for prompt in (chunk - 1, chunk, chunk + 1, 2 * chunk, 2 * chunk + 1, 2 * chunk + chunk // 2):
        if prompt < 1:
            continue
        boundary = (
            (prompt // chunk + 1) * chunk - prompt + 1
        )  # a response this long feeds the chunk's last token
        lengths = {max(1, boundary - 1), boundary, boundary + 1, 1, boundary + 2 * chunk}
        shape.append((prompt, sorted(lengths, reverse=len(shape) % 2 == 0)))
    return window(seed, shape=shape)


@contextmanager
def lastkv_run(runtime: Runtime, hf: Path, *overrides: str, gradients: bool = False) -> Iterator[Run]:
    """A run over a LastKV directory, in float64 with poisoned frees unless overridden."""
    settings = [
        f'model.hf="{hf}"',
        "model.attention=lastkv",
        "model.dtype=float64",
        "replay.check_poison=true",
    ]
    with open_run(load_config(os.devnull, [*settings, *overrides]), runtime, gradients=gradients) as run:
        yield run


def logits_head(hidden_smh: torch.Tensor, _layout: Any, model: Any) -> torch.Tensor:
    """`advance` head: logits [V, n] of every fed token (last axis: tokens), on one rank."""
    weight = model.shared_embedding_or_output_weight() if model.arch.tied else model.output_layer.weight
    return (hidden_smh.squeeze(1) @ weight.T)[:, : model.arch.vocab_size].T


def token_ids(count: int, seed: int) -> tuple[int, ...]:
    """Random token ids."""
    return tuple(torch.randint(VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist())


def cut(ids: Sequence[int], size: int) -> list[Sequence[int]]:
    """Consecutive parts of at most `size` ids."""
    return [ids[i : i + size] for i in range(0, len(ids), size)]


def records_of(groups: Sequence[Group]) -> list[types.Group]:
    """A window of the oracle as the program's own records."""
    return [
        types.Group(
            group["id"],
            tuple(group["prompt_ids"]),
            tuple(
                types.Response(
                    tuple(r["ids"]),
                    r["reward"],
                    tuple(r["logprobs"]) if "logprobs" in r else None,
                    r["advantage"],
                )
                for r in group["responses"]
            ),
        )
        for group in groups
    ]
