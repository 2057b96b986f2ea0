"""Rank functions of the expert tests; see `worlds.ranks` for what a case is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from harness.worlds import World

from megatron_lrl.checkpoint.hf_export import parameter_value, write_hf_file
from megatron_lrl.errors import UserError
from megatron_lrl.lifetimes.open import open_run, read_model_architecture
from megatron_lrl.lifetimes.run import Run
from megatron_lrl.lifetimes.window import UpdateWindow
from megatron_lrl.passes.schedule import in_lockstep
from megatron_lrl.rl.accumulate import WindowPlan, accumulate, nonfinite_branches
from megatron_lrl.rl.gradients import compare_gradients, snapshot
from megatron_lrl.rl.material import limits
from megatron_lrl.rollout.data import read_trajectories
from megatron_lrl.runtime import Runtime
from worlds.ranks import Case, config_of, scope


def plan_of(run: Run, case: Case, runtime: Runtime) -> WindowPlan:
    groups = list(read_trajectories(case["trajectories"], limits(read_model_architecture(run.config))))
    return WindowPlan(groups, run.config, runtime.dp, runtime.dp_rank)


def step(world: World, cases: Sequence[Case]) -> list[dict[str, Any]]:
    """One optimizer step of each case; writes the gradient before it (`out`) and the parameters' change (`moved`).

    Returns the gradient's norm, bytes by part, its comparison with itself and with its half, and router biases.
    """
    found = []
    with scope(world) as runtime:
        for case in cases:
            with (
                open_run(config_of(world, case), runtime, optimizer=True) as run,
                UpdateWindow(run) as window,
            ):
                accumulate(window, plan_of(run, case, runtime))
                window.reduce()
                gradient = snapshot(run.model)
                same = compare_gradients(run.model, gradient, runtime)
                twice = compare_gradients(run.model, {k: 2 * v for k, v in gradient.items()}, runtime)
                result = window.step()
                write_hf_file(run.model, run.arch, case["moved"], runtime, get=parameter_value)
                layers = run.core(run.model).decoder.layers
                found.append(
                    {
                        "norm": result.grad_norm,
                        "bytes": dict(run.ledger.parts),
                        "same": {kind: (row.relative_l2, row.norm) for kind, row in same.items()},
                        "twice": twice["all"].relative_l2,
                        "version": run.version,
                        "bias": {
                            layer.layer_number - 1: layer.mlp.router.expert_bias.tolist()
                            for layer in layers
                            if layer.is_moe_layer and layer.mlp.router.expert_bias is not None
                        },
                    }
                )
    return found


def failing_replica(world: World, case: Case, user: bool) -> str:
    """The last replica fails before its capture; what this rank raises for it."""
    with (
        scope(world) as runtime,
        open_run(config_of(world, case), runtime) as run,
        UpdateWindow(run) as window,
    ):
        try:
            with in_lockstep(run):
                if runtime.dp_rank == runtime.dp - 1:
                    raise UserError("no such thing") if user else ValueError("no such thing")
                with window.prompt_group("g", tuple(range(3, 20)), "response_only"):
                    pass
        except Exception as raised:
            return f"{type(raised).__name__}: {raised}"
    return "nothing"


def named_nonfinite(world: World, case: Case, token: int | None) -> str:
    """Which branches are named when the embedding of a token is infinite."""
    with scope(world) as runtime, open_run(config_of(world, case), runtime, gradients=True) as run:
        plan, core = plan_of(run, case, runtime), run.core(run.model)
        with UpdateWindow(run) as window:
            accumulate(window, plan)
            if token is not None and core.pre_process:
                with torch.no_grad():
                    core.embedding.word_embeddings.weight[token] = float("inf")
            return nonfinite_branches(window, plan)
