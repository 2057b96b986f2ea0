"""The one exception a user can cause."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LONGEST_LINE = 2000  # characters of a message's line: what was found may be of any size


class UserError(Exception):
    """A mistake in a setting, a file or a layout.

    The message stands alone: it names the key, file, line or rank, says what was found and what would be valid.
    The command line prints it once and exits with status 2; nothing has been written by then. The middle of a line
    longer than `LONGEST_LINE` is left out.
    """

    def __init__(self, message: str = "") -> None:
        super().__init__("\n".join(map(_shortened, str(message).split("\n"))))


def _shortened(line: str) -> str:
    return line if len(line) <= LONGEST_LINE else f"{line[: LONGEST_LINE - 505]} ... {line[-500:]}"


class RankFailure(UserError):
    """Another rank failed in a way that is nobody's mistake; the message names it. Another attempt may succeed."""


@contextmanager
def writing(place: str | Path) -> Iterator[None]:
    """What the file system refuses in the block, a full disk for instance, as a `UserError` that names ``place``."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{place}: cannot be written: {error.strerror or error}") from error
