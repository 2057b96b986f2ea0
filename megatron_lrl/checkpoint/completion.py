"""Which files a training checkpoint consists of, with sizes and checksums: written last, checked first.

`complete.json` lists every file of the directory. It is written when all others are, so a directory without
it was interrupted, and a file that was truncated, changed or lost afterwards is found and named. Checksums
are SHA-256 of whole files; ranks share the work, each reading 1/world of the files.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from megatron_lrl.errors import UserError, writing
from megatron_lrl.reading import read_object, shown
from megatron_lrl.runtime import Runtime

COMPLETION_FILE = "complete.json"
FORMAT_VERSION = 1
SMALL_FILE = 1 << 20  # bytes; a quick check reads files up to this size and only measures larger ones


def write_json(path: Path, content: Any) -> None:
    """Write by a temporary name that is then replaced, and onto the disk before returning."""
    partial = path.with_name(path.name + ".incomplete")
    with partial.open("w", encoding="utf-8") as handle:
        handle.write(json.dumps(content, indent=1, allow_nan=False) + "\n")
        handle.flush()
        os.fsync(handle.fileno())
    os.replace(partial, path)


def read_json(path: Path, format_version: int, what: str) -> dict[str, Any]:
    """A JSON object of this format version. Raises UserError naming the file if it is missing, damaged or
    newer."""
    if not os.path.lexists(path):
        raise UserError(f"{path}: no such file; expected {what}")
    try:
        content = read_object(path)
    except UserError as error:
        raise UserError(f"{error}; expected {what}") from None
    version = content.get("format_version")
    if version != format_version:
        raise UserError(f"{path}: format_version = {shown(version)}; this version reads {format_version}")
    return content


def write_completion(directory: Path, runtime: Runtime) -> None:
    """List and hash all files of a finished directory; collective."""
    runtime.barrier()  # every rank has written its files
    names = sorted(path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file())
    runtime.barrier()  # every rank has listed them before the list itself is written

    def write() -> None:
        if runtime.is_main:
            files = {name: record for part in parts for name, record in part.items()}
            content = {"format_version": FORMAT_VERSION, "files": dict(sorted(files.items()))}
            with writing(directory / COMPLETION_FILE):
                write_json(directory / COMPLETION_FILE, content)

    mine = runtime.together(lambda: {name: _record(directory / name) for name in _share(names, runtime)})
    parts = runtime.gather_objects(mine)
    runtime.together(write)


def check_completion(directory: Path, runtime: Runtime | None = None, whole: bool = False) -> None:
    """Compare a directory with its completion file.

    With a `runtime` every file is read once, by one of the ranks, and the call is collective. Without one it
    is quick, unless it is to read the `whole`: sizes of all files, content of those up to `SMALL_FILE` bytes.

    Raises:
        UserError: naming the first file that is missing, of another size or of other content.
    """
    if runtime is None:
        files = _read_files(directory)
        _check(directory, files, set(files) if whole else None)
        return
    files = runtime.together(_read_files, directory)
    runtime.together(_check, directory, files, set(_share(sorted(files), runtime)))


def _read_files(directory: Path) -> dict[str, dict[str, Any]]:
    path = directory / COMPLETION_FILE
    content = read_json(path, FORMAT_VERSION, "the list that ends a complete training checkpoint")
    files = content.get("files")
    if not isinstance(files, dict) or not files:
        raise UserError(f"{path}: damaged: it lists no files")
    for name, record in files.items():
        parts = Path(name).parts
        if not isinstance(record, dict) or not {"bytes", "sha256"} <= record.keys() or ".." in parts:
            raise UserError(f"{path}: damaged: the record of {name!r} is not one of a file below it")
    return files


def _check(directory: Path, files: dict[str, dict[str, Any]], hashed: set[str] | None) -> None:
    """Sizes of all `files`; content of those in `hashed`, or of the small ones if it is None."""
    for name, record in files.items():
        path = directory / name
        if not path.is_file():
            raise UserError(f"{path}: missing; a damaged checkpoint")
        size = path.stat().st_size
        if size != record["bytes"]:
            raise UserError(
                f"{path}: {size} bytes where {record['bytes']} were written; a damaged checkpoint"
            )
        wanted = size <= SMALL_FILE if hashed is None else name in hashed
        if wanted and _record(path)["sha256"] != record["sha256"]:
            raise UserError(f"{path}: its content changed after it was written; a damaged checkpoint")


def _share(names: list[str], runtime: Runtime) -> list[str]:
    """This rank's part of the files."""
    return names[runtime.rank :: runtime.world_size]


def _record(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as handle:
            digest = hashlib.file_digest(handle, "sha256").hexdigest()
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from error
    return {"bytes": path.stat().st_size, "sha256": digest}
