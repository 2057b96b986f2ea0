"""The built-in sampler: forks resident prefixes and decodes the responses of all groups together."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_lrl.experts.record import Routing
from megatron_lrl.lifetimes.prompt import PromptGroup
from megatron_lrl.rollout.decode import Decoding, Sampled
from megatron_lrl.rollout.types import Response
from megatron_lrl.settings import RolloutTable


@dataclass(frozen=True)
class Rollout:
    """Responses of a group, in branch order, and the mean entropy (nats per token) they were sampled at."""

    responses: tuple[Response, ...]
    entropy: float


class Sampler:
    """Samples groups from their prefixes; every rank of the replica returns the same responses."""

    def __init__(self, run: Any, stop_ids: Collection[int], settings: RolloutTable | None = None) -> None:
        """``run``: the lifetimes' Run. ``stop_ids``: a sampled token that ends its response (and is part of it).
        ``settings``: default the run's."""
        self.run, self.stop_ids = run, frozenset(stop_ids)
        self.settings = settings or run.config.rollout

    def sample(self, group: PromptGroup, responses: int, max_new_tokens: int, update: int) -> Rollout:
        """Sample ``responses`` continuations of one group's prompt; see `sample_together`."""
        return self.sample_together([group], responses, max_new_tokens, update)[0]

    def sample_together(
        self,
        groups: Sequence[PromptGroup],
        responses: int,
        max_new_tokens: int,
        update: int,
        capture: Callable[[PromptGroup], None] = PromptGroup.capture,
    ) -> list[Rollout]:
        """Sample ``responses`` continuations of each group's prompt, as many at once as rollout.decode_bytes allows.

        A group that is not captured yet is captured (by ``capture``) when its turn comes, and closed after its last
        response. The log-probabilities are those of the distribution each token was drawn from (temperature and top-p
        applied). Raises ValueError for a group under the conventional contract: there is no prefix to fork.
        """
        if any(group.conventional for group in groups):
            raise ValueError("sampling forks a resident prefix; open the group under another contract")
        decoding = Decoding(
            self.run, self.settings, self.stop_ids, groups, responses, max_new_tokens, update, capture
        )
        return [_rollout(sampled) for sampled in decoding.finish()]


def _rollout(sampled: Sampled) -> Rollout:
    routing: list[Routing | None] = [None] * len(sampled.ids)
    if sampled.routing is not None:
        routing = list(sampled.routing)
    responses = tuple(
        Response(tuple(ids), logprobs=tuple(logprobs), routing=record)
        for ids, logprobs, record in zip(sampled.ids, sampled.logprobs, routing, strict=True)
    )
    return Rollout(responses, sampled.entropy / sum(map(len, sampled.ids)))
