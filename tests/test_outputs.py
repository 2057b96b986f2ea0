"""Claim: one rule holds for every output. It is a regular file or nothing yet, never what the run reads (by any name or
link), another file only where the verb wrote it or with --overwrite; a run's folder has one holder at a time; a reward
ends no process and moves no output.

Why the tests show it: links, devices, FIFOs and inputs are put where the output should go and are compared afterwards;
twenty processes reach for one folder at once; a killed holder is followed by the next. Rewards do what they must not.
Not shown: file systems whose locks do not reach other hosts.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_lrl import cli
from megatron_lrl.errors import UserError
from megatron_lrl.outputs import GRADIENT, LOCK_FILE, check_file, check_folder, held
from megatron_lrl.rl.rewards import Reward
from megatron_lrl.rollout.types import Prompt

HOLD = """
import sys, time
from pathlib import Path
from megatron_lrl.errors import UserError
from megatron_lrl.outputs import held
try:
    with held(Path(sys.argv[1]), "train.output"):
        print("held", flush=True)
        sys.stdin.read()
except UserError as error:
    print(error, flush=True)
"""


def started(folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_of_twenty_starts_one_runs(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "run"
    processes = [started(folder) for _ in range(20)]
    told = [first_line(process) for process in processes]
    assert told.count("held") == 1
    [winner] = [process for process, line in zip(processes, told, strict=True) if line == "held"]
    host = os.uname().nodename
    assert all(f"process {winner.pid} on {host}" in line for line in told if line != "held"), told
    for process in processes:
        process.communicate()
    assert not list(tmp_path.iterdir()), "a run that wrote nothing leaves nothing"


def test_a_killed_holder_holds_nothing(tmp_path: Path) -> None:
    process = started(tmp_path)
    assert first_line(process) == "held"
    with pytest.raises(UserError, match=f"process {process.pid}"), held(tmp_path, "train.output"):
        pass
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert (tmp_path / LOCK_FILE).exists()
    with held(tmp_path, "train.output"):
        pass
    assert tmp_path.is_dir() and not list(tmp_path.iterdir())


@pytest.fixture
def inputs(tmp_path: Path) -> dict[str, Path]:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (tmp_path / "t.jsonl").write_text('{"id": "a", "logprobs": []}\n')
    return {"model.hf": model, "--trajectories": tmp_path / "t.jsonl"}


def test_what_is_no_regular_file_or_is_read_is_refused(tmp_path: Path, inputs: dict[str, Path]) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "hard").hardlink_to(inputs["model.hf"] / "config.json")
    (tmp_path / "soft").symlink_to(inputs["--trajectories"])
    (tmp_path / "way").symlink_to(inputs["model.hf"])
    for out, named in (
        ("fifo", "a FIFO"), ("link", "symbolic link"), ("hard", "model.hf"), ("soft", "--trajectories"),
        ("t.jsonl", "--trajectories"), ("model/config.json", "model.hf"), ("model/new", "model.hf"),
        ("way/new", "model.hf"), ("/dev/null", "a device"), ("model", "folder"), ("absent/x", "does not exist"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=named):
            check_file(tmp_path / out, "score", inputs, overwrite=True)


def gradient_file(path: Path, metadata: dict[str, str]) -> None:
    header = json.dumps({"__metadata__": metadata}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header)


def test_another_file_is_replaced_on_request_alone(tmp_path: Path, inputs: dict[str, Path]) -> None:
    out = tmp_path / "out"
    earlier: dict[str, Any] = {
        "score": {"id": "a", "logprobs": [[-1.0]]},
        "generate": {"id": "a", "prompt_ids": [1], "responses": [{"ids": [1], "logprobs": [-1.0]}]},
        "check": {"sampler_vs_replay": {}, "gradients": {}, "passed": {}},
        "plan": {"world": 1, "work": {}, "stages": []},
    }
    check_file(out, "score", inputs)
    for verb in (*earlier, "grad"):
        for written in earlier:
            out.write_text(json.dumps(earlier[written]) + "\n")
            if written == verb:
                check_file(out, verb, inputs)
                continue
            with pytest.raises(UserError, match=f"not an earlier output of {verb}"):
                check_file(out, verb, inputs)
            check_file(out, verb, inputs, overwrite=True)
    gradient_file(out, {"format": "pt"})
    with pytest.raises(UserError, match="not an earlier output"):
        check_file(out, "grad", inputs)
    gradient_file(out, {"format": "pt", **GRADIENT})
    check_file(out, "grad", inputs)


def test_a_gradient_is_no_model(tmp_path: Path) -> None:
    from megatron_lrl.checkpoint.safetensors_io import SafetensorsReader

    gradient_file(tmp_path / "model.safetensors", {"format": "pt", **GRADIENT})
    with pytest.raises(UserError, match="holds a gradient"):
        SafetensorsReader(tmp_path)


def test_a_target_folder_is_new(tmp_path: Path, inputs: dict[str, Path]) -> None:
    model = inputs["model.hf"]
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for target, named in (
        ("model/ckpt", "is read"),
        ("link", "symbolic"),
        ("t.jsonl", "not an empty directory"),
    ):
        with pytest.raises(UserError, match=named):
            check_folder(tmp_path / target, model)
    check_folder(tmp_path / "new", model)


@pytest.mark.parametrize("present, absent", [("RANK", "WORLD_SIZE"), ("WORLD_SIZE", "RANK")])
def test_half_a_launcher_is_refused(
    present: str, absent: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(present, "1")
    monkeypatch.delenv(absent, raising=False)
    assert cli.main(["plan", "absent.toml"]) == 2
    told = capsys.readouterr().err
    assert told.count("error: ") == 1 and f"sets {present} and not {absent}" in told


def interrupting(text: str, record: Any) -> float:
    sys.exit(0)


def leaving(text: str, record: Any) -> float:
    os._exit(0)


PROMPT = Prompt(id="p7", prompt_ids=(1,), record={})


@pytest.mark.parametrize("function", [interrupting, leaving])
def test_a_reward_ends_no_process(function: Any) -> None:
    leave = os._exit
    with pytest.raises(UserError, match=r"reward r on group 'p7' raised SystemExit: 0"):
        Reward("r", function, {})("", PROMPT)
    assert os._exit is leave


def test_a_reward_moves_no_output(tmp_path: Path) -> None:
    before = Path.cwd()
    assert Reward("r", lambda text, record: os.chdir(tmp_path) or 1.0, {})("", PROMPT) == 1.0
    assert Path.cwd() == before


@pytest.mark.parametrize(
    "value",
    ["1.0", b"1", 10**400, 10**5000, math.nan, math.inf, None, 1j, [1.0]],
    ids=lambda value: type(value).__name__,
)
def test_a_reward_is_a_finite_number(value: Any) -> None:
    with pytest.raises(
        UserError, match=r"reward r on group 'p7' returned .{1,70}; a reward must be a finite"
    ):
        Reward("r", lambda text, record: value, {})("", PROMPT)


def test_a_verdict_is_one_or_zero() -> None:
    assert [Reward("r", lambda text, record, v=v: v, {})("", PROMPT) for v in (True, False)] == [1.0, 0.0]
