"""What can be said of a command before torch is imported: its settings, and whether its files and folders are there.

What the files hold is checked by those who read them, in the same words where a file is missing.
"""

from __future__ import annotations

import os
from pathlib import Path

from megatron_lrl.config import check_train
from megatron_lrl.errors import UserError
from megatron_lrl.settings import Config


def check_conversion(verb: str, source: str, target: str) -> None:
    """Raise `UserError` unless `import` or `export` finds its source, and no target."""
    require_checkpoint(source) if verb == "export" else require_model(source)
    require_new(target)


def check_inputs(verb: str, config: Config, files: dict[str, str | None]) -> None:
    """Raise `UserError` naming what a verb that runs a model would not find.

    ``files``: its options that name a file: ``prompts`` or ``trajectories`` to read, ``out`` to write.
    """
    if verb == "train":
        check_train(config)
    if config.model.checkpoint is not None:
        require_checkpoint(config.model.checkpoint)
    elif config.model.hf is not None:
        require_model(config.model.hf)
    source = files.get("prompts") or files.get("trajectories")
    if verb == "train" and config.train.objective == "grpo":
        source = config.data.prompts
    if source is not None:
        require_file(source)
    if (out := files.get("out")) is not None:
        # Every rank of one machine sees the same folders; over several machines rank 0 looks once all have met.
        world = os.environ.get("WORLD_SIZE", "1")
        check_target(out, os.environ.get("LOCAL_WORLD_SIZE", world) == world, source)


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


def require_new(target: str | Path) -> None:
    """Raise `UserError` if ``target`` exists and is not an empty directory."""
    path = Path(target)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise UserError(
            f"{path}: exists and is not an empty directory; nothing was overwritten, choose another"
        )


def require_file(path: str | Path) -> None:
    """Raise `UserError` unless the file is there. It is not opened: it may be a pipe."""
    try:
        os.stat(path)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error


def check_target(out: str | Path, check: bool = True, source: str | Path | None = None) -> None:
    """Raise `UserError` unless ``out`` can be created or replaced and is not the file ``source`` that is read.

    Only the rank with ``check`` looks: it is the one that writes.
    """
    if not check:
        return
    path = Path(out)
    if path.is_dir():
        raise UserError(f"--out {path} is a folder; give the name of a file")
    if not path.parent.is_dir():
        raise UserError(f"--out {path}: the folder {path.parent} does not exist")
    if source is not None and path.resolve() == Path(source).resolve():
        raise UserError(f"--out {path} is the file that is read; give another name")
    require_writable(path.parent, f"--out {path}")


def require_writable(folder: Path, name: str) -> None:
    """Raise `UserError`, which begins with ``name``, unless files can be made in ``folder`` or where it would
    be created."""
    existing = next(path for path in (folder, *folder.absolute().parents) if os.path.lexists(path))
    if not existing.is_dir():
        raise UserError(f"{name}: {existing} is not a folder")
    # The name is the process's own: several may look at once.
    probe = existing / f".{os.getpid()}.probe"
    try:
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UserError(f"{name}: cannot write in {existing}: {error.strerror}") from error
