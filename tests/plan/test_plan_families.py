"""Claim: a plan knows layers that differ. For Gated DeltaNet hybrids and mixtures of experts, planned parameters,
gradient buffers, optimizer state, recurrent states, snapshots and adjoints are the measured ones to the byte, graphs
within 10%; sizes of Qwen3.6-27B and GLM-4.5-Air are those counted by hand.

Why the tests show it: windows are run on every rank of worlds with tp, cp, pp, dp and ep and compared with the plan of
each stage, made without weights or peers; stages are deep enough that layers are extrapolated per kind. Experts of the
measured runs are chosen by random routers, so a rank's graphs differ from the plan's even dispatch by their imbalance.
Published sizes and operations are written out here as sums over layers.

Not shown: what Transformer Engine's or flash-linear-attention's kernels save; a real router's imbalance.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from harness import World, run_world
from oracle.tiny_families import HYBRID_CASES, LATENT_CASES, MOE_CASES, THREE_TO_ONE
from oracle.tiny_models import make_hf_dir

from megatron_lrl.config import load_config
from megatron_lrl.layers.moe.kind import even_dispatch
from megatron_lrl.lifetimes.open import read_model_architecture
from megatron_lrl.models.hf_config import read_architecture
from megatron_lrl.passes.restarts import kept_bytes
from megatron_lrl.plan.bytes import Plan, Work, open_plan_of_stage, stages_that_differ
from megatron_lrl.plan.cost import window_cost
from megatron_lrl.plan.graphs import Kind, short_stage
from megatron_lrl.runtime import Layout

EXAMPLES = Path(__file__).parents[2] / "examples"
WORK = (90, 13, 4, 2)
SETTINGS = ("prefix.chunk_size=16", "prefix.truncate_tokens=21", "replay.concurrent=2")
EXACT = ("parameters", "gradients", "optimizer", "state", "group")
CASES = {**HYBRID_CASES, **MOE_CASES, **LATENT_CASES}


class Planned(NamedTuple):
    """A model (its layers, if not 4) in a world, with settings."""

    case: str
    world: World
    contracts: tuple[str, ...] = ("exact", "truncated")
    settings: tuple[str, ...] = ()
    layers: int = 4

    @property
    def name(self) -> str:
        return "-".join((self.case, self.world.name, *self.settings))


LASTKV = ("model.attention=lastkv", "lastkv.chunk_size=8")
LORA = ("adapter.rank=3", 'adapter.targets=["q_proj", "v_proj", "down_proj"]', "loss.kl_coef=0.1")
PLANNED = [
    Planned("qwen3_5-vl", World(), ("exact", "response_only", "conventional"), layers=8),
    Planned("qwen3_5", World(cp=2), settings=("prefix.snapshot_bytes=16000",)),
    Planned("qwen3_5", World(pp=2), settings=LASTKV),
    Planned("qwen3_5_moe-vl", World(cp=2, ep=2)),
    pytest.param(Planned("qwen3_next", World(tp=2, cp=2), ("exact", "conventional")), marks=pytest.mark.slow),
    Planned("qwen3_moe-sparse", World(pp=2), layers=8),
    Planned("glm4_moe", World(), ("response_only", "conventional")),
    Planned("glm4_moe_lite", World(tp=2, cp=2)),
    Planned("qwen3_5", World(tp=2, pp=2), settings=LORA),
    *(
        pytest.param(Planned("glm4_moe", world, settings=LORA), marks=pytest.mark.slow)
        for world in (World(), World(cp=2, dp=2))
    ),
    pytest.param(Planned("glm4_moe-groups", World(tp=2, dp=2, ep=2), ("exact",)), marks=pytest.mark.slow),
]


def model_of(folder: Path, one: Planned) -> Path:
    family, variation = CASES[one.case]
    if "layer_types" in variation:
        variation = {**variation, "layer_types": THREE_TO_ONE * (one.layers // 4)}
    path = folder / f"plan-{one.case}-{one.layers}"
    if not path.exists():
        make_hf_dir(path, family, 3, layers=one.layers, **variation)
    return path


@pytest.mark.parametrize("one", PLANNED, ids=lambda one: one.name)
def test_planned_bytes_are_measured_bytes(one: Planned, session_dir: Path, report: Any) -> None:
    settings = [f"model.hf={model_of(session_dir, one)}", *SETTINGS, *one.settings]
    ranks = run_world(
        one.world,
        "plan.plan_ranks:measured",
        settings=settings,
        contracts=list(one.contracts),
        work=list(WORK),
    )
    config, errors = load_config("/dev/null", [*settings, *one.world.overrides]), []
    arch = read_model_architecture(config)
    for stage in stages_that_differ(one.world.pp):
        with open_plan_of_stage(config, arch, one.world.size, stage) as plan:
            planned = {
                contract: plan.bytes_of(Work(*WORK), contract, recorded=True) for contract in one.contracts
            }
        mine = [rank for rank in ranks if rank["stage"] == stage]
        for contract in one.contracts:
            found = {**vars(planned[contract]), "group": planned[contract].groups}
            assert {k: found[k] for k in EXACT} == {k: mine[0][contract][k] for k in EXACT}, (stage, contract)
            errors += [abs(planned[contract].replay / rank[contract]["replay"] - 1) for rank in mine]
        assert mine[0]["planned beside"] == planned[one.contracts[0]].lifetimes()
    report("largest relative error of planned graphs", max(errors))
    assert max(errors) <= 0.1


def test_fewer_snapshots_are_kept_and_some_made_again(session_dir: Path) -> None:
    folder = model_of(session_dir, Planned("qwen3_5", World()))
    planned = []
    for budget in (0, 30_000):
        config = load_config(
            "/dev/null", [f"model.hf={folder}", *SETTINGS, f"prefix.snapshot_bytes={budget}"]
        )
        with open_plan_of_stage(config, read_architecture(folder), 1, 0) as plan:
            planned.append(plan.bytes_of(Work(*WORK), "exact"))
    one = kept_bytes(read_architecture(folder), Layout(), torch.float32).advance
    every, few = planned
    # 6 chunks; the first starts from nothing. 30,000 bytes hold 4 states: a snapshot before chunks 0, 2, 4.
    assert one == 2 * 4 * (8 * 8 * 8 + (2 * 4 * 8 + 8 * 8) * 3) and 4 * one <= 30_000 < 5 * one
    assert every.refilled == 0 and few.refilled == one
    assert every.state - few.state == 3 * one
    assert few.adjoint == every.adjoint


def test_kinds_of_a_stage() -> None:
    d, a, sparse = Kind("gdn", False), Kind("attention", False), Kind("attention", True)
    assert short_stage([d, d, d, a, d, d, d, a]) == ((d, a), {d: 5, a: 1})
    assert short_stage([a, d, a, d]) == ((a, d), {a: 1, d: 1})
    assert short_stage([a, sparse, sparse]) == ((a, sparse), {sparse: 1})
    assert short_stage([a]) == ((a,), {})


@pytest.mark.parametrize(
    ("rows", "ep", "tp", "local"), [(6, 1, 1, 8), (10, 2, 1, 4), (14, 2, 2, 4), (3, 4, 1, 1)]
)
def test_even_dispatch_loses_no_row(rows: int, ep: int, tp: int, local: int) -> None:
    class Dispatcher:
        config = type("Config", (), {"moe_router_topk": 2})
        ep_size, tp_size, num_local_experts = ep, tp, local
        output_splits: Any = None
        num_global_tokens_per_local_expert: Any = None

        def _maybe_update_cuda_sync_point(self, _point: str) -> None: ...

    one = Dispatcher()
    received = even_dispatch(one, torch.zeros(rows, ep * local, dtype=torch.bool))
    assert received.sum() == tp * 2 * rows and len(received) == local
    assert received.max() - received.min() <= tp * ep
    if local > 1:
        counts = one.num_global_tokens_per_local_expert
        assert counts.shape == (tp * ep, local)
        assert np.array_equal(counts.sum(0), received)
    if ep > 1:
        assert one.output_splits.sum() == 2 * rows


def planned(name: str, world: int, *overrides: str, stage: int = 0) -> Any:
    folder = EXAMPLES / name
    config = load_config(folder / "grpo.toml", [f"model.hf={folder / 'hf'}", *overrides])
    return open_plan_of_stage(config, read_model_architecture(config), world, stage)


def parameter_bytes(plan: Plan) -> int:
    """Bytes of the parameters' own values: buffers hold them padded."""
    return sum(x.numel() * x.element_size() for x in plan.run.core(plan.run.model).parameters())


