"""Claim: responses that share tokens are taken together, and the gradient is that of each response alone; long ones are
swept in chunks; token-passes are those of the distinct tokens, and saved bytes are flat in R and in the tree's depth.

Why the tests show it: the tree has 12 responses that branch at three depths, a twin, one that ends inside another,
masks, and an advantage for every token; the oracle runs every path alone through transformers. Divergences fall inside
capture chunks and swept chunks. Tokens that are fed are counted. `replay.share_tokens = 0` must give the same gradient
with more of them.
Not shown: seconds (tools/bench_trees.py).
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from harness import ONE, WORLDS, World, run_world
from layers.lastkv.tiny import write_lastkv
from oracle import hf_oracle
from oracle.compare import compare_tensors, max_difference
from oracle.trajectories import Group
from safetensors.torch import load_file

PROMPT, TURN = 23, (9, 7, 6)  # tokens of the prompt and of each shared turn


def tree(seed: int = 11, vocab: int = 131) -> list[Group]:
    """One group of 12 responses below 2 first turns, 2 second turns each, 3 ends each; two of them special."""
    draw = random.Random(seed)

    def ids(count: int) -> list[int]:
        return [draw.randrange(vocab) for _ in range(count)]

    paths = []
    for _ in range(2):
        first = ids(TURN[0])
        for _ in range(2):
            second = ids(TURN[1])
            paths += [[*first, *second, *ids(TURN[2] + i)] for i in range(3)]
    paths[3] = paths[4][: TURN[0] + 4]  # ends inside a shared turn
    paths[7] = list(paths[6])  # a twin
    responses = []
    for path in paths:
        mask = [int(draw.random() < 0.7) for _ in path]
        mask[draw.randrange(len(path))] = 1
        advantage = [round(draw.uniform(-2, 2), 3) for _ in path]
        responses.append({"ids": path, "mask": mask, "advantage": advantage, "reward": 0.0})
    return [
        {"id": "tree", "prompt_ids": ids(PROMPT), "responses": responses},
        {
            "id": "plain",
            "prompt_ids": ids(5),
            "responses": [{"ids": ids(4), "advantage": 1.0, "reward": 0.0}],
        },
    ]


def small_tree() -> list[Group]:
    """The tree's first turn and what is below: 5 responses that branch at two depths, one inside another; and the plain
    group."""
    tree_, plain = tree()
    kept = [tree_["responses"][i] for i in (0, 1, 3, 4, 5)]
    return [{**tree_, "prompt_ids": tree_["prompt_ids"][:13], "responses": kept}, plain]


def distinct(groups: list[Group]) -> int:
    """Tokens of the first group's responses, each shared one once."""
    return len({tuple(r["ids"][: n + 1]) for r in groups[0]["responses"] for n in range(len(r["ids"]))})


@pytest.mark.parametrize("world", WORLDS, ids=lambda world: world.name)
def test_gradients_of_a_tree(world: World, answers: Any, tmp_path: Path, report: Any) -> None:
    groups = tree()
    answers.add("tree", groups)
    asked = {
        "exact": {}, "response_only": {}, "conventional": {}, "truncated": {"T": 9},
        "exact, chunks": {"replay__chunk_size": 4}, "exact, alone": {"replay__share_tokens": 0},
    }  # fmt: skip
    outs = {name: tmp_path / f"{name}.safetensors" for name in asked}
    cases = [
        answers.case(
            "qwen3",
            "tree",
            outs[name],
            contract=name.split(",")[0],
            Z=8,
            **{"replay__share_tokens": 3, **more},
        )
        for name, more in asked.items()
    ]
    run_world(world, "worlds.ranks:run_verbs", cases=cases)
    for name, out in outs.items():
        oracle = answers.grad("qwen3", name.split(",")[0], "tree", live=9)
        found = compare_tensors(load_file(out), oracle)
        report(name, found)
        found.require(1e-5, 1e-4, name)


