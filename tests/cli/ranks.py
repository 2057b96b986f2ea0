"""Rank functions: several command lines in one world, one after another, as fresh invocations of the
program.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from pathlib import Path

import torch
from harness.verbs import verb
from harness.worlds import World
from torch.distributed import FileStore, TCPStore


class Rendezvous:
    """A fresh store for every command, held by rank 0 as torchrun's agent holds one.

    Ports are told through a file: the program may cut every connection of the process when it recovers.
    """

    def __init__(self, world: World, meeting: str) -> None:
        self.rank, self.size = int(os.environ["RANK"]), world.size
        self.board = FileStore(meeting, world.size)
        self.stores: list[TCPStore] = []
        self.turns = itertools.count()
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"

    def following(self) -> None:
        """Points the next command to its store."""
        turn = f"port-{next(self.turns)}"
        if self.rank == 0:
            self.stores.append(TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))
            self.board.set(turn, str(self.stores[-1].port))
        os.environ["MASTER_PORT"] = self.board.get(turn).decode()

    def leave(self) -> None:
        """Rank 0 leaves last: the others still use its stores."""
        self.board.set(f"left-{self.rank}", "yes")
        if self.rank == 0:
            self.board.wait([f"left-{other}" for other in range(self.size)])


def commands(world: World, cases: list[list[str]], meeting: str) -> list[tuple[int, str, str, float, float]]:
    """Exit code, stdout, stderr, seconds and processor seconds of each command line on this rank."""
    outcomes = []
    rendezvous = Rendezvous(world, meeting)
    for arguments in cases:
        rendezvous.following()
        start, busy = time.monotonic(), time.process_time()
        outcome = verb(world, arguments)
        outcomes.append((*outcome, time.monotonic() - start, time.process_time() - busy))
    rendezvous.leave()
    return outcomes


def interrupted(
    world: World, arguments: list[str], metrics: str, lines: int, rank: int, number: int
) -> tuple[int, str, str]:
    """Runs a command; `rank` gets signal `number` once `metrics` has so many lines."""

    def watch() -> None:
        path = Path(metrics)
        while not path.exists() or path.read_text().count("\n") < lines:
            time.sleep(0.02)
        os.kill(os.getpid(), number)

    if int(os.environ["RANK"]) == rank:
        threading.Thread(target=watch, daemon=True).start()
    return verb(world, arguments)


def logits(world: World, folders: list[str], ids: list[int]) -> list[torch.Tensor]:
    """[tokens, vocabulary] of plain transformers on some Hugging Face directories."""
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        models = [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for folder in folders]
        return [model(torch.tensor([ids])).logits[0] for model in models]
