"""Strategies of damaged input: a good file in which a value, a key or some bytes are replaced by what breaks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

DEEP = 100_000
# JSON text of values that are out of place, or that Python's own readers, printers or floats cannot take.
FRAGMENTS = (
    "null", "true", "[]", "{}", '""', "-1", "0", "0.5", "1e38", "1e999", "NaN", "-Infinity", "[[1]]", '{"a": 1}',
    "1" + "0" * 30, "-9223372036854775809", "18446744073709551616", "1" + "0" * 5000, '"\\ud83d"', '"\\u0000"',
    '{"\\udfff": 1}', '"../x"', '"' + "x" * 5000 + '"', "[" * DEEP, "[" * 150 + "]" * 150, '{"a":' * DEEP,
    '"\\u2028"', "[" + "0," * 500 + "0]", "9" * 18, "\x00", "",
)  # fmt: skip
TOML_FRAGMENTS = (
    "true", "[]", "{}", '""', "-1", "0", "0.5", "1e38", "1e999", "nan", "inf", "[[1]]", "{a = 1}", "1" + "0" * 30,
    "1" + "0" * 5000, "0x" + "f" * 40, '"\\u0000"', '"' + "x" * 5000 + '"', "[" * DEEP, "{a=" * DEEP,
    "[" * 150 + "]" * 150,
    "{" + "a." * DEEP + "b = 1}", "1979-05-27T07:32:00Z", "9999-99-99", '"\\ud83d"', "'''", "1_000", "9" * 18, "",
)  # fmt: skip
TEXTS = (
    *FRAGMENTS, "\ud83d", "a\x00b", "x" * 300, "/" + "x/" * 3000, "x" * 100_000, "\udcff", ".", "..", "", " ",
    "é" * 200, "a." * DEEP + "b",
)  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of all values inside a JSON value, itself included."""
    yield path
    if isinstance(value, dict):
        for key, item in value.items():
            yield from places(item, (*path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value[:3]):
            yield from places(item, (*path, index))


def with_fragment(value: Any, path: tuple[Any, ...], fragment: str) -> str:
    """JSON text of ``value`` with ``fragment`` in place of what stands at ``path``."""
    mark = "@here@"
    copy = json.loads(json.dumps([value]))
    holder = copy
    steps: tuple[Any, ...] = (0, *path)
    for step in steps[:-1]:
        holder = holder[step]
    holder[steps[-1]] = mark
    return json.dumps(copy[0]).replace(f'"{mark}"', fragment)


@st.composite
def damaged_json(draw: st.DrawFn, value: Any) -> bytes:
    """A JSON value with one to three values replaced, then perhaps `damaged_bytes`."""
    text = json.dumps(value)
    fragment = draw(st.sampled_from(FRAGMENTS))
    path = draw(st.sampled_from(list(places(value))))
    if draw(st.booleans()):
        key = draw(st.sampled_from(["__metadata__", "extra", "id", "shape", "x" * 5000, "\\ud83d"]))
        text = text[:-1] + f', "{key}": {fragment}' + text[-1:]
    else:
        text = with_fragment(value, path, fragment)
    return draw(damaged_bytes(text.encode())) if draw(st.booleans()) else text.encode()


@st.composite
def damaged_bytes(draw: st.DrawFn, content: bytes) -> bytes:
    """Cut, with a byte order mark, with bytes put in, or zeroed in part."""
    place = draw(st.integers(0, len(content)))
    kind = draw(st.sampled_from(["cut", "bom", "insert", "zero", "replace"]))
    if kind == "cut":
        return content[:place]
    if kind == "bom":
        return b"\xef\xbb\xbf" + content
    if kind == "insert":
        return content[:place] + draw(st.binary(min_size=1, max_size=8)) + content[place:]
    if kind == "zero":
        return content[:place] + b"\0" * (len(content) - place)
    return content[:place] + b"\xff" + content[place + 1 :]


@st.composite
def damaged_toml(draw: st.DrawFn, tables: dict[str, dict[str, str]]) -> bytes:
    """TOML tables (values as TOML text) with one value replaced, then perhaps `damaged_bytes`."""
    table = draw(st.sampled_from(sorted(tables)))
    key = draw(st.sampled_from([*tables[table], "x", "a." * 5 + "b"]))
    fragment = draw(st.sampled_from(TOML_FRAGMENTS))
    changed = {name: dict(keys) for name, keys in tables.items()}
    changed[table][key] = fragment
    text = "".join(
        f"[{name}]\n" + "".join(f"{k} = {v}\n" for k, v in keys.items()) for name, keys in changed.items()
    )
    return draw(damaged_bytes(text.encode())) if draw(st.booleans()) else text.encode()
