"""Rank functions of tests/plan/test_plan.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from harness.worlds import World
from lifetimes.tiny import branches, ids, mean_loss

from megatron_lrl.config import load_config
from megatron_lrl.lifetimes.open import open_run
from megatron_lrl.lifetimes.run import Run
from megatron_lrl.lifetimes.window import UpdateWindow
from megatron_lrl.lifetimes.work import batches_of, work_of
from megatron_lrl.plan.bytes import Work, open_plan
from megatron_lrl.plan.world import beside
from megatron_lrl.runtime import Layout, runtime_scope


def planned_beside(run: Run, shape: Work, contract: str) -> dict[str, int]:
    """A plan in the process of an open run, which must neither use nor change anything of it."""
    with open_plan(run.config, beside(run.runtime), run.arch) as plan:
        return plan.bytes_of(shape, contract, recorded=True).lifetimes()


def measured(
    world: World, settings: Sequence[str], contracts: Sequence[str], work: Sequence[int]
) -> dict[str, Any]:
    """Bytes of this rank after one update under each contract, and what a plan beside the run says."""
    shape = Work(*work)
    config = load_config("/dev/null", [*settings, *world.overrides])
    found: dict[str, Any] = {}
    with runtime_scope(Layout(world.tp, world.cp, world.pp, world.ep)) as runtime:
        with open_run(config, runtime, optimizer=True) as run:
            beside_before = planned_beside(run, shape, contracts[0])
            for contract in contracts:
                responses = branches([shape.response] * shape.group)
                batches = batches_of(responses, shape.concurrent)
                with UpdateWindow(run) as window:
                    window.fix(branch.key for branch in responses)
                    with window.prompt_group("g", ids(shape.prompt, 1), contract) as group:
                        state = group.state.nbytes if group.state is not None else 0
                        window.replay(group, work_of(batches, [mean_loss(0.1)] * len(batches)))
                    window.reduce()
                    window.step()
                found[contract] = {"state": state, **run.ledger.peak, **run.ledger.parts}
            found["planned beside"] = planned_beside(run, shape, contracts[0])
            assert beside_before == found["planned beside"]
            found["stage"] = runtime.pp_rank
    return found


def resident(
    world: World, settings: Sequence[str], contracts: Sequence[str], works: Sequence[Sequence[int]]
) -> Any:
    """Bytes of this rank by contract and shape of window: state after capture, peaks of the lifetimes. No step."""
    config = load_config("/dev/null", [*settings, *world.overrides])
    found: dict[str, list[dict[str, int]]] = {contract: [] for contract in contracts}
    with runtime_scope(Layout(world.tp, world.cp, world.pp)) as runtime:
        with open_run(config, runtime, gradients=True) as run:
            for contract in contracts:
                for work in works:
                    shape = Work(*work)
                    responses = branches([shape.response] * shape.group)
                    batches = batches_of(responses, shape.concurrent)
                    with UpdateWindow(run) as window:
                        window.fix(branch.key for branch in responses)
                        with window.prompt_group("g", ids(shape.prompt, 1), contract) as group:
                            assert group.state is not None
                            state = group.state.nbytes
                            window.replay(group, work_of(batches, [mean_loss(0.1)] * len(batches)))
                        window.reduce()
                    found[contract].append({"state": state, **run.ledger.peak})
    return {"stage": runtime.pp_rank, **found}
