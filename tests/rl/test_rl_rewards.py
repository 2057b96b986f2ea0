"""Claim: the built-in rewards score as documented, and a reward that fails does so with its name and its
group.

Why this shows it: answers right, nearly right and wrong by hand; functions that raise or return nonsense,
loaded from a module written by the test.
It does not show: that a reward measures what a user wants.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_lrl.errors import UserError
from megatron_lrl.rl.reward_workers import RewardWorkers
from megatron_lrl.rl.rewards import Reward, load_reward
from megatron_lrl.rollout.text import Text
from megatron_lrl.rollout.types import Prompt, Response
from megatron_lrl.settings_data import DataTable

BUILT_IN = "megatron_lrl.rl.rewards:"


def score(name: str, text: str, record: dict[str, Any], **args: Any) -> float:
    return load_reward(BUILT_IN + name, args)(text, Prompt("g3", (1,), record))


@pytest.mark.parametrize(
    ("name", "text", "answer", "args", "expected"),
    [
        ("exact_match", " 4711\n", "4711", {}, 1),
        ("exact_match", "4711", 4711, {}, 1),
        ("exact_match", "b", ["a", "b"], {}, 1),
        ("exact_match", "It is 4711", "4711", {}, 0),
        ("exact_match", "paris", "Paris", {}, 0),
        ("exact_match", "paris", "Paris", {"ignore_case": True}, 1),
        ("contains", "4711", "4711", {}, 1),
        ("contains", "It is 4711.", "4711", {}, 0.5),
        ("contains", "It is 4711.", "4711", {"partial": 0.25}, 0.25),
        ("contains", "It is 47112.", "4711", {}, 0),
        ("contains", "a-5", "-5", {}, 0),
        ("contains", "is -5", "-5", {}, 0.5),
        ("contains", "4.7", "4x7", {}, 0),
        ("contains", "THE CODE", "code", {"ignore_case": True}, 0.5),
        ("number", "first 3, then 1,234.50.", 1234.5, {}, 1),
        ("number", "-3", "-3.0", {}, 1),
        ("number", "1e3", 1000, {}, 1),
        ("number", ".5", 0.5, {}, 1),
        ("number", "4711 or 4712", 4711, {}, 0),
        ("number", "no digits", 3, {}, 0),
        ("number", "100.4", 100, {"tolerance": 0.01}, 1),
        ("number", "102", 100, {"tolerance": 0.01}, 0),
        ("number", "7", ["5", "7"], {}, 1),
        ("regex", "<answer>4</answer>", None, {"pattern": r"<answer>\d</answer>"}, 1),
        ("regex", "4", None, {"pattern": r"<answer>\d</answer>"}, 0),
        ("regex", "x4", r"\d$", {"field": "answer"}, 1),
    ],
)
def test_built_in(name: str, text: str, answer: Any, args: dict[str, Any], expected: float) -> None:
    assert score(name, text, {"answer": answer}, **args) == expected


def test_another_field() -> None:
    assert score("exact_match", "x", {"gold": "x"}, field="gold") == 1


@pytest.mark.parametrize("name", ["exact_match", "contains", "number"])
@pytest.mark.parametrize("record", [{}, {"answer": None}, {"answer": []}, {"answer": ["a", True]}])
def test_a_record_without_an_answer(name: str, record: dict[str, Any]) -> None:
    with pytest.raises(UserError) as caught:
        score(name, "x", record)
    assert f"{BUILT_IN}{name} on group 'g3'" in str(caught.value)
    assert "record['answer'] must be a string, a number or a list" in str(caught.value)


def test_answers_and_patterns_that_cannot_be_read() -> None:
    with pytest.raises(UserError, match="'many' is not a number"):
        score("number", "3", {"answer": "many"})
    with pytest.raises(UserError, match="not a regular expression"):
        score("regex", "3", {}, pattern="(")


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "own_rewards_for_test.py").write_text(
        "import math\n"
        "constant = 3\n"
        "def raises(text, record): return record['gold']\n"
        "def nan(text, record): return math.nan\n"
        "def infinite(text, record): return math.inf\n"
        "def nothing(text, record): pass\n"
        "def half(text, record): return len(text) / record['length']\n"
        "def one_argument(text): return 1.0\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    return "own_rewards_for_test"


def test_any_function(module: str) -> None:
    assert load_reward(f"{module}:half")("abc", Prompt("g3", (1,), {"length": 6})) == 0.5


@pytest.mark.parametrize(
    ("signature", "args", "expected"),
    [
        ("text, record", {}, {}),
        ("text, record, *, ids", {}, {"ids": [5, 2]}),
        ("text, record, raw_text, ids", {}, {"ids": [5, 2], "raw_text": "a</s>"}),
        ("text, record, raw_text='', bonus=1", {"bonus": 3}, {"raw_text": "a</s>", "bonus": 3}),
        # what data.reward_args gives is the user's own; a first parameter keeps its meaning whatever its name
        ("text, record, *, ids", {"ids": [9]}, {"ids": [9]}),
        ("raw_text, record", {}, {"raw_text": "a"}),
        ("text, record, **kwargs", {"bonus": 3}, {"kwargs": {"bonus": 3}}),
    ],
)
def test_a_reward_gets_what_its_signature_asks_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, signature: str, args: dict[str, Any], expected: Any
) -> None:
    (tmp_path / "asking_reward.py").write_text(
        f"def f({signature}):\n    seen.append(dict(locals()))\n    return 1\nseen = []\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "asking_reward", raising=False)
    reward = load_reward("asking_reward:f", args)
    assert reward("a", Prompt("g3", (1,), {"answer": "a"}), (5, 2), "a</s>") == 1
    (seen,) = sys.modules["asking_reward"].seen
    assert {k: v for k, v in seen.items() if k not in ("text", "record")} == expected


def test_a_reward_reads_whole_ids_and_the_text_without_the_end(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 2}')
    seen: list[Any] = []

    def reward(text: str, record: Any, *, ids: Any, raw_text: str) -> float:
        seen.append((text, record, ids, raw_text))
        return 1.0

    workers = RewardWorkers(Reward("own:reward", reward, {}), DataTable())
    record = {"answer": "x"}
    workers.reward([(Prompt("g3", (1,), record), (Response((5, 2)), Response((5, 6))))], Text(tmp_path))
    assert seen == [("5", record, [5, 2], "5 2"), ("5 6", record, [5, 6], "5 6")]


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        ("raises", "raised KeyError: 'gold'"),
        ("nan", "returned nan"),
        ("infinite", "returned inf"),
        ("nothing", "returned nothing"),
    ],
)
def test_a_failing_reward_names_itself_and_the_group(module: str, function: str, expected: str) -> None:
    with pytest.raises(UserError) as caught:
        load_reward(f"{module}:{function}")("text", Prompt("g3", (1,), {}))
    assert f"{module}:{function} on group 'g3' {expected}" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "args", "expected"),
    [
        ("exact_match", {}, 'must be "module:function"'),
        ("no_such_module_here:f", {}, "cannot import no_such_module_here: it raised ModuleNotFoundError"),
        ("own_rewards_for_test:missing", {}, "has no function missing"),
        ("own_rewards_for_test:constant", {}, "has no function constant"),
        ("own_rewards_for_test:one_argument", {}, "data.reward_args"),
        (BUILT_IN + "exact_match", {"case": True}, "unexpected keyword argument 'case'"),
    ],
)
def test_what_cannot_be_loaded(module: str, name: str, args: dict[str, Any], expected: str) -> None:
    with pytest.raises(UserError) as caught:
        load_reward(name, args)
    assert expected in str(caught.value) and "data.reward" in str(caught.value)


def test_a_reward_is_a_float() -> None:
    value = score("exact_match", "a", {"answer": "a"})
    assert type(value) is float and math.isfinite(value)
