"""Rank functions of test_decode.py."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from harness.worlds import World

from megatron_lrl.lifetimes.open import open_run
from megatron_lrl.lifetimes.room import Room
from megatron_lrl.lifetimes.run import PipelineUse, Run
from megatron_lrl.lifetimes.window import UpdateWindow
from megatron_lrl.passes.schedule import in_lockstep
from megatron_lrl.rl.material import limits
from megatron_lrl.rollout import decode
from megatron_lrl.rollout.builtin import Rollout, Sampler
from megatron_lrl.rollout.data import read_prompts
from megatron_lrl.rollout.types import Prompt
from worlds.ranks import Case, config_of, most_staggered, scope


def decoded(world: World, cases: Sequence[Case]) -> list[dict[str, Any]]:
    """Per case, of this replica's prompts: what is sampled group after group, together, and in a small budget.

    One sampled token ends responses. ``branches``: of the passes of each way; ``bubble`` of a pipeline likewise.
    """
    found = []
    with scope(world) as runtime:
        for case in cases:
            with open_run(config_of(world, case), runtime) as run, UpdateWindow(run) as window:
                prompts = list(read_prompts(case["prompts"], limits(run.arch)))
                ways = _Ways(run, window, prompts[runtime.dp_rank :: runtime.dp])
                with in_lockstep(run):
                    free = ways.alone([])
                    stop = most_staggered([r.ids for rollout in free for r in rollout.responses])
                    of_case = {way: ways.watched(way, [stop]) for way in ("alone", "together", "small")}
                found.append(of_case)
    return found


class _Ways:
    """Some prompts, sampled in several ways."""

    def __init__(self, run: Run, window: UpdateWindow, prompts: Sequence[Prompt]) -> None:
        self.run, self.window, self.prompts = run, window, prompts
        self.size = run.config.rollout.group_size, run.config.rollout.max_new_tokens

    def groups(self) -> list[Any]:
        return [self.window.prompt_group(p.id, p.prompt_ids, "response_only") for p in self.prompts]

    def alone(self, stop_ids: list[int]) -> list[Rollout]:
        rollouts = []
        for group in self.groups():
            with group:
                rollouts.append(Sampler(self.run, stop_ids).sample(group, *self.size, 0))
        return rollouts

    def together(self, stop_ids: list[int]) -> list[Rollout]:
        groups = self.groups()
        rollouts = Sampler(self.run, stop_ids).sample_together(groups, *self.size, 0)
        assert all(group.state.phase.value == "closed" for group in groups)
        return rollouts

    def small(self, stop_ids: list[int]) -> list[Rollout]:
        """Room for a group and a half."""
        run, config = self.run, self.run.config
        room = Room(run, self.size[1])
        largest = max(
            room.prefix(group) + self.size[0] * room.branch(len(group.prefix_ids)) for group in self.groups()
        )
        rollout = config.rollout.model_copy(update={"decode_bytes": largest * 3 // 2})
        run.config = config.model_copy(update={"rollout": rollout})
        try:
            return self.together(stop_ids)
        finally:
            run.config = config

    def watched(self, way: str, stop_ids: list[int]) -> dict[str, Any]:
        self.run.pipeline_use = PipelineUse()
        with _watched() as branches:
            rollouts = getattr(self, way)(stop_ids)
        return {
            "responses": [[_shown(response) for response in rollout.responses] for rollout in rollouts],
            "entropies": [rollout.entropy for rollout in rollouts],
            "branches": list(branches),
            "bubble": self.run.pipeline_use.bubble,
        }


def _shown(response: Any) -> tuple[Any, ...]:
    routing = response.routing
    return response.ids, response.logprobs, None if routing is None else routing.experts


@contextmanager
def _watched() -> Iterator[list[int]]:
    """Branches of every decode step."""
    branches: list[int] = []
    plain = decode.Decoding._draw

    def counting(self: Any, batches: Any, starts: Any) -> Any:
        branches.append(starts[-1])
        return plain(self, batches, starts)

    decode.Decoding._draw = counting  # type: ignore[method-assign]
    try:
        yield branches
    finally:
        decode.Decoding._draw = plain  # type: ignore[method-assign]


__all__ = ["decoded"]
