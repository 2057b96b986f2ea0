"""Rank functions of the world tests: several cases in one open runtime, through the code behind the verbs.

A case is a plain dictionary:

    hf              Hugging Face directory of the model
    settings        `table.key=value` overrides (the layout is added from the world)
    trajectories    file of recorded groups;  prompts: file of prompts (for `generate`)
    out             the file that the verb writes
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from harness.worlds import World
from oracle.dtype_watch import FloatWatch

from megatron_lrl.checkpoint.hf_export import write_hf_file
from megatron_lrl.config import load_config
from megatron_lrl.layers.sequence import SequenceState
from megatron_lrl.lifetimes.contributions import BranchKey
from megatron_lrl.lifetimes.node import Documents
from megatron_lrl.lifetimes.open import load_policy, open_run, read_model_architecture
from megatron_lrl.lifetimes.replay import Replay
from megatron_lrl.lifetimes.run import Run
from megatron_lrl.lifetimes.window import UpdateWindow
from megatron_lrl.lifetimes.work import Branch, work_of
from megatron_lrl.passes.schedule import in_lockstep
from megatron_lrl.rl import verbs
from megatron_lrl.rl.accumulate import WindowPlan, accumulate
from megatron_lrl.rl.loss import summarise
from megatron_lrl.rl.material import limits
from megatron_lrl.rollout.builtin import Rollout, Sampler
from megatron_lrl.rollout.data import read_prompts, read_trajectories
from megatron_lrl.runtime import Layout, Runtime, runtime_scope
from megatron_lrl.settings import Config

Case = dict[str, Any]


def scope(world: World) -> Any:
    """The world's runtime, for one rank function."""
    return runtime_scope(Layout(world.tp, world.cp, world.pp, world.ep))


def config_of(world: World, case: Case, hf: str | None = None) -> Config:
    """The case's settings, read as a user's would be: an (empty) file and overrides."""
    layout = [*world.overrides, f"parallel.sequence_parallel={str(world.tp > 1).lower()}"]
    return load_config(os.devnull, [f'model.hf="{hf or case["hf"]}"', *layout, *case.get("settings", ())])


def run_verbs(world: World, cases: Sequence[Case]) -> int:
    """Each case's `verb`: generate, score or grad. Returns the number of cases."""
    with scope(world) as runtime:
        for case in cases:
            config = config_of(world, case)
            if case["verb"] == "generate":
                verbs.generate(config, runtime, case["prompts"], case["out"])
            else:
                getattr(verbs, case["verb"])(config, runtime, case["trajectories"], case["out"])
    return len(cases)


def grads_by_model(world: World, models: Sequence[Sequence[Case]]) -> None:
    """Each case's `grad`; the cases of one model differ in what does not concern it, and share an open run."""
    with scope(world) as runtime:
        for cases in models:
            with open_run(config_of(world, cases[0]), runtime, gradients=True) as run:
                groups = list(read_trajectories(cases[0]["trajectories"], limits(run.arch)))
                for case in cases:
                    run.config = config_of(world, case)
                    plan = WindowPlan(groups, run.config, runtime.dp, runtime.dp_rank)
                    with UpdateWindow(run) as window:
                        accumulate(window, plan)
                        window.reduce()
                        write_hf_file(run.model, run.arch, case["out"], runtime, dtype=torch.float64)


def fed_tokens(world: World, cases: Sequence[Case]) -> dict[str, Any]:
    """Each case's `grad`: how many tokens this rank's replica fed through the model, how many of them under autograd,
    and whether it leads a replica."""
    found: list[int] = []
    graphs: list[int] = []
    grow = SequenceState.grow

    def counting(state: SequenceState, lengths: Sequence[int]) -> None:
        grow(state, lengths)
        found[-1] += sum(lengths)
        graphs[-1] += sum(lengths) * torch.is_grad_enabled()

    with scope(world) as runtime:
        SequenceState.grow = counting  # type: ignore[method-assign]
        try:
            for case in cases:
                found.append(0)
                graphs.append(0)
                verbs.grad(config_of(world, case), runtime, case["trajectories"], case["out"])
        finally:
            SequenceState.grow = grow  # type: ignore[method-assign]
        return {"tokens": found, "graphs": graphs, "leads": runtime.is_replica_leader}


@contextmanager
def opened(world: World, case: Case, runtime: Runtime) -> Iterator[tuple[Run, UpdateWindow, WindowPlan]]:
    """What the `grad` verb opens, for cases that look inside."""
    config = config_of(world, case)
    groups = list(read_trajectories(case["trajectories"], limits(read_model_architecture(config))))
    plan = WindowPlan(groups, config, runtime.dp, runtime.dp_rank)
    with open_run(config, runtime, gradients=True) as run, UpdateWindow(run) as window:
        yield run, window, plan


