"""Verbs of the command line, run on every rank of a world as torchrun would run them.

    outcome = run_verb(World(tp=2), ["score", "run.toml", "--trajectories", "t.jsonl", "--out", "s.jsonl"])

The outcome holds every rank's exit code, stdout and stderr.
"""

from __future__ import annotations

import contextlib
import io
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from harness.spawn import run_world
from harness.worlds import World


class Outcome(NamedTuple):
    """Exit code and printed text of each rank."""

    codes: list[int]
    out: list[str]
    err: list[str]

    def require_success(self) -> Outcome:
        """Raises AssertionError with the first failing rank's output unless every rank returned 0."""
        for rank, code in enumerate(self.codes):
            if code != 0:
                raise AssertionError(f"rank {rank} returned {code}\n{self.out[rank]}\n{self.err[rank]}")
        return self


def run_verb(
    world: Sequence[int], arguments: Sequence[str | Path], *, device: str = "cpu", timeout_s: float = 300.0
) -> Outcome:
    """Runs `megatron-lrl` on every rank. A non-zero exit code is an outcome; a hang raises `RankFailure`."""
    words = [str(argument) for argument in arguments]
    ranks = run_world(world, "harness.verbs:verb", device=device, timeout_s=timeout_s, arguments=words)
    codes, out, err = zip(*ranks, strict=True)
    return Outcome(list(codes), list(out), list(err))


def verb(world: World, arguments: list[str]) -> tuple[int, str, str]:
    """One rank's exit code, stdout and stderr. An escaping exception counts as 1 and shows in stderr."""
    from megatron_lrl.cli import main

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(arguments)
        except SystemExit as leaving:
            code = leaving.code
            if isinstance(code, str):
                err.write(f"{code}\n")
                code = 1
        except BaseException:
            err.write(traceback.format_exc())
            code = 1
    return int(code or 0), out.getvalue(), err.getvalue()
