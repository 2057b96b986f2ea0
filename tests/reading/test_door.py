"""Claim: whatever is wrong with data from outside is one `UserError` with file, line and reason, within stated limits.

Why the tests show it: each known way to break Python's readers (brackets, digits, lone surrogates, NUL and long paths,
bytes that are not UTF-8, FIFOs) goes through the door, and the message is held against file, line and reason. The
readers behind the door are fuzzed in `test_readers.py`.
Not shown: damage that needs several files to agree.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from megatron_lrl.errors import UserError
from megatron_lrl.reading import (
    MAX_SETTINGS,
    NotInFormat,
    check_path,
    failures_of,
    json_lines,
    parse_json,
    parse_toml,
    printable,
    read_bytes,
    read_object,
    read_text,
    read_toml,
    shown,
)

DEEP = 100_000


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[" * DEEP, "nested more than 100 deep"),
        ('{"a":' * DEEP, "nested more than 100 deep"),
        ("[" * 101 + "]" * 101, "nested more than 100 deep"),
        ('{"a": 1' + "0" * 5000 + "}", "5001 digits|4300 digits"),
        ('{"a": 1' + "0" * 30 + "}", "31 digits; valid: 64 bits"),
        ('{"a": -9223372036854775809}', "19 digits; valid: 64 bits"),
        (r'{"a": "\ud83d"}', "lone surrogate"),
        (r'{"\udfff": 1}', "lone surrogate"),
        ('{"a": 1', "not valid JSON"),
        ("", "not valid JSON"),
    ],
)
def test_json_that_is_refused(text: str, reason: str) -> None:
    start = time.process_time()
    with pytest.raises(UserError, match=rf"^there:7: .*({reason})"):
        parse_json(text, "there:7")
    assert time.process_time() - start < 2


def test_json_that_is_accepted() -> None:
    assert parse_json("[" * 100 + "]" * 100, "x") is not None
    assert parse_json(r'{"a": "\ud83d\ude00", "b": 9223372036854775807}', "x") == {"a": "😀", "b": 2**63 - 1}
    assert parse_json(b'\xef\xbb\xbf{"a": 0.12345678901234567890123}', "x") == {"a": 0.12345678901234568}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a = " + "[" * DEEP, "nested more than 100 deep"),
        ("a." * DEEP + "b = 1", "nested more than 100 deep"),
        ("[" + "a." * DEEP + "b]", "nested more than 100 deep"),
        ("a = 1" + "0" * 5000, "digits"),
        ("a = 1" + "0" * 30, "64 bits"),
        ("a = 9999-99-99", "not valid TOML"),
        ("[a\n", "not valid TOML.*line 1"),
    ],
)
def test_toml_that_is_refused(text: str, reason: str) -> None:
    start = time.process_time()
    with pytest.raises(UserError, match=rf"^there: .*{reason}"):
        parse_toml(text, "there")
    assert time.process_time() - start < 2


def test_only_a_syntax_error_means_that_text_is_not_in_the_format() -> None:
    with pytest.raises(NotInFormat):
        parse_toml("a = runs/a", "x")
    with pytest.raises(UserError) as caught:
        parse_toml("a = 1" + "0" * 5000, "x")
    assert not isinstance(caught.value, NotInFormat)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    for path, reason in (
        (tmp_path / "absent", "No such file"),
        (tmp_path, "Is a directory"),
        (fifo, "not a regular file"),
        (Path("/dev/zero"), "not a regular file"),
        (tmp_path / ("x" * 300), "File name too long"),
        (Path("a\0b"), "null"),
    ):
        for read in (read_bytes, read_text, read_object, read_toml, lambda p: list(json_lines(p))):
            with pytest.raises(UserError, match="cannot be read: ") as caught:
                read(path)
            assert reason in str(caught.value)
    assert read_toml(os.devnull) == {}


def test_limits_and_encoding(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"#" * (MAX_SETTINGS + 1))
    with pytest.raises(UserError, match=rf"f: larger than {MAX_SETTINGS} bytes"):
        read_toml(path)
    path.write_bytes(b"one\ntwo\xff\n")
    with pytest.raises(UserError, match="f:2: not UTF-8 text"):
        read_text(path)
    path.write_bytes(b"\xef\xbb\xbfa = 1\n")
    assert read_toml(path) == {"a": 1}


def test_lines_end_at_line_feeds_alone(tmp_path: Path) -> None:
    path = tmp_path / "f.jsonl"
    path.write_text('\ufeff{"a": "x\u2028y\u0085z\x0b"}\n\n{"b": 1}\r\n{"c": 2', encoding="utf-8", newline="")
    with pytest.raises(UserError, match=r"f\.jsonl:1: not valid JSON"):  # a control character inside a string
        list(json_lines(path))
    path.write_text('\ufeff{"a": "x\u2028y\u0085z"}\n\n{"b": 1}\r\n{"c": 2', encoding="utf-8", newline="")
    assert list(json_lines(path, whole=True)) == [(1, {"a": "x\u2028y\u0085z"}), (3, {"b": 1})]
    with pytest.raises(UserError, match=r"f\.jsonl:4: not valid JSON"):
        list(json_lines(path))
    path.write_text("{}\n\ufeff{}\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"f\.jsonl:2: not valid JSON"):
        list(json_lines(path))
    path.write_text("[1]\n")
    with pytest.raises(UserError, match=r"f\.jsonl:1: a line must be a JSON object, found \[1\]"):
        list(json_lines(path))


def test_paths_values_and_foreign_failures() -> None:
    for path, reason in (
        ("a\0b", "NUL"),
        ("x" * 256, "256 bytes"),
        ("x/" * 3000, "5999|6000"),
        ("\udcff", "UTF-8"),
    ):
        with pytest.raises(UserError, match=rf"^train\.output = .*({reason})") as caught:
            check_path(path, "train.output")
        assert len(printable(str(caught.value)).encode()) < 300
    check_path("x" * 255, "out")
    assert len(shown("x" * 10**6)) <= 60 and shown(10**5000) == "a int" and shown(None) == "nothing"

    class Panic(BaseException):
        """As the tokenizers' panics: no Exception."""

    with pytest.raises(UserError, match=r"^here: does not load: lost$"), failures_of("here", "does not load"):
        raise Panic("lost")
    with pytest.raises(KeyboardInterrupt), failures_of("here", "x"):
        raise KeyboardInterrupt
