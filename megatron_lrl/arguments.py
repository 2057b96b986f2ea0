"""Values of command-line options: what a text must be, and what is said of another."""

from __future__ import annotations

import argparse
import math

from megatron_lrl.table import LARGEST, MOST_RANKS


def size(text: str) -> int:
    """A parallel size or a length from the command line."""
    number = int(text) if text.isdecimal() and len(text) <= 10 else 0
    if not 1 <= number <= LARGEST:
        raise argparse.ArgumentTypeError(f"{text[:60]!r} is not an integer from 1 to {LARGEST}")
    return number


def world(text: str) -> int:
    """A number of ranks from the command line."""
    if (number := size(text)) > MOST_RANKS:
        raise argparse.ArgumentTypeError(f"{text} ranks; valid: at most {MOST_RANKS}")
    return number


def share(text: str) -> float:
    """A number between 0 and 1 from the command line."""
    return _between(text, 1, "a number > 0 and < 1")


def positive(text: str) -> float:
    """A number above 0 from the command line."""
    return _between(text, math.inf, "a positive number")


def _between(text: str, most: float, what: str) -> float:
    """A number above 0 and below ``most``."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < most:
        raise argparse.ArgumentTypeError(f"{text[:60]!r} is not {what}")
    return value
