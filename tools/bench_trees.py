"""Responses that share turns, merged against taken one by one (replay.share_tokens = 0), interleaved in one run.

    python tools/bench_trees.py
    python tools/bench_trees.py --layers 30 --hidden 576 --intermediate 1536 --heads 9 --kv-heads 3 --vocab 49152 \\
        --prompt 2048 --turn 128
    python tools/bench_trees.py --break-even 8 16 32 64 128

A window of one group: families of responses share all turns but the last (--common: all responses share the first).
Half of each turn is tool output, which is masked. `--break-even`: instead pairs of responses that share so many
tokens, which says from how many on merging pays.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from bench_common import MIB, ProcessPeak, options_of, write_model

from megatron_lrl.config import load_config
from megatron_lrl.runtime import Layout, runtime_scope

if TYPE_CHECKING:
    from megatron_lrl.lifetimes.run import Run
    from megatron_lrl.rollout.types import Group


def parse() -> argparse.Namespace:
    parser = options_of(
        __doc__,
        prompt=(2048, "P", "prompt tokens"),
        families=(4, "N", "families"),
        responses=(16, "G", "responses in all"),
        turns=(4, "N", "turns of a response"),
        turn=(64, "N", "tokens of a turn"),
        chunk=(512, "Z", "capture chunk"),
        replay_chunk=(0, "N", "replay.chunk_size"),
        concurrent=(1, "K", "responses at once"),
        repeats=(3, "N", "rounds; medians"),
    )
    parser.add_argument("--common", action="store_true", help="the first turn is the same everywhere")
    parser.add_argument("--break-even", type=int, nargs="+", metavar="N", help="shared tokens of pairs")
    return parser.parse_args()


def agents(options: argparse.Namespace) -> Group:
    """One group of responses in families."""
    draw = torch.Generator().manual_seed(1)

    def turn() -> list[int]:
        return torch.randint(options.vocab, (options.turn,), generator=draw).tolist()

    first, mask = turn(), ([1] * (options.turn // 2) + [0] * (options.turn - options.turn // 2))
    paths = []
    for _ in range(options.families):
        shared = [first if options.common and i == 0 else turn() for i in range(options.turns - 1)]
        paths += [[*shared, turn()] for _ in range(options.responses // options.families)]
    return _group(options, draw, [list(chain(*path)) for path in paths], mask * options.turns)


def pairs(options: argparse.Namespace, shared: int) -> Group:
    """Responses of which every two share their first tokens."""
    draw = torch.Generator().manual_seed(2)
    paths = []
    for _ in range(options.responses // 2):
        both = torch.randint(options.vocab, (shared,), generator=draw).tolist()
        paths += [both + torch.randint(options.vocab, (options.turn,), generator=draw).tolist() for _ in "ab"]
    return _group(options, draw, paths, None)


def _group(
    options: argparse.Namespace, draw: torch.Generator, paths: list[list[int]], mask: list[int] | None
) -> Group:
    from megatron_lrl.rollout.types import Group, Response

    prompt = torch.randint(options.vocab, (options.prompt,), generator=draw).tolist()
    responses = [
        Response(tuple(ids), advantage=(-1.0) ** i, mask=None if mask is None else tuple(mask))
        for i, ids in enumerate(paths)
    ]
    return Group("g", tuple(prompt), tuple(responses))


def measure(run: Run, group: Group, share: int, found: dict[str, list[float]]) -> None:
    """One window's gradient."""
    from megatron_lrl.lifetimes.window import UpdateWindow
    from megatron_lrl.rl.accumulate import WindowPlan, accumulate

    config, memory = run.config, ProcessPeak()
    run.config = config.model_copy(
        update={"replay": config.replay.model_copy(update={"share_tokens": share})}
    )
    plan = WindowPlan([group], run.config)
    with memory.measure():
        wall, cpu = time.perf_counter(), time.process_time()
        with UpdateWindow(run) as window:
            accumulate(window, plan)
            window.reduce()
        found.setdefault("CPU s", []).append(time.process_time() - cpu)
        found.setdefault("wall s", []).append(time.perf_counter() - wall)
    run.config = config
    tokens = sum(len(response.ids) for response in group.responses) - plan.shared
    found.setdefault("response tokens under autograd", []).append(tokens)
    found.setdefault("saved MiB", []).append(run.ledger.peak["replay"] / MIB)
    found.setdefault("resident MiB", []).append(run.ledger.peak["group"] / MIB)
    found.setdefault("process MiB", []).append((memory.bytes or 0) / MIB)


def compare(run: Run, group: Group, repeats: int) -> dict[str, tuple[float, float]]:
    """Medians, merged and one by one."""
    found: dict[int, dict[str, list[float]]] = {1: {}, 0: {}}
    for _ in range(repeats):
        for share, values in found.items():
            measure(run, group, share, values)
    return {name: (statistics.median(found[1][name]), statistics.median(found[0][name])) for name in found[1]}


def show(rows: Sequence[tuple[str, dict[str, tuple[float, float]]]]) -> None:
    for title, medians in rows:
        print(f"{title:34s}{'merged':>12s}{'one by one':>12s}{'ratio':>9s}")
        for name, (merged, alone) in medians.items():
            print(f"{name:34s}{merged:12.3f}{alone:12.3f}{alone / merged if merged else 0:9.2f}")


def main() -> int:
    options = parse()
    with tempfile.TemporaryDirectory() as name, runtime_scope(Layout()) as runtime, ExitStack() as stack:
        from megatron_lrl.lifetimes.open import open_run

        folder = Path(name)
        longest = max(options.turns * options.turn, options.turn + max(options.break_even or [0]))
        write_model(folder / "hf", options, options.prompt + longest)
        (folder / "bench.toml").write_text("")
        settings = [
            f"model.hf={folder / 'hf'}", f"prefix.chunk_size={options.chunk}",
            f"replay.chunk_size={options.replay_chunk}", f"replay.concurrent={options.concurrent}",
        ]  # fmt: skip
        run = stack.enter_context(
            open_run(load_config(folder / "bench.toml", settings), runtime, gradients=True)
        )
        small = argparse.Namespace(**{**vars(options), "prompt": 9, "turn": 4, "responses": 2, "families": 1})
        measure(run, agents(small), 1, {})  # what loads lazily
        print(
            f"P = {options.prompt}, {options.responses} responses, Z = {options.chunk}, K = {options.concurrent}, "
            f"{options.layers} layers, hidden {options.hidden}, float32, medians of {options.repeats}"
        )
        if options.break_even:
            rows = [(f"pairs share {n}", pairs(options, n)) for n in options.break_even]
        else:
            title = f"{options.families} families, {options.turns} turns of {options.turn}"
            rows = [(title + (", 1st common" if options.common else ""), agents(options))]
        for title, group in rows:
            show([(title, compare(run, group, options.repeats))])
    return 0


if __name__ == "__main__":
    sys.exit(main())
