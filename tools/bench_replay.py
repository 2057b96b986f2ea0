"""Measure the gradient of one window under each contract: seconds, saved-for-backward bytes, resident bytes.

    python tools/bench_replay.py --prompt 2048 --response 64 --group 8 --concurrent 1 2
    torchrun --nproc-per-node 2 tools/bench_replay.py --prompt 8192 --set parallel.cp=2

A random model is written to a temporary folder, so no file is needed. All combinations run in one process, and each
repeat goes through all of them before the next starts, so that a slow minute of the machine hits all alike.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench_common import (
    MIB,
    ProcessPeak,
    add_model_arguments,
    link_model,
    resident_set,
    run_window,
    trajectories,
    write_model,
)
from bench_longest import longest
from tqdm import tqdm

from megatron_lrl.config import load_config
from megatron_lrl.errors import UserError
from megatron_lrl.runtime import Layout, runtime_scope

if TYPE_CHECKING:
    from megatron_lrl.lifetimes.run import Run

CONTRACTS = ("conventional", "response_only", "exact", "truncated")


@dataclass
class Case:
    """One row of the table and what was measured for it, one value per repeat."""

    contract: str
    prompt: int
    response: int
    group: int
    concurrent: int
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)  # of this process: steady on a shared machine
    saved: int = 0  # bytes, the peak of saved-for-backward tensors
    resident: int = 0  # bytes, prefix state and its adjoint
    process: int | None = None  # bytes above what the process held before the window

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.prompt, self.response, self.group, self.concurrent


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    about = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0], formatter_class=about)
    several: dict[str, Any] = {"type": int, "nargs": "+", "metavar": "N"}
    parser.add_argument(
        "--contracts", nargs="+", choices=CONTRACTS, default=["conventional", "response_only", "exact"]
    )
    parser.add_argument("--prompt", default=[512], help="P, prompt tokens", **several)
    parser.add_argument("--response", default=[32], help="R, response tokens", **several)
    parser.add_argument("--group", default=[4], help="G, responses of the prompt", **several)
    parser.add_argument("--concurrent", default=[1], help="K, responses replayed at once", **several)
    parser.add_argument("--chunk", type=int, default=2048, metavar="N", help="Z, capture chunk size")
    parser.add_argument("--truncate", type=int, default=1024, metavar="N", help="T of the truncated contract")
    parser.add_argument(
        "--repeats", type=int, default=3, metavar="N", help="windows per row; the median is shown"
    )
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="also draw the table, as a PNG file (matplotlib)"
    )
    parser.add_argument(
        "--longest", type=float, metavar="GIB",
        help="instead of the table: the longest prompt whose window fits this process memory, under each of "
        "--contracts, for the first R, G and K (one rank, Linux)",
    )  # fmt: skip
    parser.add_argument(
        "--probe-seconds", type=float, default=300, metavar="S",
        help="--longest: a window that takes longer ends the search of its contract",
    )  # fmt: skip
    parser.add_argument(
        "--start", type=int, nargs="+", default=[1024], metavar="P",
        help="--longest: the first prompt tried, one for all of --contracts or one for each; four times it is next",
    )  # fmt: skip
    parser.add_argument(
        "--step", action="store_true", help="whole updates: the optimizer's state is held, and it steps"
    )
    parser.add_argument(
        "--hf", type=Path, metavar="DIR",
        help="this model, whatever positions its config.json allows, instead of a random one",
    )  # fmt: skip
    add_model_arguments(parser)
    parser.add_argument("--probe", help=argparse.SUPPRESS)  # a child of --longest: its options as JSON
    parser.add_argument("--set", nargs="+", default=[], metavar="TABLE.KEY=VALUE", help="further settings")
    return parser.parse_args(arguments)


def measure(case: Case, run: Run, options: argparse.Namespace) -> None:
    """One window of a case."""
    prompt_ids, responses = trajectories(options.vocab, case.prompt, case.response, case.group)
    weights = [1.0 / (case.group * case.response)] * case.group
    peak = ProcessPeak()
    run.runtime.barrier()
    with peak.measure():
        start, cpu_start = time.perf_counter(), time.process_time()
        run_window(run, prompt_ids, responses, weights, case.contract, case.concurrent, options.step)
        case.seconds.append(time.perf_counter() - start)
        case.cpu_seconds.append(time.process_time() - cpu_start)
    case.saved = run.ledger.peak["replay"]
    case.resident = run.ledger.peak["group"]
    case.process = peak.bytes


def table(cases: Sequence[Case]) -> str:
    """Rows of equal shape together; ratios against the conventional row of the same shape, if it was measured."""
    head = (
        f"{'contract':<14} {'P':>7} {'R':>5} {'G':>4} {'K':>3} {'s/window':>9} {'ratio':>7} "
        f"{'CPU s':>8} {'ratio':>7} "
        f"{'saved MiB':>10} {'ratio':>7} {'resident MiB':>13} {'process MiB':>12}"
    )
    lines = [head, "-" * len(head)]
    base = {case.shape: case for case in cases if case.contract == "conventional"}
    for case in cases:
        seconds, cpu = statistics.median(case.seconds), statistics.median(case.cpu_seconds)
        ratios = ["-"] * 3
        if (reference := base.get(case.shape)) is not None:
            ratios = [
                f"{seconds / statistics.median(reference.seconds):.3f}",
                f"{cpu / statistics.median(reference.cpu_seconds):.3f}",
                f"{case.saved / reference.saved:.4f}",
            ]
        process = "-" if case.process is None else f"{case.process / MIB:.1f}"
        lines.append(
            f"{case.contract:<14} {case.prompt:>7} {case.response:>5} {case.group:>4} {case.concurrent:>3} "
            f"{seconds:>9.3f} {ratios[0]:>7} {cpu:>8.3f} {ratios[1]:>7} "
            f"{case.saved / MIB:>10.2f} {ratios[2]:>7} {case.resident / MIB:>13.2f} {process:>12}"
        )
    return "\n".join(lines)


def plot(cases: Sequence[Case], path: Path) -> None:
    """Draw CPU seconds, saved and resident bytes of each contract over P, one line per contract, R, G and K."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError(
            "--plot needs matplotlib: pip install 'megatron-lrl[dev]', or leave --plot out"
        ) from error
    lines: dict[tuple, list[Case]] = {}
    for case in cases:
        lines.setdefault((case.contract, *case.shape[1:]), []).append(case)
    panels = {
        "CPU seconds per window": lambda case: statistics.median(case.cpu_seconds),
        "peak saved-for-backward MiB": lambda case: case.saved / MIB,
        "peak resident MiB (state, adjoint)": lambda case: case.resident / MIB,
        "peak process MiB above the model": lambda case: (case.process or 0) / MIB,
    }
    prompts = sorted({case.prompt for case in cases})
    figure = Figure(figsize=(13, 7), layout="constrained")
    for axes, (title, value) in zip(figure.subplots(2, 2).flat, panels.items(), strict=True):
        for (contract, response, group, concurrent), row in lines.items():
            row = sorted(row, key=lambda case: case.prompt)
            label = f"{contract}, R={response}, G={group}, K={concurrent}"
            values = [value(case) or math.nan for case in row]  # a logarithmic axis has no zero
            axes.plot([case.prompt for case in row], values, marker="o", label=label)
        axes.set(title=title, xlabel="prompt tokens P", xscale="log", yscale="log")
        axes.set_xticks(prompts, [str(prompt) for prompt in prompts])
        axes.set_xticks([], minor=True)
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:g}")
        axes.tick_params(axis="y", which="minor", labelsize="small")
        axes.grid(alpha=0.3)
    figure.axes[0].legend(fontsize="small")
    partial = path.with_name(f".{path.name}.partial")
    figure.savefig(partial, dpi=120, format="png")
    os.replace(partial, path)


