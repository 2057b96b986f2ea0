"""A tiny model, prompts and a learnable task to train on, and how two runs are compared."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from harness import ONE, World, run_world
from oracle.tiny_models import make_hf_dir
from oracle.trajectories import write_jsonl
from safetensors.torch import load_file

from megatron_lrl.tracking import read_metrics

# What may differ between two runs of the same computation: times, and bytes (a resumed run's first update has
# optimizer state already).
OF_THE_PROCESS = ("seconds/", "speed/", "bytes/", "bytes_planned/", "window/")


class Runs:
    """A folder of inputs and runs. Prompts are of awkward lengths; one is a single token."""

    def __init__(self, root: Path, **fields: Any) -> None:
        self.root = root
        shape = {"vocab": 131, "layers": 2, "hidden": 32, "intermediate": 32, "max_positions": 128}
        self.model = make_hf_dir(root / "model", "qwen2", 11, **{**shape, **fields})
        prompts = [list(range(3, 3 + n)) for n in (23, 1, 11, 17)]
        self.prompts = write_jsonl(
            root / "prompts.jsonl", [{"id": f"p{i}", "prompt_ids": ids} for i, ids in enumerate(prompts)]
        )
        self.config = root / "config.toml"
        self.config.write_text(
            f"[model]\nhf = {str(self.model)!r}\n"
            "[rollout]\ngroup_size = 4\nmax_new_tokens = 5\n"
            "[optimizer]\nlr = 1e-2\n"
            "[prefix]\nchunk_size = 7\n[replay]\nconcurrent = 3\ncheck_poison = true\n"
            "[train]\nupdates = 2\nsave_every = 0\n"
            f"[data]\nprompts = {str(self.prompts)!r}\nreward = 'cli.toy_rewards:low_ids'\n"
        )

    def train(self, run: str, *overrides: str) -> list[str]:
        """Arguments of a training run in the folder `run`."""
        return ["train", str(self.config), f"train.output={self.root / run}", *overrides]

    def export(self, run: str, update: int) -> list[str]:
        """Arguments that export a run's checkpoint to `<run>-hf-<update>`."""
        return ["export", str(self.checkpoint(run, update)), str(self.exported(run, update))]

    def checkpoint(self, run: str, update: int) -> Path:
        return self.root / run / "checkpoints" / f"update-{update:06d}"

    def exported(self, run: str, update: int) -> Path:
        return self.root / f"{run}-hf-{update}"

    def weights(self, run: str, update: int) -> dict[str, torch.Tensor]:
        return load_file(self.exported(run, update) / "model.safetensors")

    def metrics(self, run: str) -> list[dict[str, Any]]:
        """The recorded updates of a run."""
        return read_metrics(self.root / run)

    def computed(self, run: str) -> list[dict[str, Any]]:
        """The recorded updates of a run, without what belongs to the process."""
        return [
            {name: value for name, value in record.items() if not name.startswith(OF_THE_PROCESS)}
            for record in self.metrics(run)
        ]


def outcomes_of(
    world: World, cases: Sequence[Sequence[str]], timeout_s: float = 580.0
) -> list[list[tuple[int, str, str, float, float]]]:
    """By rank and command line: exit code, stdout, stderr, seconds, processor seconds."""
    words = [list(case) for case in cases]
    with tempfile.TemporaryDirectory() as folder:
        meeting = f"{folder}/meeting"
        return run_world(world, "cli.ranks:commands", timeout_s=timeout_s, cases=words, meeting=meeting)


def run(*cases: Sequence[str], world: World = ONE, timeout_s: float = 580.0) -> list[str]:
    """Runs command lines in one world; all must succeed. Returns what rank 0 printed on stderr."""
    ranks = outcomes_of(world, cases, timeout_s)
    for case, *outcomes in zip(cases, *ranks, strict=True):
        codes = [outcome[0] for outcome in outcomes]
        assert codes == [0] * world.size, f"{' '.join(case)}: {codes}\n{outcomes}"
    return [outcome[2] for outcome in ranks[0]]


def require_equal_weights(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    """Bit-equal, name by name."""
    assert ours.keys() == theirs.keys()
    different = [name for name in ours if not torch.equal(ours[name], theirs[name])]
    assert not different, different


def relative_l2(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """|ours - theirs| / |theirs| over all tensors."""
    assert ours.keys() == theirs.keys()
    difference = sum(float((ours[n].double() - theirs[n].double()).square().sum()) for n in ours)
    return math.sqrt(difference / sum(float(theirs[n].double().square().sum()) for n in ours))


def require_continuous(records: list[dict[str, Any]], updates: int) -> None:
    """Every update once, in order, every number finite, no window started over."""
    assert [record["update"] for record in records] == list(range(updates))
    for record in records:
        broken = [
            n for n, v in record.items() if n != "samples" and not math.isfinite(math.nan if v is None else v)
        ]
        assert not broken, (record["update"], broken)
        assert record["window/restarts"] == 0, record["update"]


def write_eos(model: Path, ids: list[int]) -> None:
    """Make every one of `ids` end a response."""
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))


def require_same(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> None:
    """Equal records, number by number."""
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs, strict=True):
        names = mine.keys() | other.keys()
        differing = {n: (mine.get(n), other.get(n)) for n in names if mine.get(n) != other.get(n)}
        assert not differing, (mine["update"], differing)
