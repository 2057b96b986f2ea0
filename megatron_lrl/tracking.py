"""Where a run's numbers go: TensorBoard, `metrics.jsonl`, and one line per update on the terminal.

    trainer ── log(update, metrics, samples) ──┬─> output/tensorboard/   scalars, one chart of bytes, texts
               (rank 0 only)                   ├─> output/metrics.jsonl  one object per update, in order, once
                                               └─> terminal              progress bar (a TTY) or plain lines

A metric's name is "group/what", e.g. "reward/mean", "loss/policy", "seconds/replay", "bytes/prompt_group";
the group becomes a section of TensorBoard. All names that start with "bytes/" share one chart.
"""

from __future__ import annotations

import json
import math
import os
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from megatron_lrl.errors import UserError, writing
from megatron_lrl.reading import json_lines

METRICS_FILE = "metrics.jsonl"
TENSORBOARD_FOLDER = "tensorboard"
BYTES = "bytes/"

# What the one-line summary shows, where present: (metric, label, format).
_SUMMARY = (
    ("reward/mean", "reward", ".3f"),
    ("reward/solved", "solved", ".2f"),
    ("response/length", "length", ".1f"),
    ("loss/policy", "loss", "+.4f"),
    ("lm/loss", "loss", ".4f"),
    ("lm/held_out_loss_start", "held-out at first", ".4f"),
    ("lm/held_out_loss", "held-out", ".4f"),
    ("eval/reward_start", "held-out at first", ".3f"),
    ("eval/reward", "held-out", ".3f"),
    ("mismatch/kl", "kl", ".1e"),
    ("mismatch/bitwise", "same bits", ".1%"),
    ("mismatch/max_ratio_deviation", "ratio off by", ".1e"),
    ("optimizer/grad_norm", "grad", ".2f"),
    ("optimizer/lr", "lr", ".1e"),
    ("seconds/update", "s", ".1f"),
)


