"""The built-in sampler: forks the resident prefix and decodes all responses of a group together."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lrl.experts.recorded import Recorder
from megatron_lrl.layers.advance import advance
from megatron_lrl.layers.sequence import SequenceState
from megatron_lrl.lifetimes.prompt import PromptGroup
from megatron_lrl.passes.schedule import from_last_stage, run_schedule, sum_over_cp
from megatron_lrl.rollout.recorded_routing import Routing
from megatron_lrl.rollout.sampling import SampleHead, uniform
from megatron_lrl.rollout.types import Response
from megatron_lrl.settings import RolloutTable

_COMPACT_BELOW = 0.75
"""Finished branches leave the state once fewer than this share of its branches is still decoding."""


@dataclass(frozen=True)
class Rollout:
    """Responses of a group, in branch order, and the mean entropy (nats per token) they were sampled at."""

    responses: tuple[Response, ...]
    entropy: float


class Sampler:
    """Samples groups from a prefix; every rank of the replica returns the same responses."""

    def __init__(self, run: Any, stop_ids: Collection[int], settings: RolloutTable | None = None) -> None:
        """``run``: the lifetimes' Run. ``stop_ids``: a sampled token that ends its response (and is part of it).
        ``settings``: default the run's."""
        self.run, self.stop_ids = run, frozenset(stop_ids)
        self.settings = settings or run.config.rollout

    def sample(self, group: PromptGroup, responses: int, max_new_tokens: int, update: int) -> Rollout:
        """Sample ``responses`` continuations of the group's prompt.

        The log-probabilities are those of the distribution each token was drawn from (temperature and top-p applied).
        Raises ValueError for a group under the conventional contract: there is no prefix to fork.
        """
        if group.conventional:
            raise ValueError("sampling forks a resident prefix; open the group under another contract")
        settings = self.settings
        ids: list[list[int]] = [[] for _ in range(responses)]
        logprobs: list[list[float]] = [[] for _ in range(responses)]
        entropy, active = 0.0, list(range(responses))  # active: state branch -> response
        with torch.no_grad():
            state = group.fork(responses)
            recorder = None
            if settings.record_routing:
                recorder = Recorder(self.run, responses, len(group.prompt_ids) - 1)
            feed = [[group.prompt_ids[-1]]] * responses
            done: set[int] = set()
            for index in range(max_new_tokens):

                def uniforms(first: int, index: int = index, active: list[int] = active) -> list[float]:
                    return [
                        uniform(settings.seed, update, group.name, response, index)
                        for response in active[first:]
                    ]

                if recorder is not None:
                    recorder.active = active
                values_3n = self._step(group, state, feed, uniforms, recorder)
                for branch, response in enumerate(active):
                    if response in done:
                        continue
                    token = int(values_3n[0, branch])
                    ids[response].append(token)
                    logprobs[response].append(float(values_3n[1, branch]))
                    entropy += float(values_3n[2, branch])
                    if token in self.stop_ids:
                        done.add(response)
                live = [response for response in active if response not in done]
                if not live:
                    break
                if len(live) < _COMPACT_BELOW * len(active):
                    state.keep([branch for branch, response in enumerate(active) if response not in done])
                    active = live
                # A finished response that still has a branch is fed its last token; nothing reads the outcome.
                feed = [[ids[response][-1]] for response in active]
            state.close()
        routing: list[Routing | None] = [None] * responses
        if recorder is not None:
            records = recorder.records([len(i) for i in ids])
            routing = [Routing.of(r.layers, r.expert_RLk, r.weight_RLk) for r in records]
        sampled = tuple(
            Response(tuple(i), logprobs=tuple(p), routing=r)
            for i, p, r in zip(ids, logprobs, routing, strict=True)
        )
        return Rollout(sampled, entropy / sum(map(len, ids)))

    def _step(
        self,
        group: PromptGroup,
        state: SequenceState,
        feed: list[list[int]],
        uniforms: Any,
        routing: Recorder | None,
    ) -> Tensor:
        """[3, branches] token, log-probability, entropy of each branch's next token, on every rank, on the CPU."""
        settings, runtime = self.settings, self.run.runtime
        values = torch.zeros(3, len(feed), dtype=torch.float64, device=runtime.device)
        head = SampleHead(uniforms, settings.temperature, settings.top_p)

        def micro_batch(model: Any) -> tuple[Tensor, Any]:
            local: list[int] = []

            def sample(hidden: Tensor, layout: Any, core: Any) -> Tensor:
                local.append(layout.local_start)
                return head(hidden, layout, core)

            output = advance(model, state, feed, sample, routing)

            def finish(out_3n: Tensor) -> None:
                values[:, local[0] : local[0] + out_3n.shape[1]] = out_3n

            return output, finish

        run_schedule(self.run, group.model, [micro_batch], backward=False)
        state.settle(runtime.groups.pp)
        values = sum_over_cp(values, runtime)
        if runtime.layout.tp > 1:
            # CUDA may sum the same numbers in another order on each rank, and one draw in very many falls otherwise.
            dist.broadcast(values, src=dist.get_global_rank(runtime.groups.tp, 0), group=runtime.groups.tp)
        return from_last_stage(values, runtime).cpu()