@pytest.mark.parametrize("world", [ONE, World(cp=2, pp=2)], ids=lambda world: world.name)
def test_scores_of_a_tree(world: World, answers: Any, tmp_path: Path, report: Any) -> None:
    groups = tree()
    for response in groups[0]["responses"]:
        del response["mask"]
    answers.add("unmasked tree", groups)
    outs = [tmp_path / f"{size}.jsonl" for size in (0, 4)]
    cases = [
        answers.case(
            "llama", "unmasked tree", out, "score", replay__share_tokens=3, replay__chunk_size=int(out.stem)
        )
        for out in outs
    ]
    run_world(world, "worlds.ranks:run_verbs", cases=cases)
    expected = hf_oracle.score(answers.hf("llama"), groups)
    for out in outs:
        ours = [json.loads(line)["logprobs"] for line in out.read_text().splitlines()]
        worst = max_difference(ours, expected)
        report(f"chunks of {out.stem}", worst)
        assert worst <= 2e-5


def test_shared_tokens_are_fed_once(answers: Any, tmp_path: Path, report: Any) -> None:
    """Every distinct token has one pass under autograd, and those of nodes that branch one without before.

    The last token of a node is fed with each child instead of with the node.
    """
    groups = tree()[:1]
    answers.add("only the tree", groups)
    outs = [tmp_path / f"{least}.safetensors" for least in (3, 0)]
    cases = [
        answers.case(
            "qwen3", "only the tree", out, contract="response_only", K=1, replay__share_tokens=int(out.stem)
        )
        for out in outs
    ]
    (rank,) = run_world(ONE, "worlds.ranks:fed_tokens", cases=cases)
    (shared, alone), (graphs, graphs_alone) = rank["tokens"], rank["graphs"]
    prefix, tokens = PROMPT - 1, distinct(groups)
    leaves = 12 - 2  # a twin, and one that ends inside another
    nodes = 2 + 4
    inner = 2 * TURN[0] + 4 * TURN[1]
    # Every run feeds the token before its first, and not its own last one.
    assert graphs == tokens and shared == prefix + tokens + inner
    paths = sum(len(r["ids"]) for r in groups[0]["responses"])
    report("tokens fed, shared and alone", f"{shared}, {alone}")
    assert graphs_alone == paths and alone == prefix + paths and nodes + leaves == 16
    compare_tensors(load_file(outs[0]), load_file(outs[1])).require(1e-6, 1e-5)


KINDS = ["qwen3_5", "qwen3_moe", "glm4_moe_lite", "lastkv"]


@pytest.mark.parametrize(
    "world",
    [
        ONE,
        World(cp=2, dp=2),
        *(pytest.param(w, marks=pytest.mark.slow) for w in (World(tp=2), World(cp=2, pp=2))),
    ],
    ids=lambda world: world.name,
)
def test_trees_of_every_layer_kind(world: World, answers: Any, tmp_path: Path, report: Any) -> None:
    """Recurrent states fork at any node, LastKV boundaries lie inside nodes: merged is unmerged, in float64.

    The unmerged gradients of these models have their own oracles (test_fp64_families, layers/lastkv).
    """
    answers.add("small tree", small_tree())
    models: list[list[dict[str, Any]]] = []
    outs = {}
    for kind in KINDS:
        models.append([])
        for contract, least, chunk in (
            ("exact", 0, 0), ("exact", 3, 0), ("exact", 3, 4), ("response_only", 0, 0), ("response_only", 3, 4),
        ):  # fmt: skip
            out = tmp_path / f"{kind}-{contract}-{least}-{chunk}.safetensors"
            settings = {"contract": contract, "Z": 8, "model__dtype": "float64"}
            settings |= {"replay__share_tokens": least, "replay__chunk_size": chunk}
            case = answers.case("qwen3" if kind == "lastkv" else kind, "small tree", out, **settings)
            if kind == "lastkv":
                case["hf"] = str(write_lastkv(answers.root, "qwen3", 5))
                case["settings"].append("model.attention=lastkv")
            models[-1].append(case)
            outs[kind, contract, least, chunk] = out
    run_world(world, "worlds.ranks:grads_by_model", models=models)
    for (kind, contract, least, chunk), out in outs.items():
        if least:
            found = compare_tensors(load_file(out), load_file(outs[kind, contract, 0, 0]))
            report(f"{kind}, {contract}, chunks of {chunk}", found)
            found.require(1e-10, 1e-9, out.stem)
