"""Read settings from TOML and `table.key=value` overrides; check them for a verb.

    CONFIG.toml ──────┐
                      ├─ merge ─> Config (megatron_lrl.settings) ─> check_* ─> the verbs
    table.key=value ──┘

Relative paths are taken relative to the current working directory, never to the config file's folder, so that
a path means the same in the file, in an override and in the shell.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import PydanticUndefined

from megatron_lrl.errors import UserError
from megatron_lrl.reading import (
    NotInFormat,
    check_depth,
    check_path,
    check_text,
    parse_toml,
    read_toml,
    shown,
)
from megatron_lrl.settings import Config
from megatron_lrl.table import Table

__all__ = [
    "Config",
    "check_train",
    "describe_settings",
    "differing_settings",
    "load_config",
]


_PATHS = (
    "model.hf",
    "model.checkpoint",
    "adapter.path",
    "train.output",
    "data.prompts",
    "rollout.trajectories",
    "eval.prompts",
    "lm.data",
    "lm.held_out",
)


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a TOML file, apply `table.key=value` overrides in order (the last one wins) and validate.

    An override's value is read as TOML; text that is not TOML stands for itself as a string, so that
    `train.output=runs/a` needs no quotes. Raises UserError naming every wrong key, where it was set and what
    would be valid.
    """
    tables = read_toml(path)
    source: dict[str, str] = {}
    for text in overrides:
        keys, value = _parse_override(text)
        _set(tables, keys, value, text)
        source[".".join(keys)] = text
    if isinstance(tables.get("model"), dict) and ("model.hf" in source) != ("model.checkpoint" in source):
        tables["model"].pop("checkpoint" if "model.hf" in source else "hf", None)
    try:
        config = Config.model_validate(tables)
    except ValidationError as error:
        # A default that depends on a wrong key could not be computed; the wrong key has its own error.
        wrong = [e for e in error.errors() if e["type"] != "default_factory_not_called"]
        problems = dict.fromkeys(_problem(e, str(path), source) for e in wrong)
        raise UserError("\n".join(problems)) from None
    for key in _PATHS:
        table, name = key.split(".")
        if (value := getattr(getattr(config, table), name)) is not None:
            check_path(value, key)
    return config


def describe_settings() -> str:
    """All tables and keys with what is valid, the default and the meaning; plain text for `--help`."""
    lines: list[str] = []
    for table, field in Config.model_fields.items():
        model = _table_of(field)
        lines += ["", f"[{table}]  {' '.join((model.__doc__ or '').split())}"]
        for key, setting in model.model_fields.items():
            lines.append(f"  {key:<20} {setting.description}")
            lines.append(f"  {'':<20} ({_valid(setting)}; default: {_default(key, setting)})")
    return "\n".join(lines[1:])


def check_train(config: Config) -> None:
    """Raise UserError unless the settings that only training needs are there and can teach anything."""
    lm = config.train.objective == "lm"
    if lm and config.lm.data is None:
        raise UserError(
            'train.objective = "lm" needs lm.data: a .txt or .jsonl file, or a Megatron indexed dataset'
        )
    if lm and config.lm.held_out is not None and config.lm.held_out == config.lm.data:
        raise UserError(f"lm.held_out = {config.lm.held_out} is lm.data itself; give other documents")
    recorded = config.rollout.source == "file"
    if not lm and recorded and config.rollout.trajectories is None:
        raise UserError('rollout.source = "file" needs rollout.trajectories: a JSONL file of groups')
    if not lm and not recorded and config.data.prompts is None:
        raise UserError("train needs data.prompts: a JSONL file of prompts")
    if not lm and recorded and config.prefix.max_staleness:
        raise UserError(
            'prefix.max_staleness keeps prefixes to sample from; rollout.source = "file" samples nothing: set it to 0'
        )
    if config.eval.prompts is not None:
        if lm:
            raise UserError(
                'eval.prompts is for train.objective = "grpo"; next-token training has lm.held_out'
            )
        trained = config.data.prompts
        if trained is not None and Path(config.eval.prompts).resolve() == Path(trained).resolve():
            raise UserError(
                f"eval.prompts = {config.eval.prompts} is data.prompts itself; give other prompts"
            )
    if config.train.output is None:
        raise UserError('train needs train.output: a folder for the run, for example "runs/name"')
    if config.model.dtype == "float64":
        raise UserError(
            'model.dtype = "float64" is for score and grad; the optimizer works in float32; '
            'valid for train: "float32", "bfloat16"'
        )
    if config.replay.use_recorded_routing and not (config.rollout.record_routing or recorded):
        raise UserError(
            "replay.use_recorded_routing = true: train samples its responses, so it needs rollout.record_routing = true"
        )
    if not lm and not recorded and config.rollout.group_size < 2:
        raise UserError(
            f'rollout.group_size = {config.rollout.group_size}: loss.advantage = "{config.loss.advantage}" '
            "compares the responses of a group and needs at least 2"
        )


# What may change when a run resumes: layout, execution settings that leave results alone, bookkeeping.
_MAY_CHANGE = (
    "parallel.",
    "replay.concurrent",
    "replay.chunk_size",
    "replay.share_tokens",
    "replay.logits_chunk",
    "replay.check_poison",
    "prefix.chunk_size",
    "rollout.decode_bytes",
    "train.updates",
    "train.save_every",
    "train.max_seconds",
    "train.output",
    "train.overwrite",
    "train.log_samples",
    "train.window_attempts",
    "train.on_nonfinite",
    "train.changed_inputs",
    "lm.held_out",
    "lm.eval_every",
    "data.reward_workers",
    "data.reward_timeout",
    "data.reward_retries",
    "data.reward_errors",
    "eval.",
)


