"""`plan CONFIG`: bytes of every kind of rank by lifetime, what fits a budget, and the break-even with `conventional`.

settings ─ one planned rank per kind of pipeline stage ─┬─ bytes by lifetime ─ headroom
                                                        ├─ largest P, R, G, K that fit
shapes ─ operations ────────────────────────────────────┴─ break-even: seconds, bytes
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from megatron_lrl.errors import UserError
from megatron_lrl.layers.kinds import describe_attention
from megatron_lrl.layers.moe.routing import check_routing
from megatron_lrl.lifetimes.ledger import Ledger, process_peak
from megatron_lrl.lifetimes.open import read_model_architecture
from megatron_lrl.lifetimes.run import Run
from megatron_lrl.models.hf_config import Architecture
from megatron_lrl.models.layout_check import check_layout
from megatron_lrl.outputs import write_report
from megatron_lrl.plan.bytes import (
    Plan,
    RankBytes,
    Work,
    open_plan,
    open_plan_of_stage,
    stages_that_differ,
)
from megatron_lrl.plan.cost import break_even_group, window_cost
from megatron_lrl.plan.limits import GIB, largest
from megatron_lrl.plan.search import describe, search
from megatron_lrl.plan.world import beside
from megatron_lrl.runtime import Layout, check_world
from megatron_lrl.settings import Config

DEFAULT_PROMPT = 32768
NO_LIMIT = 1_000_000
"""A number of responses that nothing but time limits."""


@dataclass(frozen=True)
class Request:
    """What `plan` is asked for. ``budget``: bytes of one rank's device."""

    world: int
    work: Work
    budget: int | None
    teraflops: float | None


@dataclass(frozen=True)
class StagePlan:
    """One kind of rank: its bytes under the contract and under `conventional`, and the largest sizes that fit."""

    ours: RankBytes
    conventional: RankBytes
    limits: dict[str, int]
    prompts: dict[int, tuple[int, int]]  # P -> bytes above the run: ours, conventional


def plan(
    config: Config,
    *,
    world: int | None = None,
    prompt: int | None = None,
    response: int | None = None,
    budget: float | None = None,
    teraflops: float | None = None,
    out: str | None = None,
    search_layouts: bool = False,
) -> str:
    """The report as text; also written as JSON if ``out`` is given.

    Args:
        world: ranks (default: one replica, tp cp pp).
        prompt, response: tokens (default: 32,768 or what the model allows; rollout.max_new_tokens).
        budget: GiB of one rank's device.
        teraflops: 10^12 operations a second that one rank achieves, to turn operations into seconds.
        search_layouts: instead the best layouts of the world, whatever [parallel] says.

    Raises `UserError` for a layout that does not fit the model or the world, and for lengths beyond the
    model's positions.
    """
    arch = read_model_architecture(config)
    if search_layouts:
        if world is None:
            raise UserError("--search needs --world N: the number of ranks to lay out")
        limit = None if budget is None else int(budget * GIB)
        found = search(config, arch, world, _work(config, arch, prompt, response), limit)
        if out is not None:
            write_report(out, {"layouts": [{"layout": c.name, **asdict(c)} for c in found]})
        return describe(found, limit)
    parallel = config.parallel
    layout = Layout(parallel.tp, parallel.cp, parallel.pp, parallel.ep)
    check_layout(arch, layout)
    check_routing(config, arch)
    world = layout.model_size if world is None else world
    check_world(layout, world)
    request = Request(
        world, _work(config, arch, prompt, response), None if budget is None else int(budget * GIB), teraflops
    )
    stages = [_plan_stage(config, arch, request, stage) for stage in stages_that_differ(layout.pp)]
    if out is not None:
        write_report(out, _described(request, stages))
    return _text(config, arch, request, stages)


def _work(config: Config, arch: Architecture, prompt: int | None, response: int | None) -> Work:
    response = config.rollout.max_new_tokens if response is None else response
    longest = arch.positions - response
    if prompt is None:
        prompt = min(DEFAULT_PROMPT, longest)
    if prompt < 1 or response < 1 or prompt > longest:
        raise UserError(
            f"--prompt {prompt} and --response {response} together exceed the model's {arch.positions} positions; "
            f"valid: a prompt of 1 to {max(0, longest)} tokens"
        )
    return Work(prompt, response, config.rollout.group_size, config.replay.concurrent)


