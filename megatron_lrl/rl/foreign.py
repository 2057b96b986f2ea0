"""The user's own code runs among ours: it ends no process of ours, and its working directory stays its own."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

_leave = os._exit
_user = threading.local()  # .process: that of the block in which this thread runs the user's code


def _refuse(status: int) -> NoReturn:
    if getattr(_user, "process", None) == os.getpid():  # else ours, or a process that the user's code started
        raise SystemExit(status)
    _leave(status)


@contextmanager
def contained() -> Iterator[None]:
    """``os._exit`` in the block raises `SystemExit`, as `sys.exit` does; in this thread alone."""
    os._exit = _refuse
    before, _user.process = getattr(_user, "process", None), os.getpid()
    try:
        yield
    finally:
        _user.process = before


@contextmanager
def stays() -> Iterator[None]:
    """The process's working directory is after the block what it was before."""
    before = os.getcwd()
    try:
        yield
    finally:
        with suppress(OSError):
            os.chdir(before)
