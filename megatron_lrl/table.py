"""What a table of settings is made of."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class Table(BaseModel):
    """Frozen, strictly typed (an integer may stand for a float), no unknown key, no inf, no NaN."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


LARGEST, LARGEST_NUMBER = 2**31 - 1, 1e30  # of integers and numbers; float32 goes to 3e38
LARGEST_BYTES = 2**60
MOST_RANKS = 16_384  # a plan makes the process groups of all
MOST_AT_ONCE = 65_536  # responses or prompts: all of a window stay in memory


def key(default: Any, description: str, **constraints: Any) -> Any:
    """A setting: its default, what `--help` says of it, and the bounds that pydantic checks."""
    if type(default) in (int, float):
        constraints.setdefault("le", LARGEST if type(default) is int else LARGEST_NUMBER)
    return Field(default=default, description=description, **constraints)