def _plan_stage(config: Config, arch: Architecture, request: Request, stage: int) -> StagePlan:
    work = request.work
    with open_plan_of_stage(config, arch, request.world, stage) as plan:
        ours, conventional = plan.bytes_of(work), plan.bytes_of(work, "conventional")
        limits = {} if request.budget is None else _limits(plan, work, request.budget)
        prompts = {}
        for prompt in sorted({max(1, work.prompt // n) for n in (1, 4, 16, 64)}):
            shape = replace(work, prompt=prompt)
            mine, theirs = (
                plan.bytes_of(shape, contract, recorded=True) for contract in (None, "conventional")
            )
            prompts[prompt] = (mine.total - mine.run, theirs.total - theirs.run)
    return StagePlan(ours, conventional, limits, prompts)


def _limits(plan: Plan, work: Work, budget: int) -> dict[str, int]:
    """Largest P, R, G, K, each with the others as they are."""
    positions = plan.run.arch.positions

    def total(**changes: int) -> int:
        return plan.bytes_of(replace(work, **changes)).total

    return {
        "P": largest(lambda n: total(prompt=n), work.prompt, budget, positions - work.response),
        "R": largest(lambda n: total(response=n), work.response, budget, positions - work.prompt),
        "G": largest(lambda n: total(group=n), work.group, budget, NO_LIMIT),
        "K": largest(lambda n: total(concurrent=n), work.concurrent, budget, work.group),
    }


def _text(config: Config, arch: Architecture, request: Request, stages: Sequence[StagePlan]) -> str:
    parallel, work, contract = config.parallel, request.work, config.prefix.contract
    dp = request.world // (parallel.tp * parallel.cp * parallel.pp)
    lines = [
        f"{arch.family}, {arch.num_layers} layers, hidden {arch.hidden_size}, {config.model.dtype}, attention "
        f"{describe_attention(arch)}; "
        f"{request.world} ranks: tp {parallel.tp}, cp {parallel.cp}, pp {parallel.pp}, dp {dp}"
        + (f", ep {parallel.ep}" if arch.moe is not None else ""),
        f"prompt P = {work.prompt}, response R = {work.response}, group G = {work.group}, K = {work.at_once} at once, "
        f"chunk Z = {config.prefix.chunk_size}, contract {contract}"
        + (f", responses in chunks of {config.replay.chunk_size}" if config.replay.chunk_size else ""),
        "",
        f"{'bytes per rank':<30}" + "".join(f"{'stage ' + str(s.ours.stage):>14}" for s in stages),
        *bytes_lines([s.ours for s in stages]),
    ]
    if request.budget is not None:
        room = [request.budget - s.ours.total for s in stages]
        lines += [
            _row("headroom", room),
            "",
            f"fits {request.budget / GIB:.1f} GiB, one size changed at a time:",
        ]
        # What bounds a size besides memory: positions of the model, nothing, the group.
        ends = {
            "P": (arch.positions - work.response, " (all positions)"),
            "R": (arch.positions - work.prompt, " (all positions)"),
            "G": (NO_LIMIT, " or more"),
            "K": (work.group, " (the whole group)"),
        }
        for name, (end, remark) in ends.items():
            value = min(s.limits[name] for s in stages)
            lines.append(f"  largest {name}  {value or 'nothing fits'}{remark if value == end else ''}")
    lines += ["", *_break_even(config, arch, request, stages)]
    return "\n".join(lines)


def bytes_lines(columns: Sequence[RankBytes]) -> list[str]:
    """A table of planned bytes by lifetime, one column per rank."""

    def row(name: str, value: Callable[[RankBytes], int]) -> str:
        return _row(name, [value(column) for column in columns])

    return [
        row("run", lambda b: b.run),
        row("  parameters", lambda b: b.parameters),
        row("  gradient buffers", lambda b: b.gradients),
        row("  optimizer", lambda b: b.optimizer),
        *([row("  reference model", lambda b: b.reference)] if any(b.reference for b in columns) else []),
        row("window", lambda b: b.window),
        row("prompt group", lambda b: b.groups),
        row("  state of one prompt", lambda b: b.state),
        row("  adjoint", lambda b: b.adjoint),
        row("replay", lambda b: b.replay),
        row("  replay graphs", lambda b: b.replay_graph),
        row("  sweep graphs", lambda b: b.sweep_graph),
        row("  decoding", lambda b: b.decoding),
        row("saving a checkpoint, host", lambda b: b.saving),
        row("file of `grad`, host", lambda b: b.gradient_file),
        row("peak", lambda b: b.total),
        *([row("  of the process", lambda b: b.process)] if any(b.libraries for b in columns) else []),
    ]


def plan_of_run(run: Run, work: Work, recorded: bool = False) -> RankBytes:
    """What this rank of an open run will take at its peak. ``recorded``: responses are not sampled."""
    with open_plan(run.config, beside(run.runtime), run.arch) as plan:
        return replace(plan.bytes_of(work, recorded=recorded), libraries=run.ledger.libraries)


def against_measured(planned: RankBytes, ledger: Ledger) -> str:
    """A table of planned and measured bytes by lifetime; the run's parts as they are now, the others at their peak."""
    measured = {**ledger.parts, "run": ledger.run, **ledger.peak, "process": process_peak()}
    rows = {
        "run": planned.run, "parameters": planned.parameters, "gradients": planned.gradients,
        "optimizer": planned.optimizer, "reference": planned.reference,
        "window": planned.window, "group": planned.groups, "replay": planned.replay,
        "process": planned.process if planned.libraries else 0,
    }  # fmt: skip
    parts = set(ledger.parts)
    lines = [f"{'bytes of rank 0':<30}{'planned':>14}{'measured':>14}"]
    for name, value in rows.items():
        if value or measured.get(name):
            label = f"  {name}" if name in parts else name
            lines.append(_row(label, [value, measured.get(name, 0)]))
    return "\n".join(lines)


def saving_against_measured(planned: RankBytes, ledger: Ledger) -> str:
    """What writing checkpoints took on rank 0's host beside the run, as a line."""
    line = f"writing it took {_size(ledger.output)} of host memory beside the run (planned {_size(planned.saving)})"
    if planned.libraries:
        line += f"; the process {_size(process_peak())} in all (planned {_size(planned.process)})"
    return line


def _row(name: str, values: Sequence[int]) -> str:
    return f"  {name:<28}" + "".join(f"{_size(value):>14}" for value in values)


def _size(nbytes: int) -> str:
    """Bytes in the unit that fits: "12.345 GiB", "96.0 MiB", "-1.5 KiB"."""
    for unit, scale, digits in (("GiB", GIB, 3), ("MiB", 2**20, 1), ("KiB", 2**10, 1)):
        if abs(nbytes) >= 0.1 * scale:
            return f"{nbytes / scale:.{digits}f} {unit}"
    return str(nbytes)


def _break_even(
    config: Config, arch: Architecture, request: Request, stages: Sequence[StagePlan]
) -> list[str]:
    work, contract, truncate = request.work, config.prefix.contract, config.prefix.truncate_tokens
    if contract == "conventional":
        return ["contract conventional: there is nothing to break even with"]
    unit = "seconds" if request.teraflops else "PFLOP"
    ranks = request.world // (request.world // (config.parallel.tp * config.parallel.cp * config.parallel.pp))
    scale = 1e15 if not request.teraflops else request.teraflops * 1e12 * ranks
    responses = sorted({max(1, work.response // 4), work.response, 4 * work.response})
    lines = [
        f"break-even of {contract} with conventional (operations counted from shapes)",
        f"  {'P':>8} {'R':>7} {unit + ' (G = ' + str(work.group) + ')':>22} {'conventional':>14} {'ratio':>7} "
        f"{'cheaper from G':>15}",
    ]
    for prompt in stages[0].prompts:
        for response in responses:
            mine = window_cost(arch, contract, prompt, response, truncate)
            full = window_cost(arch, "conventional", prompt, response)
            a, b = mine.total(work.group) / scale, full.total(work.group) / scale
            start = break_even_group(mine, full)
            lines.append(
                f"  {prompt:>8} {response:>7} {a:>22.4g} {b:>14.4g} {b / a:>7.2f} {start if start else 'never':>15}"
            )
    lines += ["", "bytes of a window above the run, worst rank (recorded responses)",
              f"  {'P':>8} {contract:>14} {'conventional':>14} {'ratio':>7}"]  # fmt: skip
    for prompt in stages[0].prompts:
        ours, theirs = (max(s.prompts[prompt][i] for s in stages) for i in (0, 1))
        lines.append(f"  {prompt:>8} {_size(ours):>14} {_size(theirs):>14} {theirs / ours:>7.2f}")
    return lines


def _described(request: Request, stages: Sequence[StagePlan]) -> dict[str, Any]:
    """The report as JSON."""

    def described(bytes_: RankBytes) -> dict[str, Any]:
        return {**asdict(bytes_), **bytes_.lifetimes(), "total": bytes_.total}

    return {
        "world": request.world,
        "work": asdict(request.work),
        "budget": request.budget,
        "stages": [
            {
                "planned": described(stage.ours),
                "conventional": described(stage.conventional),
                "largest": stage.limits,
            }
            for stage in stages
        ],
    }
