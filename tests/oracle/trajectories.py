"""Awkward windows: groups of recorded responses in the program's trajectory format.

A group is the JSON record itself:
`{"id", "prompt_ids", "responses": [{"ids", "reward", "logprobs"?, "advantage"?}]}`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Group = dict[str, Any]

# (prompt length, response lengths): primes, one token, nothing divisible by cp * tp, a response of one token
AWKWARD = ((37, (1, 7, 2)), (11, (13, 5)))
ONE_TOKEN_PROMPT = ((1, (3, 1, 8)), (2, (5, 4)))  # an empty prefix, and a prefix of one token
ONE_GROUP = ((53, (5, 1, 11, 2)),)


def window(
    seed: int, vocab: int = 131, shape: Sequence[tuple[int, Sequence[int]]] = AWKWARD, advantages: bool = True
) -> list[Group]:
    """Random groups of the given shape, with fixed rewards and (unless switched off) fixed advantages."""
    draw = random.Random(seed)
    groups: list[Group] = []
    for number, (prompt, lengths) in enumerate(shape):
        responses = []
        for length in lengths:
            response: dict[str, Any] = {"ids": [draw.randrange(vocab) for _ in range(length)]}
            response["reward"] = round(draw.uniform(0.0, 1.0), 3)
            if advantages:
                response["advantage"] = round(draw.uniform(-2.0, 2.0), 3)
            responses.append(response)
        prompt_ids = [draw.randrange(vocab) for _ in range(prompt)]
        groups.append({"id": f"g{number}", "prompt_ids": prompt_ids, "responses": responses})
    return groups


def with_logprobs(
    groups: Sequence[Group], logprobs: Sequence[Sequence[Sequence[float]]], shift: float, seed: int
) -> list[Group]:
    """The groups with old log-probabilities: the given ones moved by up to ±`shift`, so that some clip.

    Args:
        logprobs: by group and response, as `hf_oracle.score` returns them.
    """
    draw = random.Random(seed)
    moved = []
    for group, of_group in zip(groups, logprobs, strict=True):
        responses = [
            {**response, "logprobs": [float(x) + draw.uniform(-shift, shift) for x in of_response]}
            for response, of_response in zip(group["responses"], of_group, strict=True)
        ]
        moved.append({**group, "responses": responses})
    return moved


def write_jsonl(path: Path | str, groups: Sequence[Group]) -> Path:
    """Writes one group a line."""
    path = Path(path)
    path.write_text("".join(json.dumps(group) + "\n" for group in groups))
    return path
