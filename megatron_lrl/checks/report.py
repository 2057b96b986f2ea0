"""`check CONFIG`: does the trainer evaluate the policy that sampled, and which gradient does each contract give?

prompts ─ capture ─ sample ──┐
                             ├─ sampler against replay: log-probabilities, KL, ratio, effective sample size
recorded responses ─ replay ─┘
      └─ gradient under each contract ── against conventional: cosine, relative L2, per kind of parameter

Both are judged by what rounding does to this very model (`rounding`).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from megatron_lrl.checks.positions import PositionMismatch, boundary_prompts, replayed, sample_and_score
from megatron_lrl.checks.rounding import Bar, moved_by_an_ulp
from megatron_lrl.layers.kinds import describe_attention
from megatron_lrl.lifetimes.open import open_run, read_model_architecture
from megatron_lrl.lifetimes.run import Run
from megatron_lrl.lifetimes.window import UpdateWindow
from megatron_lrl.outputs import write_report
from megatron_lrl.passes.lockstep import check_lockstep
from megatron_lrl.rl.accumulate import WindowPlan, accumulate
from megatron_lrl.rl.finite import reduce_finite
from megatron_lrl.rl.gradients import GradientComparison, compare_gradients, snapshot
from megatron_lrl.rl.loss import k3, summarise
from megatron_lrl.rl.material import load_prompts
from megatron_lrl.rollout.text import Text, hf_folder
from megatron_lrl.rollout.types import Group, Prompt
from megatron_lrl.runtime import Runtime
from megatron_lrl.settings import Config

GROUPS = 2
"""Prompts that are checked."""
SYNTHETIC_PROMPTS = (61, 128)
"""Lengths of random prompts where the config names none (under LastKV: around its boundaries)."""
WORST = 5
"""Positions that the printed report shows; the JSON has all."""


def check(config: Config, runtime: Runtime, out: str | None) -> bool:
    """Print the report on rank 0, write it as JSON if asked, and return whether every bar was reached.

    Takes the first prompts of data.prompts, or random ids. Raises `UserError` as `train` does.
    """
    prompts = runtime.together(_prompts, config)
    arch = runtime.together(read_model_architecture, config)
    runtime.together(check_lockstep, config, arch, runtime.layout, "conventional")
    with open_run(config, runtime, gradients=True) as run:
        groups, mismatch, parted = sample_and_score(run, prompts)
        # Fixed advantages of both signs, so that no term of the gradient vanishes.
        groups = [_with_advantages(group) for group in groups]
        report: dict[str, Any] = {
            "model": run.arch.to_dict(), "attention": describe_attention(run.arch),
            "dtype": config.model.dtype, "layout": asdict(runtime.layout),
            "prompts": [len(group.prompt_ids) for group in groups],
            "responses": [[len(r.ids) for r in group.responses] for group in groups],
        }  # fmt: skip
        contracts = [c for c in ("response_only", "exact", config.prefix.contract) if c != "conventional"]
        summary, baseline = _window(run, groups, "conventional")
        comparisons: dict[str, dict[str, GradientComparison]] = {}
        peaks = {"conventional": dict(run.ledger.peak)}
        for contract in dict.fromkeys(contracts):
            summary, comparisons[contract] = _window(run, groups, contract, baseline)
            peaks[contract] = dict(run.ledger.peak)
        bars = _bars(run, groups, summary, comparisons["exact"]["all"], baseline)
        report["sampler_vs_replay"] = summary
        report["parted"] = parted
        report["by_position"] = [asdict(row) for row in mismatch]
        report["gradients"] = {
            contract: {kind: asdict(value) for kind, value in rows.items()}
            for contract, rows in comparisons.items()
        }
        report["peak_bytes"] = peaks
        report["bars"] = {name: bar.to_dict() for name, bar in bars.items()}
        same_bits = run.core(run.model).same_bits
    if runtime.is_main:
        print(_text(report, mismatch, comparisons, bars, same_bits), flush=True)
    if out is not None:
        runtime.together(lambda: write_report(out, report) if runtime.is_main else None)
    return (parted is None or not same_bits) and all(bar.passed for bar in bars.values())


def _bars(
    run: Run, groups: Sequence[Group], summary: dict[str, float], exact: GradientComparison, baseline: Any
) -> dict[str, Bar]:
    """What was measured beside the same quantities of the model with its weights moved by an ulp."""
    plain_N = replayed(run, groups)
    with moved_by_an_ulp(run.model):
        difference_N = replayed(run, groups) - plain_N
        _, moved = _window(run, groups, "conventional", baseline)
    largest, kl = float(difference_N.abs().max()), float(k3(difference_N).mean())
    return {
        "sampler log-probabilities": Bar(
            summary["max_logprob_difference"],
            largest,
            "sampler against replay, largest log-probability difference",
        ),
        "sampler KL": Bar(summary["kl"], kl, "sampler against replay, KL per token", power=2),
        "exact gradient": Bar(
            exact.relative_l2, moved["all"].relative_l2, "exact against conventional gradient, relative L2"
        ),
    }


def _prompts(config: Config) -> list[Prompt]:
    arch = read_model_architecture(config)
    if config.data.prompts is not None:
        return load_prompts(config, arch, Text(hf_folder(config)), config.data.prompts)[:GROUPS]
    draw = random.Random(config.train.seed)
    longest = arch.positions - config.rollout.max_new_tokens
    lengths = SYNTHETIC_PROMPTS if arch.lastkv is None else boundary_prompts(arch.lastkv.chunk_size)
    return [
        Prompt(f"random{i}", tuple(draw.randrange(arch.vocab_size) for _ in range(max(1, min(n, longest)))))
        for i, n in enumerate(lengths)
    ]


def _with_advantages(group: Group) -> Group:
    return replace(
        group,
        responses=tuple(
            replace(response, advantage=(-1.0) ** i * (1.0 + 0.5 * i / len(group.responses)))
            for i, response in enumerate(group.responses)
        ),
    )


def _window(run: Run, groups: Sequence[Group], contract: str, baseline: Any = None) -> tuple[Any, Any]:
    """Accumulate one window under a contract. Returns (mismatch summary, snapshot or comparison with the baseline)."""
    plan = WindowPlan(groups, run.config, run.runtime.dp, run.runtime.dp_rank)
    with UpdateWindow(run) as window:
        sums = accumulate(window, plan, contract=contract, quiet=False)
        reduce_finite(window)
        values = summarise(sums)
        summary = {
            "max_logprob_difference": float(sums["logprob_difference_max"]),
            "kl": values["sampler_kl"],
            "ratio_mean": values["ratio_mean"],
            "ratio_max_deviation": values["ratio_deviation_max"],
            "effective_sample_size": values["effective_sample_size"],
        }
        if baseline is None:
            return summary, snapshot(run.model)
        return summary, compare_gradients(run.model, baseline, run.runtime)


def _text(
    report: dict[str, Any],
    mismatch: Sequence[PositionMismatch],
    comparisons: dict[str, dict[str, GradientComparison]],
    bars: dict[str, Bar],
    same_bits: bool,
) -> str:
    lines = [
        f"prompts of {report['prompts']} tokens, responses of {report['responses']}, {report['dtype']}, "
        f"layout {report['layout']}",
        "",
        "sampler against replay (before any update)",
        *(
            f"  {name.replace('_', ' '):28s} {value:.3e}"
            for name, value in report["sampler_vs_replay"].items()
        ),
    ]
    lines.append("  same bits" if report["parted"] is None else f"  first difference: {report['parted']}")
    worst = sorted(mismatch, key=lambda row: -row.max_difference)[:WORST]
    lines += ["", "positions with the largest differences", *(f"  {row}" for row in worst)]
    for contract, rows in comparisons.items():
        lines += ["", f"gradient: {contract} against conventional (attention {report['attention']})"]
        if contract != "exact":
            omitted = rows["all"]
            lines.append(
                f"  omitted: |difference| / |full| = {omitted.relative_l2:.4f}, cosine {omitted.cosine:.4f}"
            )
        lines += [f"  {kind:14s} {value}" for kind, value in rows.items()]
    lines += ["", "peak bytes of this rank"]
    for contract, peak in report["peak_bytes"].items():
        lines.append(f"  {contract:14s} replay {peak['replay']:>14,}  resident {peak['group']:>14,}")
    lines += ["", *map(str, bars.values())]
    if same_bits:
        lines.append(f"{'pass' if report['parted'] is None else 'FAIL'}  same bits")
    return "\n".join(lines)
