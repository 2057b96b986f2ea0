"""Claim: every reader of data from outside accepts what it is given or raises one line; never anything else.

Why the tests show it: a good file of each kind is damaged by hypothesis (values out of place, thousands of digits and
brackets, lone surrogates, bytes cut, zeroed or put in) and given to the reader that the program uses. A reader that
promises a fallback (the journal) must print a line instead. By default some dozens of cases each; 1,000 under `slow`.
Not shown: that an accepted file means what its author thought; files whose damage only other files show.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracle.tiny_models import make_hf_dir

from megatron_lrl.checkpoint.completion import check_completion
from megatron_lrl.checkpoint.manifest import read_manifest
from megatron_lrl.checkpoint.safetensors_io import SafetensorsReader, read_header
from megatron_lrl.checkpoint.training import read_progress
from megatron_lrl.config import load_config
from megatron_lrl.errors import UserError
from megatron_lrl.models.hf_config import read_architecture
from megatron_lrl.reading import check_path
from megatron_lrl.rl.lm_data import load_corpus
from megatron_lrl.rollout.data import Limits, read_prompts, read_trajectories
from megatron_lrl.rollout.journal import Journal, Recorded
from megatron_lrl.rollout.text import Text
from megatron_lrl.rollout.types import Group, Prompt, Response
from megatron_lrl.settings import LmTable
from megatron_lrl.tracking import read_metrics
from reading.nasty import TEXTS, damaged_bytes, damaged_json, damaged_toml

QUICK, MANY = 40, 1000
TABLES = {
    "model": {"hf": '"m"', "dtype": '"float32"'},
    "train": {"updates": "3", "seed": "1", "output": '"o"'},
    "optimizer": {"lr": "1e-3", "betas": "[0.9, 0.95]"},
    "data": {"prompts": '"p.jsonl"', "reward_args": "{x = 1}"},
}
PROMPT = {"id": "p", "prompt_ids": [1, 2, 3], "answer": "x"}
MESSAGES = {"messages": [{"role": "user", "content": "hello"}]}
GROUP = {
    "id": "g",
    "prompt_ids": [1, 2],
    "responses": [{"ids": [3, 4], "reward": 1.0, "logprobs": [-1.0, -0.5], "advantage": 0.5, "mask": [1, 0]}],
}
METRICS = {"update": 0, "reward/mean": 0.5, "samples": ["a"]}
TOKENIZER = {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "added_tokens": [],
    "normalizer": None,
    "pre_tokenizer": {"type": "Whitespace"},
    "post_processor": None,
    "decoder": None,
    "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1, "<unk>": 2}, "unk_token": "<unk>"},
}


@dataclass(frozen=True)
class Case:
    """How a kind of file is damaged, and the reader it is given to in a folder that already holds ``others``."""

    content: st.SearchStrategy[bytes]
    name: str
    read: Callable[[Path], Any]  # of the folder
    others: dict[str, bytes]


def dumps(value: Any) -> bytes:
    return json.dumps(value).encode()


def lines(*values: Any) -> st.SearchStrategy[bytes]:
    """Files of JSON lines in which one of the records is damaged."""
    before = b"".join(dumps(value) + b"\n" for value in values[:-1])
    return damaged_json(values[-1]).map(lambda raw: before + raw + b"\n")


def header(value: Any) -> bytes:
    raw = value if isinstance(value, bytes) else dumps(value)
    return len(raw).to_bytes(8, "little") + raw + bytes(24)


RECORDS = {
    "__metadata__": {"format": "pt"},
    "a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]},
    "b": {"dtype": "BF16", "shape": [4], "data_offsets": [16, 24]},
}
INDEX = {"metadata": {"total_size": 24}, "weight_map": {"a": "x.safetensors", "b": "x.safetensors"}}
LIMITS = Limits(100, 64)
LM = {"sequence_length": 8}


def _journal(folder: Path) -> Journal:
    (folder / "c.toml").write_text('[model]\nhf = "m"\n')
    return Journal(folder, load_config(folder / "c.toml"))


def _recall(folder: Path) -> Recorded | None:
    """The journal promises to sample again: it never raises."""
    path = folder / "journal" / "update-000000.jsonl"
    path.parent.mkdir(exist_ok=True)
    shutil.copyfile(folder / "journal.jsonl", path)
    try:
        return _journal(folder).recall(0, [Prompt("p", (1, 2), {})])
    except UserError as error:
        raise AssertionError(f"the journal raised {error}") from error


def _written_journal() -> list[Any]:
    """A good journal's records, and what ends it left out."""
    with tempfile.TemporaryDirectory() as place:
        journal = _journal(Path(place))
        group = Group("p", (1, 2), (Response((3, 4), 1.0, (-1.0, -0.5)),))
        journal.record(0, Recorded((group,), 1.5))
        return [json.loads(line) for line in journal.path(0).read_bytes().splitlines()[:-1]]


