"""The one door for data from outside: files, command-line paths and values.

    file ─ read_bytes ─ read_text ─┬─ parse_json ── read_json, json_lines      regular files, UTF-8 (a byte order
                                   └─ parse_toml ── read_toml                  mark may stand first)
    a library that reads a file by itself ── failures_of(place, doing)
    a path as it was typed ──────────────── check_path

Whatever is wrong with what comes in is one `UserError` with the file, the line where lines count, and the reason. What
has passed is within these limits, so that nothing behind the door meets a value that it cannot print, compare or
convert:

- a file of settings has at most `MAX_SETTINGS` bytes, a JSON file `MAX_JSON`, one JSON line `MAX_LINE`;
- lists and tables nest at most `MAX_DEPTH` deep;
- integers have 64 bits; text is Unicode without lone surrogates.
"""

from __future__ import annotations

import json
import os
import re
import stat
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Any

from megatron_lrl.errors import UserError

MAX_DEPTH = 100
MAX_SETTINGS = 1 << 20
MAX_JSON = 1 << 28
MAX_LINE = 1 << 30
MAX_NAME, MAX_PATH = 255, 4095  # bytes, of Linux file systems

_LONG_DIGITS = re.compile(r"\d{19}")
_NO_LIMIT = str(int(1e30))  # model_max_length of most tokenizer_config.json: transformers' "no limit"
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_DOTTED = re.compile(r"""(?:(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')[ \t]*+\.[ \t]*+){100}""")
_SHOWN = 60


def shown(value: Any) -> str:
    """A value as a message shows it: short, whatever it is."""
    if value is None:
        return "nothing"
    if isinstance(value, (str, bytes)) and len(value) > _SHOWN:
        value = value[:_SHOWN]  # before repr, which would copy it
        return repr(value)[: _SHOWN - 3] + "..."
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # thousands of digits, or of brackets
        return f"a {type(value).__name__}"
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


class NotInFormat(UserError):
    """The text is not in the format at all."""


def printable(text: str) -> str:
    """Text that any stream takes: a byte of a command line that is not UTF-8 comes as an escape."""
    return text.encode("utf-8", "backslashreplace").decode()


