"""Directories that appear whole or not at all, and the files that travel with a model's weights."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from megatron_lrl.errors import UserError, writing
from megatron_lrl.outputs import check_folder

# What belongs to a model beside its weights: settings, tokenizer, chat template, generation defaults,
# licence, notes. Code and weights in other formats (pickles among them) stay behind.
_CARRIED_SUFFIXES = {
    ".json", ".jsonl", ".txt", ".model", ".jinja", ".tiktoken", ".md", ".spm", ".bpe", ".codes", ".vocab",
}  # fmt: skip
_CARRIED_NAMES = (
    "LICENSE",
    "LICENCE",
    "NOTICE",
    "COPYING",
    "TOKENIZER.MODEL.",
)  # the last of Mistral, with a version
_TEMPLATES = "additional_chat_templates"  # the one folder that a tokenizer reads


def incomplete_path(target: Path) -> Path:
    """Where a directory is built before it is renamed to `target`."""
    return target.with_name(f".{target.name}.incomplete")


def prepare(target: str | Path, source: str | Path | None = None) -> Path:
    """Check that `target` may be created and make its empty working directory next to it; returns the latter.

    A working directory left by an interrupted run is removed. Raises UserError: target exists and is not an
    empty directory, lies in the `source` that is read, or the place is not writable.
    """
    target = Path(target)
    check_folder(target, source)
    partial = incomplete_path(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if partial.exists():
            shutil.rmtree(partial)
        partial.mkdir()
    except OSError as error:
        raise UserError(f"{target}: cannot be created: {error.strerror or error}") from error
    return partial


def publish(target: str | Path) -> None:
    """Rename the finished working directory to `target`. Raises UserError when that cannot be done."""
    target = Path(target)
    with writing(target):
        os.replace(incomplete_path(target), target)


def discard(target: str | Path) -> None:
    """Remove the working directory after a failure."""
    shutil.rmtree(incomplete_path(Path(target)), ignore_errors=True)


def carry_files(source: Path, target: Path) -> list[str]:
    """Copy the files that travel with a model (not its weights); returns their names, sorted."""
    carried = [path.relative_to(source) for path in carried_files(source)]
    target.mkdir(parents=True, exist_ok=True)
    for name in carried:
        (target / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(source / name, target / name)
    return sorted(map(str, carried))


def carried_files(source: Path) -> list[Path]:
    """The files of a model's directory that travel with it: regular ones, inside it.

    A link may lead to another place of the directory, or into the blobs of a Hugging Face cache (MODEL/blobs beside
    MODEL/snapshots/REVISION). Raises `UserError` for one that leads elsewhere: what it names would be published.
    """
    folders = [folder for folder in (source, source / _TEMPLATES) if folder.is_dir()]
    files = [path for folder in folders for path in sorted(folder.iterdir())]
    found = [path for path in files if path.is_file() and _is_carried(path)]
    home = source.resolve()
    cache = home.parent.parent / "blobs" if home.parent.name == "snapshots" else home
    for path in found:
        place = path.resolve()
        if not place.is_relative_to(home) and place.parent != cache:
            raise UserError(
                f"{path}: a link to {place}, outside the model's directory, would be copied into checkpoints; put the "
                "file itself there, or remove the link"
            )
    return found


def _is_carried(path: Path) -> bool:
    if path.name.startswith(".") or path.name.endswith((".index.json", ".incomplete")):
        return False
    return path.suffix in _CARRIED_SUFFIXES or path.name.upper().startswith(_CARRIED_NAMES)