def _sealed(raw: bytes) -> bytes:
    """With a checksum that agrees: damage behind it must be found by itself."""
    return raw + dumps({"sha256": hashlib.sha256(raw).hexdigest()}) + b"\n"


def _manifest() -> dict[str, Any]:
    return {
        "format_version": 1,
        "fingerprint": "f",
        "architecture": {"family": "llama"},
        "dtype": "float32",
        "source": {
            "indexed": False,
            "metadata": {"model.safetensors": {"format": "pt"}},
            "index_metadata": {},
            "tensors": [["a", "model.safetensors", "F32", [2, 2]]],
        },
    }


TRAINING = {
    "format_version": 1,
    "model_version": 2,
    "optimizer_step": 1,
    "scheduler_steps": 1,
    "dtype": "float32",
    "layout": {"tp": 1},
    "rng_bytes": 10,
    "progress": {"update": 1},
}
COMPLETE = {"format_version": 1, "files": {"a": {"bytes": 1, "sha256": "0" * 64}}}


def _config_json() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as place:
        path = make_hf_dir(Path(place) / "m", "llama", 1, vocab=61, layers=1, hidden=16, intermediate=16)
        return dict(json.loads((path / "config.json").read_text()))


def cases() -> dict[str, Case]:
    config = _config_json()
    first, *groups = _written_journal()
    corpus = {"tokenizer": None, "vocab_size": 100, "max_positions": 64, "seed": 0, "shuffle": False}
    return {
        "settings": Case(damaged_toml(TABLES), "c.toml", lambda f: load_config(f / "c.toml"), {}),
        "config.json": Case(damaged_json(config), "config.json", read_architecture, {}),
        "generation_config.json": Case(
            damaged_json({"eos_token_id": [1, 2]}), "generation_config.json", Text, {}
        ),
        "tokenizer.json": Case(
            damaged_json(TOKENIZER), "tokenizer.json", Text, {"config.json": dumps(config)}
        ),
        "tokenizer_config.json": Case(
            damaged_json({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "b"}),
            "tokenizer_config.json",
            Text,
            {"tokenizer.json": dumps(TOKENIZER), "config.json": dumps(config)},
        ),
        "safetensors header": Case(
            damaged_json(RECORDS).map(header), "x.safetensors", lambda f: read_header(f / "x.safetensors"), {}
        ),
        "safetensors bytes": Case(
            damaged_bytes(header(RECORDS)), "x.safetensors", lambda f: read_header(f / "x.safetensors"), {}
        ),
        "safetensors index": Case(
            damaged_json(INDEX),
            "model.safetensors.index.json",
            SafetensorsReader,
            {"x.safetensors": header(RECORDS)},
        ),
        "journal": Case(lines(first, *groups).map(_sealed), "journal.jsonl", _recall, {}),
        "journal header": Case(
            damaged_json(first).map(lambda raw: _sealed(raw + b"\n" + dumps(groups[0]) + b"\n")),
            "journal.jsonl",
            _recall,
            {},
        ),
        "journal bytes": Case(
            damaged_bytes(_sealed(dumps(first) + b"\n" + dumps(groups[0]) + b"\n")),
            "journal.jsonl",
            _recall,
            {},
        ),
        "metrics": Case(lines(METRICS, {**METRICS, "update": 1}), "metrics.jsonl", read_metrics, {}),
        "manifest": Case(damaged_json(_manifest()), "megatron_lrl.json", read_manifest, {}),
        "training.json": Case(damaged_json(TRAINING), "training.json", read_progress, {}),
        "complete.json": Case(damaged_json(COMPLETE), "complete.json", check_completion, {"a": b"x"}),
        "trajectories": Case(
            lines({**GROUP, "id": "f"}, GROUP),
            "t.jsonl",
            lambda f: list(read_trajectories(f / "t.jsonl", LIMITS)),
            {},
        ),
        "prompts": Case(
            lines(PROMPT, PROMPT), "p.jsonl", lambda f: list(read_prompts(f / "p.jsonl", LIMITS)), {}
        ),
        "messages": Case(
            lines(PROMPT, MESSAGES), "p.jsonl", lambda f: list(read_prompts(f / "p.jsonl", LIMITS)), {}
        ),
        "lm documents": Case(
            lines({"ids": [1, 2, 3]}, {"ids": [4, 5]}),
            "d.jsonl",
            lambda f: load_corpus(LmTable(data=str(f / "d.jsonl"), **LM), **corpus),
            {},
        ),
        "lm index": Case(
            damaged_bytes(b"MMIDIDX\x00\x00" + bytes(64)),
            "d.idx",
            lambda f: load_corpus(LmTable(data=str(f / "d"), **LM), **corpus),
            {"d.bin": bytes(64)},
        ),
    }


