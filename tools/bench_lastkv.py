"""LastKV against full attention: the same weights and sizes, interleaved in one run.

    python tools/bench_lastkv.py
    python tools/bench_lastkv.py --layers 16 --prompt 16384 --chunk-size 512 --restarts 11

Measures capture, sampling and the gradient of one window under each contract, resident bytes after capture and peak
saved-for-backward bytes, and prints them with their ratio to full attention.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from bench_common import MIB, options_of, run_window, trajectories, write_model

from megatron_lrl.config import load_config
from megatron_lrl.lifetimes.window import UpdateWindow
from megatron_lrl.runtime import Layout, runtime_scope

if TYPE_CHECKING:
    from megatron_lrl.lifetimes.run import Run

CONTRACTS = ("response_only", "exact")


def parse() -> argparse.Namespace:
    return options_of(
        __doc__,
        prompt=(4096, "P", "prompt tokens"),
        response=(64, "R", "response tokens"),
        group=(8, "G", "responses"),
        chunk_size=(512, "C", "LastKV chunk"),
        restarts=(
            0,
            "N",
            "a third column: own-layer keys and values of at most N chunks for the sweep (prefix.snapshot_bytes)",
        ),
        repeats=(3, "N", "rounds; medians are shown"),
    ).parse_args()


def timed(action: Callable[[], object], name: str, found: dict[str, list[float]], scale: float = 1) -> None:
    """Note wall and CPU seconds times ``scale`` under ``name``; CPU seconds stay steady on a shared machine."""
    wall, cpu = time.perf_counter(), time.process_time()
    action()
    found.setdefault(f"{name}, CPU", []).append(scale * (time.process_time() - cpu))
    found.setdefault(f"{name}, wall", []).append(scale * (time.perf_counter() - wall))


def measure(run: Run, options: argparse.Namespace, found: dict[str, list[float]]) -> None:
    """One round of everything on one run."""
    from megatron_lrl.rollout.builtin import Sampler

    prompt, responses = trajectories(options.vocab, options.prompt, options.response, options.group)
    with UpdateWindow(run) as window:
        group = window.prompt_group("g", prompt, "response_only")
        timed(group.capture, "capture, s", found)
        found.setdefault("resident, MiB", []).append(run.ledger.live["group"] / MIB)
        sampler = Sampler(run, ())
        timed(
            partial(sampler.sample, group, options.group, options.response, 0),
            "sampling, ms per token", found, 1000 / options.response,
        )  # fmt: skip
    weights = [(-1.0) ** i for i in range(options.group)]
    for contract in CONTRACTS:
        window_of = partial(run_window, run, prompt, responses, weights, contract, 1)
        timed(window_of, f"window under {contract}, s", found)
        found.setdefault(f"peak saved under {contract}, MiB", []).append(run.ledger.peak["replay"] / MIB)
        found.setdefault(f"peak of the group under {contract}, MiB", []).append(
            run.ledger.peak["group"] / MIB
        )


def main() -> int:
    options = parse()
    kinds = ("full", "lastkv", "few restarts") if options.restarts else ("full", "lastkv")
    found: dict[str, dict[str, list[float]]] = {kind: {} for kind in kinds}
    with tempfile.TemporaryDirectory() as name, runtime_scope(Layout()) as runtime, ExitStack() as open_runs:
        from megatron_lrl.lifetimes.open import open_run
        from megatron_lrl.passes.restarts import kept_bytes

        folder = Path(name)
        write_model(folder / "hf", options, options.prompt + options.response)
        (folder / "bench.toml").write_text("")
        settings = [f"model.hf={folder / 'hf'}", f"prefix.chunk_size={options.chunk_size}"]
        runs: dict[str, Run] = {}
        for kind in kinds:
            attention = "full" if kind == "full" else "lastkv"
            extra = [f"model.attention={attention}", f"lastkv.chunk_size={options.chunk_size}"]
            if kind == "few restarts":
                one = kept_bytes(runs["lastkv"].arch, Layout(), torch.float32).chunk
                extra.append(f"prefix.snapshot_bytes={options.restarts * one}")
            config = load_config(folder / "bench.toml", [*settings, *extra])
            runs[kind] = open_runs.enter_context(open_run(config, runtime, gradients=True))
        for kind in kinds:  # what loads lazily
            measure(runs[kind], argparse.Namespace(**{**vars(options), "prompt": 64, "response": 4}), {})
        for _ in range(options.repeats):
            for kind in kinds:
                measure(runs[kind], options, found[kind])
    print(f"P = {options.prompt}, R = {options.response}, G = {options.group}, C = {options.chunk_size}, "
          f"{options.layers} layers, hidden {options.hidden}, float32, medians of {options.repeats}")  # fmt: skip
    print(" " * 42 + f"{'full':>12s}" + "".join(f"{kind:>14s}{'ratio':>9s}" for kind in kinds[1:]))
    for name in found["full"]:
        full, *others = (statistics.median(found[kind][name]) for kind in kinds)
        print(f"{name:42s}{full:12.3f}" + "".join(f"{other:14.3f}{other / full:9.3f}" for other in others))
    return 0


if __name__ == "__main__":
    sys.exit(main())