class Tracker:
    """Records the updates of one run; does nothing on every rank but 0.

    `first_update` is the first update this process will log: on a resume everything recorded from it on is
    dropped, so that no update appears twice. Updates count from 0. Use as a context manager, or call `close`.
    """

    def __init__(
        self,
        output_dir: str | Path,
        enabled_on_rank0: bool,
        *,
        first_update: int = 0,
        updates: int | None = None,
        stream: IO[str] | None = None,
    ) -> None:
        """`enabled_on_rank0` is true on rank 0 alone; `updates` is the length of the whole run, for the bar;
        `stream` is the terminal, by default standard error. Raises UserError if `output_dir` is not writable.
        """
        self.enabled = enabled_on_rank0
        self.output_dir = Path(output_dir)
        self._next = first_update
        if not self.enabled:
            return
        # Imported here: other ranks and the verbs that do not train need neither.
        from torch.utils.tensorboard import SummaryWriter
        from tqdm import tqdm

        path = self.output_dir / METRICS_FILE
        try:
            self.output_dir.mkdir(parents=True, exist_ok=True)
            _truncate(path, first_update)
            self._metrics = path.open("a", encoding="utf-8")
            _quiet_worker()
            # purge_step makes TensorBoard drop what an earlier process logged for the same updates.
            self._writer: Any = SummaryWriter(
                str(self.tensorboard_dir), purge_step=first_update, max_queue=1000
            )
        except OSError as error:
            raise UserError(
                f"train.output = {self.output_dir}: cannot write {error.filename or path}: {error.strerror}"
            ) from error
        self._layout: tuple[str, ...] = ()
        self._stream = stream if stream is not None else sys.stderr
        self._bar: Any = None
        if self._stream.isatty():
            self._bar = tqdm(
                total=updates, initial=first_update, unit="update", file=self._stream, dynamic_ncols=True
            )
        self._updates = updates

    @property
    def tensorboard_dir(self) -> Path:
        return self.output_dir / TENSORBOARD_FOLDER

    def log(self, update: int, metrics: Mapping[str, float], samples: Sequence[str] = ()) -> None:
        """Record one update: `metrics` maps "group/what" to a number, `samples` are texts to read.

        A number that is not finite is kept out of the charts and written as null, which JSON can hold. Raises
        ValueError for an update that was already logged, UserError if it cannot be written.
        """
        if update < self._next:
            raise ValueError(f"update {update} was already logged; the next one is {self._next}")
        self._next = update + 1
        if not self.enabled:
            return
        numbers = {name: float(value) for name, value in metrics.items()}
        finite = {name: value if math.isfinite(value) else None for name, value in numbers.items()}
        record: dict[str, Any] = {"update": update, **finite}
        if samples:
            record["samples"] = list(samples)
        with writing(self.output_dir / METRICS_FILE):
            self._metrics.write(json.dumps(record, allow_nan=False) + "\n")
            self._metrics.flush()
        with writing(self.tensorboard_dir):
            self._chart(update, finite, samples)
        self._print(update, numbers)

    def note(self, text: str) -> None:
        """Print a line that belongs to no update, without breaking the progress bar."""
        if self.enabled:
            if self._bar is not None:
                self._bar.write(text, file=self._stream)
            else:
                print(text, file=self._stream, flush=True)

    def close(self) -> None:
        """Flush and close all of it; a second call does nothing."""
        if not self.enabled:
            return
        self.enabled = False
        for part in (self._metrics, self._writer):
            with suppress(OSError):  # what could not be written was reported when it was
                part.close()
        if self._bar is not None:
            self._bar.close()

    def __enter__(self) -> Tracker:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _chart(self, update: int, finite: Mapping[str, float | None], samples: Sequence[str]) -> None:
        """Give an update to TensorBoard."""
        self._chart_bytes(name for name in finite if name.startswith(BYTES))
        for name, value in finite.items():
            if value is not None:
                self._writer.add_scalar(name, value, update)
        for index, text in enumerate(samples):
            # Indented, so that TensorBoard's Markdown shows the text as it is.
            self._writer.add_text(f"samples/{index}", "    " + text.replace("\n", "\n    "), update)
        self._writer.flush()

    def _chart_bytes(self, names: Iterable[str]) -> None:
        """Tell TensorBoard, whenever a name is new, to draw the bytes of all lifetimes in one chart."""
        layout = tuple(sorted({*self._layout, *names}))
        if layout != self._layout:
            self._layout = layout
            self._writer.add_custom_scalars({"memory": {"bytes by lifetime": ["Multiline", list(layout)]}})

    def _print(self, update: int, metrics: Mapping[str, float]) -> None:
        shown = [f"{label} {metrics[name]:{form}}" for name, label, form in _SUMMARY if name in metrics]
        of = f"/{self._updates}" if self._updates is not None else ""
        self.note(f"update {update + 1}{of}  " + "  ".join(shown))
        if self._bar is not None:
            self._bar.update(update + 1 - self._bar.n)


def read_metrics(output_dir: str | Path) -> list[dict[str, Any]]:
    """The recorded updates of a run in order: dicts with "update", the metrics and, where logged, "samples".

    A last line that was cut off by a crash is left out. Raises UserError if there is no such file or a line
    is broken.
    """
    return _read(Path(output_dir) / METRICS_FILE)


def _read(path: Path) -> list[dict[str, Any]]:
    records = []
    for number, record in json_lines(path, whole=True):
        if not isinstance(record.get("update"), int):
            raise UserError(f'{path}:{number}: not an object with an integer "update"')
        records.append(record)
    return records


def _quiet_worker() -> None:
    """TensorBoard's writing thread hands its failure to the next call; without this it prints a traceback too."""
    report = threading.excepthook

    def hook(failed: threading.ExceptHookArgs) -> None:
        if type(failed.thread).__name__ != "_AsyncWriterThread":
            report(failed)

    if getattr(report, "__name__", "") != "hook":
        threading.excepthook = hook


def _truncate(path: Path, first_update: int) -> None:
    """Drop updates from `first_update` on, and a cut-off last line; the file is replaced in one step."""
    if not path.exists():
        return
    kept = [record for record in _read(path) if record["update"] < first_update]
    partial = path.with_name(path.name + ".partial")
    partial.write_text("".join(json.dumps(record) + "\n" for record in kept), encoding="utf-8")
    os.replace(partial, path)