CASES = cases()


def accepted_or_one_line(case: Case, content: bytes, folder: Path) -> None:
    """Gives the damaged file to its reader."""
    for name, other in case.others.items():
        (folder / name).write_bytes(other)
    (folder / case.name).write_bytes(content)
    try:
        case.read(folder)
    except UserError as error:
        message = str(error)
        assert message and len(message) < 4000, message[:200]
        message.encode()  # it prints
        problems = message.split("\n")
        # The settings name every wrong key, each with its place.
        assert len(problems) == 1 or all(line.startswith(str(folder)) for line in problems), message


def check(kind: str, count: int) -> None:
    case = CASES[kind]

    @given(case.content)
    @settings(max_examples=count, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    def run(content: bytes) -> None:
        with tempfile.TemporaryDirectory() as place:
            accepted_or_one_line(case, content, Path(place))

    run()


@pytest.mark.parametrize("kind", CASES)
def test_damaged_files(kind: str) -> None:
    check(kind, QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("kind", CASES)
def test_many_damaged_files(kind: str) -> None:
    check(kind, MANY)


KEYS = (
    "train.seed",
    "optimizer.lr",
    "model.hf",
    "data.reward_args.x",
    "a",
    "",
    "train",
    "x" * 300,
    "train.output",
)


def override(key: str, text: str) -> None:
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "c.toml"
        path.write_text('[model]\nhf = "m"\n')
        try:
            load_config(path, [f"{key}={text}"])
        except UserError as error:
            str(error).encode()
            assert len(str(error)) < 6000, str(error)[:300]


@given(st.sampled_from(KEYS), st.sampled_from(TEXTS) | st.text(max_size=40))
@settings(max_examples=200, deadline=None)
def test_overrides(key: str, text: str) -> None:
    override(key, text)


@pytest.mark.slow
@given(st.sampled_from(KEYS), st.sampled_from(TEXTS) | st.text(max_size=400))
@settings(max_examples=MANY, deadline=None)
def test_many_overrides(key: str, text: str) -> None:
    override(key, text)


@given(st.sampled_from(TEXTS) | st.text(max_size=400))
@settings(max_examples=200, deadline=None)
def test_paths(text: str) -> None:
    try:
        check_path(text, "--out")
    except UserError as error:
        str(error).encode()
        assert str(error).startswith("--out") and len(str(error)) < 400
    else:
        Path(text).exists()  # a path that passes can be asked for