def bench(options: argparse.Namespace, folder: Path) -> str:
    """All cases on this rank. Raises `UserError` for settings that do not fit the model or the world."""
    positions = max(options.prompt) + max(options.response)
    if options.hf:
        options.vocab = link_model(folder / "hf", Path(options.hf), positions)
    else:
        write_model(folder / "hf", options, positions)
    (folder / "bench.toml").write_text("")
    settings = [f"model.hf={folder / 'hf'}", f"prefix.chunk_size={options.chunk}"]
    settings += [f"prefix.truncate_tokens={options.truncate}", *options.set]
    config = load_config(folder / "bench.toml", settings)
    parallel = config.parallel
    shapes = itertools.product(options.prompt, options.response, options.group, options.concurrent)
    cases = [Case(contract, *shape) for shape in shapes for contract in options.contracts]
    with runtime_scope(Layout(parallel.tp, parallel.cp, parallel.pp, parallel.ep)) as runtime:
        from megatron_lrl.lifetimes.open import open_run

        with open_run(config, runtime, gradients=True, optimizer=options.step) as run:
            for contract in options.contracts:  # touch the gradient buffers and load what loads lazily
                measure(Case(contract, 16, 4, 1, 1), run, options)
            rounds = [case for _ in range(options.repeats) for case in cases]
            for case in tqdm(rounds, unit="window", leave=False, disable=not runtime.is_main):
                measure(case, run, options)
            if runtime.is_main and options.plot:
                plot(cases, options.plot)
            return table(cases) if runtime.is_main else ""


def probe(options: argparse.Namespace) -> int:
    """A child of the search for the longest prompt: one window; the last line printed holds its peak."""
    with tempfile.TemporaryDirectory(prefix="bench-longest-") as folder:
        try:
            bench(options, Path(folder))
        except UserError as error:
            print(error)
            return 2
    print(json.dumps({"peak": resident_set("VmHWM")}))
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if options.probe:
        return probe(argparse.Namespace(**json.loads(options.probe)))
    if options.longest:
        return longest(options)
    with tempfile.TemporaryDirectory(prefix="bench-replay-") as folder:
        try:
            print(bench(options, Path(folder)), flush=True)
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
