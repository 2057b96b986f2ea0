"""Reward functions for the tests, named in data.reward as "cli.toy_rewards:...".

The tiny models have no tokenizer: a response's text is its ids, separated by spaces.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Mapping
from typing import Any


def low_ids(text: str, record: Mapping[str, Any], below: int = 60) -> float:
    """The share of response tokens whose id is below `below`: a task that any model can learn."""
    ids = [int(word) for word in text.split()]
    return sum(i < below for i in ids) / len(ids) if ids else 0.0


def nothing(text: str, record: Mapping[str, Any]) -> float:
    """The same for every response, so that all advantages are 0."""
    return 0.25


def nan(text: str, record: Mapping[str, Any]) -> float:
    """What no reward may be."""
    return math.nan


def nan_on(text: str, record: Mapping[str, Any], places: list[str]) -> float:
    """NaN for the prompts named, so that only the rank that rewards them fails."""
    return math.nan if record["id"] in places else 0.0


def exits_on(text: str, record: Mapping[str, Any], places: list[str]) -> float:
    """Ends the process, as a script would, for the prompts named."""
    return sys.exit(0) if record["id"] in places else 0.0


def leaves_on(text: str, record: Mapping[str, Any], places: list[str]) -> float:
    """Ends the process without a word."""
    return os._exit(0) if record["id"] in places else 0.0


def hangs_on(text: str, record: Mapping[str, Any], places: list[str]) -> float:
    """Does not come back."""
    while record["id"] in places:
        time.sleep(0.1)
    return 0.0


def broken(text: str, record: Mapping[str, Any]) -> float:
    """A reward function with a fault of its own."""
    raise KeyError("colour")
