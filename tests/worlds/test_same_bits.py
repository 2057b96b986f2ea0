"""Claim: with `model.same_bits = "on"` replay gives every sampled token the sampler's own log-probability, bit by bit,
in every layout, for full attention, LastKV and mixtures of experts; and nothing in how a window is executed can be
told from its bits.

Why the test shows it: groups are sampled and scored on the same weights, in float32 and bfloat16, at prompts of 1 to
530 tokens (below, across and beyond tiles of 256 keys, so that context parallel ranks own the new tokens in turn),
captured and replayed in pieces that divide nothing, decoded group by group and all together, with branches that leave
the batch as they end; `torch.equal` compares the numbers. Products of too few rows, tiles that depend on the pass, or
no setting at all are found.
Not shown: Gated DeltaNet, and mixtures at tp > 2 (refused by name); CUDA.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import ONE, WORLDS, World, run_world
from harness.worlds import EP_WORLDS
from oracle.compare import compare_tensors
from oracle.tiny_models import make_hf_dir
from oracle.trajectories import window, write_jsonl
from safetensors.torch import load_file

NUMBER = random.Random(4)
PROMPTS = [[NUMBER.randrange(131) for _ in range(length)] for length in (37, 1, 250, 530)]
SHORT = PROMPTS[:2]
FAMILIES = ("llama", "qwen2", "qwen3")
DTYPES = ["float32", "bfloat16"]
TARGET = "worlds.same_bits_ranks:sampled_and_replayed"
REL_L2, WORST = 1e-5, 1e-4  # of gradients, as in test_grad


def case(
    answers: Any,
    family: str,
    dtype: str,
    same_bits: str = "on",
    prompts: Any = PROMPTS,
    fault: str | None = None,
    **more: Any,
) -> dict[str, Any]:
    settings = {
        "model__dtype": f'"{dtype}"', "model__same_bits": f'"{same_bits}"', "rollout__group_size": 5,
        "rollout__max_new_tokens": 9, "prefix__chunk_size": 113, "replay__concurrent": 2, **more,
    }  # fmt: skip
    return {
        "hf": str(answers.hf(family)),
        "prompt_ids": prompts,
        "stop": [3, 7, 20, 50, 90],  # so that branches leave the batch one after another
        "settings": [f"{key.replace('__', '.')}={value}" for key, value in settings.items()],
        "fault": fault,
    }


def lastkv(answers: Any, family: str, dtype: str, size: int, blend: bool, **more: Any) -> dict[str, Any]:
    settings = {
        "model__attention": '"lastkv"',
        "lastkv__chunk_size": size,
        "lastkv__blend": str(blend).lower(),
    }
    return case(answers, family, dtype, **settings, lastkv__gate_init=0.4, **more)


def differing(groups: list[dict[str, Any]]) -> int:
    return sum(int((group["sampled"] != group["replayed"]).sum()) for group in groups)


def require_same(world: World, cases: dict[str, dict[str, Any]]) -> None:
    for rank, found in enumerate(run_world(world, TARGET, cases=list(cases.values()))):
        for name, groups in zip(cases, found, strict=True):
            assert differing(groups) == 0, f"rank {rank}, {name}"


@pytest.mark.parametrize("world", WORLDS, ids=lambda world: world.name)
def test_bfloat16_in_short(world: World, answers: Any) -> None:
    """Around a tile's end, decoded together, and LastKV."""
    small = {"rollout__group_size": 3, "prompts": PROMPTS[1:3]}
    cases = {
        "full": {**case(answers, "qwen3", "bfloat16", **small), "together": True},
        "C=16": lastkv(answers, "llama", "bfloat16", 16, True, **{**small, "prompts": SHORT}),
    }
    require_same(world, cases)


@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS, ids=lambda world: world.name)
def test_replay_has_the_samplers_bits(world: World, answers: Any) -> None:
    """Families and dtypes take turns over the worlds of several ranks."""
    turn = WORLDS.index(world)
    families = FAMILIES if world == ONE else (FAMILIES[turn % 3],)
    narrow, wide = DTYPES[turn % 2], DTYPES[(turn + 1) % 2]
    cases = {f"{f}-{d}": case(answers, f, d) for f in families for d in DTYPES}
    cases["together"] = {**case(answers, families[-1], narrow), "together": True}
    cases["C=16, together"] = {
        **lastkv(answers, "llama", wide, 16, True, prompts=PROMPTS[:3]),
        "together": True,
    }
    cases["C=16"] = lastkv(answers, "qwen3", narrow, 16, turn % 4 < 2, prompts=PROMPTS[1:3])
    cases["C=3"] = lastkv(answers, "llama", wide, 3, turn % 4 >= 2, prompts=SHORT)
    require_same(world, cases)


