"""Rank functions of the training checkpoint tests.

Gradients are an elementwise function of the parameters and the step: the same in every layout, zero on rows
that only pad the vocabulary, and written straight into Megatron's buffers.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import World

from megatron_lrl.checkpoint.hf_export import export_checkpoint, gather_hf_tensors
from megatron_lrl.checkpoint.optimizer_state import saving_bytes
from megatron_lrl.checkpoint.training import latest_training, load_training, save_training, training_path
from megatron_lrl.config import load_config
from megatron_lrl.errors import UserError
from megatron_lrl.lifetimes.open import open_run
from megatron_lrl.lifetimes.run import Run
from megatron_lrl.runtime import Layout, Runtime, runtime_scope, unwrap

SETTINGS = """
[model]
{source}
dtype = "{dtype}"
[parallel]
tp = {tp}
cp = {cp}
pp = {pp}
ep = {ep}
[optimizer]
lr = 1e-2
weight_decay = 0.1
warmup_updates = 2
decay = "cosine"
min_lr = 1e-3
[train]
updates = 8
"""


def _layout(world: World) -> Layout:
    return Layout(tp=world.tp, cp=world.cp, pp=world.pp, ep=world.ep)


@contextmanager
def _run(runtime: Runtime, folder: str, source: str, dtype: str, optimizer: bool = True) -> Iterator[Run]:
    layout = runtime.layout
    path = Path(folder) / f"config-{runtime.rank}.toml"
    sizes = {"tp": layout.tp, "cp": layout.cp, "pp": layout.pp, "ep": layout.ep}
    text = SETTINGS.format(source=source, dtype=dtype, **sizes)
    path.write_text(text)
    with open_run(load_config(path), runtime, optimizer=optimizer) as run:
        yield run


def _take_steps(run: Run, first: int, last: int) -> None:
    """Optimizer steps first + 1 to last."""
    for step in range(first + 1, last + 1):
        run.zero_grad()
        for parameter in unwrap(run.model).parameters():
            value = parameter.detach().float()
            parameter.main_grad.copy_(value * torch.sin(37 * value + step))
        run.step()


def _local(run: Run) -> dict[str, torch.Tensor]:
    """Copies of everything a step reads or writes on this rank, found without the code under test."""
    found = {f"model.{n}": p.detach().clone() for n, p in unwrap(run.model).named_parameters()}
    for part in run.optimizer.chained_optimizers:
        for g, group in enumerate(part.optimizer.param_groups):
            found[f"group{g}"] = torch.tensor([group["lr"], group["weight_decay"]], dtype=torch.float64)
            for i, main in enumerate(group["params"]):
                found[f"main{g}.{i}"] = main.detach().clone()
                for key, value in part.optimizer.state[main].items():
                    found[f"{key}{g}.{i}"] = value.detach().clone()
    return found


def _whole(run: Run) -> dict[str, torch.Tensor]:
    return {n: t.clone() for n, t in gather_hf_tensors(run.model, run.arch, run.runtime)}


def _draws() -> torch.Tensor:
    """One number of each random generator, which moves on."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    with get_cuda_rng_tracker().fork():
        tracked = torch.rand(1, dtype=torch.float64).item()
    values = [random.random(), random.gauss(0, 1), np.random.random(), torch.rand(1).item(), tracked]
    return torch.tensor(values, dtype=torch.float64)


def _seed_apart(runtime: Runtime, salt: int) -> None:
    random.seed(100 * salt + runtime.rank)
    np.random.seed(100 * salt + runtime.rank)
    torch.manual_seed(100 * salt + runtime.rank)


def train(world: World, cases: list[tuple[str, str, str]]) -> list[dict[str, Any]]:
    """Each (source line, dtype, folder): 3 steps, a save to folder/own, 3 more; the state at 3, 4 and 6."""
    results = []
    with runtime_scope(_layout(world)) as runtime:
        for source, dtype, folder in cases:
            with _run(runtime, folder, source, dtype) as run:
                kinds = [type(part).__name__ for part in run.optimizer.chained_optimizers]
                _take_steps(run, 0, 3)
                _seed_apart(runtime, 1)
                _draws()  # gauss and numpy keep a second value: the saved state is not a fresh one
                progress = {"update": 3, "data": [1, {"position": 7}]}
                taken = save_training(run, Path(folder) / "own", progress)
                found = {"saving": (taken, saving_bytes(run.model, runtime), run.ledger.run)}
                found |= {"kinds": kinds, "draws": _draws(), "local3": _local(run), "whole3": _whole(run)}
                _take_steps(run, 3, 4)
                found["whole4"] = _whole(run)
                _take_steps(run, 4, 6)
                results.append({**found, "local6": _local(run), "version": run.version})
    return results


