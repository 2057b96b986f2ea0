"""Claim: the journal gives back exactly what was recorded, and never anything else: a damaged, half-written or foreign
file is named in a line and not used.

Why the tests show it: recorded values include floats that decimal notation rounds; every prefix of a valid file (as an
interrupted write would leave it) and a change of any single byte are refused; so are other prompts, settings, another
update. Trimming is compared with the exact list of files.
Not shown: that a resumed run uses it (tests/cli/test_kill.py).
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest

from megatron_lrl.config import load_config
from megatron_lrl.errors import UserError
from megatron_lrl.rollout.journal import Journal, Recorded
from megatron_lrl.rollout.types import Group, Prompt, Response
from megatron_lrl.settings import Config

PROMPTS = [Prompt("a@0", (3, 4), {"answer": "x"}), Prompt("b@1", (5,), {})]
RECORDED = Recorded(
    (
        Group(
            "a@0", (3, 4), (Response((7, 8), 0.1 + 0.2, (-1e-17, -math.pi)), Response((9,), -0.0, (-5e-324,)))
        ),
        Group("b@1", (5,), (Response((2,), None, None, 1 / 3),)),
    ),
    entropy=2 / 3,
)


def settings(*overrides: str) -> Config:
    return load_config(os.devnull, ["model.hf=somewhere", *overrides])


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(tmp_path, settings())


def test_what_was_recorded_comes_back_to_the_bit(journal: Journal) -> None:
    assert journal.recall(7, PROMPTS) is None
    journal.record(7, RECORDED)
    found = journal.recall(7, PROMPTS)
    assert found == RECORDED
    assert repr(found) == repr(RECORDED)  # -0.0 and 0.0 are equal
    assert [path.name for path in journal.folder.iterdir()] == ["update-000007.jsonl"]


def test_recording_again_replaces(journal: Journal) -> None:
    journal.record(0, Recorded((), 0.0))
    journal.record(0, RECORDED)
    assert journal.recall(0, PROMPTS) == RECORDED


def test_no_beginning_of_a_file_is_taken_for_the_file(journal: Journal, capsys: Any) -> None:
    journal.record(3, RECORDED)
    whole = journal.path(3).read_bytes()
    for size in range(len(whole)):
        journal.path(3).write_bytes(whole[:size])
        assert journal.recall(3, PROMPTS) is None, size
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(whole)
    assert all(line.startswith(f"skipped {journal.path(3)}: ") for line in lines)
    assert all(line.endswith("; update 4 is sampled again") for line in lines)


def test_no_changed_byte_goes_unnoticed(journal: Journal, capsys: Any) -> None:
    journal.record(3, RECORDED)
    whole = journal.path(3).read_bytes()
    for place in range(0, len(whole)):
        changed = bytearray(whole)
        changed[place] ^= 1
        journal.path(3).write_bytes(changed)
        assert journal.recall(3, PROMPTS) is None, place
    assert len(capsys.readouterr().out.splitlines()) == len(whole)


def test_an_interrupted_write_is_mentioned(journal: Journal, capsys: Any) -> None:
    journal.folder.mkdir()
    (journal.folder / ".update-000002.jsonl.incomplete").write_bytes(b'{"jour')
    assert journal.recall(2, PROMPTS) is None
    assert "writing it was interrupted; update 3 is sampled again" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["optimizer.lr=1"], "optimizer.lr"),
        (["rollout.temperature=0.5"], "rollout.temperature"),
        (["train.updates=21"], "train.updates"),
    ],
)
def test_rollouts_of_other_settings_are_refused(
    journal: Journal, capsys: Any, overrides: list[str], named: str
) -> None:
    journal.record(1, RECORDED)
    other = Journal(journal.folder.parent, settings(*overrides))
    assert other.recall(1, PROMPTS) is None
    assert f"recorded under other settings ({named})" in capsys.readouterr().out


def test_settings_that_leave_results_alone_may_change(journal: Journal) -> None:
    journal.record(1, RECORDED)
    other = Journal(journal.folder.parent, settings("replay.concurrent=3", "train.window_attempts=5"))
    assert other.recall(1, PROMPTS) == RECORDED


def test_rollouts_of_other_prompts_or_updates_are_refused(journal: Journal, capsys: Any) -> None:
    journal.record(1, RECORDED)
    assert journal.recall(1, PROMPTS[::-1]) is None
    assert "recorded for other prompts" in capsys.readouterr().out
    os.replace(journal.path(1), journal.path(2))
    assert journal.recall(2, PROMPTS) is None
    assert "not this update's rollouts" in capsys.readouterr().out


def test_trimming_deletes_earlier_updates_only(journal: Journal) -> None:
    journal.trim(5)  # nothing is there yet
    for update in (0, 9, 10, 11, 1_000_000):
        journal.record(update, RECORDED)
    stranger = journal.folder / "notes.txt"
    stranger.write_text("")
    journal.trim(10)
    assert sorted(path.name for path in journal.folder.iterdir()) == [
        "notes.txt", "update-000010.jsonl", "update-000011.jsonl", "update-1000000.jsonl",
    ]  # fmt: skip


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "journal").write_text("a file where the folder belongs")
    with pytest.raises(UserError, match=r"update-000000.jsonl: the rollouts cannot be recorded"):
        Journal(tmp_path, settings()).record(0, RECORDED)
