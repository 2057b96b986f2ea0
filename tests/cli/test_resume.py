"""Claim: a run that was stopped and resumed is the run that was not: bit-equal parameters and the same
metrics, each update once, on one rank, over dp and over cp; a signal stops a run with a checkpoint; a run
goes on in another layout; `train.overwrite` replaces the run in a folder and nothing else.

Why this shows it: the same settings are trained in one go and in two, through the program, each command a
fresh invocation; exported weights are compared bit by bit and metrics number by number.
It does not show: a machine that dies while a checkpoint is written (see `checkpoint/`).
"""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest
from harness import ONE, World, run_world

from cli.runs import (
    Runs,
    outcomes_of,
    relative_l2,
    require_continuous,
    require_equal_weights,
    require_same,
    run,
)

SCHEDULE = ("optimizer.warmup_updates=2", "optimizer.decay=linear")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("resume"))


@pytest.mark.parametrize("world", [ONE, World(dp=2), World(cp=2)], ids=lambda world: world.name)
def test_three_and_three_updates_are_six(world: World, runs: Runs) -> None:
    whole, halves = f"whole-{world.name}", f"halves-{world.name}"
    settings = ["train.groups_per_update=3", "loss.kl_coef=0.05", *world.overrides]
    said = run(
        runs.train(whole, *settings, "train.updates=6"),
        runs.train(halves, *settings, "train.updates=3"),
        runs.train(halves, *settings, "train.updates=6"),
        runs.train(halves, *settings, "train.updates=6"),  # nothing is left to do
        runs.export(whole, 6),
        runs.export(halves, 6),
        world=world,
    )
    assert "resumed" not in said[1] and not any("Warning" in text for text in said)
    assert "at update 3" in said[2] and "update 4/6" in said[2] and "update 3/6" not in said[2]
    assert "at update 6" in said[3] and "update 6/6" not in said[3]
    require_continuous(runs.metrics(halves), 6)
    require_same(runs.computed(halves), runs.computed(whole))
    ours, theirs = runs.weights(halves, 6), runs.weights(whole, 6)
    require_equal_weights(ours, theirs)
    assert relative_l2(ours, _start(runs)) > 1e-3  # it trained


@pytest.mark.parametrize(
    ("world", "number"), [(ONE, signal.SIGTERM), (World(dp=2), signal.SIGINT)], ids=["one", "dp2"]
)
def test_a_signal_stops_with_a_checkpoint(world: World, number: signal.Signals, runs: Runs) -> None:
    """The last rank alone is told; the schedule spans the run, so that a wrong step count would show."""
    whole, cut = f"unbroken-{world.name}", f"cut-{world.name}"
    settings = ["train.groups_per_update=2", "train.updates=9", *SCHEDULE, *world.overrides]
    stopped = run_world(
        world,
        "cli.ranks:interrupted",
        arguments=runs.train(cut, *settings),
        metrics=str(runs.root / cut / "metrics.jsonl"),
        lines=2,
        rank=world.size - 1,
        number=int(number),
    )
    assert [code for code, _, _ in stopped] == [0] * world.size, stopped
    assert "interrupted after update" in stopped[0][2] and "the same command resumes" in stopped[0][2]
    done = len(runs.metrics(cut))
    assert 2 <= done < 9, "the signal came too late for this test to say anything"
    assert runs.checkpoint(cut, done).is_dir()
    run(
        runs.train(cut, *settings),
        runs.train(whole, *settings),
        runs.export(cut, 9),
        runs.export(whole, 9),
        world=world,
    )
    require_continuous(runs.metrics(cut), 9)
    require_same(runs.computed(cut), runs.computed(whole))
    require_equal_weights(runs.weights(cut, 9), runs.weights(whole, 9))


