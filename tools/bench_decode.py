"""Groups decoded together against group after group: the same prompts and ids, interleaved in one run.

    python tools/bench_decode.py
    python tools/bench_decode.py --layers 30 --hidden 576 --intermediate 1536 --heads 9 --kv-heads 3 --vocab 49152 \\
        --response 64

Under torchrun with --pp 2 it also prints the pipeline's idle share.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import torch
from bench_common import options_of, write_model

from megatron_lrl.config import load_config
from megatron_lrl.runtime import Layout, runtime_scope


def parse() -> argparse.Namespace:
    return options_of(
        __doc__,
        prompt=(512, "P", "prompt tokens"),
        response=(16, "R", "new tokens"),
        groups=(8, "N", "groups"),
        group=(4, "G", "responses of a group"),
        repeats=(3, "N", "rounds; medians"),
        pp=(1, "N", "stages, under torchrun"),
    ).parse_args()


def main() -> int:
    options = parse()
    found: dict[str, dict[str, list[float]]] = {"alone": {}, "together": {}}
    layout = Layout(pp=options.pp)
    with ExitStack() as stack:
        runtime = stack.enter_context(runtime_scope(layout))
        from megatron_lrl.lifetimes.open import open_run
        from megatron_lrl.lifetimes.run import PipelineUse
        from megatron_lrl.lifetimes.window import UpdateWindow
        from megatron_lrl.rollout.builtin import Sampler

        name = stack.enter_context(tempfile.TemporaryDirectory()) if runtime.is_main else None
        folder = Path(next(part for part in runtime.gather_objects(name) if part is not None))
        if runtime.is_main:
            write_model(folder / "hf", options, options.prompt + options.response)
            (folder / "bench.toml").write_text("")
        runtime.barrier()
        settings = [f"model.hf={folder / 'hf'}", f"parallel.pp={options.pp}"]
        run = stack.enter_context(open_run(load_config(folder / "bench.toml", settings), runtime))
        draw = torch.Generator().manual_seed(1)
        prompts = torch.randint(options.vocab, (options.groups, options.prompt), generator=draw).tolist()
        window = stack.enter_context(UpdateWindow(run))
        groups = [
            stack.enter_context(window.prompt_group(f"g{i}", ids, "response_only"))
            for i, ids in enumerate(prompts)
        ]
        sampler = Sampler(run, ())

        def sample(way: str, tokens: int) -> list[object]:
            batches = [groups] if way == "together" else [[group] for group in groups]
            return [r for batch in batches for r in sampler.sample_together(batch, options.group, tokens, 0)]

        ids = {}
        for round_ in range(-1, options.repeats):  # the first one loads what loads lazily
            for way, values in found.items():
                run.pipeline_use = PipelineUse()
                wall, cpu = time.perf_counter(), time.process_time()
                rollouts = sample(way, 2 if round_ < 0 else options.response)
                if round_ >= 0:
                    ids[way] = [r.ids for rollout in rollouts for r in rollout.responses]  # type: ignore[attr-defined]
                    values.setdefault("CPU s", []).append(time.process_time() - cpu)
                    values.setdefault("wall s", []).append(time.perf_counter() - wall)
                    values.setdefault("idle share of the pipeline", []).append(run.pipeline_use.bubble)
                    if runtime.is_main:
                        print(f"{way}: {values['CPU s'][-1]:.2f} CPU s", file=sys.stderr, flush=True)
        if runtime.is_main:
            print(
                f"{options.groups} groups of {options.group}, P = {options.prompt}, {options.response} new tokens, "
                f"{options.layers} layers, hidden {options.hidden}, float32, pp {options.pp}, "
                f"medians of {options.repeats}"
            )
            same = sum(a == b for a, b in zip(ids["alone"], ids["together"], strict=True))
            print(f"responses with the same ids: {same} of {len(ids['alone'])}")
            print(f"{'':32s}{'group after group':>18s}{'together':>12s}{'ratio':>9s}")
            for name in found["alone"]:
                alone, together = (statistics.median(values[name]) for values in found.values())
                ratio = f"{alone / together:9.2f}" if together else ""
                print(f"{name:32s}{alone:18.3f}{together:12.3f}{ratio}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
