"""Verifiable rewards: functions of a response's text and its prompt's record.

A reward is any `function(text, record, **reward_args) -> float`, named "module:function" in data.reward;
the module must be importable (installed, or on PYTHONPATH). `text` is the decoded response without special
tokens, `record` the whole JSONL record of the prompt. A function that has a parameter `ids` also gets the
response's token ids (a list, the end-of-sequence id included), one that has `raw_text` the text of all of
them with special tokens. The ones here read the expected answer from record["answer"]: a string, a number,
or a list of acceptable ones.
"""

from __future__ import annotations

import importlib
import inspect
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

from megatron_lrl.errors import UserError
from megatron_lrl.reading import reason_of, shown
from megatron_lrl.rollout.types import Prompt

_NUMBER = re.compile(
    r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:[eE][-+]?\d+)?|[-+]?\.\d+(?:[eE][-+]?\d+)?"
)


class Reward:
    """A loaded reward; calling it checks what the function returns."""

    def __init__(self, name: str, function: Callable[..., Any], args: Mapping[str, Any]) -> None:
        self.name = name
        self._function = function
        self._args = dict(args)
        self._asked = _asked(function, args)

    def __call__(self, text: str, prompt: Prompt, ids: Sequence[int] = (), raw_text: str = "") -> float:
        """The reward of `text`, finite; the function gets `ids` and `raw_text` if its signature names them.

        Raises UserError naming the group and the function otherwise.
        """
        where = f"reward {self.name} on group {prompt.id!r}"
        offered = {"ids": list(ids), "raw_text": raw_text}
        with _foreign(where):
            value = self._function(
                text, prompt.record, **{name: offered[name] for name in self._asked}, **self._args
            )
        try:
            number = math.nan if isinstance(value, (str, bytes, bytearray)) else float(value)
        except Exception:  # a value of the user's own kind may raise anything, a huge integer overflows
            number = math.nan
        if not math.isfinite(number):
            raise UserError(f"{where} returned {shown(value)}; a reward must be a finite number")
        return number


@contextmanager
def _foreign(where: str) -> Iterator[None]:
    """The user's own code runs in the block: what it raises, `SystemExit` too, is a `UserError` beginning with
    ``where``; it ends no process of ours, and the working directory is afterwards what it was."""
    before, mine, leave = os.getcwd(), os.getpid(), os._exit

    def refuse(status: int) -> NoReturn:
        if os.getpid() != mine:  # a process that the function started
            leave(status)
        raise SystemExit(status)

    os._exit = refuse  # type: ignore[assignment]
    try:
        yield
    except UserError as error:
        raise UserError(f"{where}: {error}") from error
    except KeyboardInterrupt:  # the user's own
        raise
    except BaseException as error:
        raise UserError(f"{where} raised {type(error).__name__}: {reason_of(error)}") from error
    finally:
        os._exit = leave
        with suppress(OSError):
            os.chdir(before)


def load_reward(spec: str, args: Mapping[str, Any] | None = None) -> Reward:
    """Import "module:function" and bind `args` to it. Raises UserError naming data.reward or
    data.reward_args."""
    args = args or {}
    module_name, colon, function_name = spec.partition(":")
    if not (module_name and colon and function_name):
        raise UserError(f'data.reward = {spec!r} must be "module:function"')
    with _foreign(f"data.reward = {spec!r}: cannot import {module_name}: it"):
        module = importlib.import_module(module_name)
    function = getattr(module, function_name, None)
    if not callable(function):
        raise UserError(f"data.reward = {spec!r}: {module_name} has no function {function_name}")
    try:
        inspect.signature(function).bind("", {}, **dict.fromkeys(_asked(function, args)), **args)
    except TypeError as error:
        raise UserError(
            f"data.reward_args: {spec} cannot be called as {function_name}(text, record"
            f"{''.join(f', {name}=...' for name in args)}): {error}"
        ) from None
    except ValueError:
        pass  # some built-in functions have no signature; calling them will tell
    return Reward(spec, function, args)


def _asked(function: Callable[..., Any], args: Mapping[str, Any]) -> tuple[str, ...]:
    """Which of `ids` and `raw_text` a function names beyond its first two parameters; `args` goes before."""
    try:
        # the first two are text and record, whatever they are called
        parameters = list(inspect.signature(function).parameters.values())[2:]
    except ValueError:  # some built-in functions have no signature
        return ()
    named = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    return tuple(name for name in ("ids", "raw_text") if name in named and name not in args)


def exact_match(
    text: str, record: Mapping[str, Any], *, field: str = "answer", ignore_case: bool = False
) -> float:
    """1 if the text is an acceptable answer, white space at its ends aside; else 0."""
    given = _fold(text, ignore_case)
    return float(any(given == _fold(answer, ignore_case) for answer in _answers(record, field)))


def contains(
    text: str,
    record: Mapping[str, Any],
    *,
    field: str = "answer",
    ignore_case: bool = False,
    partial: float = 0.5,
) -> float:
    """1 if the text is an acceptable answer, `partial` if one merely occurs in it as a whole word, else 0."""
    if exact_match(text, record, field=field, ignore_case=ignore_case):
        return 1.0
    given = _fold(text, ignore_case)
    for answer in _answers(record, field):
        # Not \b: an answer may begin or end with a sign.
        if re.search(rf"(?<!\w){re.escape(_fold(answer, ignore_case))}(?!\w)", given):
            return partial
    return 0.0


def number(text: str, record: Mapping[str, Any], *, field: str = "answer", tolerance: float = 1e-6) -> float:
    """1 if the last number in the text equals an acceptable answer, else 0.

    "1,234.5" is one number. Equal means within `tolerance`, relative to the answer's size above 1, absolute
    below.
    """
    expected = []
    for answer in _answers(record, field):
        found = _NUMBER.fullmatch(answer.strip())
        if found is None:
            raise UserError(f"record[{field!r}] = {answer!r} is not a number")
        expected.append(_value(found.group()))
    given = _NUMBER.findall(text)
    if not given:
        return 0.0
    last = _value(given[-1])
    return float(any(abs(last - answer) <= tolerance * max(1.0, abs(answer)) for answer in expected))


def regex(
    text: str, record: Mapping[str, Any], *, pattern: str | None = None, field: str = "pattern"
) -> float:
    """1 if a regular expression is found in the text, else 0: `pattern`, or without it record[field]."""
    patterns = [pattern] if pattern is not None else _answers(record, field)
    try:
        return float(any(re.search(p, text) for p in patterns))
    except re.error as error:
        raise UserError(f"{patterns!r} is not a regular expression: {error}") from None


def _answers(record: Mapping[str, Any], field: str) -> list[str]:
    """The acceptable answers of a record as strings."""
    value = record.get(field)
    values = value if isinstance(value, list) else [value]
    usable = [v for v in values if isinstance(v, (str, int, float)) and not isinstance(v, bool)]
    if not usable or len(usable) < len(values):
        raise UserError(f"record[{field!r}] must be a string, a number or a list of them, found {value!r}")
    return [str(v) for v in usable]


def _fold(text: str, ignore_case: bool) -> str:
    text = text.strip()
    return text.casefold() if ignore_case else text


def _value(digits: str) -> float:
    return float(digits.replace(",", ""))