@pytest.mark.parametrize("world", [World(tp=4)], ids=lambda world: world.name)
def test_four_tensor_ranks_add_in_their_order(
    world: World, answers: Any, tmp_path: Path, report: Any
) -> None:
    """A library's sum of four terms depends on the message. The gradient is one rank's, without the setting."""
    hf = make_hf_dir(tmp_path / "hf", "qwen3", 5, heads=8, kv_heads=4, hidden=64)
    cases = {d: {**case(answers, "qwen3", d), "hf": str(hf)} for d in DTYPES}
    cases["C=16"] = {**lastkv(answers, "qwen3", "bfloat16", 16, True, prompts=PROMPTS[:3]), "hf": str(hf)}
    require_same(world, cases)
    recorded = write_jsonl(tmp_path / "window.jsonl", window(12))
    outs = [tmp_path / f"{bits}.safetensors" for bits in ("off", "on")]
    for place, bits, out in zip((ONE, world), ("off", "on"), outs, strict=True):
        made = {**case(answers, "qwen3", "float32", bits), "hf": str(hf), "verb": "grad"}
        run_world(
            place, "worlds.ranks:run_verbs", cases=[{**made, "trajectories": str(recorded), "out": str(out)}]
        )
    found = compare_tensors(load_file(outs[1]), load_file(outs[0]))
    report("tp = 4 against one rank", found)
    found.require(REL_L2, WORST)


@pytest.mark.parametrize("world", [ONE, *EP_WORLDS], ids=lambda world: world.name)
def test_experts_keep_the_bits(world: World, answers: Any) -> None:
    families = ("qwen3_moe", "glm4_moe")
    require_same(
        world, {f"{f}-{d}": case(answers, f, d, prompts=PROMPTS[:3]) for f in families for d in DTYPES}
    )


@pytest.mark.parametrize("world", [ONE, World(cp=2, dp=2)], ids=lambda world: world.name)
def test_chunks_and_batches_leave_no_trace(world: World, answers: Any) -> None:
    """Z = 7, 64, P; K = 1, 3, G: the same ids, bits and prefix state."""
    pieces = [(7, 1), (64, 3), (999, 5)]
    prompts = PROMPTS[:3]
    cases = [
        made
        for size, together in pieces
        for more in [{"prefix__chunk_size": size, "replay__concurrent": together, "prompts": prompts}]
        for made in (
            case(answers, "qwen3", "bfloat16", **more),
            lastkv(answers, "llama", "bfloat16", 16, True, **more),
        )
    ]
    for found in run_world(world, TARGET, cases=cases):
        for groups, first in ((found[i], found[i % 2]) for i in range(2, len(cases))):
            for a, b in zip(first, groups, strict=True):
                assert a["ids"] == b["ids"] and torch.equal(a["sampled"], b["sampled"])
                assert torch.equal(a["replayed"], b["replayed"])
                assert a["prefix"] == b["prefix"]


