"""Rank functions: several command lines in one world, one after another, as fresh invocations of the program."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from harness.verbs import verb
from harness.worlds import World
from torch.distributed import TCPStore


@contextlib.contextmanager
def agent_store(world: World) -> Iterator[None]:
    """A store that outlives the commands, as torchrun's agent keeps one: each command is an attempt of its own."""
    rank, port = int(os.environ["RANK"]), int(os.environ["MASTER_PORT"])
    store = TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    yield
    store.set(f"left-{rank}", "")
    if rank == 0:
        store.wait([f"left-{other}" for other in range(world.size)])


def commands(world: World, cases: list[list[str]]) -> list[tuple[int, str, str, float, float]]:
    """Exit code, stdout, stderr, seconds and processor seconds of each command line on this rank."""
    outcomes = []
    with agent_store(world):
        for attempt, arguments in enumerate(cases):
            os.environ["TORCHELASTIC_RESTART_COUNT"] = str(attempt)
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
