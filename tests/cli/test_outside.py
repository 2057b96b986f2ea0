"""Claim: a run survives what happens to the files it depends on, or says in one line what is wrong with them.

Why the tests show it: a real run is trained, its newest checkpoint, prompts, weights or learning rate are then spoiled
as a disk, an editor or an attacker would, and the command line is called again in this process. Exit status, the one
message and what is left on disk are looked at. A pickle that runs code when it is opened normally leaves a marker file;
the test first shows that it would.
Not shown: several ranks (`checkpoint/test_training_checkpoint.py` and the kill tests resume in worlds).
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from cli.runs import Runs
from megatron_lrl.checkpoint.completion import COMPLETION_FILE, _record
from megatron_lrl.cli import main


class Touch:
    """A pickle of this creates a file when it is opened by `pickle.load`."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return os.mkdir, (str(self.marker),)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """A run of two updates with a checkpoint after each, and an imported checkpoint of its model."""
    runs = Runs(tmp_path_factory.mktemp("outside"))
    assert main(runs.train("run", "train.save_every=1")) == 0
    assert main(["import", str(runs.model), str(runs.root / "ckpt")]) == 0
    return runs


@pytest.fixture
def run(trained: Runs, request: pytest.FixtureRequest) -> str:
    """A copy of the run under a name of its own."""
    name = request.node.name.split("[")[0]
    shutil.copytree(trained.root / "run", trained.root / name, dirs_exist_ok=True)
    return name


def refused(arguments: Sequence[str], capsys: pytest.CaptureFixture[str], *named: str) -> str:
    """The one message of a command line that must fail."""
    capsys.readouterr()
    assert main(list(arguments)) == 2
    *before, error = capsys.readouterr().err.splitlines()  # a run that began has told of its updates
    assert error.startswith("error: ") and all(part in error for part in named), error
    assert not any(line.startswith(("error", "Traceback")) for line in before), before
    return error


def test_a_zeroed_shard_falls_back_to_the_checkpoint_before(
    trained: Runs, run: str, capsys: pytest.CaptureFixture[str]
) -> None:
    newest = trained.checkpoint(run, 2)
    shard = max(newest.glob("*.distcp"), key=lambda path: path.stat().st_size)
    shard.write_bytes(bytes(shard.stat().st_size))
    assert main(trained.train(run, "train.save_every=1")) == 0
    told = capsys.readouterr()
    assert f"skipped {newest}: {shard}: its content changed" in told.out
    assert f"resumed {trained.checkpoint(run, 1)} at update 1" in told.err
    assert (newest.parent / "update-000002.damaged").is_dir() or shard.read_bytes().strip(b"\0")
    assert trained.computed(run) == trained.computed("run")  # the replayed update is the one that was lost


def test_changed_inputs_are_named_and_can_be_accepted(
    trained: Runs, run: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    more = trained.train(run, "train.updates=3")
    prompts, model = trained.prompts.read_bytes(), trained.model / "model.safetensors"
    weights = model.read_bytes()
    try:
        records = [json.loads(line) for line in prompts.splitlines()]
        records[1]["answer"] = "other"
        trained.prompts.write_text("".join(json.dumps(record) + "\n" for record in records))
        refused(more, capsys, run, "data.prompts", 'train.changed_inputs = "accept"')
        trained.prompts.write_bytes(prompts)
        tensors = load_file(model)
        tensors["model.norm.weight"] += 1.0
        save_file(tensors, model, {"format": "pt"})
        refused(more, capsys, "model.hf: model.safetensors")
        assert len(trained.metrics(run)) == 2  # nothing was lost
        assert main([*more, "train.changed_inputs=accept"]) == 0
        assert "goes on with other content of model.hf: model.safetensors" in capsys.readouterr().err
    finally:
        trained.prompts.write_bytes(prompts)
        model.write_bytes(weights)


@pytest.mark.parametrize("on_nonfinite", ["stop", "skip"])
def test_parameters_that_overflow_are_not_published(
    trained: Runs, run: str, capsys: pytest.CaptureFixture[str], on_nonfinite: str, tmp_path: Path
) -> None:
    model = shutil.copytree(trained.model, tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    tensors["model.embed_tokens.weight"][130] = (
        1e9  # of a token that no prompt has: weight decay overflows it
    )
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    overrides = [f"model.hf={model}", f"train.on_nonfinite={on_nonfinite}", "optimizer.warmup_updates=1"]
    overrides += ["optimizer.lr=1e3", "optimizer.weight_decay=1e30", "train.save_every=1", "train.updates=4"]
    arguments = trained.train(f"{run}-{on_nonfinite}", *overrides)
    refused(arguments, capsys, "the step overflowed", "optimizer.lr = 1000")
    kept = trained.checkpoint(f"{run}-{on_nonfinite}", 1)  # after an update at learning rate 0
    assert [path.name for path in kept.parent.iterdir()] == [kept.name]
    assert main(["export", str(kept), str(tmp_path / "hf")]) == 0
    assert load_file(tmp_path / "hf" / "model.safetensors")["model.embed_tokens.weight"].isfinite().all()


def test_export_refuses_weights_that_are_not_finite(
    trained: Runs, run: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    model = shutil.copytree(trained.model, tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = float("inf")
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    if main(["import", str(model), str(tmp_path / "ckpt")]) == 0:
        refused(
            ["export", str(tmp_path / "ckpt"), str(tmp_path / "hf")],
            capsys,
            "up_proj.weight",
            "NaN or infinite",
        )
    else:
        assert "up_proj.weight" in capsys.readouterr().err
    assert not (tmp_path / "hf").exists()


def test_no_code_of_a_checkpoint_runs(
    trained: Runs, run: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    marker = tmp_path / "marker"
    evil = pickle.dumps(Touch(marker))
    pickle.loads(evil)
    assert marker.is_dir()  # so it would be
    marker.rmdir()
    imported = shutil.copytree(trained.root / "ckpt", tmp_path / "ckpt")
    (imported / ".metadata").write_bytes(evil)
    named = (".metadata", "posix.mkdir", "no part of a checkpoint's index")
    refused(["export", str(imported), str(tmp_path / "hf")], capsys, *named)
    refused(trained.train("other", f"model.checkpoint={imported}"), capsys, *named)
    # a training checkpoint whose list of files agrees
    newest = trained.checkpoint(run, 2)
    (newest / ".metadata").write_bytes(evil)
    listed = json.loads((newest / COMPLETION_FILE).read_text())
    listed["files"][".metadata"] = _record(newest / ".metadata")
    (newest / COMPLETION_FILE).write_text(json.dumps(listed))
    refused(trained.train(run, "train.updates=3"), capsys, *named)
    assert not marker.exists() and not (tmp_path / "hf").exists()


@pytest.mark.parametrize("content", [b"", b"\x80", b"N.", pickle.dumps({"a": torch.Size([1])})])
def test_damaged_indexes_are_one_line(
    trained: Runs, capsys: pytest.CaptureFixture[str], tmp_path: Path, content: bytes
) -> None:
    imported = shutil.copytree(trained.root / "ckpt", tmp_path / "ckpt")
    (imported / ".metadata").write_bytes(content)
    refused(
        ["export", str(imported), str(tmp_path / "hf")], capsys, ".metadata", "not the index of a checkpoint"
    )


def test_links_out_of_a_model_are_not_carried(
    trained: Runs, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "secret").write_text("mine")
    model = shutil.copytree(trained.model, tmp_path / "model")
    (model / "notes.txt").symlink_to(tmp_path / "secret")
    named = ("notes.txt", "a link to", "secret")
    refused(["import", str(model), str(tmp_path / "ckpt")], capsys, *named)
    refused(trained.train("linked", f"model.hf={model}"), capsys, *named)
    assert not (tmp_path / "ckpt").exists() and not (trained.root / "linked").exists()
    # The cache of the hub: files are links into blobs beside snapshots.
    snapshot, blobs = tmp_path / "hub" / "snapshots" / "abc", tmp_path / "hub" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for index, path in enumerate(sorted(trained.model.iterdir())):
        shutil.copyfile(path, blobs / str(index))
        (snapshot / path.name).symlink_to(f"../../blobs/{index}")
    assert main(["import", str(snapshot), str(tmp_path / "from-hub")]) == 0
    assert (tmp_path / "from-hub" / "hf" / "config.json").read_bytes() == (
        trained.model / "config.json"
    ).read_bytes()


def test_a_start_without_memory_is_one_line(tmp_path: Path) -> None:
    """An address space in which torch's libraries find no room."""
    (tmp_path / "c.toml").write_text('[model]\nhf = "m"\n')
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text("{}")
    (tmp_path / "t.jsonl").write_text("{}\n")
    limited = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30)); "
        "from megatron_lrl.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    words = ["score", "c.toml", "--trajectories", "t.jsonl", "--out", "s.jsonl"]
    ended = subprocess.run(
        [sys.executable, "-c", limited, *words], capture_output=True, text=True, cwd=tmp_path, timeout=100
    )
    assert ended.returncode == 2 and ended.stderr.count("\n") == 1, ended.stderr
    assert ended.stderr.startswith("error: not enough memory may be used")
