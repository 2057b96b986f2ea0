"""Claim: models with Gated DeltaNet layers are scored and differentiated like all others: the recurrent state
is resident, forked and swept, and in every parallel layout the numbers are those of transformers.

Why the tests show it: the oracle is transformers' torch path, whole sequences for `conventional` and `exact`, a
constant cache (keys, values, recurrent state, convolution tail) for `response_only`. Prompts of 37, 11 and 1 tokens are
captured in chunks of 13, replays hold responses of unequal lengths, and heads are exchanged over cp. Routing of
the mixtures has no near-ties in these windows (asserted). Packed documents are compared with runs of each alone.
Not shown: float64 (test_fp64_families), flash-linear-attention's kernels, bfloat16.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from harness import ONE, WORLDS, World, run_world
from harness.worlds import EP_WORLDS
from oracle import hf_oracle
from oracle.compare import compare_tensors, max_difference
from oracle.hf_oracle import routing_margin
from oracle.tiny_families import HYBRID_CASES
from oracle.trajectories import window
from safetensors.torch import load_file

BAR, REL_L2, WORST = 2e-5, 1e-5, 1e-4
CONTRACTS = ["conventional", "response_only", "exact"]
DENSE = [case for case in HYBRID_CASES if "moe" not in case and "next" not in case]
MIXTURES = [case for case in HYBRID_CASES if case not in DENSE]
CASES = [(world, case) for world in WORLDS for case in HYBRID_CASES] + [
    (w, c) for w in EP_WORLDS for c in MIXTURES
]
ALL_WORLDS = [*WORLDS, *EP_WORLDS]


def in_world(world: World) -> str:
    return world.name


def slow(world: World) -> Any:
    """A world that runs with `-m slow` only."""
    return pytest.param(world, marks=pytest.mark.slow)


@pytest.mark.parametrize("world", ALL_WORLDS, ids=in_world)
def test_score_and_grad_are_those_of_transformers(
    world: World, answers: Any, tmp_path: Path, report: Any
) -> None:
    """Each world scores every hybrid; cases and contracts take turns over the worlds for the gradient."""
    names = MIXTURES if world.ep > 1 else list(HYBRID_CASES)
    turn = ALL_WORLDS.index(world)
    asked = [(names[(turn + i) % len(names)], contract) for i, contract in enumerate(CONTRACTS)]
    asked.append((names[(turn + 1) % len(names)], "exact"))
    scored = {case: tmp_path / f"{case}.jsonl" for case in names}
    graded = {key: tmp_path / f"{key[0]}-{key[1]}.safetensors" for key in asked}
    cases = [answers.case(case, "mixed", out, "score") for case, out in scored.items()]
    cases += [answers.case(case, "mixed", out, contract=contract) for (case, contract), out in graded.items()]
    run_world(world, "worlds.ranks:run_verbs", cases=cases)
    worst = 0.0
    for case, out in scored.items():
        ours = [json.loads(line)["logprobs"] for line in out.read_text().splitlines()]
        worst = max(worst, max_difference(ours, answers.score(case, "mixed")))
    found = {
        f"{case}-{contract}": compare_tensors(load_file(out), answers.grad(case, contract))
        for (case, contract), out in graded.items()
    }
    name, farthest = max(found.items(), key=lambda item: item[1].rel_l2)
    report("max difference of a log-probability", worst)
    report(f"farthest of {len(found)}: {name}", farthest)
    assert worst <= BAR
    for name, comparison in found.items():
        comparison.require(REL_L2, WORST, name)


@pytest.mark.parametrize("case", MIXTURES)
def test_no_token_is_near_a_tie(case: str, answers: Any, report: Any) -> None:
    margin = routing_margin(answers.hf(case), answers.groups["mixed"])
    report("smallest routing margin", margin)
    assert margin > 1e-4


@pytest.mark.parametrize("world", [ONE, World(cp=2), World(pp=2)], ids=in_world)
def test_memory_is_flat_and_snapshots_are_budgeted(world: World, answers: Any, report: Any) -> None:
    """Saved bytes of `exact` do not grow with P or G; resident bytes with fewer snapshots are fewer."""
    cases = []
    for prompt, size in ((65, 2), (257, 2), (65, 8)):
        name = answers.add(f"hybrid-P{prompt}-G{size}", window(1, shape=((prompt, (9,) * size),)))
        cases.append(answers.case("qwen3_5", name, Path("unused"), contract="exact", K=1, Z=32))
    one_snapshot = 2 * (8 * 8 * 8 * 4 + 128 * 3 * 4) // world.cp // world.pp
    name = answers.add("hybrid-P257-G2", window(1, shape=((257, (9, 9)),)))
    budget = {"contract": "exact", "K": 1, "Z": 16, "prefix__snapshot_bytes": 7 * one_snapshot}
    cases.append(answers.case("qwen3_5", name, Path("unused"), **budget))
    cases.append(answers.case("qwen3_5", name, Path("unused"), **{**budget, "prefix__snapshot_bytes": 0}))
    short, long, many, coarse, fine = zip(
        *run_world(world, "worlds.ranks:measured", cases=cases), strict=True
    )
    for rank in range(world.size):
        saved = [x[rank]["peak"]["replay"] for x in (short, long, many)]
        assert max(saved) <= 1.01 * min(saved), saved
        # 16 chunks: a snapshot before each but the first (which starts from nothing), or before every 4th and, while
        # the newest four are swept, the three in between
        spared = fine[rank]["peak"]["group"] - coarse[rank]["peak"]["group"]
        assert spared == (15 - (3 + 3)) * one_snapshot, (spared, one_snapshot)
    report("saved bytes, P = 65, 257, G = 8", [x[0]["peak"]["replay"] for x in (short, long, many)])
    report("resident bytes, every snapshot and every 4th", [x[0]["peak"]["group"] for x in (fine, coarse)])


@pytest.mark.parametrize(
    "world", [slow(ONE), World(cp=2), slow(World(tp=2, cp=2)), World(cp=2, pp=2)], ids=in_world
)
def test_coarse_snapshots_and_chunks_change_nothing(
    world: World, answers: Any, tmp_path: Path, report: Any
) -> None:
    case = "qwen3_5-vl"
    tight = 4 * 3 * (8 * 8 * 8 * 4 + 128 * 3 * 4)
    variants = [{"Z": 1, "K": 1}, {"Z": 7, "K": 3, "prefix__snapshot_bytes": tight}, {"Z": 64, "K": 2}]
    outs = [tmp_path / f"{i}.safetensors" for i in range(len(variants))]
    cases = [
        answers.case(case, "mixed", out, contract="exact", **variant)
        for out, variant in zip(outs, variants, strict=True)
    ]
    run_world(world, "worlds.ranks:run_verbs", cases=cases)
    for out, variant in zip(outs, variants, strict=True):
        comparison = compare_tensors(load_file(out), answers.grad(case, "exact"))
        report(str(variant), comparison)
        comparison.require(REL_L2, WORST, str(variant))


@pytest.mark.parametrize(
    "world", [ONE, World(cp=2), slow(World(tp=2, cp=2)), slow(World(cp=2, pp=2))], ids=in_world
)
@pytest.mark.parametrize("case", ["qwen3_5", "qwen3_next"])
def test_packed_documents_do_not_leak(
    case: str, world: World, answers: Any, tmp_path: Path, report: Any
) -> None:
    """Documents of 37, 51 and 40 tokens in one micro-batch: each is what transformers makes of it alone."""
    draw = random.Random(9)
    documents = [[draw.randrange(131) for _ in range(n)] for n in (37, 51, 40)]
    out = tmp_path / "packed.safetensors"
    settings = answers.case(case, "mixed", out, contract="exact")
    found = run_world(
        world, "worlds.ranks:packed_documents", case=settings, documents=documents, out=str(out)
    )[0]
    model = hf_oracle.load(answers.hf(case))
    expected = []
    for ids in documents:
        logprobs_R = hf_oracle.full_logprobs(model, ids[:1], ids[1:], 1.0)
        logprobs_R.sum().backward()
        expected.append(logprobs_R.tolist())
    distance = max_difference([found], [expected])
    stored = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    comparison = compare_tensors(load_file(out), hf_oracle.named_as_stored(stored, answers.hf(case)))
    report("packed against alone", f"{distance:.1e}  {comparison}")
    assert distance <= BAR
    comparison.require(REL_L2, WORST, case)


def test_without_sequence_parallelism(answers: Any, tmp_path: Path, report: Any) -> None:
    """The output norm is not split over tp: its gradient is summed there by the layer itself."""
    out = tmp_path / "plain.safetensors"
    case = answers.case("qwen3_5", "mixed", out, contract="exact", parallel__sequence_parallel="false")
    run_world(World(tp=2), "worlds.ranks:run_verbs", cases=[case])
    comparison = compare_tensors(load_file(out), answers.grad("qwen3_5", "exact"))
    report("tp = 2, sequence_parallel = false", comparison)
    comparison.require(REL_L2, WORST, "qwen3_5")
