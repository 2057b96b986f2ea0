"""A run over a tiny random model, and a window of random responses, for tests of state and lifetimes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from oracle.tiny_models import write_case

from megatron_lrl.config import load_config
from megatron_lrl.lifetimes.contributions import BranchKey
from megatron_lrl.lifetimes.open import open_run
from megatron_lrl.lifetimes.run import Run
from megatron_lrl.lifetimes.work import Branch, TokenLoss
from megatron_lrl.runtime import Layout, runtime_scope


@contextmanager
def tiny_run(
    folder: Path, *overrides: str, case: str = "qwen3", gradients: bool = True, optimizer: bool = False
) -> Iterator[Run]:
    """One rank's run in float64 with poisoned frees, unless overridden."""
    empty = folder / "empty.toml"
    empty.write_text("")
    settings = [f"model.hf={write_case(folder, case)}", "model.dtype=float64", "replay.check_poison=true"]
    config = load_config(empty, [*settings, *overrides])
    with runtime_scope(Layout()) as runtime:
        with open_run(config, runtime, gradients=gradients, optimizer=optimizer) as run:
            yield run


def ids(count: int, seed: int, vocab: int = 131) -> tuple[int, ...]:
    """Random token ids."""
    return tuple(torch.randint(vocab, (count,), generator=torch.Generator().manual_seed(seed)).tolist())


def branches(lengths: Sequence[int], group: str = "g") -> list[Branch]:
    """Random responses of the given lengths."""
    return [Branch(BranchKey(group, i), ids(n, 100 + i)) for i, n in enumerate(lengths)]


def mean_loss(weight: float) -> TokenLoss:
    """The negative sum of log-probabilities times a final weight."""
    return lambda logprob_S, _entropy, _index: (-weight * logprob_S.sum(), {"tokens": torch.ones(())})


def gradient(run: Run) -> torch.Tensor:
    """A copy of the gradient buffers, flat."""
    return torch.cat([buffer.grad_data.flatten() for buffer in run.model.buffers]).clone()
