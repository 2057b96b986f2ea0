"""What a run reads, by content: a run that resumes must find the inputs it began with.

    config ─ fingerprints ─┬─> training.json of every checkpoint, header of every journal file
                           └─ changed(recorded, now) ─> "data.prompts", "model.hf: model.safetensors", ...

Up to `WHOLE` bytes a file's fingerprint is its SHA-256. Of a larger one it is size, time of the last change and the
SHA-256 of `SAMPLES` blocks spread over it, so that a model of any size costs a second or two.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_lrl.checkpoint.manifest import read_manifest
from megatron_lrl.checkpoint.training import read_progress
from megatron_lrl.errors import UserError
from megatron_lrl.reading import opened
from megatron_lrl.settings import Config

WHOLE = 1 << 26  # bytes
SAMPLES, BLOCK = 64, 1 << 18
# Of a model's directory: what a run or its checkpoints take from it. Notes and licences may change.
_READ = {".safetensors", ".distcp", ".metadata", ".json", ".jinja", ".model", ".tiktoken", ".txt"}


def fingerprints(config: Config) -> dict[str, str]:
    """The fingerprint of every file that decides what a run computes: "key" or "key: file" -> text.

    Raises `UserError` for a file that cannot be read.
    """
    return {name: _fingerprint(path) for name, path in _files(config)}


def changed(recorded: Mapping[str, Any], now: Mapping[str, str]) -> list[str]:
    """Names of inputs that are not as recorded, missing and new ones too."""
    return sorted(name for name in recorded.keys() | now.keys() if recorded.get(name) != now.get(name))


def check_inputs(recorded: Any, now: Mapping[str, str], config: Config, place: str | Path) -> list[str]:
    """The inputs that differ from those ``place`` was made with; none if it does not say.

    Raises `UserError` naming them, unless train.changed_inputs = "accept".
    """
    if not isinstance(recorded, dict):
        return []
    differing = changed(recorded, now)
    if differing and config.train.changed_inputs == "refuse":
        shown = ", ".join(differing[:4]) + (f" and {len(differing) - 4} more" if len(differing) > 4 else "")
        raise UserError(
            f"{place}: the run began with other content of {shown}; put it back, or go on with what is there now by "
            'train.changed_inputs = "accept", or choose another train.output'
        )
    return differing


def check_base(ckpt_dir: str | Path) -> None:
    """Raise `UserError` if the model that an adapter's checkpoint was trained on is gone or has other content now."""
    progress = read_progress(ckpt_dir)
    recorded = {k: v for k, v in dict(progress.get("inputs") or {}).items() if k.startswith("model.")}
    adapter = read_manifest(ckpt_dir).adapter
    if adapter is None or not recorded:
        return
    base = Path(str(adapter.get("base")))
    if not base.is_dir():
        raise UserError(f"{ckpt_dir}: its base {base} is not there")
    key = next(iter(recorded)).partition(":")[0]
    if differing := changed(recorded, {name: _fingerprint(path) for name, path in _model_files(key, base)}):
        raise UserError(
            f"{ckpt_dir}: its base {base} has other content than the run began with: {', '.join(differing[:4])}"
        )


def _files(config: Config) -> Iterator[tuple[str, Path]]:
    if config.train.objective == "lm":
        assert config.lm.data is not None
        data = Path(config.lm.data)
        parts = [data.with_name(data.name + end) for end in (".idx", ".bin")]
        yield from ((f"lm.data: {part.name}", part) for part in parts if part.is_file())
        if data.is_file():
            yield "lm.data", data
    elif config.rollout.source == "file":
        assert config.rollout.trajectories is not None
        yield "rollout.trajectories", Path(config.rollout.trajectories)
    elif config.data.prompts is not None:
        yield "data.prompts", Path(config.data.prompts)
    for key in ("model.hf", "model.checkpoint", "adapter.path"):
        table, setting = key.split(".")
        value = getattr(getattr(config, table), setting)
        if value is not None:
            yield from _model_files(key, Path(value))


def _model_files(key: str, folder: Path) -> Iterator[tuple[str, Path]]:
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if path.is_file() and (path.suffix or path.name) in _READ and len(name.parts) <= 3:
            yield f"{key}: {name.as_posix()}", path


def _fingerprint(path: Path) -> str:
    with opened(path) as file:
        state = os.fstat(file.fileno())
        if state.st_size <= WHOLE:
            return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"
        digest = hashlib.sha256()
        for place in range(SAMPLES):
            file.seek((state.st_size - BLOCK) * place // (SAMPLES - 1))
            digest.update(file.read(BLOCK))
        return f"sample:{state.st_size}:{state.st_mtime_ns}:{digest.hexdigest()}"
