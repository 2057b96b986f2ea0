"""Claim: with an adapter buffers and optimizer are the adapter's alone, the reference is no second model, and a window
saves less than one that trains every parameter.

Why the tests show it: the sizes of A and B are counted by hand; saved bytes of the same window are compared with full
training's. That planned bytes are the measured ones, also with adapters, is in test_plan_families.
Not shown: time (examples/lora).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from oracle.tiny_models import make_hf_dir

from megatron_lrl.config import load_config
from megatron_lrl.models.hf_config import read_architecture
from megatron_lrl.plan.bytes import Work, open_plan_of_stage

WORK = (90, 13, 4, 2)
SETTINGS = ("prefix.chunk_size=16", "replay.concurrent=2", "loss.kl_coef=0.1")
ADAPTER = ("adapter.rank=3", 'adapter.targets=["q_proj", "v_proj", "down_proj"]')


@pytest.fixture(scope="module")
def hf(session_dir: Path) -> Path:
    return make_hf_dir(session_dir / "plan-adapter", "qwen3", 3, layers=4)


def test_buffers_are_the_adapters_alone(hf: Path, report: Any) -> None:
    """Rank 3: A [3, i] and B [o, 3] of q, v and down in 4 layers, 4 bytes each, and twice that of moments."""
    arch = read_architecture(hf)
    h, f, q, kv = (
        arch.hidden_size,
        arch.ffn_hidden_size,
        arch.num_heads * arch.head_dim,
        arch.num_kv_heads * arch.head_dim,
    )
    count = 4 * 3 * ((h + q) + (h + kv) + (f + h))
    found = {}
    for name, more in (("full", ()), ("adapter", ADAPTER)):
        config = load_config("/dev/null", [f"model.hf={hf}", *SETTINGS, *more])
        with open_plan_of_stage(config, arch, 1, 0) as plan:
            found[name] = plan.bytes_of(Work(*WORK), "exact", recorded=True)
    ours, full = found["adapter"], found["full"]
    padding = 1 << 12
    assert 4 * count <= ours.gradients <= 4 * count + padding
    assert 8 * count <= ours.optimizer <= 8 * count + padding  # a float32 parameter is its own master
    assert ours.parameters == full.parameters + 4 * count
    assert ours.reference == 0 < full.reference  # the policy's own base
    report(
        "saved bytes of a replay and of a sweep, adapter / full",
        f"{ours.replay_graph / full.replay_graph:.2f}, {ours.sweep_graph / full.sweep_graph:.2f}",
    )
    assert ours.replay_graph < full.replay_graph and ours.sweep_graph < full.sweep_graph
