"""One rule for every output, whatever verb writes it.

    --out FILE ──────── check_file ──> Out ── written under a temporary name, renamed
    target folder ───── check_folder          (`import` and `export`; they build beside it and rename)
    train.output ────── held ── one run at a time holds the folder

A file is written where nothing is, or where a regular file is that the same verb wrote before, or with ``--overwrite``;
never over what the run itself reads, by whatever name or link.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from megatron_lrl.errors import UserError
from megatron_lrl.reading import opened, parse_json

LOCK_FILE = ".lock"
GRADIENT = {"content": "gradient"}
"""What the metadata of a gradient's file say, so that nothing takes it for a model's weights."""
_FIRST = 1 << 24  # bytes of a file that are looked at to recognise it

_KINDS = (
    (stat.S_ISLNK, "a symbolic link"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def check_file(
    out: str | Path, verb: str, reads: Mapping[str, str | Path | None], overwrite: bool = False
) -> None:
    """Raise `UserError` unless ``verb`` may write the file ``out``; nothing is created that stays.

    ``reads``: what the run reads, by the name of its setting or option: files, and folders with all they hold.
    """
    path, name = Path(out), f"--out {out}"
    if path.is_dir():
        raise UserError(f"{name} is a folder; give the name of a file")
    if not path.parent.is_dir():
        raise UserError(f"{name}: the folder {path.parent} does not exist")
    for what, value in reads.items():
        if value is not None and _touches(path, Path(value)):
            raise UserError(f"{name} is or lies in {what} = {value}, which is read; give another name")
    require_writable(path.parent, name)
    if not os.path.lexists(path):
        return
    mode = path.lstat().st_mode
    for is_kind, kind in _KINDS:
        if is_kind(mode):
            raise UserError(f"{name} is {kind}; give the name of a regular file or a new one")
    if not overwrite and not _wrote(verb, path):
        raise UserError(
            f"{name} exists and is not an earlier output of {verb}; give another name, or --overwrite to replace it"
        )


def check_folder(target: str | Path, source: str | Path | None = None) -> None:
    """Raise `UserError` unless a folder may be made of ``target``, from what ``source`` holds if that is given."""
    path = Path(target)
    if path.is_symlink():
        raise UserError(f"{path}: is a symbolic link; nothing was overwritten, choose another")
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise UserError(
            f"{path}: exists and is not an empty directory; nothing was overwritten, choose another"
        )
    if source is not None and path.resolve().is_relative_to(Path(source).resolve()):
        raise UserError(f"{path}: lies in {source}, which is read; choose another")


def require_writable(folder: Path, name: str) -> None:
    """Raise `UserError`, which begins with ``name``, unless files can be made in ``folder`` or where it would be
    created."""
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


@contextmanager
def held(folder: Path, name: str, hold: bool = True) -> Iterator[None]:
    """The folder belongs to this process for the block; it is created if need be, and removed if it stays empty.

    The lock is the kernel's, on ``folder/.lock``: it ends with the process, however that ends. Only the rank with
    ``hold`` acts. Raises `UserError`, which begins with ``name``, with the host and process that hold the folder.
    """
    if not hold:
        yield
        return
    lock = folder / LOCK_FILE
    created = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        descriptor = _locked(folder, lock, name)
    except OSError as error:
        raise UserError(f"{name}: cannot write in {folder}: {error.strerror or error}") from error
    try:
        yield
    finally:
        with suppress(OSError):  # while it is held: who opened it meanwhile finds another file in its place
            lock.unlink()
        os.close(descriptor)
        with suppress(OSError):
            for path in created:
                path.rmdir()


def _locked(folder: Path, lock: Path, name: str) -> int:
    while True:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        except FileNotFoundError:  # the run before ended and removed what it had created
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            try:
                mine = os.path.samestat(os.fstat(descriptor), os.stat(lock))
            except FileNotFoundError:
                mine = False
            if mine:
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, f"{socket.gethostname()} {os.getpid()}\n".encode(), 0)
                return descriptor
            os.close(descriptor)
        except OSError as error:
            holder = os.pread(descriptor, 300, 0).decode("utf-8", "replace").split()
            os.close(descriptor)
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise
            who = f"process {holder[1]} on {holder[0]}" if len(holder) == 2 else "another process"
            raise UserError(
                f"{name} is in use by {who}; wait for that run to end, stop it, or choose another folder"
            ) from None


def _touches(path: Path, source: Path) -> bool:
    """Whether a file is one that is read: by name, through links, or inside a folder that is read."""
    real, read = path.resolve(), source.resolve()
    if real == read or real.is_relative_to(read):
        return True
    try:
        mine = path.stat()
    except OSError:
        return False
    files = (
        [source] if not source.is_dir() else [Path(f) / n for f, _, names in os.walk(source) for n in names]
    )
    with suppress(OSError):
        return any(os.path.samestat(mine, file.stat()) for file in files)
    return False


def _wrote(verb: str, path: Path) -> bool:
    """Whether a file looks like an output of the verb; an empty one is nobody's."""
    try:
        with opened(path) as file:
            if verb == "grad":
                length = int.from_bytes(file.read(8), "little")
                return (
                    parse_json(file.read(min(length, _FIRST)), str(path))["__metadata__"].items()
                    >= GRADIENT.items()
                )
            first = file.readline(_FIRST) if verb in ("generate", "score") else file.read(_FIRST)
        content = parse_json(first, str(path))
        return _MARKS[verb](content)
    except (UserError, LookupError, TypeError, AttributeError):
        return False


def _generated(group: Any) -> bool:
    return group.keys() == {"id", "prompt_ids", "responses"} and all(
        r["logprobs"] for r in group["responses"]
    )


_MARKS = {
    "generate": _generated,
    "score": lambda record: record.keys() == {"id", "logprobs"},
    "check": lambda report: report.keys() >= {"sampler_vs_replay", "gradients", "passed"},
    "plan": lambda report: report.keys() >= {"world", "work", "stages"},
}


def write_report(out: str | Path, report: Any) -> None:
    """Write a value as JSON, whole or not at all. Raises `UserError` when the file cannot be written."""
    path = Path(out)
    temporary = path.with_name(f".{path.name}.incomplete")
    try:
        temporary.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        raise UserError(f"--out {path} cannot be written: {error.strerror}") from error
    finally:
        with suppress(OSError):
            temporary.unlink()
