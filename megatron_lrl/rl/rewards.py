"""Verifiable rewards: functions of a response's text and its prompt's record.

A reward is any `function(text, record, **reward_args) -> float`, named "module:function" in data.reward;
the module must be importable (installed, or on PYTHONPATH). `text` is the decoded response without special
tokens, `record` the whole JSONL record of the prompt. A function that has a parameter `ids` also gets the
response's token ids (a list, the end-of-sequence id included), one that has `raw_text` the text of all of
them with special tokens. It may return a mapping: "reward", and further numbers that are logged by their names.

A function whose first parameter is called `texts`, or that has an attribute `batch` that is true, is called once
for all responses of a prompt: `function(texts, records)` (and `ids`, `raw_texts`), lists of one item a response, and
returns as many rewards. Any function may be asynchronous. The ones here read the expected answer from
record["answer"]: a string, a number, or a list of acceptable ones.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import math
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_lrl.errors import UserError
from megatron_lrl.reading import reason_of, shown
from megatron_lrl.rl.foreign import contained, stays
from megatron_lrl.rollout.types import Prompt

_NUMBER = re.compile(
    r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:[eE][-+]?\d+)?|[-+]?\.\d+(?:[eE][-+]?\d+)?"
)


SOLVED = 1.0
"""A response with at least this reward is right."""

FAILED = "failed"
"""Marks, among a response's parts, a reward that failed and counts as 0 (data.reward_errors = "zero")."""

_PART = re.compile(r"[A-Za-z_][\w.-]*")


@dataclass(frozen=True)
class Call:
    """What one call of the function judges: responses of one prompt, more than one only for a batch function."""

    prompt: Prompt
    texts: tuple[str, ...]
    ids: tuple[tuple[int, ...], ...]
    raw_texts: tuple[str, ...]


@dataclass(frozen=True)
class Score:
    """A response's reward and the further numbers that the function returned beside it; all finite."""

    reward: float
    parts: Mapping[str, float] = field(default_factory=dict)


class _Wrong(UserError):
    """What the function returned is no reward."""


class Reward:
    """A loaded reward function: called, and what it returns checked."""

    def __init__(self, name: str, function: Callable[..., Any], args: Mapping[str, Any]) -> None:
        self.name = name
        self.batch = _takes_batches(function)
        self._function = function
        self._args = dict(args)
        self._asked = _asked(function, args)

    def __call__(self, text: str, prompt: Prompt, ids: Sequence[int] = (), raw_text: str = "") -> float:
        """The reward of one response, finite.

        Raises UserError naming the group and the function otherwise.
        """
        call = Call(prompt, (text,), (tuple(ids),), (raw_text,))
        try:
            with stays(), contained():
                value = self.start(call)
                value = asyncio.run(_wait(value)) if inspect.isawaitable(value) else value
            return self.scores(call, value)[0].reward
        except KeyboardInterrupt:  # the user's own
            raise
        except BaseException as error:  # the user's own function may raise anything
            raise self.failure(call, error) from error

    def start(self, call: Call) -> Any:
        """What the function returns, an awaitable if it is asynchronous; raises whatever it raises."""
        if self.batch:
            first: list[Any] = [list(call.texts), [call.prompt.record] * len(call.texts)]
            offered: dict[str, Any] = {"ids": [list(i) for i in call.ids], "raw_texts": list(call.raw_texts)}
        else:
            first = [call.texts[0], call.prompt.record]
            offered = {"ids": list(call.ids[0]), "raw_text": call.raw_texts[0]}
        return self._function(*first, **{name: offered[name] for name in self._asked}, **self._args)

    def scores(self, call: Call, value: Any) -> list[Score]:
        """What the function returned, read: a score for every response. Raises UserError if it is none."""
        if not self.batch:
            return [self._score(value)]
        try:
            values = list(value)
        except TypeError:
            raise _Wrong(f"returned {shown(value)}; a batch function returns one reward a response") from None
        if len(values) != len(call.texts):
            raise _Wrong(f"returned {len(values)} rewards for {len(call.texts)} responses")
        return [self._score(one) for one in values]

    def failure(self, call: Call, error: BaseException | str) -> UserError:
        """An error, of whatever kind, under the names of the function and the group."""
        what = f" {error}"
        if isinstance(error, UserError) and not isinstance(error, _Wrong):
            what = f": {error}"
        elif isinstance(error, BaseException) and not isinstance(error, _Wrong):
            what = f" raised {type(error).__name__}: {reason_of(error)}"
        return UserError(f"reward {self.name} on group {call.prompt.id!r}{what}")

    def _score(self, value: Any) -> Score:
        if not isinstance(value, Mapping):
            return Score(_finite(value))
        if "reward" not in value:
            raise _Wrong(f'returned {shown(value)}; among named numbers there must be "reward"')
        parts = {}
        for name, number in value.items():
            if not isinstance(name, str) or not _PART.fullmatch(name) or name == FAILED:
                raise _Wrong(
                    f"returned a number named {shown(name)}; valid: letters, digits, _, . and -, "
                    f'a letter or _ first, not "{FAILED}"'
                )
            if name != "reward":
                parts[name] = _finite(number, f"{name} = ")
        return Score(_finite(value["reward"]), parts)


