"""Make the inputs of the uptraining: documents with facts to recall.

    pydoc_data.topics ── lines ── plant facts, state most again, ask for the rest ──> uptrain.jsonl, heldout.jsonl

A document is exactly one packed sequence of four chunks: facts stand in its first half and are recalled in its second,
so that most of what is recalled lies in the history. A quarter of the documents are the manual alone. Names are none of
the quickstart's; the held-out documents have names and a part of the manual of their own.

    python examples/lastkv/prepare.py --quickstart .cache/quickstart --out .cache/lastkv
"""

from __future__ import annotations

import argparse
import json
import os
import random
import runpy
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

TASK = runpy.run_path(str(Path(__file__).parents[1] / "quickstart" / "prepare.py"))
"""The quickstart's task: HEAD, FACT, QUESTION, and the NAMES that are left to it."""

LENGTH, HALF, FACTS, ASKED = 2048, 1024, 32, 4
DOCUMENTS, HELD_OUT, PLAIN_EVERY, SEED = 256, 4, 4, 1
TURN = "<|im_end|>\n<|im_start|>user" + TASK["QUESTION"].replace("\n\n", "\n", 1)
WORDS = """
Amber Apollo Arrow Aspen Aurora Bamboo Beacon Birch Blaze Boston Breeze Bronze Cactus Cairo Canyon Castle
Cedar Cherry Cobalt Comet Copper Coral Cotton Crane Crystal Cyclone Dallas Delta Diamond Dolphin Dragon Eagle
Echo Eclipse Ember Falcon Fern Forest Fox Galaxy Geneva Glacier Granite Harbor Hawk Hazel Helix Heron Horizon
Indigo Island Ivory Jade Jungle Jupiter Kansas Lagoon Laser Lemon Leopard Lima Lion Lotus Lunar Magnet Maple
Marble Mars Meadow Mercury Meteor Milan Mirage Monarch Nebula Neptune Nova Oasis Ocean Olive Opal Orbit Orchid
Otter Oxford Panther Pearl Pegasus Pepper Pine Planet Plaza Polar Prism Pulsar Pyramid Quest Rainbow Ranger
Ridge River Robin Rocket Ruby Sahara Salem Sapphire Saturn Shadow Sierra Silver Solar Spark Spruce Storm
Summit Sunset Sydney Tango Thunder Tiger Titan Topaz Tornado Tulip Tundra Valley Venus Victor Viking Violet
Volcano Vortex Walnut Willow Winter Wolf Zebra Zenith Zephyr
"""
NAMES = WORDS.split()


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the documents of the uptraining.")
    parser.add_argument(
        "--quickstart", type=Path, default=Path(".cache/quickstart"), help="the tokenizer of its hf/ is read"
    )
    parser.add_argument("--out", type=Path, default=Path(".cache/lastkv"), help="where everything goes")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    write_documents(args.quickstart / "hf", args.out)


def write_documents(hf: Path, out: Path) -> None:
    """Write uptrain.jsonl and heldout.jsonl, {"id", "ids"} a line."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(hf, trust_remote_code=False)
    text = "\n\n".join(topics[name].strip() for name in sorted(topics))
    lines = tokenizer(text.splitlines(keepends=True), add_special_tokens=False)["input_ids"]
    cut = len(lines) * 9 // 10
    rng = random.Random(SEED)
    for name, count, part, names in (
        ("uptrain", DOCUMENTS, lines[:cut], [n for i, n in enumerate(NAMES) if i % 4 < 3]),
        ("heldout", HELD_OUT, lines[cut:], NAMES[3::4]),
    ):
        path = out / f"{name}.jsonl"
        partial = path.with_suffix(".partial")
        with partial.open("w", encoding="utf-8") as file:
            for number in range(count):
                ids = make_document(tokenizer, part, names if number % PLAIN_EVERY else [], rng)
                file.write(json.dumps({"id": f"{name}-{number}", "ids": ids}) + "\n")
        os.replace(partial, path)
        print(f"{path}: {count} documents of {LENGTH} tokens")


def make_document(tokenizer: Any, lines: list[list[int]], names: list[str], rng: random.Random) -> list[int]:
    """LENGTH token ids: FACTS facts between consecutive lines of the manual; later all but ASKED of them again, and
    questions for those with their answers. Without names, the manual alone."""

    def encode(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    facts = {name: str(rng.randrange(1000, 10000)) for name in rng.sample(names, FACTS if names else 0)}
    planted = [encode(TASK["FACT"].format(name=name, code=code)) for name, code in facts.items()]
    head, turns = encode(TASK["HEAD"]), []
    for name in list(facts)[:ASKED]:
        question = TURN if turns else TASK["QUESTION"]
        turns += encode(question.format(name=name) + f" {facts[name]}.")
    turns += encode("<|im_end|>")
    start = rng.randrange(len(lines))

    def fill(room: int, facts: list[list[int]]) -> list[int]:
        """``room`` tokens: the next lines of the manual, and each of ``facts`` between two of them."""
        nonlocal start
        room -= sum(map(len, facts))
        stretch: list[list[int]] = []
        while room > 0:
            stretch.append(lines[start % len(lines)][:room])
            room -= len(stretch[-1])
            start += 1
        places = sorted((rng.randrange(len(stretch) + 1) for _ in facts), reverse=True)
        for place, fact in zip(places, facts, strict=True):
            stretch.insert(place, fact)
        return [token for part in stretch for token in part]

    first = head + fill(HALF - len(head), rng.sample(planted, len(planted)))
    again = planted[ASKED:]
    return first + fill(LENGTH - HALF - len(turns), rng.sample(again, len(again))) + turns


if __name__ == "__main__":
    main()
