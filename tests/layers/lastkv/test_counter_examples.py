"""Claim: what is not the sequential recurrence is caught as a policy mismatch by the numbers that every window logs:
ending the open chunk at the prompt's end, and a finite number of parallel refinement rounds.

Why the tests show it: responses are given the log-probabilities of the wrong policy (an oracle with other boundaries,
or with the last layer's keys and values of the round before), as a faulty sampler would record them; one window is
accumulated and its metrics are held against the bars of `check`. The right policy's pass them, so do as many rounds
as there are chunks. The scalar recurrence h ← 1 + ρ h, ρ = 0.5, has its numbers written out.
Not shown: a faulty sampler inside the program (test_lastkv_sampler has one).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle.lastkv_reference import ChunkParallel, TokenByToken, attend_chunk
from oracle.trajectories import window

from layers.lastkv.tiny import lastkv_run, records_of, write_lastkv
from megatron_lrl.lifetimes.window import UpdateWindow
from megatron_lrl.rl.accumulate import WindowPlan, accumulate
from megatron_lrl.rl.loss import summarise
from megatron_lrl.runtime import Runtime

CHUNK, MODEL = 4, "llama"
KL_BAR, LOGPROB_BAR = 1e-8, 2e-5  # of a tiny float32 model; every counter-example lies far above
LogitsOf = Callable[[Sequence[int], int], torch.Tensor]  # ids, prompt length -> logits [T, V]


def mismatch(runtime: Runtime, models: Path, prompt: int, sampler: LogitsOf) -> tuple[float, float]:
    """KL a token and largest log-probability difference that a window reports for a sampler's records."""
    groups = copy.deepcopy(window(4, shape=((prompt, (13, 6)),)))
    for group in groups:
        for response in group["responses"]:
            table = torch.log_softmax(sampler([*group["prompt_ids"], *response["ids"][:-1]], prompt), -1)
            rows = table[prompt - 1 :]
            response["logprobs"] = rows[torch.arange(len(rows)), torch.tensor(response["ids"])].tolist()
    hf = write_lastkv(models, MODEL, CHUNK)
    settings = ["model.dtype=float32", "prefix.contract=response_only", "prefix.chunk_size=5"]
    with lastkv_run(runtime, hf, *settings, gradients=True) as run, UpdateWindow(run) as opened:
        sums = accumulate(opened, WindowPlan(records_of(groups), run.config))
    return summarise(sums)["sampler_kl"], float(sums["logprob_difference_max"])


def passes(found: tuple[float, float]) -> bool:
    return found[0] <= KL_BAR and found[1] <= LOGPROB_BAR


def test_ending_the_chunk_at_the_prompts_end(runtime: Runtime, models: Path, report: Any) -> None:
    oracle = TokenByToken(write_lastkv(models, MODEL, CHUNK), None, CHUNK)

    def ends_at_prompt(ids: Sequence[int], prompt: int) -> torch.Tensor:
        prefix = prompt - 1
        first = -(-prefix // CHUNK)
        chunks = [p // CHUNK if p < prefix else first + (p - prefix) // CHUNK for p in range(len(ids))]
        return oracle.forward_all(ids, chunks)

    right = mismatch(runtime, models, 11, lambda ids, _: oracle.forward_all(ids))
    wrong = mismatch(runtime, models, 11, ends_at_prompt)
    report(
        "right, wrong: KL a token, log-probability",
        f"{right[0]:.1e} {right[1]:.1e}, {wrong[0]:.1e} {wrong[1]:.1e}",
    )
    assert passes(right) and not passes(wrong)
    assert wrong[0] > 1e-3 and wrong[1] > 0.01
    assert passes(mismatch(runtime, models, 13, ends_at_prompt))  # a prefix of 12: the ends coincide


class Refined(ChunkParallel):
    """All chunks at once, round after round: the last layer's keys and values are those of the round before."""

    @torch.no_grad()
    def forward_rounds(self, ids: Sequence[int], rounds: int) -> torch.Tensor:
        before: list[tuple[torch.Tensor, torch.Tensor]] | None = (
            None  # per chunk; None: own-layer ones stand in
        )
        for _ in range(rounds + 1):
            kept_last, logits = [], []
            own: list[list[tuple[torch.Tensor, torch.Tensor]]] = []
            for c, start in enumerate(range(0, len(ids), self.chunk)):
                x_SH = self.embed(ids[start : start + self.chunk])
                own.append([])
                for layer in range(self.layers):
                    q, k, v = self.project(x_SH, layer, start)
                    own[c].append((k, v))
                    k_T, v_T = (torch.cat(self.seen(own, before, c, layer, i)) for i in (0, 1))
                    x_SH = self.close_layer(x_SH, attend_chunk(q, k_T, v_T), layer)
                kept_last.append(own[c][-1])
                logits.append(self.logits(x_SH))
            before = kept_last
        return torch.cat(logits)

    def seen(self, own: Any, before: Any, c: int, layer: int, which: int) -> list[torch.Tensor]:
        parts = []
        for j in range(c):
            last = own[j][layer][which] if before is None else before[j][which]
            previous = j == c - 1
            alpha = self.alpha(layer)
            parts.append((1 - alpha) * own[j][layer][which] + alpha * last if previous else last)
        return [*parts, own[c][layer][which]]


def test_finite_parallel_refinement(runtime: Runtime, models: Path, report: Any) -> None:
    oracle = Refined(write_lastkv(models, MODEL, CHUNK), None, CHUNK)
    chunks = -(-(11 + 12) // CHUNK)
    found = [
        mismatch(runtime, models, 11, lambda ids, _, n=n: oracle.forward_rounds(ids, n))
        for n in (0, 1, 2, chunks)
    ]
    for n, (kl, apart) in zip((0, 1, 2, chunks), found, strict=True):
        report(f"{n} rounds: KL a token, log-probability", f"{kl:.1e} {apart:.1e}")
    assert [passes(x) for x in found] == [False, False, False, True]


def test_the_scalar_recurrence() -> None:
    """h ← 1 + ρ h over four chunks, in sequence and by one round in parallel, as two-token policies."""
    rho, sequential, parallel = 0.5, [1.0], [1.0, 1.0, 1.0, 1.0]
    for _ in range(3):
        sequential.append(1 + rho * sequential[-1])
    one_round = [1.0, *(1 + rho * h for h in parallel[:-1])]
    assert sequential == [1.0, 1.5, 1.75, 1.875]
    assert one_round == [1.0, 1.5, 1.5, 1.5]
    p, q = (
        torch.log_softmax(torch.tensor([[h, 0.0] for h in hs], dtype=torch.float64), -1)
        for hs in (sequential, one_round)
    )
    kl = (p.exp() * (p - q)).sum(-1)
    assert kl[:2].tolist() == [0.0, 0.0]
    assert bool((kl[2:] > 1e-3).all()) and kl[3] > kl[2]
    assert float((p - q).abs().max()) > 100 * LOGPROB_BAR
    for _ in range(2):  # as many rounds as chunks after the first reach the recurrence
        one_round = [1.0, *(1 + rho * h for h in one_round[:-1])]
    assert one_round == pytest.approx(sequential)
