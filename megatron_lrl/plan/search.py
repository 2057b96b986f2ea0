"""`plan CONFIG --search`: every layout of a world, the best few by longest prompt and by work per rank.

divisors of the world ─ check_layout ─ one plan per kind of stage ─► peak bytes, longest P within the budget
                                                        shapes ──► operations per rank, pipeline bubble included
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from tqdm import tqdm

from megatron_lrl.errors import UserError
from megatron_lrl.layers.moe.routing import check_routing
from megatron_lrl.models.hf_config import Architecture
from megatron_lrl.models.layout_check import check_layout
from megatron_lrl.passes.lockstep import check_lockstep
from megatron_lrl.plan.bytes import Work, open_plan_of_stage, stages_that_differ
from megatron_lrl.plan.cost import window_cost
from megatron_lrl.plan.limits import GIB, largest
from megatron_lrl.runtime import Layout
from megatron_lrl.settings import Config

_SHOWN = 6
_TP = 8  # tensor parallel ranks that one machine's links join, on the machines that people have


@dataclass(frozen=True)
class Candidate:
    """One layout: bytes of its fullest rank, the longest prompt in the budget, and the work of a rank."""

    layout: Layout
    dp: int
    peak: int
    longest: int | None  # None: no budget was given
    operations: float

    @property
    def name(self) -> str:
        sizes = {
            "tp": self.layout.tp,
            "cp": self.layout.cp,
            "pp": self.layout.pp,
            "ep": self.layout.ep,
            "dp": self.dp,
        }
        return " ".join(f"{axis}={n}" for axis, n in sizes.items() if n > 1) or "one rank"


def candidates(config: Config, arch: Architecture, world: int) -> Iterator[tuple[Config, Layout]]:
    """Every layout that the world, the model and the settings allow, and the settings in it."""
    plain = config.model_dump(exclude_unset=True)
    for tp in _divisors(world):
        if tp > _TP:
            continue
        for cp in _divisors(world // tp):
            for pp in _divisors(world // (tp * cp)):
                for ep in _divisors(world // (tp * pp)) if arch.moe is not None else (1,):
                    layout = Layout(tp, cp, pp, ep)
                    sizes = {"tp": tp, "cp": cp, "pp": pp, "ep": ep}
                    try:
                        chosen = Config.model_validate({**plain, "parallel": sizes})
                        check_layout(arch, layout)
                        check_routing(chosen, arch)
                        check_lockstep(chosen, arch, layout)
                    except (UserError, ValidationError, ValueError):
                        continue
                    yield chosen, layout


def search(config: Config, arch: Architecture, world: int, work: Work, budget: int | None) -> list[Candidate]:
    """All candidates, planned; in the order of `candidates`. Raises `UserError` if there is none."""
    asked = list(candidates(config, arch, world))
    if not asked:
        raise UserError(f"--search: no layout of {world} ranks fits the model and the settings")
    found = []
    for chosen, layout in tqdm(asked, desc="plan", unit="layout", leave=False, delay=2):
        peak, longest = 0, None if budget is None else arch.positions - work.response
        for stage in stages_that_differ(layout.pp):
            with open_plan_of_stage(chosen, arch, world, stage) as plan:
                peak = max(peak, plan.bytes_of(work).total)
                if budget is not None and longest is not None:
                    longest = min(longest, _longest(plan, work, budget, longest))
        dp = world // (layout.tp * layout.cp * layout.pp)
        found.append(Candidate(layout, dp, peak, longest, _operations(chosen, arch, work, layout, dp)))
    return found


def _longest(plan: Any, work: Work, budget: int, cap: int) -> int:
    def total(prompt: int) -> int:
        return plan.bytes_of(Work(prompt, work.response, work.group, work.concurrent)).total

    return largest(total, min(work.prompt, cap), budget, cap) if cap > 0 else 0


def _operations(config: Config, arch: Architecture, work: Work, layout: Layout, dp: int) -> float:
    """Operations of the busiest rank in a window. A pipeline of m micro-batches passes in m + pp - 1 steps."""
    prefix = config.prefix
    cost = window_cost(arch, prefix.contract, work.prompt, work.response, prefix.truncate_tokens)
    groups = -(-config.train.groups_per_update // dp)
    replays = groups * -(-work.group // work.at_once)
    chunks = (
        groups * -(-(work.prompt - 1) // prefix.chunk_size) if prefix.contract != "conventional" else replays
    )
    bubble = layout.pp - 1
    shared = cost.shared * groups * (1 + bubble / max(1, chunks))
    each = cost.each * work.group * groups * (1 + bubble / replays)
    return (shared + each) / (layout.tp * layout.cp * layout.pp)


def describe(found: Sequence[Candidate], budget: int | None) -> str:
    """Two short tables: what holds most, and what computes least."""
    by_room = sorted(
        found, key=lambda c: (-(c.longest or 0), c.peak) if budget is not None else (c.peak, c.operations)
    )
    fits = [c for c in found if budget is None or c.peak <= budget]
    by_work = sorted(fits, key=lambda c: (c.operations, c.peak))
    lines = [f"{len(found)} layouts; {len(fits)} fit" if budget is not None else f"{len(found)} layouts"]
    lines += [
        "",
        "most room" if budget is None else f"longest prompt in {budget / GIB:g} GiB",
        *_table(by_room),
    ]
    lines += [
        "",
        "least work on a rank (operations, pipeline bubble included; no communication)",
        *_table(by_work),
    ]
    if budget is not None and not fits:
        lines.append("  none fits: fewer tokens, more ranks, [adapter], or a smaller prefix.chunk_size")
    return "\n".join(lines)


def _table(ranked: Sequence[Candidate]) -> list[str]:
    rows = [f"  {'layout':<28}{'peak GiB':>10}{'longest P':>14}{'PFLOP / rank':>15}"]
    for one in ranked[:_SHOWN]:
        longest = "-" if one.longest is None else f"{one.longest:,}" if one.longest else "none"
        rows.append(f"  {one.name:<28}{one.peak / GIB:>10.1f}{longest:>14}{one.operations / 1e15:>15.4g}")
    return rows


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]
