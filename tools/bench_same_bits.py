"""What `model.same_bits` costs: the same weights without and with it, interleaved in one run.

    python tools/bench_same_bits.py
    python tools/bench_same_bits.py --hf DIR --dtype bfloat16 --prompt 2048 --response 12 --group 12 --chunk-size 2048

Measures capture, sampling and the gradient of one window under each contract, and prints them with their ratio.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from bench_common import link_model, options_of, write_model
from bench_lastkv import measure

from megatron_lrl.config import load_config
from megatron_lrl.runtime import Layout, runtime_scope

KINDS = ("off", "on")


def parse() -> argparse.Namespace:
    parser = options_of(
        __doc__,
        prompt=(4096, "P", "prompt tokens"),
        response=(64, "R", "response tokens"),
        group=(8, "G", "responses"),
        chunk_size=(512, "Z", "capture chunk"),
        repeats=(3, "N", "rounds; medians are shown"),
    )
    parser.add_argument("--hf", type=Path, metavar="DIR", help="a model in the place of the random one")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    return parser.parse_args()


def main() -> int:
    options = parse()
    found: dict[str, dict[str, list[float]]] = {kind: {} for kind in KINDS}
    with tempfile.TemporaryDirectory() as name, runtime_scope(Layout()) as runtime, ExitStack() as open_runs:
        from megatron_lrl.lifetimes.open import open_run

        folder = Path(name)
        positions = options.prompt + options.response
        if options.hf is None:
            write_model(folder / "hf", options, positions)
        else:
            options.vocab = link_model(folder / "hf", options.hf, positions)
        (folder / "bench.toml").write_text("")
        settings = [
            f"model.hf={folder / 'hf'}", f"model.dtype={options.dtype}", f"prefix.chunk_size={options.chunk_size}",
        ]  # fmt: skip
        runs = {
            kind: open_runs.enter_context(
                open_run(
                    load_config(folder / "bench.toml", [*settings, f'model.same_bits="{kind}"']),
                    runtime,
                    gradients=True,
                )
            )
            for kind in KINDS
        }
        for run in runs.values():  # what loads lazily
            measure(run, argparse.Namespace(**{**vars(options), "prompt": 64, "response": 4}), {})
        for _ in range(options.repeats):
            for kind, run in runs.items():
                measure(run, options, found[kind])
    print(f"P = {options.prompt}, R = {options.response}, G = {options.group}, Z = {options.chunk_size}, "
          f"{options.hf or 'random model'}, {options.dtype}, medians of {options.repeats}")  # fmt: skip
    print(" " * 42 + f"{'off':>12s}{'on':>14s}{'ratio':>9s}")
    for name in found["off"]:
        off, on = (statistics.median(found[kind][name]) for kind in KINDS)
        print(f"{name:42s}{off:12.3f}{on:14.3f}{on / off if off else 1:9.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
