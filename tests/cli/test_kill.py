"""Claim: a run whose worker is killed with SIGKILL at any moment is resumed by the same command, or by
`torchrun --max-restarts`, and ends bit-equal to a run that nothing disturbed.

Why the tests show it: a rank kills itself before a randomly drawn layer forward, collective or file operation (so also
between the writing and the renaming of journals and checkpoints); the other ranks are ended by the launcher. Then the
same command runs again. Exported weights are compared byte by byte, and the metrics of every update, losses and
gradient norms among them, number by number. Sampling is random, with a checkpoint only every second update, so that
the journal is read too. Seeds are printed.
Not shown: a machine that loses power (the writes are fsynced, the test cannot cut them), NCCL.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from harness import ONE, RankFailure, World, run_world
from harness.spawn import TESTS
from harness.verbs import run_verb
from oracle.tiny_models import write_case

from megatron_lrl.tracking import read_metrics

SEED = 20
CP, MIXED = World(cp=2), World(tp=2, pp=2)
# A resumed update replays recorded rollouts: it has no sampling passes, whose share of the pipeline's time is measured.
_UNEQUAL = ("seconds/", "speed/", "bytes/", "window/", "pipeline/")
TREES = (
    "replay.share_tokens=1", "replay.chunk_size=2", "rollout.temperature=0.3", "rollout.group_size=5",
    "rollout.max_new_tokens=6", "train.groups_per_update=2",
)  # fmt: skip


class Case:
    """Command lines of one run in one world, and what an undisturbed run of it gives."""

    def __init__(self, root: Path, world: World, settings: tuple[str, ...] = ()) -> None:
        self.root, self.world, self.settings = root, world, settings
        root.mkdir()
        self.hf = write_case(root, "qwen3")
        generator = random.Random(3)
        prompts = [{"prompt_ids": [generator.randrange(3, 131) for _ in range(n)]} for n in (17, 9, 5)]
        self.prompts = root / "prompts.jsonl"
        self.prompts.write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
        self.config = root / "config.toml"
        self.config.write_text("")
        whole = self.run("whole", -1, "", 0)
        assert [rank["code"] for rank in whole] == [0] * world.size, whole[0]["err"]
        self.counts = [rank["counts"] for rank in whole]
        self.expected = self.result("whole")

    def arguments(self, name: str) -> list[str]:
        settings = [
            f"model.hf={self.hf}", f"data.prompts={self.prompts}", "data.reward=cli.toy_rewards:low_ids",
            "train.updates=3", "train.save_every=2", "train.log_samples=0", f"train.output={self.root / name}",
            "rollout.group_size=2", "rollout.max_new_tokens=4", "prefix.chunk_size=7", "optimizer.lr=1e-3",
            *self.world.overrides, *self.settings,
        ]  # fmt: skip
        return ["train", str(self.config), *settings]

    def run(self, name: str, rank: int, kind: str, at: int) -> list[dict[str, Any]]:
        return run_world(
            self.world, "cli.kill_ranks:run", arguments=self.arguments(name), rank=rank, kind=kind, at=at
        )

    def result(self, name: str) -> tuple[bytes, list[dict[str, Any]]]:
        """Exported weights and each update's metrics."""
        checkpoint, out = self.root / name / "checkpoints" / "update-000003", self.root / f"{name}-hf"
        shutil.rmtree(out, ignore_errors=True)
        run_verb(ONE, ["export", checkpoint, out]).require_success()
        metrics = [
            {key: value for key, value in record.items() if not key.startswith(_UNEQUAL)}
            for record in read_metrics(self.root / name)
        ]
        return (out / "model.safetensors").read_bytes(), metrics

    def draw(self, generator: random.Random) -> tuple[int, str, int]:
        rank = generator.randrange(self.world.size)
        kind = generator.choice([kind for kind, count in self.counts[rank].items() if count])
        return rank, kind, generator.randint(1, self.counts[rank][kind])

    def check(self, name: str) -> None:
        weights, metrics = self.result(name)
        assert metrics == self.expected[1]
        assert weights == self.expected[0]


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Cases by world and settings, made when first asked for."""
    made: dict[tuple[World, tuple[str, ...]], Case] = {}
    root = tmp_path_factory.mktemp("kill")

    def get(world: World, settings: tuple[str, ...] = ()) -> Case:
        key = world, settings
        if key not in made:
            made[key] = Case(root / f"{world.name}-{len(made)}", world, settings)
        return made[key]

    return get


def kill_and_resume(case: Case, seed: int) -> None:
    rank, kind, at = case.draw(random.Random(seed))
    of, name = case.counts[rank][kind], f"killed-{seed}"
    print(f"{case.world.name}, seed {seed}: rank {rank} is killed before {kind} {at} of {of}")
    with pytest.raises(RankFailure, match="exit -9"):
        case.run(name, rank, kind, at)
    again = case.run(name, -1, "", 0)
    assert [found["code"] for found in again] == [0] * case.world.size, again[0]["err"]
    case.check(name)


@pytest.mark.parametrize("seed", [SEED, SEED + 1])
def test_a_killed_run_ends_bit_equal(cases: Any, seed: int) -> None:
    kill_and_resume(cases(CP), seed)


def test_a_damaged_checkpoint_and_journal_are_skipped(cases: Any) -> None:
    """The newest checkpoint is cut: the one before it and the journal serve; then the journal is cut too."""
    case, name = cases(CP), "damaged"
    root = case.root / name
    case.run(name, -1, "", 0)
    journal = root / "journal" / "update-000002.jsonl"
    assert list(journal.parent.iterdir()) == [journal], "what the checkpoint before the newest needs"
    for also in (False, True):
        newest = max(
            (root / "checkpoints" / "update-000003").glob("*.distcp"), key=lambda path: path.stat().st_size
        )
        newest.write_bytes(newest.read_bytes()[:-1])
        if also:
            journal.write_bytes(journal.read_bytes()[:-20])
        printed = case.run(name, -1, "", 0)[0]["out"]
        assert f"skipped {root / 'checkpoints' / 'update-000003'}" in printed
        assert (f"update 3: replays the rollouts recorded in {journal}" in printed) != also
        assert (f"skipped {journal}: " in printed) == also
        case.check(name)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(SEED + 2, SEED + 12))
@pytest.mark.parametrize("world", [CP, MIXED], ids=lambda world: world.name)
def test_a_run_killed_anywhere_ends_bit_equal(cases: Any, world: World, seed: int) -> None:
    kill_and_resume(cases(world), seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(SEED + 12, SEED + 16))
def test_a_window_of_trees_killed_anywhere_ends_bit_equal(cases: Any, seed: int) -> None:
    """Groups decode together; their responses share tokens and are swept in chunks."""
    case = cases(CP, TREES)
    assert all(record["tokens/shared"] > 0 for record in case.expected[1])
    kill_and_resume(case, seed)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["forward", "write"])
def test_torchrun_restarts_a_killed_run(cases: Any, kind: str) -> None:
    case, name = cases(CP), f"torchrun-{kind}"
    generator = random.Random(f"{SEED}/{kind}")
    rank = 0 if kind == "write" else 1
    at = generator.randint(1, case.counts[rank][kind])
    print(f"torchrun: rank {rank} is killed before {kind} {at} of {case.counts[rank][kind]}")
    paths = os.pathsep.join([str(TESTS), str(TESTS.parent)])
    outcome = subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
            "--max-restarts", "1", str(TESTS / "cli" / "kill_ranks.py"), str(rank), kind, str(at),
            *case.arguments(name),
        ],
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert outcome.returncode == 0, outcome.stderr[-3000:]
    assert "Signal 9" in outcome.stderr or "exitcode: -9" in outcome.stderr  # it was killed once
    case.check(name)
