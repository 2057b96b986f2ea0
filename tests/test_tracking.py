"""Claim: what a run logs can be read back, each update exactly once, also after a crash and a resume.

Why these tests show it: they read TensorBoard's event files with TensorBoard's own reader (not with our code)
and metrics.jsonl with plain json, after a simulated crash that logged further than the checkpoint it resumes
from. They do not show how TensorBoard's web page looks, nor that the trainer logs the right numbers.
"""

from __future__ import annotations

import io
import json
import os
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2

from megatron_lrl.errors import UserError
from megatron_lrl.tracking import Tracker, read_metrics


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def events(folder: Path) -> EventAccumulator:
    accumulator = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    accumulator.Reload()
    return accumulator


def record(output: Path, first: int, last: int, offset: float = 0.0) -> str:
    stream = io.StringIO()
    with Tracker(output, True, first_update=first, updates=9, stream=stream) as tracker:
        for update in range(first, last):
            tracker.log(
                update, {"reward/mean": update + offset, "bytes/run": 10.0, "bytes/replay": 2.0}, ["a\nb"]
            )
    return stream.getvalue()


def test_scalars_texts_and_one_chart_for_bytes(tmp_path: Path) -> None:
    record(tmp_path, 0, 3)
    read = events(tmp_path / "tensorboard")
    assert [(e.step, e.value) for e in read.Scalars("reward/mean")] == [(0, 0.0), (1, 1.0), (2, 2.0)]
    assert [e.step for e in read.Tensors("samples/0/text_summary")] == [0, 1, 2]
    assert read.Tensors("samples/0/text_summary")[0].tensor_proto.string_val[0] == b"    a\n    b"
    config = read.Tensors("custom_scalars__config__")
    layout = layout_pb2.Layout.FromString(config[-1].tensor_proto.string_val[0])
    (chart,) = layout.category[0].chart
    assert list(chart.multiline.tag) == ["bytes/replay", "bytes/run"]


def test_a_resume_replaces_what_was_logged_past_the_checkpoint(tmp_path: Path) -> None:
    record(tmp_path, 0, 5)
    record(tmp_path, 3, 6, offset=100.0)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    want = [(0, 0.0), (1, 1.0), (2, 2.0), (3, 103.0), (4, 104.0), (5, 105.0)]
    assert [(line["update"], line["reward/mean"]) for line in lines] == want
    assert lines[0]["samples"] == ["a\nb"]
    assert [(e.step, e.value) for e in events(tmp_path / "tensorboard").Scalars("reward/mean")] == want


def test_a_line_cut_by_a_crash_is_dropped(tmp_path: Path) -> None:
    record(tmp_path, 0, 2)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"update": 2, "rew')
    assert [r["update"] for r in read_metrics(tmp_path)] == [0, 1]
    record(tmp_path, 2, 3)
    assert [r["update"] for r in read_metrics(tmp_path)] == [0, 1, 2]
    assert not list(tmp_path.glob("*.partial"))


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"update": 0}\nnonsense\n')
    with pytest.raises(UserError, match=r"metrics\.jsonl:2: not valid JSON"):
        read_metrics(tmp_path)
    with pytest.raises(UserError, match=r"cannot be read"):
        read_metrics(tmp_path / "nowhere")


def test_numbers_that_are_not_finite_are_null_and_stay_out_of_the_charts(tmp_path: Path) -> None:
    with Tracker(tmp_path, True, stream=io.StringIO()) as tracker:
        tracker.log(0, {"loss/policy": float("nan"), "reward/mean": float("inf"), "optimizer/lr": 0.5})
    (line,) = read_metrics(tmp_path)
    assert line == {"update": 0, "loss/policy": None, "reward/mean": None, "optimizer/lr": 0.5}
    assert events(tmp_path / "tensorboard").Tags()["scalars"] == ["optimizer/lr"]


def test_an_update_cannot_be_logged_twice(tmp_path: Path) -> None:
    with Tracker(tmp_path, True, stream=io.StringIO()) as tracker:
        tracker.log(0, {})
        with pytest.raises(ValueError, match="update 0 was already logged"):
            tracker.log(0, {})


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    with Tracker(tmp_path / "run", False) as tracker:
        tracker.log(0, {"reward/mean": 1.0})
        tracker.note("silent")
    assert list(tmp_path.iterdir()) == []


def test_one_plain_line_per_update_and_a_bar_on_a_terminal(tmp_path: Path) -> None:
    text = record(tmp_path / "plain", 0, 2)
    assert text.splitlines() == ["update 1/9  reward 0.000", "update 2/9  reward 1.000"]
    terminal = Terminal()
    with Tracker(tmp_path / "bar", True, updates=4, stream=terminal) as tracker:
        tracker.log(0, {"reward/mean": 0.5})
        tracker.note("saved")
    assert "update 1/4  reward 0.500\n" in terminal.getvalue()
    assert "saved\n" in terminal.getvalue()
    assert "1/4" in terminal.getvalue().splitlines()[-1]


@pytest.mark.skipif(os.name != "posix", reason="uses a path through a file")
def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"train\.output = .*file/run: cannot write"):
        Tracker(tmp_path / "file" / "run", True)