@pytest.mark.parametrize("world", [World(tp=2), World(dp=2)], ids=lambda world: world.name)
def test_resume_in_another_layout(world: World, runs: Runs) -> None:
    settings = ["train.groups_per_update=2"]
    name = f"moved-{world.name}"
    if not (runs.root / "stays").exists():
        run(
            runs.train("stays", *settings, "train.updates=2"),
            ["export", str(runs.checkpoint("stays", 2)), str(runs.root / "stays-hf-2")],
        )
    shutil.copytree(runs.root / "stays", runs.root / name)
    if not runs.exported("goes-on", 4).exists():
        shutil.copytree(runs.root / "stays", runs.root / "goes-on")
        run(runs.train("goes-on", *settings, "train.updates=4"), runs.export("goes-on", 4))
    run(runs.train(name, *settings, "train.updates=4", *world.overrides), runs.export(name, 4), world=world)
    ours, theirs = runs.metrics(name), runs.metrics("goes-on")
    require_continuous(ours, 4)
    for mine, other in zip(ours[2:], theirs[2:], strict=True):
        assert mine["reward/mean"] == pytest.approx(other["reward/mean"], abs=1e-12)  # the same tokens
        assert mine["optimizer/grad_norm"] == pytest.approx(other["optimizer/grad_norm"], rel=1e-3)
        assert mine["ratio/max_deviation_before_step"] < 1e-4
    step = relative_l2(runs.weights("goes-on", 4), runs.weights("stays", 2))
    assert relative_l2(runs.weights(name, 4), runs.weights("goes-on", 4)) < 0.02 * step


def test_overwrite_replaces_the_run_and_nothing_else(runs: Runs) -> None:
    folder = runs.root / "again"
    run(runs.train("again", "train.updates=2"))
    (folder / "notes.txt").write_text("mine")
    (folder / "checkpoints" / "update-000009.damaged").mkdir()
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    [[refused]] = outcomes_of(ONE, [runs.train("again", "optimizer.lr=1e-3")])
    assert refused[0] == 2 and "optimizer.lr" in refused[2]
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before
    [said] = run(
        runs.train("again", "optimizer.lr=1e-3", "train.updates=1", "train.overwrite=true"),
    )
    assert "resumed" not in said
    require_continuous(runs.metrics("again"), 1)
    assert runs.metrics("again")[0]["optimizer/lr"] == pytest.approx(1e-3)
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["update-000001"]
    assert len(list((folder / "tensorboard").iterdir())) == 1
    assert (folder / "notes.txt").read_text() == "mine"


def test_updates_after_the_newest_checkpoint_are_run_again(tmp_path: Path) -> None:
    """A crash after update 3 with a checkpoint at 2: metrics of update 3 are replaced, not repeated."""
    runs = Runs(tmp_path)
    run(runs.train("crash", "train.updates=3", "train.save_every=2"))
    shutil.rmtree(runs.checkpoint("crash", 3))
    before = runs.computed("crash")
    [said] = run(runs.train("crash", "train.updates=3", "train.save_every=2"))
    assert "at update 2" in said
    require_same(runs.computed("crash"), before)
    # Without any checkpoint the run starts over in its folder.
    shutil.rmtree(runs.root / "crash" / "checkpoints")
    run(runs.train("crash", "train.updates=3", "train.save_every=2"))
    require_same(runs.computed("crash"), before)
    assert _tensorboard_steps(runs.root / "crash" / "tensorboard") == [0, 1, 2]


def _tensorboard_steps(folder: Path) -> list[int]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return [event.step for event in events.Scalars("reward/mean")]


def _start(runs: Runs) -> dict[str, object]:
    from safetensors.torch import load_file

    return load_file(runs.model / "model.safetensors")


@pytest.mark.parametrize("world", [ONE, World(cp=2)], ids=lambda world: world.name)
def test_a_run_stops_before_its_wall_time_is_over(world: World, runs: Runs) -> None:
    """No second update fits: it saves after the first, exit 0, and goes on when there is time."""
    name = f"hurried-{world.name}"
    settings = ["train.groups_per_update=2", "train.updates=2", *world.overrides]
    said = run(
        runs.train(name, *settings, "train.max_seconds=0.5"),
        runs.train(name, *settings, "train.max_seconds=100000"),
        runs.train(f"calm-{world.name}", *settings),
        runs.export(name, 2),
        runs.export(f"calm-{world.name}", 2),
        world=world,
    )
    assert "train.max_seconds = 0.5: stopped after update 1" in said[0] and "update 2/2" not in said[0]
    assert "at update 1" in said[1] and "stopped" not in said[1]
    require_equal_weights(runs.weights(name, 2), runs.weights(f"calm-{world.name}", 2))
