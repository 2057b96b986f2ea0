"""Claim: a newcomer learns the program from the program: every verb says what it does, its arguments and
an example, `--settings` lists every key, and a wrong command line is answered by what would be right.

Why this shows it: the texts are compared with the parser's own tables and with the settings' models, so a
verb or key that is added without words fails; the examples are parsed by the program itself. It does not
show: that the words are good.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_lrl import __version__, cli
from megatron_lrl.config import Config

VERBS = ("import", "export", "train", "generate", "score", "grad", "check", "plan")


def leave(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Exit code and texts of a command line that ends in the parser."""
    with pytest.raises(SystemExit) as leaving:
        cli.main(arguments)
    out, err = capsys.readouterr()
    return int(leaving.value.code or 0), out, err


def test_program_help_names_every_verb_and_its_own_examples(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = leave(["--help"], capsys)
    assert code == 0
    for verb in VERBS:
        assert f"\n    {verb}" in out
    assert "torchrun --nproc-per-node" in out and "train --settings" in out
    assert max(map(len, out.splitlines())) <= 110


@pytest.mark.parametrize("verb", VERBS)
def test_verb_help_teaches(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = leave([verb, "--help"], capsys)
    assert code == 0
    usage, description, *_ = out.split("\n\n")
    assert usage.startswith(f"usage: megatron-lrl {verb} ") and len(description) > 60
    arguments = {
        "import": ("HF_DIR", "CKPT_DIR", "--tp", "--pp"),
        "export": ("HF_DIR", "CKPT_DIR", "--tp", "--pp"),
        "generate": ("CONFIG", "key=value", "--prompts", "--out"),
        "score": ("CONFIG", "key=value", "--trajectories", "--out"),
        "grad": ("CONFIG", "key=value", "--trajectories", "--out"),
        "check": ("CONFIG", "key=value", "--out"),
        "plan": ("CONFIG", "key=value", "--world", "--prompt", "--response", "--budget", "--tflops", "--out"),
        "train": ("CONFIG", "key=value", "--settings"),
    }[verb]
    _, details = out.split("positional arguments:")
    for argument in arguments:
        assert argument in usage or argument == "--settings"
        line = next(line for line in details.splitlines() if line.strip().startswith(argument))
        assert len(line.split(maxsplit=1)[1]) > 10 or details.count(argument) > 1
    assert max(map(len, out.splitlines())) <= 110


@pytest.mark.parametrize("verb", VERBS)
def test_the_example_of_a_verb_parses(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = leave([verb, "--help"], capsys)
    words = shlex.split(out.split("example:\n")[1])
    assert words[:2] == ["megatron-lrl", verb]
    options, rest = cli._parser().parse_known_args(words[1:])
    assert options.verb == verb and all("=" in word for word in rest)


def test_settings_lists_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--settings"], ["train", "--settings"], ["generate", "--settings"]):
        assert cli.main(arguments) == 0
        sections = capsys.readouterr().out.split("\n[")
        assert len(sections) == len(Config.model_fields)
        for section, (table, field) in zip(sections, Config.model_fields.items(), strict=True):
            assert section.lstrip("[").startswith(f"{table}]")
            for key in field.annotation.model_fields:  # type: ignore[union-attr]
                assert f"\n  {key} " in section, f"{table}.{key}"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "VERB"),
        (["trian"], "invalid choice: 'trian'"),
        (["train"], "train needs CONFIG"),
        (["score", "c.toml"], "--trajectories, --out"),
        (["generate", "c.toml", "--prompts", "p", "--out", "o", "--group", "3"], "--group"),
        (["score", "c.toml", "--traj", "t", "--out", "o"], "--trajectories"),
        (["import", "a"], "CKPT_DIR"),
        (["import", "a", "b", "train.updates=3"], "unrecognised arguments: train.updates=3"),
        (["export", "a", "b", "--tp", "0"], "'0' is not an integer from 1 to"),
        (["import", "a", "b", "--pp", "two"], "'two' is not an integer from 1 to"),
    ],
)
def test_wrong_command_line(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = leave(arguments, capsys)
    assert code == 2 and out == ""
    assert err.count("error: ") == 1 and said in err


def test_only_rank_0_speaks(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Under torchrun all ranks get the same wrong command line."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert leave(["trian"], capsys) == (2, "", "")
    assert leave(["--help"], capsys) == (0, "", "")
    assert cli.main(["--settings"]) == 0 and capsys.readouterr().out == ""


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert leave(["--version"], capsys)[:2] == (0, f"megatron-lrl {__version__}\n")


def test_help_does_not_wait_for_torch(tmp_path: Path) -> None:
    """A real interpreter: help and a wrong verb are answered without importing torch."""
    script = (
        "import sys; from megatron_lrl.cli import main\n"
        "try: main(sys.argv[1:])\nexcept SystemExit as e: code = e.code\n"
        "print(sorted(m for m in ('torch', 'megatron') if m in sys.modules)); sys.exit(code)"
    )
    for arguments, code in ((["train", "--help"], 0), (["trian"], 2)):
        done = subprocess.run(
            [sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=60
        )
        assert done.returncode == code
        assert done.stdout.endswith("[]\n"), done.stderr
