"""Claim: every config in examples/ is valid, and the quickstart's prompts are what their README says.

The configs are read by the same function as by every verb, so a renamed key or an impossible one fails here.
The prompts are made with a stand-in tokenizer (words and single marks are tokens). That shows where the fact
stands and that the answer can be rewarded, not their length under the real tokenizer: prepare.py checks that.
"""

from __future__ import annotations

import importlib.util
import json
import random
import re
from pathlib import Path
from types import ModuleType

import pytest
from models.test_published_sizes import GLM45_AIR, GLM47_FLASH, QWEN36_27B

from megatron_lrl.config import check_train, load_config
from megatron_lrl.models.hf_config import read_architecture
from megatron_lrl.models.layout_check import check_layout
from megatron_lrl.rl.rewards import load_reward
from megatron_lrl.rollout.types import Prompt
from megatron_lrl.runtime import Layout

EXAMPLES = Path(__file__).parent.parent / "examples"
WORLDS = {
    "quickstart/config.toml": 2,
    "lora/config.toml": 2,
    "qwen3/config.toml": 8,
    "lastkv/uptrain.toml": 1,
    "lastkv/grpo.toml": 1,
    "qwen3_6/grpo.toml": 32,
    "glm4_5_air/grpo.toml": 64,
    "glm_4_7_flash/grpo.toml": 8,
}
PUBLISHED = {"qwen3_6": QWEN36_27B, "glm4_5_air": GLM45_AIR, "glm_4_7_flash": GLM47_FLASH}
SHIPPED_MODELS = {"qwen3_6": 64, "glm4_5_air": 46, "glm_4_7_flash": 47}
"""Folders with a published config.json for `plan`: layers."""


class Tokenizer:
    """Words and single marks are tokens."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[str]:
        return re.findall(r"\w+|\W", text)

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[str]]:
        return {"input_ids": self.encode(text)}


def script(example: str, name: str) -> ModuleType:
    """A script of an example, as a module."""
    spec = importlib.util.spec_from_file_location(f"{example}_{name}", EXAMPLES / example / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def prepare() -> ModuleType:
    return script("quickstart", "prepare")


def test_every_shipped_config_is_listed_here() -> None:
    shipped = {path.relative_to(EXAMPLES).as_posix() for path in EXAMPLES.rglob("*.toml")}
    assert shipped == set(WORLDS)


@pytest.mark.parametrize("name", sorted(WORLDS))
def test_config_is_valid_and_can_train(name: str) -> None:
    config = load_config(EXAMPLES / name)
    check_train(config)
    layout = config.parallel
    assert layout.tp * layout.cp * layout.pp == WORLDS[name]
    load_reward(config.data.reward, config.data.reward_args)


@pytest.mark.parametrize("name", sorted(SHIPPED_MODELS))
def test_layout_fits_the_published_model(name: str) -> None:
    """The same config.json as in tests/models/test_published_sizes.py, where its parameters are counted."""
    arch = read_architecture(EXAMPLES / name / "hf")
    layout = load_config(EXAMPLES / name / "grpo.toml").parallel
    check_layout(arch, Layout(layout.tp, layout.cp, layout.pp, layout.ep))
    assert arch.num_layers == SHIPPED_MODELS[name]
    assert json.loads((EXAMPLES / name / "hf" / "config.json").read_text()) == PUBLISHED[name]


def test_quickstart_has_a_prompt_for_every_group(prepare: ModuleType) -> None:
    train = load_config(EXAMPLES / "quickstart" / "config.toml").train
    needed = train.updates * train.groups_per_update
    assert needed <= prepare.PROMPTS


def test_quickstart_prompt_holds_its_fact_once_and_the_reward_checks_it(prepare: ModuleType) -> None:
    config = load_config(EXAMPLES / "quickstart" / "config.toml")
    reward = load_reward(config.data.reward, config.data.reward_args)
    lines = [f"line {number} of the manual\n" for number in range(900)]
    lengths = [len(Tokenizer().encode(line)) for line in lines]
    rng = random.Random(0)
    depths = []
    for index in range(20):
        record = prepare.make_prompt(f"p{index}", Tokenizer(), lines, lengths, rng)
        code = record["answer"][1]
        assert record["prompt"].count(code) == 1
        asked = rf"The access code of (\w+) is {code}\.\n.*The access code of \1 is$"
        assert re.search(asked, record["prompt"], re.DOTALL)
        assert prepare.MIN_TOKENS <= len(Tokenizer().encode(record["prompt"])) <= prepare.MAX_TOKENS
        prompt = Prompt(id=record["id"], prompt_ids=(1,), record=record)
        given = [f" {code}.", f" {code}", f" {code}. And", f" {code}5.", " none"]
        assert [reward(text, prompt) for text in given] == [1.0, 1.0, 0.2, 0.0, 0.0]
        depths.append(record["depth"])
    assert min(depths) < 0.3 and max(depths) > 0.7


def test_uptraining_documents_are_one_sequence_and_recall_what_they_state(prepare: ModuleType) -> None:
    lastkv, lm = script("lastkv", "prepare"), load_config(EXAMPLES / "lastkv" / "uptrain.toml").lm
    assert (
        lm.sequence_length
        == lastkv.LENGTH
        == 4 * load_config(EXAMPLES / "lastkv" / "uptrain.toml").lastkv.chunk_size
    )
    assert not set(lastkv.NAMES) & set(prepare.NAMES) and len(set(lastkv.NAMES)) == len(lastkv.NAMES)
    lines = [Tokenizer().encode(f"line {number} of the manual\n") for number in range(900)]
    for seed in range(5):
        ids = lastkv.make_document(Tokenizer(), lines, lastkv.NAMES, random.Random(seed))
        assert len(ids) == lastkv.LENGTH
        first, second = "".join(ids[: lastkv.HALF]), "".join(ids[lastkv.HALF :])
        stated = dict(re.findall(r"The access code of (\w+) is (\d{4})\.", first))
        again = re.findall(r"The access code of (\w+) is (\d{4})\.", second)
        assert len(stated) == len(again) == lastkv.FACTS
        assert all(stated[name] == code for name, code in again)
        assert second.count("What is the access code of") == lastkv.ASKED
        plain = "".join(lastkv.make_document(Tokenizer(), lines, [], random.Random(seed)))
        assert "access code" not in plain


@pytest.mark.parametrize(
    ("place", "length", "region"),
    [
        (0, 9, "history"),
        (3, 9, "history"),
        (4, 9, "previous chunk"),
        (8, 10, "open chunk"),
        (0, 8, "previous chunk"),
    ],
)
def test_the_region_of_a_fact_is_counted_in_chunks_from_the_last_prompt_token(
    place: int, length: int, region: str
) -> None:
    prompt_ids = [0] * length
    prompt_ids[place] = 7
    assert script("lastkv", "report").region_of(prompt_ids, [7], 4) == region