@pytest.mark.parametrize("world", [ONE, World(cp=2, dp=2)], ids=lambda world: world.name)
@pytest.mark.parametrize("kind", ["full", "lastkv"])
def test_trees_cuts_order_and_graphs_leave_no_trace(
    kind: str, world: World, answers: Any, tmp_path: Path
) -> None:
    """Scores one by one are those of the merged, cut, reversed responses, and those of the passes with a graph."""
    draw = random.Random(8)
    tokens = [[draw.randrange(131) for _ in range(n)] for n in (9, 6, 5, 7, 4)]
    shared = [tokens[0], tokens[0] + tokens[1]]
    paths = [shared[1] + tokens[2], shared[1] + tokens[3], shared[0] + tokens[4], tokens[3]]
    advantages = [1.0, -0.5, 0.25, -1.5]
    groups = [
        {"id": f"g{i}", "prompt_ids": prompt, "responses": [{"ids": ids, "advantage": a} for ids, a in pairs]}
        for i, prompt in enumerate(PROMPTS[:3])
        for pairs in [list(zip(paths, advantages, strict=True))]
    ]
    turned = [{**group, "responses": group["responses"][::-1]} for group in groups[::-1]]

    def made(name: str, window: Any, **more: Any) -> dict[str, Any]:
        kept = {"replay__share_tokens": 0, "replay__concurrent": 1, **more}
        case_of = case(answers, "qwen3", "bfloat16", **kept)
        if kind == "lastkv":
            case_of = lastkv(answers, "llama", "bfloat16", 16, True, **kept)
        recorded = write_jsonl(tmp_path / f"{world.name}-{name}.jsonl", window)
        return {**case_of, "verb": "score", "trajectories": str(recorded), "out": f"{recorded}.scores"}

    def scores(case: dict[str, Any]) -> dict[str, Any]:
        lines = Path(case["out"]).read_text().splitlines()
        return {record["id"]: record["logprobs"] for record in map(json.loads, lines)}

    merged = {"replay__share_tokens": 3, "replay__concurrent": 3, "prefix__chunk_size": 7}
    ways = [made("plain", groups), made("tree", groups, **merged), made("turned", turned, **merged)]
    if kind == "full":  # LastKV cuts a response at its own boundaries
        ways.append(made("cut", groups, replay__chunk_size=4, **merged))
    run_world(world, "worlds.ranks:run_verbs", cases=ways)
    plain, *others = map(scores, ways)
    for found in others:
        for name, responses in plain.items():
            assert found[name] in (responses, responses[::-1])
    recorded = [
        {
            **g,
            "responses": [{**r, "logprobs": x} for r, x in zip(g["responses"], plain[g["id"]], strict=True)],
        }
        for g in groups
    ]
    graphs = [made("graph", recorded), made("tree-graph", recorded, prefix__contract='"exact"', **merged)]
    for found in run_world(world, "worlds.same_bits_ranks:with_graphs", cases=graphs):
        for same, tokens_of_all in found:
            assert same == tokens_of_all == 3 * sum(map(len, paths))


def test_faults_are_found(answers: Any) -> None:
    faulty = {
        "rows": case(answers, "qwen3", "float32", fault="rows", prompts=SHORT, rollout__group_size=3),
        "tiles": case(answers, "qwen3", "float32", fault="tiles", prompts=PROMPTS[2:3]),
        "experts": case(answers, "qwen3_moe", "float32", fault="experts", prompts=SHORT),
        "no setting": case(answers, "qwen3", "bfloat16", "off"),
    }
    (found,) = run_world(ONE, TARGET, cases=list(faulty.values()))
    for name, groups in zip(faulty, found, strict=True):
        assert differing(groups) > 0, name


@pytest.mark.parametrize("world", [ONE, World(tp=2, cp=2, pp=2)], ids=lambda world: world.name)
def test_check_names_where_they_part(world: World, answers: Any) -> None:
    """The seeded faults by layer and operation; without a fault, nothing."""
    cases = {
        "linear_qkv": case(answers, "qwen3", "float32", fault="rows", prompts=SHORT, rollout__group_size=3),
        "core_attention": case(answers, "qwen3", "float32", fault="tiles", prompts=PROMPTS[2:3]),
        None: case(answers, "qwen3", "float32", prompts=PROMPTS[2:3]),
    }
    for found in run_world(world, "worlds.same_bits_ranks:where_they_part", cases=list(cases.values())):
        for name, text in zip(cases, found, strict=True):
            if name is None:
                assert text is None, text
            else:
                assert text is not None and text.startswith("layer 1") and name in text, text


@pytest.mark.parametrize(
    "world", [ONE, World(tp=2, cp=2, pp=2), World(cp=2, dp=2)], ids=lambda world: world.name
)
def test_the_gradient_is_that_of_plain_autograd(
    world: World, answers: Any, tmp_path: Path, report: Any
) -> None:
    """Keys that leave their query's rank for their owner take their gradients back."""
    answers.add("two-tiles", window(12, shape=((310, (9, 5, 1)), (40, (3, 11)))))
    asked = [("qwen3", contract) for contract in ("response_only", "exact")] + [("llama", "truncated")]
    outs = [tmp_path / f"{family}-{contract}.safetensors" for family, contract in asked]
    cases = [
        answers.case(f, "two-tiles", out, contract=c, Z=113, T=70, model__same_bits='"on"')
        for (f, c), out in zip(asked, outs, strict=True)
    ]
    run_world(world, "worlds.ranks:run_verbs", cases=cases)
    for (family, contract), out in zip(asked, outs, strict=True):
        found = compare_tensors(load_file(out), answers.grad(family, contract, "two-tiles", 70))
        report(f"{family}, {contract}", found)
        found.require(REL_L2, WORST, out.stem)