def test_qwen36_27b_by_hand() -> None:
    hidden, head, values = 5120, 256, 48 * 128
    attention = hidden * (2 * 24 + 2 * 4) * head + 24 * head * hidden + 2 * head
    channels = 2 * 16 * 128 + values
    recurrent = hidden * (channels + 2 * values + 2 * 48) + 4 * channels + 2 * 48 + 128
    count = (
        16 * attention + 48 * recurrent + 64 * (3 * hidden * 17408 + 2 * hidden) + (2 * 248320 + 1) * hidden
    )
    assert count / 1e9 == pytest.approx(26.896, abs=5e-4)
    one = ("parallel.tp=1", "parallel.cp=1", "parallel.pp=1")
    with planned("qwen3_6", 1, *one) as plan:
        # A_log and dt_bias stay float32.
        assert parameter_bytes(plan) == 2 * (count + 48 * 2 * 48)
        parts = plan.run.ledger.parts
        assert parts["gradients"] >= 4 * count and parts["gradients"] == pytest.approx(4 * count, rel=1e-4)
        assert parts["optimizer"] == pytest.approx(12 * count, rel=1e-4)
        state, adjoint = plan.resident(100_000, "response_only")
        snapshot = 48 * (48 * 128 * 128 * 4 + 3 * channels * 2)
        assert (state, adjoint) == (16 * 2 * 4 * head * 99_999 * 2 + snapshot, 0)
        state, adjoint = plan.resident(100_000, "exact")
        pages, wide_snapshot = 16 * 2 * 4 * head * 99_999, 48 * (48 * 128 * 128 + 3 * channels) * 4
        # 25 chunks of 4,096; a snapshot before each but the first of the document.
        assert (state, adjoint) == (2 * pages + 25 * snapshot, 4 * pages + wide_snapshot)