def resume(world: World, cases: list[tuple[str, str, str, str | None]]) -> list[dict[str, Any]]:
    """Each (source line, dtype, checkpoint, save to): load, save again if asked, take 3 steps."""
    results = []
    with runtime_scope(_layout(world)) as runtime:
        for source, dtype, checkpoint, target in cases:
            with _run(runtime, str(Path(checkpoint).parent), source, dtype) as run:
                _seed_apart(runtime, 2)
                progress = load_training(run, checkpoint)
                found = {
                    "progress": progress,
                    "draws": _draws(),
                    "local3": _local(run),
                    "whole3": _whole(run),
                }
                if target is not None:
                    save_training(run, target, progress)
                _take_steps(run, 3, 4)
                found["whole4"] = _whole(run)
                _take_steps(run, 4, 6)
                results.append({**found, "local6": _local(run), "version": run.version})
    return results


def from_the_start(world: World, source: str, dtype: str, folder: str) -> dict[str, Any]:
    """A save before the first step, resumed; and the same run without either."""
    with runtime_scope(_layout(world)) as runtime:
        target = Path(folder) / "start"
        with _run(runtime, folder, source, dtype) as run:
            save_training(run, target, {"update": 0})
            _take_steps(run, 0, 2)
            saved = _local(run)
        with _run(runtime, folder, source, dtype) as run:
            load_training(run, target)
            _take_steps(run, 0, 2)
            resumed = _local(run)
        with _run(runtime, folder, source, dtype) as run:
            _take_steps(run, 0, 2)
            return {"saved": saved, "resumed": resumed, "plain": _local(run)}


def as_weights(world: World, source: str, checkpoint: str, hf_dir: str) -> dict[str, Any]:
    """Export a training checkpoint; start a run from it and save that run; export the latter too."""
    with runtime_scope(_layout(world)) as runtime:
        export_checkpoint(checkpoint, hf_dir, runtime)
        start = f"checkpoint = {checkpoint!r}"
        with _run(runtime, str(Path(hf_dir).parent), start, "float32") as run:
            whole = _whole(run)
            save_training(run, hf_dir + "-again-ckpt", {})
        export_checkpoint(hf_dir + "-again-ckpt", hf_dir + "-again", runtime)
        return {"whole": whole}


def refused(world: World, cases: list[tuple[str, str, str, str]], folder: str) -> list[str]:
    """Each (verb, source line, dtype, checkpoint), verb `save` or `load`: the message of the UserError."""
    with runtime_scope(_layout(world)) as runtime:
        return [_answer(runtime, folder, *case) for case in cases]


def _answer(runtime: Runtime, folder: str, verb: str, source: str, dtype: str, checkpoint: str | Path) -> str:
    """What saving to, or loading, a checkpoint is refused with."""
    try:
        with _run(runtime, folder, source, dtype) as run:
            if verb == "save":
                save_training(run, checkpoint, {})
            else:
                load_training(run, checkpoint)
    except UserError as error:
        return str(error)
    return "accepted"


def save_many(world: World, source: str, folder: str, updates: list[int], keep: int | None) -> str | None:
    """Save one run under each update number in turn; returns the latest."""
    with runtime_scope(_layout(world)) as runtime, _run(runtime, folder, source, "float32") as run:
        for update in updates:
            save_training(run, training_path(folder, update), {"update": update}, keep=keep)
        found = latest_training(folder, runtime)
        return None if found is None else str(found)


def spoiled(world: World, source: str, dtype: str, folder: str) -> list[str]:
    """A run saved with a NaN in a weight, and with one in a moment: what a load of each says."""
    messages = []
    with runtime_scope(_layout(world)) as runtime:
        for kind in ("weight", "moment"):
            target = Path(folder) / kind
            with _run(runtime, folder, source, dtype) as run:
                _take_steps(run, 0, 1)
                norm = unwrap(run.model).decoder.final_layernorm.weight
                part = run.optimizer.chained_optimizers[0].optimizer
                main = part.param_groups[0]["params"][0]
                spoilt = norm.data if kind == "weight" else part.state[main]["exp_avg"]
                spoilt.view(-1)[-1] = float("nan")
                save_training(run, target, {})
            messages.append(_answer(runtime, folder, "load", source, dtype, target))
    return messages
