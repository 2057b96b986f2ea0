"""Claim: on a CUDA machine the program would mix no tensor of the host with one of the device, would hand NCCL and the
flash attention kernels only what they take, would call collectives in one order on all ranks, and would not wait for
the device inside a pass over the model.

Why the test shows it: command lines of the program run in worlds of ranks that believe they are on CUDA with NCCL
(`pretend`, `nccl`, `kernels_of_cuda`): real numbers, so data-dependent branches are taken too. An operation that CUDA
would refuse raises here. Each wait is recorded with its line; in the rooms that a pass runs through there must be none.
That the pretence itself notices what it should is shown in `test_pretence.py`.

Not shown: that CUDA's kernels compute the right numbers (the tests marked gpu), Transformer Engine and
flash-linear-attention, races between streams, memory, speed, hangs inside NCCL.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from harness import ONE, World
from layers.lastkv.tiny import write_lastkv
from oracle import tiny_models, trajectories

from cuda_audit.run import audit

SHAPE = ((37, (1, 7, 2)), (11, (13, 5)), (1, (4,)))
PROMPTS = (23, 1, 11, 17)
HOT = re.compile(
    r"megatron_lrl/(attention|recurrent|state|lastkv)/|megatron_lrl/models/(head|gdn|layer|norm|router)"
)
"""Rooms that a pass over the model runs through."""
BUILDING = ("__init__", "reset_parameters")  # functions there that run when the model is built


class Case(NamedTuple):
    """A world, a model, a dtype, and the verbs to run."""

    world: World
    model: str
    dtype: str
    verbs: tuple[str, ...]
    settings: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.world.name}-{self.model}-{self.dtype}"


CONTRACTS = ("exact", "response_only", "truncated", "conventional")
ALL = ("score", "generate", *CONTRACTS, "kept", "train", "resume", "import", "check")
FEW = ("generate", "exact", "train")
ROUTED = ("rollout.record_routing=true", "moe.aux_loss_coef=0.01")

QUICK = [
    Case(ONE, "qwen2", "bfloat16", ALL),
    Case(
        World(cp=2), "qwen3_5_moe-vl", "bfloat16", ("train",), ROUTED
    ),  # samples, captures, replays, sweeps, saves
]
SLOW = [
    Case(World(cp=2), "qwen3_5_moe-vl", "float32", FEW, ROUTED),
    Case(ONE, "lastkv-qwen3", "float32", ("score", *FEW)),
    Case(ONE, "glm4_moe-groups", "bfloat16", ("exact", "train"), ("moe.router_bias_update_rate=0.001",)),
    Case(World(tp=2), "qwen3", "bfloat16", FEW),
    Case(World(pp=2), "lastkv-qwen3", "float32", FEW),
    Case(World(cp=2, pp=2), "qwen2-tied", "bfloat16", FEW),
    Case(World(dp=2), "llama", "bfloat16", FEW),
    Case(World(dp=2, ep=2), "qwen3_moe", "float32", FEW),
]


def write_inputs(root: Path, case: Case) -> tuple[Path, Path, Path]:
    """Config, trajectories and prompts of a case."""
    if case.model.startswith("lastkv-"):
        hf = write_lastkv(root, case.model.removeprefix("lastkv-"), 8)
        attention = "attention = 'lastkv'\n"
    else:
        hf, attention = tiny_models.write_case(root / "hf", case.model), ""
    window = trajectories.write_jsonl(root / "window.jsonl", trajectories.window(3, shape=SHAPE))
    records = [{"id": f"p{i}", "prompt_ids": list(range(3, 3 + n))} for i, n in enumerate(PROMPTS)]
    prompts = trajectories.write_jsonl(root / "prompts.jsonl", records)
    config = root / "config.toml"
    config.write_text(
        f"[model]\nhf = {str(hf)!r}\ndtype = '{case.dtype}'\n{attention}"
        "[rollout]\ngroup_size = 4\nmax_new_tokens = 5\n[optimizer]\nlr = 1e-2\n"
        "[prefix]\nchunk_size = 13\ntruncate_tokens = 9\n[replay]\nconcurrent = 2\ncheck_poison = true\n"
        "[train]\nupdates = 2\nsave_every = 1\ngroups_per_update = 2\n"
        f"[data]\nprompts = {str(prompts)!r}\nreward = 'cli.toy_rewards:low_ids'\n"
    )
    return config, window, prompts


def commands(root: Path, case: Case) -> list[list[str]]:
    """The case's verbs as command lines."""
    config, window, prompts = write_inputs(root, case)
    settings = [*case.world.overrides, *case.settings]
    recorded = ["--trajectories", str(window), "--out"]
    run = ["train", str(config), f"train.output={root / 'run'}", *settings]
    made: dict[str, list[str]] = {
        "score": ["score", str(config), *recorded, str(root / "scores.jsonl"), *settings],
        "generate": [
            "generate",
            str(config),
            "--prompts",
            str(prompts),
            "--out",
            str(root / "g.jsonl"),
            *settings,
        ],
        "train": run,
        "resume": [*run, "train.updates=3"],
        "import": ["import", str(root / "hf" / case.model), str(root / "imported")],
        "check": ["check", str(config), *settings],
    }
    for contract in CONTRACTS:
        out = str(root / f"{contract}.safetensors")
        made[contract] = ["grad", str(config), *recorded, out, f"prefix.contract={contract}", *settings]
    made["kept"] = [*made["exact"], "prefix.keep_graph_bytes=1000000"]
    lines = [made[verb] for verb in case.verbs]
    if "train" in case.verbs:
        last = "3" if "resume" in case.verbs else "2"
        lines.append(["export", str(root / f"run/checkpoints/update-{last:0>6}"), str(root / "exported")])
    return lines


