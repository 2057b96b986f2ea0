"""Rank functions: several command lines in one world, one after another, as fresh invocations of the program."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from harness.verbs import verb
from harness.worlds import World
from torch.distributed import TCPStore


@contextlib.contextmanager
def rendezvous(world: World) -> Iterator[Callable[[], None]]:
    """Stores that outlive a command, as torchrun's agent keeps one; calling the result goes on to a fresh store."""
    rank = int(os.environ["RANK"])
    base = TCPStore(
        "127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=rank == 0, wait_for_workers=False
    )
    stores: list[TCPStore] = []
    turns = itertools.count()
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"

    def following() -> None:
        turn = f"port-{next(turns)}"
        if rank == 0:
            stores.append(TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))
            base.set(turn, str(stores[-1].port))
        os.environ["MASTER_PORT"] = base.get(turn).decode()

    yield following
    base.set(f"left-{rank}", "")
    if rank == 0:
        base.wait([f"left-{other}" for other in range(world.size)])


def commands(world: World, cases: list[list[str]]) -> list[tuple[int, str, str, float, float]]:
    """Exit code, stdout, stderr, seconds and processor seconds of each command line on this rank."""
    outcomes = []
    with rendezvous(world) as following:
        for arguments in cases:
            following()
            start, busy = time.monotonic(), time.process_time()
            outcome = verb(world, arguments)
            outcomes.append((*outcome, time.monotonic() - start, time.process_time() - busy))
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