def _finite(value: Any, name: str = "") -> float:
    try:
        number = math.nan if isinstance(value, (str, bytes, bytearray)) else float(value)
    except Exception:  # a value of the user's own kind may raise anything, a huge integer overflows
        number = math.nan
    if not math.isfinite(number):
        raise _Wrong(f"returned {name}{shown(value)}; a reward must be a finite number")
    return number


async def _wait(value: Awaitable[Any]) -> Any:
    return await value


def _takes_batches(function: Callable[..., Any]) -> bool:
    """Whether a function judges all responses of a prompt at once: by its attribute `batch`, or its signature."""
    if isinstance(marked := getattr(function, "batch", None), bool):
        return marked
    try:
        return next(iter(inspect.signature(function).parameters), "") == "texts"
    except ValueError:  # some built-in functions have no signature
        return False


def load_reward(spec: str, args: Mapping[str, Any] | None = None) -> Reward:
    """Import "module:function" and bind `args` to it. Raises UserError naming data.reward or
    data.reward_args."""
    args = args or {}
    module_name, colon, function_name = spec.partition(":")
    if not (module_name and colon and function_name):
        raise UserError(f'data.reward = {spec!r} must be "module:function"')
    try:
        with stays(), contained():
            module = importlib.import_module(module_name)
    except KeyboardInterrupt:  # the user's own
        raise
    except BaseException as error:  # importing runs the user's module, which may raise anything
        raise UserError(
            f"data.reward = {spec!r}: cannot import {module_name}: it raised {type(error).__name__}: {reason_of(error)}"
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise UserError(f"data.reward = {spec!r}: {module_name} has no function {function_name}")
    try:
        inspect.signature(function).bind("", {}, **dict.fromkeys(_asked(function, args)), **args)
    except TypeError as error:
        raise UserError(
            f"data.reward_args: {spec} cannot be called as {function_name}"
            f"({'texts, records' if _takes_batches(function) else 'text, record'}"
            f"{''.join(f', {name}=...' for name in args)}): {error}"
        ) from None
    except ValueError:
        pass  # some built-in functions have no signature; calling them will tell
    return Reward(spec, function, args)


def _asked(function: Callable[..., Any], args: Mapping[str, Any]) -> tuple[str, ...]:
    """Which of `ids` and `raw_text` (of a batch: `raw_texts`) a function names beyond its first two parameters;
    `args` goes before."""
    try:
        # the first two are text and record, whatever they are called
        parameters = list(inspect.signature(function).parameters.values())[2:]
    except ValueError:  # some built-in functions have no signature
        return ()
    named = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    offered = ("ids", "raw_texts") if _takes_batches(function) else ("ids", "raw_text")
    return tuple(name for name in offered if name in named and name not in args)


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
