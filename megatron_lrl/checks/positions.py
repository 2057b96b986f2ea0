"""Sampler against replay, position by position, with prompts and responses placed around LastKV boundaries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from megatron_lrl.checks.parting import parting
from megatron_lrl.lifetimes.run import Run
from megatron_lrl.lifetimes.window import UpdateWindow
from megatron_lrl.passes.schedule import in_lockstep
from megatron_lrl.rl.accumulate import branches_of, score_group
from megatron_lrl.rl.loss import k3
from megatron_lrl.rollout.builtin import Sampler
from megatron_lrl.rollout.types import Group, Prompt, Response


@dataclass(frozen=True)
class PositionMismatch:
    """All sampled tokens at one absolute position of one prompt's responses."""

    prompt: str
    position: int
    phase: int | None  # place in its LastKV chunk
    tokens: int
    max_difference: float  # of a log-probability, sampler against replay
    kl: float  # mean k3 of replay against sampler, nats

    def __str__(self) -> str:
        where = "" if self.phase is None else f", {self.phase} into its chunk"
        return (
            f"{self.prompt} position {self.position}{where}: max difference {self.max_difference:.2e}, "
            f"KL {self.kl:.2e} over {self.tokens} tokens"
        )


def boundary_prompts(chunk: int) -> tuple[int, ...]:
    """Prompt lengths C-1, C, C+1, 2C, 2C+1 and one that is no multiple."""
    return tuple(
        dict.fromkeys(
            max(1, n) for n in (chunk - 1, chunk, chunk + 1, 2 * chunk, 2 * chunk + 1, chunk * 3 // 2 + 1)
        )
    )


def sample_and_score(
    run: Run, prompts: Sequence[Prompt]
) -> tuple[list[Group], list[PositionMismatch], str | None]:
    """Sample a group of each prompt and replay it on the same prefix. The third result says where the two part, None if
    every log-probability is the same number.

    Every rank samples all of them (draws do not depend on the rank). Responses are cut to unequal lengths, under LastKV
    to end before, on and after a boundary: the first tokens of a response and their log-probabilities stay valid.
    """
    rollout, sampler = run.config.rollout, Sampler(run, ())
    groups: list[Group] = []
    rows: list[PositionMismatch] = []
    parted: str | None = None
    with UpdateWindow(run) as window, in_lockstep(run):
        for prompt in prompts:
            with window.prompt_group(prompt.id, prompt.prompt_ids, "response_only", quiet=False) as prefix:
                sampled = sampler.sample(prefix, rollout.group_size, rollout.max_new_tokens, 0)
                lengths = _lengths(run, len(prompt.prompt_ids))
                responses = tuple(
                    _cut(response, lengths[i % len(lengths)]) for i, response in enumerate(sampled.responses)
                )
                group = Group(prompt.id, prompt.prompt_ids, responses)
                replayed = score_group(prefix, branches_of(group))
                found = _by_position(run, group, [replayed[branch.key] for branch in branches_of(group)])
                differs = any(row.max_difference > 0 for row in found)
                if any(run.runtime.gather_objects(differs)) and parted is None:
                    parted = parting(run, prefix) or "not in the first tokens of all responses at once"
            groups.append(group)
            rows += found
    return groups, rows, parted


def replayed(run: Run, groups: Sequence[Group]) -> torch.Tensor:
    """Log-probabilities [N] of all response tokens under the weights as they are; the same on every rank."""
    found: list[torch.Tensor] = []
    with UpdateWindow(run) as window, in_lockstep(run):
        for group in groups:
            with window.prompt_group(group.id, group.prompt_ids, "response_only", quiet=False) as prefix:
                scores = score_group(prefix, branches_of(group))
            found += [scores[branch.key].double().cpu() for branch in branches_of(group)]
    return torch.cat(found)


def _lengths(run: Run, prompt: int) -> list[int]:
    """Response lengths to cut to, in turn."""
    longest = run.config.rollout.max_new_tokens
    if run.arch.lastkv is None:
        return [longest, *range(2, min(longest, 6))]
    to_boundary = run.arch.lastkv.chunk_size - prompt % run.arch.lastkv.chunk_size
    wanted = [longest, to_boundary, to_boundary + 1, to_boundary - 1]
    return [min(max(1, n), longest) for n in wanted]


def _cut(response: Response, length: int) -> Response:
    assert response.logprobs is not None
    return replace(response, ids=response.ids[:length], logprobs=response.logprobs[:length])


def _by_position(run: Run, group: Group, replayed: Sequence[torch.Tensor]) -> list[PositionMismatch]:
    found: dict[int, list[float]] = {}
    for response, logprob_R in zip(group.responses, replayed, strict=True):
        assert response.logprobs is not None
        for i, sampler in enumerate(response.logprobs):
            found.setdefault(len(group.prompt_ids) + i, []).append(float(logprob_R[i]) - sampler)
    size = None if run.arch.lastkv is None else run.arch.lastkv.chunk_size
    return [
        PositionMismatch(
            group.id,
            position,
            None if size is None else position % size,
            len(differences),
            max(map(abs, differences)),
            float(k3(torch.tensor(differences, dtype=torch.float64)).mean()),
        )
        for position, differences in sorted(found.items())
    ]
