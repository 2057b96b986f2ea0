"""Claim: what a plan says before launch is what a run then takes: parameters, gradient buffers, optimizer
state, resident state and adjoint to the byte, graphs within 10% (usually to the byte); a plan needs neither
weights nor peers, works for models of any size, and leaves nothing behind in the process.

Why the tests show it: a window is run and measured on every rank of five worlds under each contract and
compared with the plan of each rank's pipeline stage, made in another process that only has config.json;
bytes of an 8B and a 32B model are compared with counts by hand; what a rehearsal replaces is compared
before and after.

Not shown: the allocator's own peak on a device, temporaries inside a layer.
"""

from __future__ import annotations

import json
import pkgutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import World, run_world
from oracle.tiny_models import make_hf_dir

from megatron_lrl import cli
from megatron_lrl.config import load_config
from megatron_lrl.errors import UserError
from megatron_lrl.models.hf_config import architecture_from_dict, read_architecture
from megatron_lrl.plan import world as plan_world
from megatron_lrl.plan.bytes import Work, open_plan_of_stage, stages_that_differ
from megatron_lrl.plan.cost import break_even_group, window_cost
from megatron_lrl.plan.limits import largest

CONTRACTS = ("exact", "truncated", "response_only", "conventional")
WORK = (90, 13, 4, 2)
SETTINGS = ("prefix.chunk_size=16", "prefix.truncate_tokens=21", "replay.concurrent=2")
WORLDS = [World(), World(tp=2), World(cp=2), World(pp=2), World(tp=2, cp=2, pp=2)]
EXACT = ("parameters", "gradients", "optimizer", "reference", "state", "group")


@pytest.fixture(scope="module")
def hf(session_dir: Path) -> Path:
    return make_hf_dir(session_dir / "plan-model", "qwen3", 3, layers=6)


@pytest.mark.parametrize(
    "world", [*WORLDS[:-1], pytest.param(WORLDS[-1], marks=pytest.mark.slow)], ids=lambda world: world.name
)
def test_planned_bytes_are_measured_bytes(world: World, hf: Path, report: Any) -> None:
    settings = [f"model.hf={hf}", *SETTINGS]
    ranks = run_world(
        world, "plan.plan_ranks:measured", settings=settings, contracts=list(CONTRACTS), work=list(WORK)
    )
    config = load_config("/dev/null", [*settings, *world.overrides])
    arch, worst = read_architecture(hf), 0.0
    for stage in stages_that_differ(world.pp):
        with open_plan_of_stage(config, arch, world.size, stage) as plan:
            planned = {
                contract: plan.bytes_of(Work(*WORK), contract, recorded=True) for contract in CONTRACTS
            }
        mine = [rank for rank in ranks if rank["stage"] == stage]
        assert len(mine) == world.size // world.pp
        for contract in CONTRACTS:
            found = {**vars(planned[contract]), "group": planned[contract].groups}
            # The plan is that of the stage's first rank, whose share of the prompt is the largest.
            for name in EXACT:
                assert found[name] == mine[0][contract][name], (contract, name)
                # Shards of the optimizer differ by their padding.
                assert all(rank[contract][name] <= 1.01 * found[name] for rank in mine), (contract, name)
            for rank in mine:
                worst = max(worst, abs(planned[contract].replay / rank[contract]["replay"] - 1))
        assert mine[0]["planned beside"] == planned[CONTRACTS[0]].lifetimes()
    report("largest relative error of planned graphs", worst)
    assert worst <= 0.1


