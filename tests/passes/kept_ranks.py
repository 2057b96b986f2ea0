"""A window with kept graphs, on one rank or on each of a world."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from harness.worlds import World
from lifetimes.tiny import branches, gradient, ids, mean_loss
from oracle.tiny_models import write_case

from megatron_lrl.config import load_config
from megatron_lrl.lifetimes.open import open_run
from megatron_lrl.lifetimes.run import Run
from megatron_lrl.lifetimes.window import UpdateWindow
from megatron_lrl.lifetimes.work import batches_of, work_of
from megatron_lrl.runtime import Layout, runtime_scope

PROMPT = 37
LENGTHS = (3, 6)


class Window(NamedTuple):
    """Gradient, forwards of the model, and bytes of graphs that were kept after the capture."""

    gradient: torch.Tensor
    forwards: int
    kept: int


def exact_window(run: Run, contract: str) -> Window:
    """Accumulate one group under a contract."""
    responses, calls = branches(LENGTHS), 0

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1

    hook = run.core(run.model).register_forward_hook(count)
    with UpdateWindow(run) as window:
        window.fix(branch.key for branch in responses)
        with window.prompt_group("g", ids(PROMPT, 1), contract) as group:
            kept = 0 if group._tokens is None else group._tokens.kept_bytes
            window.replay(group, work_of(batches_of(responses, 1), [mean_loss(0.1)] * len(LENGTHS)))
        window.reduce()
        found = gradient(run)
    hook.remove()
    return Window(found, calls, kept)


def compare(world: World, folder: str) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    """Gradients and forwards without and with a budget that holds some chunks."""
    found = []
    with runtime_scope(Layout(world.tp, world.cp, world.pp)) as runtime:
        for budget in (0, 150_000):
            settings = [
                f"model.hf={write_case(Path(folder), 'qwen3')}", "prefix.chunk_size=8", "model.dtype=float64",
                f"prefix.keep_graph_bytes={budget}", *world.overrides,
            ]  # fmt: skip
            with open_run(load_config("/dev/null", settings), runtime, gradients=True) as run:
                found.append(exact_window(run, "exact"))
    plain, kept = found
    return plain.gradient, kept.gradient, plain.forwards, kept.forwards
