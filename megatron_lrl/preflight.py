"""What can be said of a command before torch is imported: its settings, and whether its files and folders are there.

What the files hold is checked by those who read them, in the same words where a file is missing.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from megatron_lrl.config import check_train
from megatron_lrl.errors import UserError
from megatron_lrl.outputs import check_file, check_folder
from megatron_lrl.settings import Config


def check_conversion(verb: str, source: str, target: str) -> None:
    """Raise `UserError` unless `import` or `export` finds its source, and no target."""
    require_checkpoint(source) if verb == "export" else require_model(source)
    check_folder(target, source)


def check_inputs(verb: str, config: Config, options: dict[str, Any], writes: bool) -> None:
    """Raise `UserError` naming what a verb that runs a model would not find, or must not write.

    ``options``: of its command line: ``config``, ``prompts`` or ``trajectories`` to read, ``out`` to write (looked at
    by the ranks with ``writes``), ``overwrite``.
    """
    if verb == "train":
        check_train(config)
    if config.model.checkpoint is not None:
        require_checkpoint(config.model.checkpoint)
    elif config.model.hf is not None:
        require_model(config.model.hf)
    if config.adapter.path is not None:
        require_file(Path(config.adapter.path) / "adapter_config.json")
    source = options.get("prompts") or options.get("trajectories")
    if verb == "train" and config.train.objective == "grpo":
        recorded = config.rollout.source == "file"
        source = config.rollout.trajectories if recorded else config.data.prompts
        if config.eval.prompts is not None:
            require_file(config.eval.prompts)
    if source is not None:
        require_file(source)
    if writes and options.get("out") is not None:
        check_file(options["out"], verb, _reads(config, options), options["overwrite"])


def _reads(config: Config, options: dict[str, Any]) -> dict[str, str | Path | None]:
    """What a verb reads, or a run that it stands beside holds, by option or setting."""
    lm = {"lm.data": config.lm.data, "lm.held_out": config.lm.held_out}
    return {
        "CONFIG": options["config"],
        "--prompts": options.get("prompts"),
        "--trajectories": options.get("trajectories"),
        "model.hf": config.model.hf,
        "model.checkpoint": config.model.checkpoint,
        "adapter.path": config.adapter.path,
        "data.prompts": config.data.prompts,
        "rollout.trajectories": config.rollout.trajectories,
        "eval.prompts": config.eval.prompts,
        **lm,
        **{
            f"{name} of the Megatron dataset": None if path is None else f"{path}{end}"
            for end in (".bin", ".idx")
            for name, path in lm.items()
        },
    }


def require_model(folder: str | Path) -> None:
    """Raise `UserError` unless ``folder`` is a Hugging Face model's."""
    path = Path(folder)
    if not path.is_dir():
        raise UserError(f"{path}: no such directory; expected a Hugging Face model directory")
    if not (path / "config.json").is_file():
        raise UserError(
            f"{path / 'config.json'}: no such file; a Hugging Face model directory holds a config.json"
        )


def require_checkpoint(folder: str | Path) -> None:
    """Raise `UserError` unless ``folder`` is a checkpoint's."""
    path = Path(folder) / "megatron_lrl.json"
    if not path.is_file():
        raise UserError(f"{path}: no such file; expected a checkpoint written by `import` or `train`")


def require_file(path: str | Path) -> None:
    """Raise `UserError` unless the file is there. It is not opened: it may be a pipe."""
    try:
        os.stat(path)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
