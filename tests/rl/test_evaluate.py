"""Claim: evaluation measures the model between updates, by the unbiased pass@k, and changes nothing of training; a run
that was stopped and resumed logs the same numbers; two dp ranks log those of one.

Why the tests show it: pass@k is compared with counting all subsets; a run with evaluation is compared with one without,
number by number and weight by weight, and with one in two halves.
Not shown: that held-out prompts measure what a user wants.
"""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest
from cli.runs import Runs, require_equal_weights, require_same, run
from harness import World
from oracle.trajectories import write_jsonl

from megatron_lrl.config import check_train, load_config
from megatron_lrl.errors import UserError
from megatron_lrl.rl.evaluate import metrics, pass_at_k
from megatron_lrl.rollout.types import Group, Response


@pytest.mark.parametrize("samples", [1, 2, 5, 6])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_one(samples: int) -> None:
    for right in range(samples + 1):
        for k in range(1, samples + 1):
            subsets = list(combinations(range(samples), k))
            share = sum(min(subset) < right for subset in subsets) / len(subsets)
            assert pass_at_k(samples, right, k) == pytest.approx(share, abs=1e-15)


def test_metrics_of_groups() -> None:
    def group(name: str, *rewards: float) -> Group:
        return Group(name, (1,), tuple(Response((2,) * (i + 1), reward) for i, reward in enumerate(rewards)))

    found = metrics([group("a", 1.0, 0.5, 0.0), group("b", 0.0, 0.0, 0.0)])
    assert found == pytest.approx(
        {
            "eval/reward": 0.25,
            "eval/pass@1": 1 / 6,
            "eval/pass@2": 1 / 3,
            "eval/pass@3": 0.5,
            "eval/length": 2.0,
        }
        | {"eval/failed": 0.0}
    )


def test_a_run_evaluates_without_training_on_it(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    held_out = write_jsonl(
        tmp_path / "held.jsonl",
        [{"id": f"h{i}", "prompt_ids": list(range(40, 49 + 8 * i))} for i in range(3)],
    )
    evaluated = [f"eval.prompts={held_out}", "eval.every=2", "eval.samples=3", "eval.temperature=0.7"]
    run(
        runs.train("plain", "train.updates=4"),
        runs.train("whole", *evaluated, "train.updates=4"),
        runs.train("halves", *evaluated, "train.updates=2"),
        runs.train("halves", *evaluated, "train.updates=4"),
        *(runs.export(name, 4) for name in ("plain", "whole", "halves")),
    )
    whole = runs.computed("whole")
    names = {"eval/reward", "eval/pass@1", "eval/pass@2", "eval/pass@3", "eval/length", "eval/failed"}
    assert [{name for name in record if name.startswith("eval/")} for record in whole] == [
        {f"{name}_start" for name in names}, names, set(), names,
    ]  # fmt: skip
    rewards = [whole[0]["eval/reward_start"], whole[1]["eval/reward"], whole[3]["eval/reward"]]
    assert len(set(rewards)) == 3 and all(0 < reward < 1 for reward in rewards)
    require_same(runs.computed("halves"), whole)
    untouched = [{n: v for n, v in record.items() if not n.startswith("eval/")} for record in whole]
    require_same(untouched, runs.computed("plain"))
    require_equal_weights(runs.weights("whole", 4), runs.weights("plain", 4))
    require_equal_weights(runs.weights("whole", 4), runs.weights("halves", 4))
    run(runs.train("dp2", *evaluated, "train.updates=2", "parallel.tp=1"), world=World(dp=2))
    dp2 = runs.computed("dp2")
    assert dp2[0]["eval/reward_start"] == pytest.approx(rewards[0], abs=1e-12)


def test_what_cannot_be_held_out() -> None:
    base = ["model.hf=m", "train.output=r", "data.prompts=p.jsonl"]
    with pytest.raises(UserError, match=r"eval\.prompts = \./p\.jsonl is data\.prompts itself"):
        check_train(load_config("/dev/null", [*base, "eval.prompts=./p.jsonl"]))
    with pytest.raises(UserError, match=r"next-token training has lm\.held_out"):
        lm = ["train.objective=lm", "lm.data=d.txt", "eval.prompts=e.jsonl"]
        check_train(load_config("/dev/null", [*base, *lm]))
