"""Text of a prompt record to token ids: plain text, and messages through the tokenizer's chat template.

A template is a program that came with the model, a tokenizer one that came from elsewhere: whatever they raise becomes
one message with file and line.
"""

from __future__ import annotations

import difflib
import functools
import queue
import threading
from collections.abc import Callable, Mapping
from typing import Any

from megatron_lrl.errors import UserError
from megatron_lrl.reading import failures_of
from megatron_lrl.reading import shown as _short

TEMPLATE_ARGS = "chat_template_args"
"""Key of a record with arguments for the template; they go before those of the run."""
_LONGEST_TEMPLATE, _LONGEST_TEXT = 1 << 20, 1 << 26  # characters
_LONGEST_SECONDS = 10.0
_TAKEN = ("messages", "tools", TEMPLATE_ARGS)
_GIVEN = frozenset({"add_generation_prompt"})  # what transformers gives every template, beside special tokens


def encode_text(text: Any, where: str, tokenizer: Any) -> list[int]:
    """Ids of a plain-text prompt, with the special tokens that the tokenizer adds. Raises UserError (file:line)."""
    if not isinstance(text, str):
        raise UserError(f'{where}: "prompt" must be a string, found {_short(text)}')
    with failures_of(where, 'the tokenizer refused "prompt"'):
        return list(tokenizer.encode(text))


def encode_messages(
    record: Mapping[str, Any],
    where: str,
    tokenizer: Any,
    system_prompt: str | None,
    template_args: Mapping[str, Any],
) -> list[int]:
    """Ids of record["messages"], ending where the assistant's answer begins.

    record["tools"] and record["chat_template_args"] go to the template. Content may be a list of text parts, which are
    joined, and null beside "tool_calls". Raises UserError (file:line), also for a key that the template would read if
    it stood among its arguments.
    """
    messages = [_message(m, f'{where}: "messages"[{i}]') for i, m in enumerate(_list(record, where))]
    args = dict(template_args)
    own = record.get(TEMPLATE_ARGS)
    if own is not None and not isinstance(own, dict):
        raise UserError(f'{where}: "{TEMPLATE_ARGS}" must be an object, found {_short(own)}')
    args |= own or {}
    tools = record.get("tools")
    if tools is not None:
        if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
            raise UserError(f'{where}: "tools" must be a list of objects, found {_short(tools)}')
        args["tools"] = tools
    if getattr(tokenizer, "chat_template", None) is None:
        raise UserError(
            f'{where}: "messages" need a chat template, and the tokenizer has none; give "prompt"'
        )
    if system_prompt is not None and all(message["role"] != "system" for message in messages):
        messages = [{"role": "system", "content": system_prompt}, *messages]
    with failures_of(where, 'the chat template refused "messages"'):
        template = tokenizer.get_chat_template(args.get("chat_template"), args.get("tools"))
        if len(template) > _LONGEST_TEMPLATE:
            raise ValueError(f"the template has {len(template)} characters; valid: {_LONGEST_TEMPLATE}")
        variables = _variables(template) - _GIVEN - tokenizer.special_tokens_map.keys()
        _refuse_unread(record, variables, where)
        text = _rendered(
            lambda: tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True, **args
            )
        )
    with failures_of(where, 'the tokenizer refused "messages"'):
        # The template writes the special tokens itself.
        return list(tokenizer.encode(text, add_special_tokens=False))


def _rendered(render: Callable[[], str]) -> str:
    """What a template makes, within limits of time and size.

    Nothing can end a program that only counts: its thread is left behind, and does not keep the process waiting.
    """
    outcome: queue.SimpleQueue[str | BaseException] = queue.SimpleQueue()

    def call() -> None:
        try:
            outcome.put(render())
        except BaseException as error:  # a template may raise anything
            outcome.put(error)

    threading.Thread(target=call, daemon=True, name="chat template").start()
    try:
        text = outcome.get(timeout=_LONGEST_SECONDS)
    except queue.Empty:
        raise ValueError(f"it took longer than {_LONGEST_SECONDS:g} s; does it loop?") from None
    if isinstance(text, BaseException):
        raise text
    if len(text) > _LONGEST_TEXT:
        raise ValueError(f"it made {len(text)} characters; valid: at most {_LONGEST_TEXT}")
    return text


def _list(record: Mapping[str, Any], where: str) -> list[Any]:
    messages = record["messages"]
    if not isinstance(messages, list) or not messages:
        raise UserError(f'{where}: "messages" must be a non-empty list, found {_short(messages)}')
    return messages


def _message(message: Any, where: str) -> dict[str, Any]:
    """A message as templates expect it: its content a string, or null beside tool calls."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise UserError(f'{where} must have the strings "role" and "content", found {_short(message)}')
    calls = message.get("tool_calls")
    if calls is not None and (not isinstance(calls, list) or not all(isinstance(c, dict) for c in calls)):
        raise UserError(f'{where}: "tool_calls" must be a list of objects, found {_short(calls)}')
    content = message.get("content")
    if isinstance(content, str) or (content is None and calls):
        return message
    if isinstance(content, list) and content:
        parts = []
        for index, part in enumerate(content):
            if (
                not isinstance(part, dict)
                or part.get("type") != "text"
                or not isinstance(part.get("text"), str)
            ):
                raise UserError(
                    f'{where}: "content"[{index}] must be {{"type": "text", "text": "..."}}, found {_short(part)}'
                )
            parts.append(part["text"])
        return {**message, "content": "".join(parts)}
    raise UserError(
        f'{where} must have the strings "role" and "content" (content may be a list of text parts, or null beside '
        f'"tool_calls"), found {_short(message)}'
    )


def _refuse_unread(record: Mapping[str, Any], variables: frozenset[str], where: str) -> None:
    """Name a key that the template could have meant: it would be ignored where it stands."""
    if record.get("tools") and "tools" not in variables:
        raise UserError(f'{where}: "tools" would be lost: the chat template does not read them')
    for key in record:
        if key in _TAKEN:
            continue
        if key in variables:
            raise UserError(
                f'{where}: the chat template reads "{key}", but not from there; put it into "{TEMPLATE_ARGS}", '
                "or rename it if it is for the reward"
            )
        absent = [name for name in _TAKEN if name not in record]
        if close := difflib.get_close_matches(key.lower(), absent, n=1, cutoff=0.8):
            raise UserError(f'{where}: unknown key "{key}"; did you mean "{close[0]}"?')


@functools.lru_cache(maxsize=8)
def _variables(template: str) -> frozenset[str]:
    """Names that a template reads from outside."""
    from jinja2 import meta
    from transformers.utils.chat_template_utils import _compile_jinja_template

    # transformers' own environment: it has tags and functions that jinja's has not
    environment = _compile_jinja_template(template).environment
    return frozenset(meta.find_undeclared_variables(environment.parse(template)) - environment.globals.keys())