def grad_with_reference(world: World, cases: Sequence[Case]) -> list[float]:
    """Like `grad`, with the model in `case["reference"]` as the reference of the KL term. Returns the losses."""
    losses = []
    with scope(world) as runtime:
        for case in cases:
            with opened(world, case, runtime) as (run, window, plan):
                arch = read_model_architecture(run.config)
                reference = load_policy(config_of(world, case, case["reference"]), runtime, arch)
                sums = accumulate(window, plan, reference=reference)
                window.reduce()
                write_hf_file(run.model, run.arch, case["out"], runtime)
                losses.append(float(sums["loss_sum"]))
    return losses


def watched_grad(world: World, cases: Sequence[Case]) -> list[dict[str, Any]]:
    """Capture, replay, sweep and reduction of each case under a `FloatWatch` for float64."""
    found = []
    with scope(world) as runtime:
        for case in cases:
            with opened(world, case, runtime) as (_, window, plan):
                with FloatWatch(torch.float64) as watch:
                    accumulate(window, plan)
                    window.reduce()
                found.append({"seen": watch.seen, "strangers": dict(watch.strangers)})
    return found


def measured(world: World, cases: Sequence[Case]) -> list[dict[str, Any]]:
    """Each case's window accumulated: peak bytes by lifetime on this rank, and the loss's metrics."""
    found = []
    with scope(world) as runtime:
        for case in cases:
            with opened(world, case, runtime) as (run, window, plan):
                metrics = summarise(accumulate(window, plan))
                window.reduce()
                bytes_of = {"peak": dict(run.ledger.peak), "cp_rank": runtime.cp_rank}
                found.append({**bytes_of, **metrics})
    return found


def packed_documents(
    world: World, case: Case, documents: Sequence[Sequence[int]], out: str
) -> list[list[float]]:
    """Next-token log-probabilities of documents packed into one micro-batch, and the gradient of their sum.

    The gradient goes to the file `out`; the log-probabilities are those of each document's tokens but the first.
    """
    config = config_of(world, case)
    with (
        scope(world) as runtime,
        open_run(config, runtime, gradients=True) as run,
        UpdateWindow(run) as window,
    ):
        packed = [[Branch(BranchKey("packed", i), tuple(ids)) for i, ids in enumerate(documents)]]
        with in_lockstep(run):
            scores = [found for _, found in Replay(Documents(run)).score(work_of(packed))]
        mine = packed if runtime.dp_rank == 0 else []
        window.fix(branch.key for batch in mine for branch in batch)
        with in_lockstep(run):
            window.replay(
                Documents(run), work_of(mine, [lambda logprob_S, *_: (logprob_S.sum(), {})] * len(mine))
            )
        window.reduce()
        write_hf_file(run.model, run.arch, out, runtime)
    return [logprob_R.tolist() for logprob_R, _ in scores]


def stopped_samples(world: World, case: Case) -> dict[str, Any]:
    """The case's first prompt sampled twice: without stop ids, then with a token of the first rollout as one.

    Returns both rollouts as (ids, log-probabilities) by response, the stop id, and the branch counts that
    `SequenceState.keep` left.
    """
    kept: list[int] = []
    keep = SequenceState.keep

    def counting(state: SequenceState, branches: Sequence[int]) -> None:
        keep(state, branches)
        kept.append(state.branches)

    config = config_of(world, case)
    with scope(world) as runtime, open_run(config, runtime) as run, UpdateWindow(run) as window:
        prompt = next(iter(read_prompts(case["prompts"], limits(run.arch))))
        with window.prompt_group(prompt.id, prompt.prompt_ids, "response_only") as group:

            def sample(stop_ids: list[int]) -> Rollout:
                size, longest = config.rollout.group_size, config.rollout.max_new_tokens
                return Sampler(run, stop_ids).sample(group, size, longest, 0)

            free = sample([])
            stop = most_staggered([response.ids for response in free.responses])
            SequenceState.keep = counting  # type: ignore[method-assign]
            try:
                stopped = sample([stop])
            finally:
                SequenceState.keep = keep  # type: ignore[method-assign]
    shown = [[(list(r.ids), list(r.logprobs or ())) for r in x.responses] for x in (free, stopped)]
    return {"free": shown[0], "stopped": shown[1], "stop": stop, "kept": kept}


def most_staggered(responses: Sequence[Sequence[int]]) -> int:
    """The token whose first places in the responses differ most, so that they end one after another."""
    tokens = {token for ids in responses for token in ids}
    return max(sorted(tokens), key=lambda t: len({ids.index(t) for ids in responses if t in ids}))
