"""Prompts and trajectories as JSON lines: streamed in, validated line by line, written atomically.

    prompts.jsonl ──────> read_prompts ─────> Prompt    (tokenised here, once; ids from then on)
    trajectories.jsonl ─> read_trajectories ─> Group  ─> write_jsonl(group_record(...))

Every UserError names file:line and the field. Token ids are checked against the vocabulary and lengths
against the model's positions here, so that nothing behind this door has to.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import json
import math
import os
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_lrl.errors import UserError
from megatron_lrl.experts.record import RoutingShape, routing_of
from megatron_lrl.reading import json_lines
from megatron_lrl.reading import shown as _short
from megatron_lrl.rollout.chat import encode_messages, encode_text
from megatron_lrl.rollout.types import Group, Prompt, Response

# Log-probabilities are at most 0; low-precision samplers overshoot by their rounding.
_LOGPROB_SLACK = 1e-2
_PROMPT_FORMS = ("prompt_ids", "prompt", "messages")


@dataclass(frozen=True)
class Limits:
    """What a model can take: ids are below vocab_size; max_positions (None = any) bounds prompt +
    response."""

    vocab_size: int
    max_positions: int | None = None
    routing: RoutingShape | None = None  # of a model with experts


def read_prompts(
    path: str | Path,
    limits: Limits,
    *,
    tokenizer: Any = None,
    max_new_tokens: int = 0,
    system_prompt: str | None = None,
    chat_template_args: Mapping[str, Any] | None = None,
) -> Iterator[Prompt]:
    """Stream prompts. A record has exactly one of

    - "prompt_ids": token ids;
    - "prompt": text, encoded as it stands (with the special tokens that the tokenizer adds to plain text);
    - "messages": [{"role": ..., "content": ...}, ...], rendered by the tokenizer's chat template with a
      generation prompt (see `chat.encode_messages`); `system_prompt` is put first if there is no system message;
      `chat_template_args`, the record's own and its "tools" go to the template.

    "id" is optional: without it a prompt is called after its line ("line-7"). All other keys are for the
    reward. `tokenizer` is a transformers tokenizer, needed for text and messages. prompt + max_new_tokens
    must fit limits.max_positions. Raises UserError (file:line), also for a file without prompts.
    """
    seen: dict[str, int] = {}
    for line, record in json_lines(path):
        where = f"{path}:{line}"
        name = _identifier(record, where, seen, line, default=f"line-{line}")
        forms = [form for form in _PROMPT_FORMS if form in record]
        if len(forms) != 1:
            raise UserError(
                f"{where}: give exactly one of {', '.join(_PROMPT_FORMS)}; found {forms or 'none'}"
            )
        form = forms[0]
        if form == "prompt_ids":
            encoded = record[form]
        elif tokenizer is None:
            raise UserError(
                f'{where}: "{form}" needs a tokenizer, and the model comes without one; give "prompt_ids"'
            )
        elif form == "prompt":
            encoded = encode_text(record[form], where, tokenizer)
        else:
            encoded = encode_messages(record, where, tokenizer, system_prompt, chat_template_args or {})
        prompt_ids = _ids(encoded, where, form, limits)
        _check_length(len(prompt_ids), max_new_tokens, where, "rollout.max_new_tokens", limits)
        yield Prompt(id=name, prompt_ids=prompt_ids, record=record)
    if not seen:
        raise UserError(f"{path} holds no prompts")


def read_trajectories(path: str | Path, limits: Limits) -> Iterator[Group]:
    """Stream groups, one a line:

        {"id": "g0", "prompt_ids": [...], "version": 0,
         "responses": [{"ids": [...], "reward": 1.0, "reward_parts": {"name": 0.5}, "logprobs": [...],
                        "advantage": 0.5, "mask": [...], "routing": {...}}]}

    version (how many updates the policy that sampled had seen; 0), reward, reward_parts, logprobs, advantage (a
    number, or one per token), mask (1: the policy chose the token; 0: it is only fed) and routing (see
    `experts.record`) are optional; other keys are ignored, unless they look like a misspelling of these. What logprobs
    and advantage hold where the mask is 0 is ignored, null is fine.

    Raises UserError (file:line) for malformed JSON, a missing or wrong field, an empty prompt or response, an id
    outside the vocabulary, numbers that are not finite, values that are not one per token, a response that scores
    nothing, a duplicate group id, prompt + response longer than limits.max_positions, and a file without groups.
    """
    seen: dict[str, int] = {}
    for line, record in json_lines(path):
        where = f"{path}:{line}"
        _refuse_misspellings(record, ("id", "prompt_ids", "responses", "version"), where)
        name = _identifier(record, where, seen, line, default=None)
        prompt_ids = _ids(record.get("prompt_ids"), where, "prompt_ids", limits)
        listed = record.get("responses")
        if not isinstance(listed, list) or not listed:
            raise UserError(f'{where}: "responses" must be a non-empty list, found {_short(listed)}')
        responses = []
        for index, item in enumerate(listed):
            at = f"{where}: responses[{index}]"
            responses.append(_response(item, at, limits))
            _check_length(len(prompt_ids), len(responses[-1].ids), at, "the response", limits)
        yield Group(name, prompt_ids, tuple(responses), _version(record.get("version", 0), where))
    if not seen:
        raise UserError(f"{path} holds no groups")


def group_record(group: Group) -> dict[str, Any]:
    """The JSON object of a group, as read_trajectories reads it; unknown rewards and the like are left
    out."""
    responses = []
    for response in group.responses:
        item: dict[str, Any] = {"ids": list(response.ids)}
        if response.reward is not None:
            item["reward"] = response.reward
        if response.reward_parts:
            item["reward_parts"] = dict(response.reward_parts)
        if response.logprobs is not None:
            item["logprobs"] = list(response.logprobs)
        if response.advantage is not None:
            advantage = response.advantage
            item["advantage"] = list(advantage) if isinstance(advantage, tuple) else advantage
        if response.mask is not None:
            item["mask"] = list(response.mask)
        if response.routing is not None:
            item["routing"] = response.routing.to_json()
        responses.append(item)
    version = {"version": group.version} if group.version else {}
    return {"id": group.id, "prompt_ids": list(group.prompt_ids), **version, "responses": responses}


def write_jsonl(path: str | Path, records: Iterable[Mapping[str, Any]]) -> int:
    """Write one JSON object a line and return their number. The file appears complete or not at all.

    Raises UserError if the folder cannot be written to, ValueError for NaN or infinity, which JSON does not
    have.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    count = 0
    try:
        with temporary.open("w", encoding="utf-8") as file:
            for record in records:
                file.write(json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n")
                count += 1
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()
    return count


def write_trajectories(path: str | Path, groups: Iterable[Group]) -> int:
    """Write groups as read_trajectories reads them; see write_jsonl."""
    return write_jsonl(path, (group_record(group) for group in groups))


def prompts_at(
    prompts: Sequence[Prompt], position: int, count: int, *, shuffle: bool, seed: int
) -> list[Prompt]:
    """The `count` prompts from `position` on in an endless pass over `prompts`; a pure function of its
    arguments.

    A run that resumes needs only its position. With `shuffle` every epoch has its own order, drawn from
    seed and epoch; each prompt still comes once per epoch.
    """
    if not prompts:
        raise ValueError("no prompts")
    chosen = []
    for index in range(position, position + count):
        epoch, offset = divmod(index, len(prompts))
        chosen.append(prompts[_order(len(prompts), seed, epoch)[offset] if shuffle else offset])
    return chosen


@functools.lru_cache(maxsize=4)
def _order(size: int, seed: int, epoch: int) -> tuple[int, ...]:
    order = list(range(size))
    random.Random(f"{seed}/{epoch}").shuffle(order)  # a string seed hashes alike on every machine
    return tuple(order)


def _identifier(
    record: Mapping[str, Any], where: str, seen: dict[str, int], line: int, default: str | None
) -> str:
    name = record.get("id", default)
    if isinstance(name, int) and not isinstance(name, bool):
        name = str(name)
    if not isinstance(name, str) or not name:
        raise UserError(f'{where}: "id" must be a non-empty string, found {_short(name)}')
    if name in seen:
        raise UserError(f'{where}: "id" {name!r} was already used in line {seen[name]}')
    seen[name] = line
    return name


def _ids(value: Any, where: str, field: str, limits: Limits) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise UserError(f'{where}: "{field}" must be a list of token ids, found {_short(value)}')
    if not value:
        raise UserError(f'{where}: "{field}" is empty; at least one token is needed')
    for index, token in enumerate(value):
        if not isinstance(token, int) or isinstance(token, bool):
            raise UserError(f'{where}: "{field}"[{index}] must be an integer, found {_short(token)}')
        if not 0 <= token < limits.vocab_size:
            raise UserError(
                f'{where}: "{field}"[{index}] = {token} is outside the vocabulary; '
                f"valid: 0 to {limits.vocab_size - 1}"
            )
    return tuple(value)


def _response(item: Any, where: str, limits: Limits) -> Response:
    if not isinstance(item, dict):
        raise UserError(f"{where} must be an object, found {_short(item)}")
    _refuse_misspellings(
        item, ("ids", "reward", "reward_parts", "logprobs", "advantage", "mask", "routing"), where
    )
    ids = _ids(item.get("ids"), where, "ids", limits)
    mask = _mask(item.get("mask"), len(ids), where)
    logprobs = item.get("logprobs")
    if logprobs is not None:
        logprobs = _per_token(logprobs, len(ids), mask, where, "logprobs")
        if max(logprobs) > _LOGPROB_SLACK:
            raise UserError(
                f'{where}: "logprobs" must be at most 0 (natural logarithms), found {max(logprobs)}'
            )
    reward, advantage = item.get("reward"), item.get("advantage")
    if reward is not None:
        reward = _number(reward, where, '"reward"')
    if isinstance(advantage, list):
        advantage = _per_token(advantage, len(ids), mask, where, "advantage")
    elif advantage is not None:
        advantage = _number(advantage, where, '"advantage"')
    routing = None
    if item.get("routing") is not None:
        routing = routing_of(item["routing"], len(ids), where, limits.routing)
    parts = item.get("reward_parts") or {}
    if not isinstance(parts, dict):
        raise UserError(f'{where}: "reward_parts" must be an object of numbers, found {_short(parts)}')
    parts = {name: _number(value, where, f'"reward_parts"[{_short(name)}]') for name, value in parts.items()}
    return Response(ids, reward, logprobs, advantage, routing, mask, parts)


def _version(value: Any, where: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise UserError(f'{where}: "version" must be a number of updates, 0 or more, found {_short(value)}')
    return value


def _mask(value: Any, tokens: int, where: str) -> tuple[int, ...] | None:
    """A response's mask; None if it chose every token."""
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != tokens:
        found = f"{len(value)} values" if isinstance(value, list) else _short(value)
        raise UserError(f'{where}: "mask" must hold one value per token ({tokens}), found {found}')
    for index, one in enumerate(value):
        if isinstance(one, bool) or one not in (0, 1) or not isinstance(one, int):
            raise UserError(f'{where}: "mask"[{index}] must be 0 or 1, found {_short(one)}')
    if not any(value):
        raise UserError(f'{where}: "mask" is 0 for every token; a response needs at least one that is scored')
    return None if all(value) else tuple(value)


def _per_token(
    value: Any, tokens: int, mask: tuple[int, ...] | None, where: str, field: str
) -> tuple[float, ...]:
    """One number a token; 0 where the mask is 0, whatever stands there."""
    if not isinstance(value, list) or len(value) != tokens:
        found = f"{len(value)} values" if isinstance(value, list) else _short(value)
        raise UserError(f'{where}: "{field}" must hold one value per token ({tokens}), found {found}')
    return tuple(
        0.0 if mask is not None and not mask[i] else _number(one, where, f'"{field}"[{i}]')
        for i, one in enumerate(value)
    )


def _number(value: Any, where: str, field: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise UserError(f"{where}: {field} must be a number, found {_short(value)}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise UserError(f"{where}: {field} must be finite, found {number}")
    return number


def _check_length(prompt: int, response: int, where: str, what: str, limits: Limits) -> None:
    if limits.max_positions is not None and prompt + response > limits.max_positions:
        raise UserError(
            f"{where}: {prompt} prompt tokens + {response} tokens of {what} exceed the model's "
            f"{limits.max_positions} positions"
        )


def _refuse_misspellings(record: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    for key in record:
        absent = [name for name in known if name not in record]
        close = [] if key in known else difflib.get_close_matches(key.lower(), absent, n=1, cutoff=0.85)
        if close:
            raise UserError(f'{where}: unknown key "{key}"; did you mean "{close[0]}"?')