def differing_settings(saved: Mapping[str, Any], config: Config) -> list[str]:
    """Dotted keys that make `config` another run than `saved`, a `model_dump(mode="json")` of its Config.

    A key that is younger than the saved run had its default then: what a setting adds is off unless asked for.
    """
    new = dict(_flatten(config.model_dump(mode="json")))
    old = {key: value for key, value in _defaults() if key in new} | dict(_flatten(saved))
    return sorted(
        key
        for key in old.keys() | new.keys()
        if not key.startswith(_MAY_CHANGE) and old.get(key) != new.get(key)
    )


def _defaults() -> Iterator[tuple[str, Any]]:
    """Dotted keys and defaults, as JSON gives them back."""
    for table, field in Config.model_fields.items():
        for key, setting in _table_of(field).model_fields.items():
            if setting.default is not PydanticUndefined:
                yield f"{table}.{key}", json.loads(json.dumps(setting.default))


def _flatten(tables: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for table, keys in tables.items():
        for key, value in keys.items():
            yield f"{table}.{key}", value


def _parse_override(text: str) -> tuple[list[str], Any]:
    name, equals, raw = text.partition("=")
    keys = name.strip().split(".")
    if not equals or len(keys) < 2 or not all(keys):
        raise UserError(f"override {text!r} is not table.key=value, for example train.updates=3")
    where = f"override {shown(text)}"
    check_text(text, where)
    check_depth(len(keys), where)
    try:
        parsed = parse_toml(f"value = {raw.strip()}", where)
    except NotInFormat:
        return keys, raw.strip()
    # A line break in the text could smuggle in more keys: then it is not one value but a string.
    return keys, parsed["value"] if parsed.keys() == {"value"} else raw


def _set(tables: dict[str, Any], keys: list[str], value: Any, text: str) -> None:
    for depth, key in enumerate(keys[:-1], start=1):
        tables = tables.setdefault(key, {})
        if not isinstance(tables, dict):
            raise UserError(f"override {text!r}: {'.'.join(keys[:depth])} has a value and is not a table")
    tables[keys[-1]] = value


def _table_of(field: Any) -> type[Table]:
    assert issubclass(field.annotation, Table)
    return field.annotation


def _default(key: str, setting: Any) -> str:
    """A setting's default as a config file would write it."""
    if setting.default is PydanticUndefined:
        return "true if tp > 1" if key == "sequence_parallel" else "{}"
    if setting.default is None:
        return "unset"
    return json.dumps(setting.default)


def _valid(setting: Any) -> str:
    """What a setting accepts, in words."""
    kinds = {
        int: "integer",
        float: "number",
        bool: "true or false",
        str: "string",
        str | None: "string",
        int | None: "integer",
        tuple[float, float]: "two numbers",
        tuple[str, ...]: "list of strings",
        dict[str, Any]: "table",
    }
    kind = kinds.get(setting.annotation)
    if kind is None:
        return "one of " + ", ".join(f'"{choice}"' for choice in setting.annotation.__args__)
    signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    bounds = [
        f"{sign} {getattr(rule, name)}"
        for rule in setting.metadata
        for name, sign in signs.items()
        if getattr(rule, name, None) is not None
    ]
    if any(getattr(rule, "min_length", None) for rule in setting.metadata):
        kind = "non-empty " + kind
    if any(getattr(rule, "pattern", None) for rule in setting.metadata):
        kind += ' "module:function"'
    return " ".join([kind, " and ".join(bounds)]).strip()


def _problem(error: Any, path: str, source: Mapping[str, str]) -> str:
    """One validation error as a line: where it was set, the key, what was found, what would be valid."""
    loc = [str(part) for part in error["loc"]]
    key = ".".join(loc[:2])
    where = next(
        (
            f"override {text!r}"
            for name, text in reversed(list(source.items()))
            if name == key or name.startswith(f"{key}.")
        ),
        path,
    )
    if error["type"] == "value_error":  # from a validator, whose message names its keys
        used = ", ".join(source.values())
        return f"{path}{f' with overrides {used}' if used else ''}: {error['ctx']['error']}"
    fields: Mapping[str, Any] = Config.model_fields
    if error["type"] == "extra_forbidden":
        names = list(fields) if len(loc) == 1 else list(_table_of(fields[loc[0]]).model_fields)
        prefix = "" if len(loc) == 1 else f"{loc[0]}."
        close = difflib.get_close_matches(loc[-1], names, n=1)
        if not close:  # right key, wrong table
            close = [f"{t}.{loc[-1]}" for t, f in fields.items() if loc[-1] in _table_of(f).model_fields][:1]
            prefix = "" if close else prefix
        hint = f"did you mean {prefix}{close[0]}? " if close else ""
        return f"{where}: unknown key {key}; {hint}valid: {', '.join(names)}"
    if len(loc) == 1:
        return f"{where}: {key} must be a table [{key}], found {error['input']!r}"
    setting = _table_of(fields[loc[0]]).model_fields[loc[1]]
    found = error["input"]
    return f"{where}: {key} expects {_valid(setting)}, found {found!r} ({type(found).__name__})"
