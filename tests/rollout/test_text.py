"""Claim: a model directory's text side is what transformers makes of it: the same ids end a response, the same records
give the same ids before and after an import; no file of the directory runs; an end that a tokenizer appends is said.

Why this shows it: transformers' own generation config is the oracle of stop ids; every kind of record is encoded from
the directory and from what a checkpoint carries of it; modules beside the files leave a mark when imported, and whoever
asks a question fails the test.
It does not show: tokenizers of particular published models.
"""

from __future__ import annotations

import ast
import builtins
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from models.family_configs import tiny_config
from oracle.tiny_models import write_case
from rollout.test_chat import TEMPLATE, TOOLS, byte_tokenizer
from transformers import AutoConfig, GenerationConfig

from megatron_lrl.checkpoint.publish import carry_files
from megatron_lrl.cli import main
from megatron_lrl.errors import UserError
from megatron_lrl.models.hf_config import read_architecture
from megatron_lrl.rollout.data import Limits, read_prompts
from megatron_lrl.rollout.text import Text
from megatron_lrl.rollout.types import Prompt


def write(folder: Path, **files: Any) -> Path:
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize(
    ("files", "source"),
    [
        (
            {"generation_config": {"eos_token_id": [5, 6]}, "config": {"eos_token_id": 7}},
            "generation_config.json",
        ),
        ({"config": {"eos_token_id": 7}}, "config.json"),
        ({"config": {"text_config": {"eos_token_id": [8, 9]}}}, "text_config of config.json"),
        ({"config": {"eos_token_id": 7, "text_config": {"eos_token_id": [8, 9]}}}, "config.json"),
    ],
)
def test_a_response_ends_where_transformers_ends_it(
    tmp_path: Path, files: dict[str, Any], source: str
) -> None:
    config = tiny_config("qwen3_5-vl")
    config.pop("eos_token_id", None)
    text = {**config["text_config"], **files["config"].get("text_config", {})}
    if "text_config" not in files["config"]:
        text.pop("eos_token_id", None)
    files = {**files, "config": {**config, **files["config"], "text_config": text}}
    folder = write(tmp_path / "m", **files)
    if "generation_config" in files:
        expected = GenerationConfig.from_pretrained(folder).eos_token_id
    else:
        expected = GenerationConfig.from_model_config(AutoConfig.from_pretrained(folder)).eos_token_id
    made = Text(folder)
    assert made.stop_ids == frozenset(expected if isinstance(expected, list) else [expected])
    assert made.stop_source == source
    assert made.describe() == f"a response ends at {' or '.join(map(str, sorted(made.stop_ids)))} ({source})"


def test_the_tokenizer_comes_last_and_is_named_where_it_differs(tmp_path: Path) -> None:
    byte_tokenizer().save_pretrained(tmp_path)
    assert Text(tmp_path).describe() == "a response ends at 257 '</s>' (the tokenizer)"
    write(tmp_path, generation_config={"eos_token_id": 65})
    lines = Text(tmp_path).describe().splitlines()
    assert lines[0].startswith("a response ends at 65 ")
    assert lines[1] == "the tokenizer's eos_token 257 '</s>' is not among them"
    assert Text(write(tmp_path / "none", config={})).describe().startswith("no id ends a response")


def test_an_end_that_the_tokenizer_appends_is_said_once(tmp_path: Path) -> None:
    def said(end: bool, **record: Any) -> str:
        byte_tokenizer(end=end).save_pretrained(tmp_path / str(end))
        text = Text(tmp_path / str(end))
        ids = tuple(text.tokenizer.encode("ab</s>" if record.get("own") else "ab"))
        return text.describe([Prompt("p", ids, record)] * 3)

    warning = 'warning: the tokenizer ends every "prompt" with an end-of-sequence token'
    assert said(True, prompt="ab").count(warning) == 1 and "257 '</s>')" in said(True, prompt="ab")
    assert warning not in said(False, prompt="ab")
    assert warning not in said(False, prompt="ab</s>", own=True)  # the user's own
    assert warning not in said(True, prompt_ids=[1])


RECORDS: list[dict[str, Any]] = [
    {"prompt_ids": [1, 2]},
    {"prompt": "abc"},
    {"messages": [{"role": "user", "content": "hi"}]},
    {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS},
    {"messages": [{"role": "user", "content": "hi"}], "chat_template_args": {"chat_template": "rag"}},
]


def test_every_record_encodes_alike_before_and_after_an_import(tmp_path: Path) -> None:
    named = {"default": "D", "tool_use": TEMPLATE, "rag": "R{{ messages | tojson }}"}
    byte_tokenizer(named).save_pretrained(tmp_path / "m")
    assert (tmp_path / "m" / "additional_chat_templates" / "rag.jinja").is_file()
    prompts = tmp_path / "p.jsonl"
    prompts.write_text("".join(json.dumps(record) + "\n" for record in RECORDS))

    def ids(folder: Path) -> list[tuple[int, ...]]:
        return [p.prompt_ids for p in read_prompts(prompts, Limits(300), tokenizer=Text(folder).tokenizer)]

    # from a directory to a checkpoint, and on into the next one
    carry_files(tmp_path / "m", tmp_path / "once")
    carry_files(tmp_path / "once", tmp_path / "twice")
    before = ids(tmp_path / "m")
    assert len(set(before)) == len(RECORDS)
    assert ids(tmp_path / "once") == ids(tmp_path / "twice") == before


CODE = "import pathlib\npathlib.Path(__file__).with_name('ran').touch()\nclass T: pass\n"


@pytest.mark.parametrize("where", ["tokenizer_config.json", "config.json"])
def test_code_of_a_directory_never_runs(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_case(tmp_path, "llama")
    byte_tokenizer().save_pretrained(folder)
    for name in ("own_code", "sitecustomize", "tokenizers", "__init__"):
        (folder / f"{name}.py").write_text(CODE)

    def asked(*_: Any) -> str:
        raise AssertionError("stdin was asked")

    monkeypatch.setattr(builtins, "input", asked)
    monkeypatch.setattr(sys, "stdin", None)
    Text(folder)  # code that nothing names is no reason to refuse
    path = folder / where
    auto_map = {"AutoTokenizer": ["own_code.T", "own_code.T"], "AutoConfig": "own_code.T"}
    path.write_text(json.dumps({**json.loads(path.read_text()), "auto_map": auto_map}))
    for opened in (Text, read_architecture):
        with pytest.raises(UserError, match=r"auto_map.*own_code"):
            opened(folder)
    assert main(["import", str(folder), str(tmp_path / "ckpt")]) == 2
    assert "auto_map" in capsys.readouterr().err and not (tmp_path / "ckpt").exists()
    assert not (folder / "ran").exists()
    assert not [m for m in sys.modules.values() if str(folder) in str(getattr(m, "__file__", ""))]


def test_no_directory_is_opened_without_saying_so() -> None:
    root = Path(__file__).parents[2]
    files = [file for part in ("megatron_lrl", "examples", "tools") for file in (root / part).rglob("*.py")]
    calls = [
        (file, node)
        for file in files
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "from_pretrained"
    ]
    assert calls
    for file, call in calls:
        said = {word.arg: getattr(word.value, "value", None) for word in call.keywords}
        assert said.get("trust_remote_code") is False, f"{file.name}:{call.lineno}"
