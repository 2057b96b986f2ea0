"""Rank functions of the LastKV tests: what the sampler and replay compute at every position, as whole distributions.

A case is that of `worlds.ranks`, with `prompts` (lists of ids) and optionally `end_chunk_at_prompt`: sample with the
wrong clock that ends the open chunk at the prompt's end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from harness.worlds import World
from torch import Tensor
from worlds.ranks import Case, config_of, scope

from megatron_lrl.layers.lastkv.clock import Clock
from megatron_lrl.lifetimes.contributions import BranchKey
from megatron_lrl.lifetimes.open import open_run
from megatron_lrl.lifetimes.prompt import PromptGroup
from megatron_lrl.lifetimes.replay import Replay
from megatron_lrl.lifetimes.window import UpdateWindow
from megatron_lrl.lifetimes.work import Branch, work_of
from megatron_lrl.models.head import LogprobHead, all_rows, gather_logits, local_logits, output_weight
from megatron_lrl.rollout.builtin import Sampler
from megatron_lrl.rollout.decode import Decoding
from megatron_lrl.rollout.sampling import SampleHead

Seen = dict[tuple[int, int], Tensor]  # (response, position) -> log-probabilities [V], float64


def note(
    seen: Seen,
    hidden_smh: Tensor,
    layout: Any,
    model: Any,
    temperature: float,
    responses: Sequence[int] | None = None,
) -> None:
    """Keep the distribution at every slot of this rank (the same on all tp ranks). ``responses``: of each branch."""
    tp = model.pg_collection.tp
    with torch.no_grad():
        rows = all_rows(hidden_smh, model)[: layout.local_tokens].detach()
        local = local_logits(rows, output_weight(model), model.arch.vocab_size, tp.rank(), temperature)
        table = torch.log_softmax(gather_logits(local, model.arch.vocab_size, tp).double(), -1)
    positions = layout.positions(table.device)
    slots = [branch for branch, length in enumerate(layout.lengths) for _ in range(length)]
    for row in range(layout.local_tokens):
        branch = slots[layout.local_start + row]
        seen[responses[branch] if responses else branch, int(positions[row])] = table[row]


@contextmanager
def watching(sampled: Seen, replayed: Seen) -> Iterator[None]:
    """The heads of sampler and replay, writing down what they see."""

    micro_batch = Decoding._micro_batch
    decoding: list[
        int
    ] = []  # response of each branch of the micro-batch whose head is made; stages have several

    def watched(self: Decoding, batch: Any, values_3n: Tensor) -> Any:
        decoding[:] = [response for part in batch for response in part.active]
        return micro_batch(self, batch, values_3n)

    class WatchedSampleHead(SampleHead):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.responses = list(decoding)

        def __call__(self, hidden_smh: Tensor, layout: Any, model: Any) -> Tensor:
            note(sampled, hidden_smh, layout, model, self.temperature, self.responses)
            return super().__call__(hidden_smh, layout, model)

    class WatchedLogprobHead(LogprobHead):
        def __call__(self, hidden_smh: Tensor, layout: Any, model: Any) -> Tensor:
            note(replayed, hidden_smh, layout, model, self.temperature)
            return super().__call__(hidden_smh, layout, model)

    with (
        mock.patch.object(Decoding, "_micro_batch", watched),
        mock.patch("megatron_lrl.rollout.decode.SampleHead", WatchedSampleHead),
        mock.patch("megatron_lrl.lifetimes.replay.LogprobHead", WatchedLogprobHead),
    ):
        yield


class EndsAtPrompt(Clock):
    """The wrong clock: the open chunk ends where the prefix does, and the response starts a new one."""

    def __init__(self, size: int, prefix: int) -> None:
        super().__init__(size)
        self.prefix, self.before = prefix, -(-prefix // size)  # chunks of the prefix, the cut one included

    def chunk(self, position: int) -> int:
        beyond = position - self.prefix
        return super().chunk(position) if beyond < 0 else self.before + beyond // self.size

    def phase(self, position: int) -> int:
        return super().phase(position) if position < self.prefix else (position - self.prefix) % self.size

    def to_boundary(self, position: int) -> int:
        return self.size - self.phase(position)


@contextmanager
def wrong_clock(group: PromptGroup) -> Iterator[None]:
    """Forks of the group follow `EndsAtPrompt`."""
    fork = group.fork

    def cut(branches: int, log: bool = False) -> Any:
        state = fork(branches, log)
        state.clock = EndsAtPrompt(state.clock.size, len(group.prefix_ids))
        return state

    with mock.patch.object(group, "fork", cut):
        yield


def sample_and_replay(world: World, cases: Sequence[Case]) -> list[list[dict[str, Any]]]:
    """Per case and prompt: sampled ids and log-probabilities, replay's log-probabilities (without a graph and in the
    gradient pass), and this rank's share of both passes' distributions."""
    found: list[list[dict[str, Any]]] = []
    with scope(world) as runtime:
        for case in cases:
            config = config_of(world, case)
            of_case = []
            with open_run(config, runtime, gradients=True) as run:
                for number, prompt in enumerate(case["prompts"]):
                    with UpdateWindow(run) as window:
                        of_case.append(one_prompt(run, window, f"p{number}", prompt, case))
            found.append(of_case)
    return found


def one_prompt(run: Any, window: Any, name: str, prompt: Sequence[int], case: Case) -> dict[str, Any]:
    rollout = run.config.rollout
    sampled: Seen = {}
    replayed: Seen = {}
    in_replay: list[Tensor] = []

    def loss(logprob_S: Tensor, _entropy_S: Tensor, _index_S: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        in_replay.append(logprob_S.detach())
        return -logprob_S.sum(), {}

    window.fix([BranchKey(name, i) for i in range(rollout.group_size)])
    with window.prompt_group(name, prompt) as group, watching(sampled, replayed):
        sampler = Sampler(run, case.get("stop_ids", ()))
        if case.get("end_chunk_at_prompt"):
            with wrong_clock(group):
                out = sampler.sample(group, rollout.group_size, rollout.max_new_tokens, 0)
        else:
            out = sampler.sample(group, rollout.group_size, rollout.max_new_tokens, 0)
        branches = [Branch(BranchKey(name, i), r.ids) for i, r in enumerate(out.responses)]
        scored = [found for _, found in Replay(group).score(work_of([branches]))]
        replayed.clear()  # what counts is the pass that carries the gradient
        window.replay(group, work_of([branches], [loss]))
    return {
        "ids": [list(r.ids) for r in out.responses],
        "sampled": [list(r.logprobs or ()) for r in out.responses],
        "scored": [logprob_R.tolist() for logprob_R, _ in scored],
        "sampler_seen": packed(sampled),
        "replay_seen": packed(replayed),
    }


def packed(seen: Seen) -> dict[str, Any]:
    """Distributions as plain values: places [n, 2] and a table [n, V]."""
    places = sorted(seen)
    table = torch.stack([seen[place] for place in places]) if places else torch.zeros(0, 0)
    return {"places": [list(place) for place in places], "table": table}
