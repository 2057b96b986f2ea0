"""The output folder of a run: it belongs to one run, and says which."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from megatron_lrl.checkpoint.training import CHECKPOINTS
from megatron_lrl.config import differing_settings
from megatron_lrl.errors import UserError
from megatron_lrl.outputs import LOCK_FILE, require_writable
from megatron_lrl.reading import read_object
from megatron_lrl.rollout.journal import JOURNAL
from megatron_lrl.settings import Config
from megatron_lrl.tracking import METRICS_FILE, TENSORBOARD_FOLDER

CONFIG_FILE = "config.json"
_RESULTS = (METRICS_FILE, TENSORBOARD_FOLDER, CHECKPOINTS, JOURNAL)


def check_output(output: Path, config: Config, check: bool) -> None:
    """See whether this run may have the folder; nothing is created and nothing that it holds is touched.

    Only the rank with ``check`` looks. Raises `UserError` if the folder cannot be written, holds another run
    (naming the settings that differ) or files that are no run, or if train.overwrite would delete an input.
    A run that stopped before its first update holds nothing, and any run may take its folder.
    """
    if not check:
        return
    name = f"train.output = {output}"
    require_writable(output, name)
    record = output / CONFIG_FILE
    if not output.exists():
        return
    if not record.is_file():
        if any(path.name != LOCK_FILE for path in output.iterdir()):
            raise UserError(f"{name} is not empty and holds no run; choose a new or empty folder")
    elif config.train.overwrite:
        _refuse_own_input(output, config)
    elif _has_results(output):
        differing = differing_settings(_read_record(record), config)
        if differing:
            raise UserError(
                f"{name} holds a run with other settings ({', '.join(differing)}); choose another folder, "
                "or "
                "set train.overwrite = true to replace that run"
            )


def claim_output(output: Path, config: Config, write: bool) -> None:
    """Record that the folder is this run's; with train.overwrite remove an earlier run's files (and nothing
    else).

    Call after `check_output`, once nothing can be wrong with the input any more. Only the rank with ``write``
    acts.
    """
    if not write:
        return
    temporary = output / f".{CONFIG_FILE}.tmp"
    try:
        output.mkdir(parents=True, exist_ok=True)
        if config.train.overwrite:
            for name in _RESULTS:
                path = output / name
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink(missing_ok=True)
        content = json.dumps(config.model_dump(mode="json"), indent=1)
        temporary.write_text(content + "\n", encoding="utf-8")
        os.replace(temporary, output / CONFIG_FILE)
    except OSError as error:
        where = error.filename or output
        raise UserError(f"train.output = {output}: cannot write {where}: {error.strerror}") from error


def _has_results(output: Path) -> bool:
    """Whether an update was recorded or saved."""
    metrics, checkpoints = output / METRICS_FILE, output / CHECKPOINTS
    recorded = metrics.is_file() and metrics.stat().st_size > 0
    return recorded or (checkpoints.is_dir() and any(checkpoints.iterdir()))


def _read_record(record: Path) -> dict[str, dict[str, object]]:
    """The settings that a folder's run was started with."""
    content = read_object(record)
    if not all(isinstance(table, dict) for table in content.values()):
        raise UserError(f"{record}: not the settings of a run; choose another train.output")
    return content


def _refuse_own_input(output: Path, config: Config) -> None:
    """Raise `UserError` if replacing the folder's run would delete what this run reads."""
    doomed = [(output / name).resolve() for name in _RESULTS]
    inputs = {
        "model.hf": config.model.hf,
        "model.checkpoint": config.model.checkpoint,
        "adapter.path": config.adapter.path,
        "data.prompts": config.data.prompts,
        "rollout.trajectories": config.rollout.trajectories,
        "eval.prompts": config.eval.prompts,
    }
    for key, value in inputs.items():
        path = None if value is None else Path(value).resolve()
        if path is not None and any(path.is_relative_to(place) for place in doomed):
            raise UserError(
                f"train.overwrite = true would delete {key} = {value}, which lies in train.output = "
                f"{output}; "
                "choose another train.output"
            )
