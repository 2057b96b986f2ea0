"""Claim: `train` runs under every contract, advantage, aggregation and correction that the settings
offer, in worlds whose dp ranks do not divide the prompts, and at the edges (no advantage, one token,
responses that are only an end of sequence); it records all that the charts promise; its checkpoints
export to what was trained.

Why this shows it: the options are compared with each other where mathematics says they agree; exported weights
are scored by plain transformers against the program's `score`.
It does not show: that a gradient is right to rounding (see `lifetimes/`, `rl/`), or that the reward rises
(`rl/test_learning.py`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import ONE, World, run_world
from oracle.trajectories import write_jsonl
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from cli.runs import Runs, relative_l2, require_continuous, require_equal_weights, run, write_eos
from megatron_lrl.cli import main
from megatron_lrl.layers.sequence import SequenceState
from megatron_lrl.rollout.journal import Journal

# What a run shows of itself, by the name of its chart.
SCALARS = {
    "reward/mean", "reward/max", "reward/solved",
    "advantage/mean", "advantage/std", "advantage/max",
    "response/length", "response/length_max",
    "loss/policy", "loss/kl", "loss/clip_fraction", "policy/entropy",
    "ratio/mean_before_step", "ratio/max_deviation_before_step",
    "mismatch/kl", "mismatch/effective_sample_size",
    "optimizer/grad_norm", "optimizer/lr",
    "seconds/capture", "seconds/rollout", "seconds/score", "seconds/replay", "seconds/step",
    "speed/tokens_per_second", "speed/updates_per_hour",
    "tokens/scored", "tokens/fed", "tokens/shared",
}  # fmt: skip

# name -> settings of a run of two updates
OPTIONS: dict[str, list[str]] = {
    "exact": ["prefix.contract=exact"],
    "conventional": ["prefix.contract=conventional"],
    "response_only": ["prefix.contract=response_only"],
    "truncated": ["prefix.contract=truncated", "prefix.truncate_tokens=5"],
    "kl": ["loss.kl_coef=0.1"],
    "importance": ["loss.importance_cap=2.0"],
    "kl-importance-conventional": [
        "loss.kl_coef=0.1",
        "loss.importance_cap=2.0",
        "prefix.contract=conventional",
    ],
    "dr_grpo": ["loss.advantage=dr_grpo"],
    "rloo": ["loss.advantage=rloo"],
    "sequence": ["loss.aggregate=sequence"],
    "three-groups": ["train.groups_per_update=3"],
    "more-groups-than-prompts": ["train.groups_per_update=6"],
    "in-file-order": ["data.shuffle=false", "train.groups_per_update=2"],
    "pairs": ["rollout.group_size=2", "train.groups_per_update=3"],
    "one-token": ["rollout.max_new_tokens=1"],
    "no-advantage": ["data.reward=cli.toy_rewards:nothing"],
    "nucleus": ["rollout.top_p=0.7", "rollout.temperature=0.8"],
    "bfloat16": ["model.dtype=bfloat16"],
    "one-at-once": ["replay.concurrent=1", "replay.logits_chunk=2", "prefix.chunk_size=100"],
    "no-samples": ["train.log_samples=0"],
}
IN_WORLDS = ["exact", "kl-importance-conventional", "three-groups", "no-advantage", "one-token"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    runs = Runs(tmp_path_factory.mktemp("train"))
    run(*(runs.train(name, *settings) for name, settings in OPTIONS.items()))
    return runs


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_runs_with_finite_numbers(name: str, runs: Runs) -> None:
    records = runs.metrics(name)
    require_continuous(records, 2)
    tolerance = 0.2 if name == "bfloat16" else 1e-4
    for record in records:
        # Responses without a gradient are not replayed, and a window of them measures nothing.
        replayed = record["update/responses_without_gradient"] < 1
        assert replayed == ("mismatch/kl" in record) and (replayed or record["advantage/max"] == 0)
        if replayed and name != "nucleus":  # whose sampler differs from the policy by design
            assert record["ratio/max_deviation_before_step"] < tolerance
            assert record["mismatch/effective_sample_size"] > 1 - tolerance
        # Rewards that are all equal in every group teach nothing, and nothing moves.
        assert (record["optimizer/grad_norm"] > 0) == (record["advantage/max"] > 0)
    assert any(record["optimizer/grad_norm"] > 0 for record in records) == (name != "no-advantage")


def test_options_agree_where_they_must(runs: Runs) -> None:
    first = {name: runs.metrics(name)[0] for name in OPTIONS}
    second = {name: runs.metrics(name)[1] for name in OPTIONS}

    def same(metric: str, one: str, other: str, of: dict[str, dict[str, Any]] = first) -> None:
        assert of[one][metric] == pytest.approx(of[other][metric], rel=1e-4, abs=1e-6), (metric, one, other)

    for name in ("conventional", "one-at-once"):
        for metric in ("reward/mean", "optimizer/grad_norm", "loss/policy", "policy/entropy"):
            same(metric, name, "exact")
            same(metric, name, "exact", second)
    for name in ("response_only", "truncated", "kl", "importance"):
        same("reward/mean", name, "exact")
    assert (
        abs(first["response_only"]["optimizer/grad_norm"] / first["exact"]["optimizer/grad_norm"] - 1) > 1e-3
    )
    # The reference is the model as loaded: no KL before the first step, some after it.
    assert first["kl"]["loss/kl"] == pytest.approx(0, abs=1e-8) and second["kl"]["loss/kl"] > 1e-6
    same("optimizer/grad_norm", "kl", "exact")
    same("optimizer/grad_norm", "importance", "exact")  # the same graph samples and replays
    # RLOO is (r - mean) G / (G - 1) with G = 4, Dr. GRPO is r - mean.
    ratio = first["rloo"]["optimizer/grad_norm"] / first["dr_grpo"]["optimizer/grad_norm"]
    assert ratio == pytest.approx(4 / 3, rel=1e-4)
    assert first["one-token"]["response/length_max"] == 1
    assert first["in-file-order"]["prompt/length"] == 12 and second["in-file-order"]["prompt/length"] == 14


def test_no_advantage_changes_nothing(runs: Runs) -> None:
    run(runs.export("no-advantage", 2))
    require_equal_weights(runs.weights("no-advantage", 2), load_file(runs.model / "model.safetensors"))


@pytest.mark.parametrize("world", [World(dp=2), World(tp=2)], ids=lambda world: world.name)
def test_in_worlds(world: World, runs: Runs) -> None:
    """One group on two dp ranks leaves one without any; three leave one with two."""
    run(
        *(runs.train(f"{name}-{world.name}", *OPTIONS[name], *world.overrides) for name in IN_WORLDS),
        world=world,
    )
    for name in IN_WORLDS:
        ours, theirs = runs.metrics(f"{name}-{world.name}"), runs.metrics(name)
        require_continuous(ours, 2)
        # Adam's first step has nearly the size lr wherever the gradient is not 0, be it mere rounding: after
        # it the runs agree less closely.
        for mine, other, near in zip(ours, theirs, (1e-4, 2e-2), strict=True):
            for metric in ("reward/mean", "optimizer/grad_norm", "loss/policy", "loss/kl", "policy/entropy"):
                if metric in other or metric in mine:  # a window without a gradient has fewer
                    assert mine[metric] == pytest.approx(other[metric], rel=near, abs=near / 10), (
                        name,
                        metric,
                    )
        assert ours[0]["samples"] == theirs[0]["samples"]


def test_charts_and_samples(runs: Runs) -> None:
    events = EventAccumulator(str(runs.root / "kl" / "tensorboard"))
    events.Reload()
    tags = events.Tags()
    assert set(tags["scalars"]) >= SCALARS
    lifetimes = {name for name in tags["scalars"] if name.startswith("bytes/")}
    for name in ("run", "window", "group", "replay"):
        assert any(name in tag for tag in lifetimes), (name, lifetimes)
    assert [event.step for event in events.Scalars("reward/mean")] == [0, 1]
    [layout] = events.Tensors("custom_scalars__config__")
    drawn = layout.tensor_proto.string_val[0]
    assert all(tag.encode() in drawn for tag in lifetimes)
    assert {"samples/0/text_summary", "samples/1/text_summary"} <= set(tags["tensors"])
    texts = runs.metrics("kl")[0]["samples"]
    assert len(texts) == 2 and all(" reward " in text and "\n>>> " in text for text in texts)
    assert "samples" not in runs.metrics("no-samples")[0]
    assert len(runs.metrics("three-groups")[0]["samples"]) == 2
    bytes_of = runs.metrics("kl")[-1]
    assert all(bytes_of[name] >= 0 for name in lifetimes)
    assert bytes_of[next(name for name in lifetimes if "run" in name)] > 0


def test_responses_of_the_end_token_only(tmp_path: Path) -> None:
    """Every token ends a response: the reward reads no text, and the token is still trained."""
    runs = Runs(tmp_path)
    write_eos(runs.model, list(range(131)))
    out = tmp_path / "sampled.jsonl"
    run(
        runs.train("ends"),
        ["generate", str(runs.config), "--prompts", str(runs.prompts), "--out", str(out)],
    )
    require_continuous(runs.metrics("ends"), 2)
    assert [record["response/length_max"] for record in runs.metrics("ends")] == [1, 1]
    groups = [json.loads(line) for line in out.read_text().splitlines()]
    assert [len(response["ids"]) for group in groups for response in group["responses"]] == [1] * 16
    assert {response["reward"] for group in groups for response in group["responses"]} == {0.0}


def test_export_is_what_was_trained(runs: Runs, report: Callable[[str, object], None]) -> None:
    """`score` of the checkpoint in one program, transformers on its export in another."""
    ids, split = [5, 9, 2, 77, 130, 4, 4, 61, 12], 4
    name = "three-groups"
    window = write_jsonl(
        runs.root / "window.jsonl",
        [{"id": "g", "prompt_ids": ids[:split], "responses": [{"ids": ids[split:]}]}],
    )
    scored = runs.root / "scored.jsonl"
    checkpoint = f"model.checkpoint={runs.checkpoint(name, 2)}"
    run(
        runs.export(name, 2),
        ["score", str(runs.config), checkpoint, "--trajectories", str(window), "--out", str(scored)],
    )
    exported = runs.exported(name, 2)
    assert (
        relative_l2(load_file(exported / "model.safetensors"), load_file(runs.model / "model.safetensors"))
        > 1e-3
    )
    assert sorted(path.name for path in exported.iterdir()) == sorted(
        path.name for path in runs.model.iterdir()
    )
    assert (exported / "config.json").read_text() == (runs.model / "config.json").read_text()
    [[trained_NV, start_NV]] = run_world(
        ONE, "cli.ranks:logits", folders=[str(exported), str(runs.model)], ids=ids
    )  # fmt: skip
    [ours] = json.loads(scored.read_text())["logprobs"]
    theirs = [float(trained_NV[place - 1].log_softmax(-1)[ids[place]]) for place in range(split, len(ids))]
    worst = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
    report("worst difference of a log-probability", worst)
    assert worst <= 2e-5
    assert float((trained_NV - start_NV).abs().max()) > 1e-2
    assert torch.isfinite(trained_NV).all()


def test_equal_rewards_feed_nothing_after_sampling(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens are counted until the rollouts are recorded, and to the update's end; other rewards feed more."""
    fed, recorded = [0], [0]
    grow, record = SequenceState.grow, Journal.record

    def counting(state: SequenceState, lengths: Sequence[int]) -> None:
        grow(state, lengths)
        fed[0] += sum(lengths)

    def recording(journal: Journal, *arguments: Any) -> None:
        record(journal, *arguments)
        recorded[0] = fed[0]

    monkeypatch.setattr(SequenceState, "grow", counting)
    monkeypatch.setattr(Journal, "record", recording)
    after = {}
    for reward in ("nothing", "low_ids"):
        fed[0] = 0
        more = ["train.updates=1", f"data.reward=cli.toy_rewards:{reward}"]
        assert main(runs.train(f"counted-{reward}", *more)) == 0
        assert recorded[0] > 0
        after[reward] = fed[0] - recorded[0]
    assert after["nothing"] == 0 < after["low_ids"]