@contextmanager
def failures_of(place: str | Path, doing: str) -> Iterator[None]:
    """Whatever a library raises in the block as a `UserError` ``{place}: {doing}: {reason}``.

    For libraries that read a file by themselves and may raise anything: also what is no `Exception`, as the tokenizers'
    (Rust) panics are.
    """
    try:
        yield
    except (UserError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        # torch's distributed checkpoints: what each rank failed with, (exception, traceback)
        for cause, *_ in getattr(error, "failures", {}).values():
            raise UserError(f"{place}: {doing}: {reason_of(cause)}") from error
        raise UserError(f"{place}: {doing}: {reason_of(error)}") from error


def reason_of(error: BaseException) -> str:
    """What an error says, in one line of bounded length."""
    try:
        text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    except Exception:
        text = ""
    text = " ".join(printable(text).split())
    return (text if len(text) <= 300 else text[:297] + "...") or type(error).__name__


def check_text(text: str, where: str) -> None:
    """Raise `UserError` for a lone surrogate: half of a character, or a byte of a command line that is not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UserError(f"{where}: {ascii(text)[:_SHOWN]} holds a lone surrogate, which is no text") from None


def check_depth(depth: int, where: str) -> None:
    """Raise `UserError` for lists and tables that nest deeper than `MAX_DEPTH`."""
    if depth > MAX_DEPTH:
        raise UserError(f"{where}: nested more than {MAX_DEPTH} deep")


def check_path(path: str | Path, what: str) -> None:
    """Raise `UserError` naming ``what`` unless a file system could hold this path."""
    text = str(path)
    try:
        encoded = text.encode()
    except UnicodeEncodeError:
        raise UserError(f"{what} = {ascii(shown(text))[1:-1]}: a path must be UTF-8 text") from None
    if "\0" in text:
        raise UserError(f"{what} = {shown(text)}: a path cannot hold a NUL character")
    longest = max(map(len, encoded.split(b"/")))
    if longest > MAX_NAME or len(encoded) > MAX_PATH:
        raise UserError(
            f"{what} = {shown(text)}: a name of {longest} bytes in a path of {len(encoded)}; "
            f"valid: at most {MAX_NAME} and {MAX_PATH}"
        )


@contextmanager
def opened(path: str | Path) -> Iterator[BufferedReader]:
    """A regular file, open for reading bytes.

    Raises `UserError` for what is no regular file (a FIFO would wait for ever), and for what the system refuses in the
    block.
    """
    try:
        # Not to wait in open() for somebody who writes to a FIFO.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            mode = os.fstat(descriptor).st_mode
            if stat.S_ISDIR(mode):
                raise UserError(f"{path}: cannot be read: Is a directory")
            if not stat.S_ISREG(mode) and not os.path.samefile(path, os.devnull):
                raise UserError(f"{path}: cannot be read: not a regular file")
            yield file
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read: {reason_of(error)}") from error


def read_bytes(path: str | Path, limit: int = MAX_JSON) -> bytes:
    """The bytes of a regular file of at most ``limit``."""
    with opened(path) as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise UserError(f"{path}: larger than {limit} bytes, the most that is read of such a file")
    return content


def read_text(path: str | Path, limit: int = MAX_JSON) -> str:
    """The text of a UTF-8 file, without a byte order mark."""
    return _decoded(read_bytes(path, limit), str(path), 1)


def read_json(path: str | Path) -> Any:
    """The value of a JSON file."""
    return parse_json(read_bytes(path), str(path))


def read_object(path: str | Path) -> dict[str, Any]:
    """The object of a JSON file."""
    content = read_json(path)
    if not isinstance(content, dict):
        raise UserError(f"{path}: must hold a JSON object, found {shown(content)}")
    return content


def read_toml(path: str | Path) -> dict[str, Any]:
    """The tables of a TOML file."""
    return parse_toml(read_text(path, MAX_SETTINGS), str(path))


def json_lines(path: str | Path, *, whole: bool = False) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number from 1, object) of every line that is not blank; lines end at \\n alone.

    ``whole``: a last line without its end was cut off while it was written, and is left out.
    """
    number = 0
    with opened(path) as file:
        while raw := file.readline(MAX_LINE + 1):
            number += 1
            where = f"{path}:{number}"
            if len(raw) > MAX_LINE:
                raise UserError(f"{where}: longer than {MAX_LINE} bytes, the most that is read of a line")
            if not raw.strip() or (whole and not raw.endswith(b"\n")):
                continue
            record = parse_json(raw, where, bom=number == 1)
            if not isinstance(record, dict):
                raise UserError(f"{where}: a line must be a JSON object, found {shown(record)}")
            yield number, record


def parse_json(content: bytes | str, where: str, *, bom: bool = True) -> Any:
    """The value of JSON text; ``where`` is its file, or file:line, in messages. ``bom``: a byte order mark may stand
    first."""
    text = _decoded(content, where, None, bom) if isinstance(content, bytes) else content
    try:
        value = json.loads(text)
        if _LONG_DIGITS.search(text):  # slower, and rare
            value = json.loads(text, parse_int=_bounded)
    except RecursionError:
        raise UserError(f"{where}: nested more than {MAX_DEPTH} deep") from None
    except ValueError as error:
        raise NotInFormat(f"{where}: not valid JSON: {reason_of(error)}") from None
    nested = text.count("[") + text.count("{") > MAX_DEPTH
    if nested or _SURROGATE.search(text):
        _check_values(value, where)
    return value


def parse_toml(text: str, where: str) -> dict[str, Any]:
    """The tables of TOML text; ``where`` as in `parse_json`."""
    for line in text.split("\n"):  # tomllib takes time in the square of a key's length
        if line.count(".") >= MAX_DEPTH and _DOTTED.search(line):
            check_depth(MAX_DEPTH + 1, where)
    try:
        tables = tomllib.loads(text)
    except RecursionError:
        raise UserError(f"{where}: nested more than {MAX_DEPTH} deep") from None
    except tomllib.TOMLDecodeError as error:
        raise NotInFormat(f"{where}: not valid TOML: {reason_of(error)}") from None
    except ValueError as error:  # of a number or a date
        raise UserError(f"{where}: not valid TOML: {reason_of(error)}") from None
    _check_values(tables, where)
    return tables


def _decoded(content: bytes, where: str, line: int | None, bom: bool = True) -> str:
    """``line``: the number of the first line, where lines count."""
    if bom:
        content = content.removeprefix(b"\xef\xbb\xbf")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        if line is not None:
            where = f"{where}:{line + content.count(b'\n', 0, error.start)}"
        raise UserError(f"{where}: not UTF-8 text: {error.reason} (byte {error.start})") from None


def _bounded(digits: str) -> int | float:
    if digits == _NO_LIMIT:
        return float(digits)
    number = int(digits) if len(digits) <= 20 else None
    if number is None or not -(1 << 63) <= number < 1 << 63:
        raise ValueError(f"an integer of {len(digits.lstrip('-'))} digits; valid: 64 bits")
    return number


def _check_values(value: Any, where: str) -> None:
    """Depth, integers and text of a parsed value."""
    waiting = [(value, 1)]
    while waiting:
        value, depth = waiting.pop()
        if isinstance(value, (dict, list)):
            check_depth(depth, where)
        if isinstance(value, dict):
            waiting += [(item, depth + 1) for pair in value.items() for item in pair]
        elif isinstance(value, list):
            waiting += [(item, depth + 1) for item in value]
        elif isinstance(value, str):
            check_text(value, where)
        elif isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
            raise UserError(f"{where}: an integer of more than 64 bits")
