"""Rank function: a training run or an export whose disk is full at a given place.

"name@2": from its second call on; "name#5000": after 5,000 bytes of a file, in its middle, instead of 100.
A limit on the size of files (RLIMIT_FSIZE) answers a write as a full disk does: an OSError in the middle of a file.
"""

from __future__ import annotations

import importlib
import itertools
import os
import resource
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

PLACES = {
    "shards": "megatron_lrl.checkpoint.training:_write_shards",
    "completion": "megatron_lrl.checkpoint.training:write_completion",
    "journal": "megatron_lrl.rollout.journal:Journal.record",
    "metrics": "megatron_lrl.tracking:Tracker.log",
    "tensorboard": "megatron_lrl.tracking:Tracker._chart",
    "export": "megatron_lrl.checkpoint.hf_export:write_directory",
    "import": "megatron_lrl.checkpoint.hf_import:_stream",
}


@contextmanager
def full_at(place: str) -> Iterator[None]:
    """While the place's function runs, no file of this process can be longer than 100 bytes, or so many as it says."""
    if not place:
        yield
        return
    place, _, size = place.partition("#")
    place, _, first = place.partition("@")
    calls = itertools.count(1)
    module, _, path = PLACES[place].partition(":")
    owner: Any = importlib.import_module(module)
    *outer, name = path.split(".")
    for part in outer:
        owner = getattr(owner, part)
    function: Callable[..., Any] = getattr(owner, name)

    def limited(*args: Any, **kwargs: Any) -> Any:
        if next(calls) < int(first or 1):
            return function(*args, **kwargs)
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(size or 100), before[1]))
        try:
            return function(*args, **kwargs)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    setattr(owner, name, limited)
    try:
        yield
    finally:
        setattr(owner, name, function)


def commands(
    world: Any, cases: Sequence[tuple[str, int, list[str]]], meeting: str
) -> list[tuple[int, str, str]]:
    """Each case's command line, with the disk full at its place on its rank. Exit code, stdout, stderr."""
    from harness.verbs import verb

    from cli.ranks import Rendezvous

    rendezvous, outcomes = Rendezvous(world, meeting), []
    for place, rank, arguments in cases:
        rendezvous.following()
        with full_at(place if int(os.environ["RANK"]) == rank else ""):
            outcomes.append(verb(world, list(arguments)))
    rendezvous.leave()
    return outcomes
