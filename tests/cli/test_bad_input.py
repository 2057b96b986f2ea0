"""Claim: whatever a user gets wrong is answered by one message that names the key, file or line, with
exit code 2 on every rank, within seconds, and with nothing written or overwritten.

Why this shows it: every kind of bad input goes through the program itself, alone and on two ranks; the
whole folder of inputs and outputs is hashed before and after; a traceback anywhere fails the case.
It does not show: that a run which fails later, for reasons that no input shows, fails as well-mannered.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from harness import ONE, World
from harness.spawn import TESTS
from oracle.tiny_models import make_hf_dir

from cli.bad_cases import KINDS, PROCESSOR_SECONDS, VOCAB, Case, Place, require_refused, snapshot
from cli.runs import outcomes_of


@pytest.mark.parametrize("world", [ONE, World(tp=2)], ids=lambda world: world.name)
@pytest.mark.parametrize("kind", KINDS)
def test_refused(kind: str, world: World, tmp_path: Path, report: Callable[[str, object], None]) -> None:
    place = Place(tmp_path)
    cases = KINDS[kind](place)
    if world.size > 1:  # every third case, each with the layout of the world
        layout = [*world.overrides]
        cases = [
            case if case.arguments[0] in ("import", "export") or any("parallel." in a for a in case.arguments)
            else Case([*case.arguments[:2], *layout, *case.arguments[2:]], case.named)
            for case in cases[:: 2 if kind == "output" else 3]
        ]  # fmt: skip
    report("cases", len(cases))
    report("slowest, processor seconds", require_refused(world, place, cases))


def test_layout_that_does_not_divide_the_model(tmp_path: Path) -> None:
    place = Place(tmp_path)
    odd = make_hf_dir(
        tmp_path / "odd", "llama", 1, vocab=VOCAB, layers=3, hidden=18, intermediate=15, heads=3, kv_heads=1
    )
    cases = []
    for size, named in (
        ("tp", ("parallel.tp = 2", "attention heads (3)", "KV heads (1)", "MLP width (15)", "valid", ": 1")),
        ("pp", ("parallel.pp = 2", "layers (3)", "valid", ": 1, 3")),
    ):
        layout = (f"parallel.{size}=2", f"model.hf={odd}")
        cases += [Case(verb(*layout), named) for verb in (place.train, place.score, place.generate)]
        cases.append(Case(["import", str(odd), str(tmp_path / "ckpt"), f"--{size}", "2"], named))
    require_refused(World(tp=2), place, cases)


def test_a_plan_refuses_what_the_run_would(tmp_path: Path) -> None:
    """`plan` is one process whatever the launcher, so it is not among the cases of two ranks."""
    place = Place(tmp_path)
    plan = ["plan", str(place.config), "--prompt", "32"]
    cases = [
        Case([*plan, "parallel.ep=2"], ("parallel.ep = 2", "dense", "valid: 1")),
        Case([*plan, "rollout.record_routing=true"], ("rollout.record_routing", "dense")),
        Case(
            [*plan, "moe.router_bias_update_rate=0.1"], ("moe.router_bias_update_rate", "no bias", "valid: 0")
        ),
    ]
    require_refused(ONE, place, cases)


def test_checkpoint_of_another_model(tmp_path: Path) -> None:
    """A run that would resume from weights of another model, and a checkpoint whose config.json was
    changed.
    """
    place = Place(tmp_path)
    imported, run = tmp_path / "imported", tmp_path / "run"
    [done] = outcomes_of(ONE, [["import", str(place.model), str(imported)], place.train()])
    assert [outcome[0] for outcome in done] == [0, 0], done
    config = imported / "hf" / "config.json"
    config.write_text(config.read_text().replace('"intermediate_size": 16', '"intermediate_size": 24'))
    other = make_hf_dir(tmp_path / "bigger", "llama", 1, vocab=VOCAB, layers=2, hidden=16, intermediate=24)
    shutil.rmtree(place.model)
    other.rename(place.model)  # the run's settings name the same path
    named = ("another model", "16 there and 24 here")
    cases = [
        Case(["export", str(imported), str(tmp_path / "hf")], named),
        Case(place.grad("model.checkpoint=" + str(imported)), named),
        Case(place.train(f"train.output={run}", "train.updates=2"), ("other content", "model.hf")),
    ]
    require_refused(ONE, place, cases)


def test_checkpoint_that_is_damaged(tmp_path: Path) -> None:
    """A shard of a Megatron checkpoint that is missing or cut off."""
    place = Place(tmp_path)
    folders = [tmp_path / name for name in ("missing", "cut")]
    done = outcomes_of(ONE, [["import", str(place.model), str(folder)] for folder in folders])
    assert all(outcome[0] == 0 for outcome in done[0]), done
    next(folders[0].glob("*.distcp")).unlink()
    shard = next(folders[1].glob("*.distcp"))
    os.truncate(shard, shard.stat().st_size // 2)
    for world in (ONE, World(tp=2)):
        cases = [
            Case(verb(f"model.checkpoint={folder}", *world.overrides), (folder.name, "cannot be read"))
            for folder in folders
            for verb in (place.score, place.train)
        ]
        require_refused(world, place, cases)


@pytest.mark.parametrize("world", [ONE, World(tp=2), World(dp=2)], ids=lambda world: world.name)
def test_reward_that_is_no_number(world: World, tmp_path: Path) -> None:
    """The run has begun by then: it ends on every rank, and the good settings may take its folder."""
    place = Place(tmp_path)
    layout = world.overrides
    two = ["train.groups_per_update=2", "data.shuffle=false"]
    nan = "data.reward=cli.toy_rewards:nan"
    broken = "data.reward=cli.toy_rewards:broken"
    # Under dp = 2 the second prompt is rewarded by the second rank alone.
    on_second = ["data.reward=cli.toy_rewards:nan_on", 'data.reward_args.places=["p1"]']
    refused = [
        (place.train(nan, *two, *layout), ("toy_rewards:nan", "'p", "finite")),
        (place.train(broken, *two, *layout), ("toy_rewards:broken", "KeyError", "colour")),
        (place.train(*on_second, *two, *layout), ("nan_on", "'p1", "finite")),
        (place.generate(*on_second, *layout), ("nan_on", "'p1", "finite")),
        *(
            (
                place.train(f"data.reward=cli.toy_rewards:{leaves}", on_second[1], *two, *layout),
                (leaves, "'p1", "SystemExit: 0"),
            )
            for leaves in ("exits_on", "leaves_on")
        ),
        (
            place.train(
                "data.reward=cli.toy_rewards:hangs_on", "data.reward_timeout=0.5", on_second[1], *two, *layout
            ),
            ("hangs_on", "'p1", "took longer than 0.5 s"),
        ),
    ]
    cases = [arguments for arguments, _ in refused]
    ranks = outcomes_of(world, [*cases, place.train(*two, *layout)])
    for (_, named), *outcomes in zip(refused, *ranks, strict=False):
        assert [outcome[0] for outcome in outcomes] == [2] * world.size, outcomes
        error = outcomes[0][2]
        assert error.count("error: ") == 1 and "Traceback" not in error, error
        assert all(name in error for name in named), error
        assert max(outcome[4] for outcome in outcomes) < PROCESSOR_SECONDS
    assert [outcomes[-1][0] for outcomes in ranks] == [0] * world.size, ranks
    assert not (tmp_path / "o.jsonl").exists()


def test_a_real_process(tmp_path: Path) -> None:
    """`python -m megatron_lrl`, as a user starts it."""
    place = Place(tmp_path)
    before = snapshot(tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "megatron_lrl", *place.train("train.update=3")],
        capture_output=True, text=True, timeout=120, cwd=TESTS, env=_environment(),
    )  # fmt: skip
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr
    assert "did you mean train.updates?" in done.stderr
    assert snapshot(tmp_path) == before


@pytest.mark.slow
def test_real_torchrun(tmp_path: Path) -> None:
    """torchrun on two ranks: a refusal, then a run that trains."""
    place = Place(tmp_path)

    def torchrun(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
        return subprocess.run(
            [*command, "-m", "megatron_lrl", *arguments],
            capture_output=True, text=True, timeout=280, cwd=TESTS, env=_environment(),
        )  # fmt: skip

    refused = torchrun(*place.train("parallel.tp=3"))
    assert refused.returncode != 0
    assert refused.stderr.count("error: parallel.tp = 3") == 1, refused.stderr
    assert 'File "' not in refused.stderr.split("error: parallel.tp")[0]
    assert not (tmp_path / "run").exists()
    trained = torchrun(*place.train("parallel.tp=2"))
    assert trained.returncode == 0, trained.stderr
    assert (tmp_path / "run" / "metrics.jsonl").read_text().count("\n") == 1
    assert trained.stderr.count("update 1/1") == 1  # one rank speaks


def _environment() -> dict[str, str]:
    paths = [str(TESTS), str(TESTS.parent)]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