def test_glm45_air_by_hand() -> None:
    hidden, heads, expert = 4096, 96 * 128, 3 * 4096 * 1408
    attention = hidden * (2 * heads + 2 * 8 * 128) + heads + 2 * 8 * 128
    norms, router = 2 * hidden, 128 * hidden
    dense = (
        2 * 151552 * hidden + hidden + 46 * (attention + norms) + 3 * hidden * 10944 + 45 * (expert + router)
    )
    assert (dense + 45 * 128 * expert) / 1e9 == pytest.approx(106.85, abs=0.01)
    spread = ("parallel.tp=1", "parallel.cp=32", "parallel.pp=1", "parallel.ep=32")
    with planned("glm4_5_air", 32, *spread) as plan:
        # The routers stay float32. A rank holds 4 of 128 experts.
        assert parameter_bytes(plan) == 2 * (dense + 45 * router + 45 * 4 * expert)
        # Experts' optimizer state is whole (one copy in the world), the rest is sharded over 32 ranks.
        expected = 12 * (dense / 32 + 45 * 4 * expert)
        assert plan.run.ledger.parts["optimizer"] == pytest.approx(expected, rel=2e-3)


def test_operations_of_hybrids_and_experts_by_hand(session_dir: Path) -> None:
    arch = read_architecture(model_of(session_dir, Planned("qwen3_next", World())))
    hidden, queries, keys, prompt, response = 32, 4 * 16, 2 * 16, 11, 5
    channels, values, experts = 2 * 4 * 8 + 64, 64, 3 * hidden * (2 * 16 + 24) + hidden * (8 + 1)
    attention = hidden * (2 * queries + 2 * keys) + queries * hidden
    recurrent = hidden * (channels + values + 2 * 8) + values * hidden + 4 * channels
    rule = 8 * (4 * 64 * 8 + 64 * 16 + 2 * 64 * 8 + 6 * 8 * 8)
    weights = 2 * (2 * attention + 2 * recurrent + 4 * experts)
    tokens, head = prompt + response - 1, 4 * 2 * hidden * arch.vocab_size * response
    full = window_cost(arch, "conventional", prompt, response)
    pairs = tokens * (tokens + 1) / 2
    assert full.each == 3 * weights * tokens + 5 * 2 * rule * tokens + 3.5 * 2 * 4 * queries * pairs + head
    capture = window_cost(arch, "response_only", prompt, response).shared
    prefix = prompt - 1
    left_out = 2 * (queries * hidden + experts)  # the last layer stops at its keys and values
    assert capture == prefix * (weights - left_out + 2 * rule) + 4 * queries * prefix * (prefix + 1) / 2
