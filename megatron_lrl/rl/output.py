"""The output folder of a run: it belongs to one run, and says which."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from megatron_lrl.checkpoint.training import CHECKPOINTS
from megatron_lrl.config import differing_settings
from megatron_lrl.errors import UserError
from megatron_lrl.settings import Config
from megatron_lrl.tracking import METRICS_FILE, TENSORBOARD_FOLDER

CONFIG_FILE = "config.json"
_OURS = (CONFIG_FILE, METRICS_FILE, TENSORBOARD_FOLDER, CHECKPOINTS)


def check_output(output: Path, config: Config, check: bool) -> None:
    """See whether this run may have the folder; nothing that it holds is touched.

    Only the rank with ``check`` looks. Raises `UserError` if the folder cannot be written, holds another run (naming
    the settings that differ) or files that are no run.
    """
    if not check:
        return
    record = output / CONFIG_FILE
    try:
        output.mkdir(parents=True, exist_ok=True)
        probe = output / ".probe"
        probe.touch()
        probe.unlink()
        if not record.is_file():
            if any(output.iterdir()):
                raise UserError(
                    f"train.output = {output} is not empty and holds no run; choose a new or empty folder"
                )
        elif not config.train.overwrite:
            differing = differing_settings(json.loads(record.read_text(encoding="utf-8")), config)
            if differing:
                raise UserError(
                    f"train.output = {output} holds a run with other settings ({', '.join(differing)}); choose another "
                    "folder, or set train.overwrite = true to replace that run"
                )
    except OSError as error:
        where = error.filename or output
        raise UserError(f"train.output = {output}: cannot write {where}: {error.strerror}") from error
    except json.JSONDecodeError as error:
        raise UserError(f"{record} is damaged ({error}); choose another train.output") from error


def claim_output(output: Path, config: Config, write: bool) -> None:
    """Record that the folder is this run's; with train.overwrite remove an earlier run's files (and nothing else).

    Call after `check_output`, once nothing can be wrong with the input any more. Only the rank with ``write`` acts.
    """
    if not write:
        return
    if config.train.overwrite:
        for name in _OURS:
            path = output / name
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
    temporary = output / f".{CONFIG_FILE}.tmp"
    temporary.write_text(json.dumps(config.model_dump(mode="json"), indent=1) + "\n", encoding="utf-8")
    os.replace(temporary, output / CONFIG_FILE)
