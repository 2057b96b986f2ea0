"""A rank that kills itself with SIGKILL at a given event, in the middle of a command.

Rank function in the harness, and program under torchrun: `kill_ranks.py RANK KIND AT ARGUMENT ...`, which kills only in
torchrun's first incarnation of the world.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

KINDS = ("forward", "collective", "write")
COLLECTIVES = ("all_reduce", "all_gather_object", "all_gather_into_tensor", "broadcast", "batch_isend_irecv")
WRITES = ("replace", "fsync", "mkdir", "unlink")  # of os: between any two of them files are half written


@contextmanager
def killed_at(kind: str, at: int) -> Iterator[dict[str, int]]:
    """Counts layer forwards, collectives and file operations; before number `at` of `kind` the process kills itself."""
    import torch.distributed as dist

    from megatron_lrl import platform_cpu

    platform_cpu.install()
    from megatron.core.transformer.transformer_layer import TransformerLayer

    counts = dict.fromkeys(KINDS, 0)

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            if name == kind and counts[name] == at:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return call

    places: list[tuple[str, Any, str]] = [("forward", TransformerLayer, "forward")]
    places += [("collective", dist, name) for name in COLLECTIVES]
    places += [("write", os, name) for name in WRITES]
    before = [getattr(owner, name) for _, owner, name in places]
    for (event, owner, name), function in zip(places, before, strict=True):
        setattr(owner, name, counted(event, function))
    try:
        yield counts
    finally:
        for (_, owner, name), function in zip(places, before, strict=True):
            setattr(owner, name, function)


def run(world: Any, arguments: Sequence[str], rank: int, kind: str, at: int) -> dict[str, Any]:
    """A command on every rank; `rank` kills itself. Returns the exit code, what was printed and what was counted."""
    from harness.verbs import verb

    mine = int(os.environ["RANK"]) == rank
    with killed_at(kind if mine else "", at) as counts:
        code, out, err = verb(world, list(arguments))
    return {"code": code, "out": out, "err": err, "counts": counts}


def main(rank: str, kind: str, at: str, *arguments: str) -> int:
    from megatron_lrl.cli import main as command

    mine = os.environ["RANK"] == rank and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    with killed_at(kind if mine else "", int(at)):
        return command(list(arguments))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
