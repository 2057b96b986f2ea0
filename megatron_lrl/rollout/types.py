"""What passes between data, rollout, scoring and loss: prompts, responses, groups.

Token ids in, token ids out: nothing here holds text that would be encoded again. All values are immutable,
so a window that starts over finds exactly what it recorded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_lrl.experts.record import Routing


@dataclass(frozen=True)
class Response:
    """One sampled continuation of a prompt.

    ids: the tokens after the prompt, at least one; an end-of-sequence token that was sampled is part of them.
    reward: the verifiable reward, or None while it is not known.
    reward_parts: further numbers of the reward function, by name; "failed" if it failed and its reward counts as 0.
    logprobs: natural log-probabilities of `ids` under the distribution they were sampled from, one per token.
    advantage: set when it was recorded, one for all tokens or one each; otherwise it is computed from the group's
        rewards.
    mask: 1 for a token that the policy chose, 0 for one that is only fed (tool output); None: all were chosen. At
        least one was. Log-probabilities and advantages mean nothing where it is 0.
    routing: experts and weights that the sampler gave its tokens, if they were recorded.
    """

    ids: tuple[int, ...]
    reward: float | None = None
    logprobs: tuple[float, ...] | None = None
    advantage: float | tuple[float, ...] | None = None
    routing: Routing | None = None
    mask: tuple[int, ...] | None = None
    reward_parts: Mapping[str, float] = field(default_factory=dict)

    @property
    def scored(self) -> int:
        """How many of its tokens the policy chose."""
        return len(self.ids) if self.mask is None else sum(self.mask)


@dataclass(frozen=True)
class Group:
    """A prompt's token ids (at least one) and the responses that share it (at least one).

    version: updates that the policy which sampled them had seen.
    """

    id: str
    prompt_ids: tuple[int, ...]
    responses: tuple[Response, ...]
    version: int = 0


@dataclass(frozen=True)
class Prompt:
    """A prompt to sample from. `record` is the whole JSONL record, for rewards (e.g. record["answer"])."""

    id: str
    prompt_ids: tuple[int, ...]
    record: Mapping[str, Any] = field(default_factory=dict)
