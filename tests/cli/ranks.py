"""Rank functions: several command lines in one world, one after another, as fresh invocations of the program."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

from harness.verbs import verb
from harness.worlds import World


def commands(world: World, cases: list[list[str]], ports: list[int]) -> list[tuple[int, str, str, float]]:
    """Exit code, stdout, stderr and seconds of each command line on this rank.

    `ports`: a rendezvous of its own for every command, so that no rank meets one of the previous command.
    """
    outcomes = []
    for arguments, port in zip(cases, ports, strict=True):
        os.environ["MASTER_PORT"] = str(port)
        start = time.monotonic()
        outcomes.append((*verb(world, arguments), time.monotonic() - start))
    return outcomes


def interrupted(
    world: World, arguments: list[str], metrics: str, lines: int, rank: int, number: int
) -> tuple[int, str, str]:
    """Runs a command; `rank` gets signal `number` once `metrics` has so many lines."""

    def watch() -> None:
        path = Path(metrics)
        while not path.exists() or path.read_text().count("\n") < lines:
            time.sleep(0.02)
        signal.raise_signal(number) if threading.current_thread() is threading.main_thread() else os.kill(
            os.getpid(), number
        )

    if int(os.environ["RANK"]) == rank:
        threading.Thread(target=watch, daemon=True).start()
    return verb(world, arguments)


def logits(world: World, folder: str, ids: list[int]) -> Any:
    """[tokens, vocabulary] of plain transformers on a Hugging Face directory, on rank 0."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        return model(torch.tensor([ids])).logits[0]