QWEN3 = {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 128, "num_key_value_heads": 8,
    "vocab_size": 151936, "max_position_embeddings": 131072, "rms_norm_eps": 1e-6, "hidden_act": "silu",
    "rope_theta": 1000000, "attention_bias": False, "attention_dropout": 0.0, "tie_word_embeddings": False,
}  # fmt: skip
SIZES = {
    "8B on 8": (
        {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32},
        ["parallel.tp=2", "parallel.cp=4"], 8,
    ),
    "32B on 64": (
        {"hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64, "num_attention_heads": 64},
        ["parallel.tp=8", "parallel.cp=4"], 64,
    ),
}  # fmt: skip


@pytest.mark.parametrize("size", SIZES)
def test_real_models_are_planned_by_their_shapes(size: str) -> None:
    fields, layout, world = SIZES[size]
    arch = architecture_from_dict({**QWEN3, **fields})
    config = load_config("/dev/null", ["model.hf=none", "model.dtype=bfloat16", *layout])
    tp, cp = config.parallel.tp, config.parallel.cp
    with open_plan_of_stage(config, arch, world, 0) as plan:
        planned = plan.bytes_of(Work(100_000, 1024, 8, 1))
    heads, kv = arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
    layer = arch.hidden_size * (2 * heads + 2 * kv + 3 * arch.ffn_hidden_size) // tp
    norms = 2 * arch.hidden_size + 2 * arch.head_dim
    count = (
        arch.num_layers * (layer + norms) + 2 * arch.vocab_size * arch.hidden_size // tp + arch.hidden_size
    )
    # Buffers are padded to whole shards, and parameters in them to 64 elements: a little more than the count.
    assert 2 * count <= planned.parameters <= 2 * count * 1.001
    assert planned.gradients == 2 * planned.parameters
    shards = world // tp
    assert planned.optimizer == pytest.approx(12 * count / shards, rel=0.002)
    assert planned.state == 2 * arch.num_layers * kv // tp * 2 * -(-99_999 // cp)
    assert planned.adjoint == 2 * planned.state
    assert planned.sweep_graph > 2 * 2048 // cp * arch.num_layers * arch.hidden_size // tp


def test_nothing_is_left_behind(hf: Path) -> None:
    def patched() -> list[Any]:
        return [pkgutil.resolve_name(name) for name in plan_world.REPLACED_NAMES]

    before, random = patched(), torch.get_rng_state()
    config = load_config("/dev/null", [f"model.hf={hf}", "parallel.tp=2"])
    with pytest.raises(ZeroDivisionError), open_plan_of_stage(config, read_architecture(hf), 4, 0):
        assert torch.zeros(2).device.type == "meta"
        assert dist.is_initialized()
        assert all(now is not was for now, was in zip(patched(), before, strict=True))
        raise ZeroDivisionError
    assert patched() == before and not dist.is_initialized()
    assert torch.zeros(2).device.type == "cpu"
    assert torch.equal(random, torch.get_rng_state())


def test_a_layout_that_does_not_divide_the_world_is_refused(hf: Path) -> None:
    config = load_config("/dev/null", [f"model.hf={hf}", "parallel.tp=2"])
    with (
        pytest.raises(UserError, match=r"parallel\.tp = 2.*multiple of 2"),
        open_plan_of_stage(config, read_architecture(hf), 3, 0),
    ):
        pass


def test_largest_is_the_largest() -> None:
    def bent(n: int) -> int:
        return 100 + max(7 * n, 300 + n // 3)

    for budget in (106, 107, 400, 401, 500, 10_007, 99_999):
        fits = [n for n in range(1, 5001) if bent(n) <= budget]
        assert largest(bent, 12, budget, 5000) == (fits[-1] if fits else 0)
    assert largest(lambda n: 5, 3, 10, 1_000_000) == 1_000_000


def test_operations_by_hand_and_the_break_even() -> None:
    arch = architecture_from_dict(
        {**QWEN3, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 3, "num_attention_heads": 2,
         "num_key_value_heads": 1, "head_dim": 4, "vocab_size": 10}
    )  # fmt: skip
    weights = 3 * (8 * (8 + 4 + 4) + 8 * 8 + 3 * 8 * 12)  # q, k, v; out; gate, up, down
    full = window_cost(arch, "conventional", 11, 5)
    pairs = 15 * 16 / 2
    assert full.shared == 0
    assert full.each == 3 * 2 * weights * 15 + 3.5 * 3 * 4 * 8 * pairs + 4 * 2 * 8 * 10 * 5
    exact, short = window_cost(arch, "exact", 11, 5), window_cost(arch, "response_only", 11, 5)
    assert window_cost(arch, "truncated", 11, 5, 0) == short
    assert window_cost(arch, "truncated", 11, 5, 10) == exact
    assert short.shared < exact.shared and short.each < exact.each < full.each
    first = break_even_group(exact, full)
    assert first is not None and exact.total(first) < full.total(first)
    assert first == 1 or exact.total(first - 1) >= full.total(first - 1)
    assert break_even_group(full, exact) is None


def test_the_verb_reports_and_writes(hf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "c.toml").write_text(f'[model]\nhf = "{hf}"\n[parallel]\npp = 2\n[prefix]\nchunk_size = 32\n')
    arguments = ["plan", str(tmp_path / "c.toml"), "--world", "4", "--prompt", "200", "--response", "8"]
    assert cli.main([*arguments, "--budget", "0.01", "--out", str(tmp_path / "p.json")]) == 0
    out = capsys.readouterr().out
    for word in (
        "stage 0",
        "stage 1",
        "optimizer",
        "adjoint",
        "saving a checkpoint",
        "file of `grad`",
        "headroom",
        "largest P",
        "break-even",
        "conventional",
    ):
        assert word in out
    written = json.loads((tmp_path / "p.json").read_text())
    assert [stage["planned"]["stage"] for stage in written["stages"]] == [0, 1]
    limits = written["stages"][0]["largest"]
    assert limits["P"] > 200 and limits["K"] >= 1
    assert cli.main([*arguments[:2], "--prompt", "5000"]) == 2
    assert "1024 positions" in capsys.readouterr().err
