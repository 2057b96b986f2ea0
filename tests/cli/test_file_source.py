"""Claim: `train` with rollout.source = "file" takes groups that something else recorded, makes of them the updates that
the trainer which sampled them made, and refuses a file that is too short, too old, or says nothing of its responses.

Why the tests show it: a run samples, and its journal holds what it sampled; the same groups as a file, each with the
version that sampled it, must give bit-equal weights, on one rank and over replicas. Every refusal comes before a
checkpoint or a log is written.
Not shown: where such files come from.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from harness import ONE, World
from oracle.trajectories import write_jsonl

from cli.runs import Runs, require_equal_weights, run
from megatron_lrl.cli import main

UPDATES, GROUPS = 2, 2
SETTINGS = [f"train.updates={UPDATES}", f"train.groups_per_update={GROUPS}"]


def journal(runs: Runs, name: str) -> list[dict[str, Any]]:
    """The groups of a run's updates, with the version that sampled each."""
    found = []
    for update in range(UPDATES):
        lines = (runs.root / name / "journal" / f"update-{update:06d}.jsonl").read_text().splitlines()[1:-1]
        found += [{**json.loads(line), "version": update} for line in lines]
    return found


@pytest.mark.parametrize("world", [ONE, World(cp=2, dp=2)], ids=lambda world: world.name)
def test_recorded_groups_make_the_updates_of_the_run_that_sampled_them(world: World, tmp_path: Path) -> None:
    runs, places = Runs(tmp_path), world.overrides
    run(runs.train("sampled", *SETTINGS, *places), world=world)
    recorded = write_jsonl(tmp_path / "recorded.jsonl", journal(runs, "sampled"))
    settings = [*SETTINGS, *places, "rollout.source=file", f"rollout.trajectories={recorded}"]
    run(
        runs.train("file", *settings),
        runs.train("halves", *settings, "train.updates=1"),
        runs.train("halves", *settings),
        *(runs.export(name, UPDATES) for name in ("sampled", "file", "halves")),
        world=world,
    )
    for name in ("file", "halves"):
        require_equal_weights(runs.weights(name, UPDATES), runs.weights("sampled", UPDATES))


REFUSED = {
    "short": (lambda groups: groups[:3], [], "holds 3 groups"),
    "old": (lambda groups: [{**g, "version": 0} for g in groups], [], "1 updates old"),
    "future": (lambda groups: [{**g, "version": 1} for g in groups], [], "of a later model"),
    "version": (lambda groups: [{**groups[0], "version": -1}, *groups[1:]], [], ':1: "version" must be'),
    "reward": (
        lambda groups: [{**g, "responses": [{"ids": r["ids"]} for r in g["responses"]]} for g in groups],
        [],
        "reward",
    ),
    "no file": (lambda groups: groups, ["rollout.trajectories=nowhere.jsonl"], "nowhere.jsonl"),
    "stale prefixes": (lambda groups: groups, ["prefix.max_staleness=2"], "prefix.max_staleness"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_trained_on_is_refused(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change, more, message = REFUSED[case]
    responses = [{"ids": [5, 9], "reward": 1.0}, {"ids": [8], "reward": 0.0}]
    groups = [
        {"id": f"g{i}", "prompt_ids": [3, 4, 5], "version": i // GROUPS, "responses": responses}
        for i in range(UPDATES * GROUPS)
    ]
    runs = Runs(tmp_path)
    recorded = write_jsonl(tmp_path / "recorded.jsonl", change(groups))
    settings = [*SETTINGS, "rollout.source=file", f"rollout.trajectories={recorded}", *more]
    assert main(runs.train("run", *settings)) != 0
    assert message in capsys.readouterr().err
    assert not list((tmp_path / "run").rglob("*.*")) if (tmp_path / "run").exists() else True


def test_a_group_may_be_as_old_as_the_setting_says(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    responses = [
        {"ids": [5, 9], "reward": 1.0, "logprobs": [-4.0, -5.0]},
        {"ids": [8], "reward": 0.0, "logprobs": [-3.0]},
    ]
    groups = [
        {"id": f"g{i}", "prompt_ids": [3, 4, 5], "responses": responses} for i in range(UPDATES * GROUPS)
    ]
    recorded = write_jsonl(tmp_path / "recorded.jsonl", groups)
    settings = [
        *SETTINGS,
        "rollout.source=file",
        f"rollout.trajectories={recorded}",
        "rollout.max_staleness=1",
    ]
    run(runs.train("run", *settings))
    assert len(runs.metrics("run")) == UPDATES and "rollout/entropy" not in runs.metrics("run")[0]
