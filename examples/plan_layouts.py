"""Bytes per rank of one config in several layouts, as a Markdown table, before anything is launched.

    python examples/plan_layouts.py CONFIG.toml "8: tp=4 pp=2" "32: tp=4 cp=4 pp=2" [key=value ...] [--budget 80 118]

A layout is the number of ranks and the sizes that differ from 1; dp follows. All numbers are GiB of the stage that
needs most. ``--budget`` (GiB) adds the longest prompt that fits, other sizes as in the config. One process, no GPU.
"""

from __future__ import annotations

import argparse
import os
import sys

from megatron_lrl.config import load_config
from megatron_lrl.errors import UserError

COLUMNS = ("parameters", "gradients", "optimizer", "state", "adjoint", "groups", "replay", "total")


def rows(options: argparse.Namespace, layout: str) -> str:
    """One line of the table."""
    # Torch and Megatron-Core are imported only once the command line is known to make sense.
    from megatron_lrl.lifetimes.open import read_model_architecture
    from megatron_lrl.models.layout_check import check_layout
    from megatron_lrl.plan.bytes import RankBytes, Work, open_plan_of_stage, stages_that_differ
    from megatron_lrl.plan.limits import GIB, largest
    from megatron_lrl.runtime import Layout

    world, _, sizes = layout.partition(":")
    chosen = {"tp": 1, "cp": 1, "pp": 1, "ep": 1} | {
        k: int(v) for k, v in (x.split("=") for x in sizes.split())
    }
    config = load_config(
        options.config, [*options.overrides, *(f"parallel.{k}={v}" for k, v in chosen.items())]
    )
    arch = read_model_architecture(config)
    check_layout(arch, Layout(**chosen))
    most: dict[int, int] = {}
    work = Work(
        options.prompt, config.rollout.max_new_tokens, config.rollout.group_size, config.replay.concurrent
    )
    positions = arch.positions - work.response
    worst: RankBytes | None = None
    for stage in stages_that_differ(chosen["pp"]):
        with open_plan_of_stage(config, arch, int(world), stage) as plan:
            here = plan.bytes_of(work)
            for budget in options.budget:
                fits = largest(
                    lambda p: plan.bytes_of(Work(p, work.response, work.group, work.concurrent)).total,
                    work.prompt, budget * GIB, positions,
                )  # fmt: skip
                most[budget] = min(fits, most.get(budget, positions))
        worst = here if worst is None or here.total > worst.total else worst
    assert worst is not None
    cells = [world, sizes.strip(), *(f"{getattr(worst, name) / GIB:.1f}" for name in COLUMNS)]
    for fits in most.values():
        cells.append(
            "does not fit" if not fits else f"{fits:,}{' (all positions)' if fits == positions else ''}"
        )
    return f"| {' | '.join(cells)} |"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", help="TOML file of settings")
    parser.add_argument(
        "rest", nargs="+", metavar="LAYOUT|key=value", help="layouts to plan; settings to replace"
    )
    parser.add_argument(
        "--prompt", type=int, default=131072 - 4096, help="prompt tokens (default %(default)s)"
    )
    parser.add_argument("--budget", type=int, nargs="*", default=[], help="memory of one rank, in GiB")
    options = parser.parse_args()
    layouts = [x for x in options.rest if ":" in x.partition("=")[0]]
    options.overrides = [x for x in options.rest if x not in layouts]
    if not layouts:
        parser.error('no layout; valid: "RANKS: tp=N cp=N pp=N ep=N", sizes of 1 left out')
    from megatron_lrl.runtime import quiet_libraries

    quiet_libraries()
    heads = ["ranks", "layout", *COLUMNS, *(f"longest P in {budget} GiB" for budget in options.budget)]
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}", flush=True)
    for layout in layouts:
        print(rows(options, layout), flush=True)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        print(f"plan_layouts: {error}", file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:
        os._exit(1)
