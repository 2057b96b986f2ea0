"""Claim: in a hybrid, LastKV's history is that of the last attention layer, recurrent layers keep their own state, and
every contract's gradient is right, gates included, alone and in parallel layouts, also with coarse snapshots.

Why the tests show it: the oracle (`oracle.lastkv_hybrid`) runs the rules chunk by chunk under plain float64 autograd
with the delta rule token by token. Prompts and responses sit around the boundaries; capture chunks divide nothing.
Float64 leaves room for rounding only.
Not shown: mixtures of experts under LastKV; pipeline stages without attention (refused: tests/models).
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import ONE, World, run_world
from oracle import lastkv_hybrid, lastkv_reference, tiny_models
from oracle.compare import compare_tensors
from oracle.trajectories import write_jsonl
from safetensors.torch import load_file, save_file

from layers.lastkv.tiny import around_boundaries
from megatron_lrl.models.hf_config import read_architecture
from megatron_lrl.passes.restarts import kept_bytes
from megatron_lrl.runtime import Layout

CASE, CHUNK, LIVE = "qwen3_5", 5, 4
CONTRACTS = ["conventional", "response_only", "truncated", "exact"]
ATTENTION_LAYERS = (1, 3)


@pytest.fixture(scope="module")
def hf(models: Path) -> Path:
    """The tiny hybrid as a LastKV model."""
    path = models / "lastkv-hybrid"
    if not path.exists():
        source = tiny_models.write_case(models, CASE)
        shutil.copytree(source, path)
        config = json.loads((path / "config.json").read_text())
        config["lastkv"] = {"chunk_size": CHUNK, "blend": True}
        (path / "config.json").write_text(json.dumps(config))
        gates = lastkv_reference.make_gates(5, 4, 2)
        kept = {lastkv_reference.gate_name(i): gates[lastkv_reference.gate_name(i)] for i in ATTENTION_LAYERS}
        save_file(
            load_file(source / "model.safetensors") | kept, path / "model.safetensors", {"format": "pt"}
        )
    return path


@pytest.fixture(scope="module")
def expected(hf: Path) -> dict[str, dict[str, torch.Tensor]]:
    return {c: lastkv_hybrid.grad(hf, around_boundaries(CHUNK), c, CHUNK, LIVE) for c in CONTRACTS}


@pytest.mark.parametrize(
    "world",
    [ONE, World(cp=2), World(pp=2), pytest.param(World(tp=2, cp=2), marks=pytest.mark.slow)],
    ids=lambda world: world.name,
)
def test_grad_of_a_lastkv_hybrid(world: World, hf: Path, expected: Any, tmp_path: Path, report: Any) -> None:
    """Float64 on one rank, float32 in the others."""
    wide, cases, outs = world == ONE, [], {}
    trajectories = str(write_jsonl(tmp_path / "t.jsonl", around_boundaries(CHUNK)))
    # Prompts of three chunks, captured in three pieces each, get two restarts: what these and one part take.
    layout = Layout(world.tp, world.cp, world.pp)
    kept = kept_bytes(read_architecture(hf), layout, torch.float64 if wide else torch.float32)
    few = 3 * kept.chunk + 7 * kept.advance
    variants = [(contract, 7, 2, 0) for contract in CONTRACTS] + [("exact", 2, 3, few)]
    for contract, capture, concurrent, snapshots in variants:
        out = outs[contract, capture] = tmp_path / f"{contract}-{capture}.safetensors"
        settings = [
            "model.attention=lastkv", f"prefix.contract={contract}", f"prefix.truncate_tokens={LIVE}",
            f"prefix.chunk_size={capture}", f"replay.concurrent={concurrent}", "replay.check_poison=true",
            f"prefix.snapshot_bytes={snapshots}", f"model.dtype={'float64' if wide else 'float32'}",
        ]  # fmt: skip
        case = {
            "verb": "grad",
            "hf": str(hf),
            "trajectories": trajectories,
            "out": str(out),
            "settings": settings,
        }
        cases.append(case)
    run_world(world, "worlds.ranks:run_verbs", cases=cases)
    for (contract, capture), out in outs.items():
        ours = load_file(out)
        comparison = compare_tensors(ours, expected[contract])
        report(f"{contract} Z={capture}", comparison)
        comparison.require(*((1e-10, 1e-10) if wide else (1e-5, 1e-4)), contract)
        gates = {name: bool(g.any()) for name, g in ours.items() if name.endswith("lastkv_gate")}
        assert gates == {lastkv_reference.gate_name(1): True, lastkv_reference.gate_name(3): False}