@pytest.mark.parametrize(
    "case",
    [*QUICK, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)],
    ids=lambda case: case.name,
)
def test_the_program_keeps_to_the_device_and_to_nccl(case: Case, tmp_path: Path, report: Any) -> None:
    lines = commands(tmp_path, case)
    ranks = audit(tmp_path / "job", lines, case.world.size, timeout_s=900)
    for number, line in enumerate(lines):
        results = [rank[number] for rank in ranks]
        assert all(result["operations"] > 100 for result in results), "the pretence saw nothing"
        for result in results:
            inside = {
                place: count
                for place, count in result["waits"].items()
                if HOT.search(place) and not place.endswith(BUILDING)
            }
            assert not inside, f"{line[0]} waits for the device inside a pass: {inside}"
        require_one_order(results, line[0])
    report("waits of a sampled token", decode_waits(ranks[0], lines))


def require_one_order(results: list[dict[str, Any]], verb: str) -> None:
    """The ranks of a group called the same collectives on it, in the same order.

    In a group of two a message from one to the other has its place in that order; in larger ones it concerns two.
    """
    for group in {group for result in results for group in result["sequence"]}:
        ranks = [int(rank) for rank in group.strip("[]").split(",")]
        orders = [_order(results[rank]["sequence"].get(group, []), len(ranks) == 2) for rank in ranks]
        for other in orders[1:]:
            assert orders[0] == other, f"{verb}: ranks {group} differ: {_first_difference(orders[0], other)}"


def _order(calls: list[str], messages: bool) -> list[str]:
    names = [call.split(" megatron")[0] for call in calls]
    named = ["message" if re.match("i?(send|recv)", name) else name for name in names]
    return [name for name in named if messages or name != "message"]


def _first_difference(a: list[str], b: list[str]) -> str:
    place = next(
        (i for i, pair in enumerate(zip(a, b, strict=False)) if pair[0] != pair[1]), min(len(a), len(b))
    )
    return f"call {place}: {a[place : place + 2]} against {b[place : place + 2]}"


def decode_waits(results: list[dict[str, Any]], lines: list[list[str]]) -> float:
    """Waits of `generate` in rollout and schedule, for each of its decode steps."""
    for result, line in zip(results, lines, strict=True):
        if line[0] == "generate":
            steps = len(PROMPTS) * 5
            found = [
                n
                for place, n in result["waits"].items()
                if re.search(r"megatron_lrl/(rl|lifetimes)/|pipeline_parallel", place)
            ]
            return sum(found) / steps
    return float("nan")
