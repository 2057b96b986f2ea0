"""Next-token training: ``train.objective = "lm"``. The same window, step, checkpoints and tracking as GRPO.

A packed sequence is one micro-batch; its documents are branches that start at position 0. Held-out documents are
packed alike and scored without a graph.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lrl.lifetimes.contributions import BranchKey
from megatron_lrl.lifetimes.node import Documents
from megatron_lrl.lifetimes.replay import Replay
from megatron_lrl.lifetimes.run import Run
from megatron_lrl.lifetimes.window import UpdateWindow, WindowPhase
from megatron_lrl.lifetimes.work import Branch, TokenLoss, work_of
from megatron_lrl.passes.schedule import from_last_stage, in_lockstep
from megatron_lrl.rl.lm_data import Corpus
from megatron_lrl.rl.retry import Retry
from megatron_lrl.rl.stopwatch import Stopwatch
from megatron_lrl.rl.update import run_update, speed


class LmTrainer:
    """Runs next-token updates; every rank of the world calls `update` with the same number."""

    def __init__(
        self, run: Run, corpus: Corpus, retry: Retry | None = None, held_out: Corpus | None = None
    ) -> None:
        """``retry``: attempts at a window after a failure; default one. ``held_out``: documents to evaluate on."""
        self.run, self.corpus, self.retry = run, corpus, retry or Retry(run, 1)
        self.held_out = held_out

    def close(self) -> None:
        """Nothing outlives a window."""

    def update(self, number: int) -> tuple[dict[str, float], list[str]]:
        """One update. Returns its metrics (the loss before the step) and no samples; equal on every rank.

        "lm/held_out_loss" is that after the step, in the updates that evaluate; the first update also has
        "lm/held_out_loss_start", that of the model as loaded. Raises as `run_update`.
        """
        watch, settings = Stopwatch(), self.run.config
        start = self._evaluate(watch) if number == 0 else {}
        done = run_update(self.retry, number, watch, lambda window: self._accumulate(window, number, watch))
        loss, tokens = done.accumulated
        metrics = {
            "lm/loss": loss,
            "lm/perplexity": math.exp(min(loss, 50.0)),
            "lm/tokens": float(tokens),
            **done.metrics,
            **speed(tokens, watch.total - watch.seconds.get("held_out", 0.0)),
            **{f"{name}_start": value for name, value in start.items()},
        }
        last, every = number + 1, settings.lm.eval_every
        if last == settings.train.updates or (every and last % every == 0):
            metrics |= self._evaluate(watch)
        return metrics | {f"seconds/{k}": v for k, v in watch.seconds.items()}, []

    def _evaluate(self, watch: Stopwatch) -> dict[str, float]:
        """Mean loss of the held-out documents (nats per token), equal on every rank; nothing if there are none."""
        if self.held_out is None:
            return {}
        run, length = self.run, self.run.config.lm.sequence_length
        runtime = run.runtime
        sum_2 = torch.zeros(2, dtype=torch.float64, device=runtime.device)  # losses, tokens
        with watch.timed("held_out"), in_lockstep(run):
            for i in range(runtime.dp_rank, self.held_out.sequences(length), runtime.dp):
                parts = self.held_out.sequence(i, length)
                batch = [Branch(BranchKey(f"held_out{i}", j), tuple(part)) for j, part in enumerate(parts)]
                for _, (logprob_R, _) in Replay(Documents(run)).score(work_of([batch] if batch else [])):
                    sum_2[0] -= logprob_R.double().sum().item()
                    sum_2[1] += len(logprob_R)
        # Every rank of a replica holds the replica's sums.
        dist.all_reduce(sum_2, group=runtime.groups.dp)
        return {"lm/held_out_loss": float(sum_2[0] / sum_2[1])}

    def _accumulate(self, window: UpdateWindow, number: int, watch: Stopwatch) -> tuple[float, int]:
        """Add the gradient of the update's sequences. Returns the mean loss (nats per token) and the token count."""
        run, settings = self.run, self.run.config.lm
        count = settings.sequences_per_update
        sequences = [self.corpus.sequence(number * count + i, settings.sequence_length) for i in range(count)]
        tokens = sum(len(part) - 1 for sequence in sequences for part in sequence)
        batches = [
            [
                Branch(BranchKey(f"sequence{number * count + i}", j), tuple(part))
                for j, part in enumerate(parts)
            ]
            for i, parts in enumerate(sequences)
            if parts and i % run.runtime.dp == run.runtime.dp_rank
        ]
        if window.phase is WindowPhase.OPEN:
            window.fix(branch.key for batch in batches for branch in batch)
        loss: TokenLoss = _mean_over(tokens)
        with watch.timed("replay"):
            documents = sum(map(len, sequences))
            window.balance = run.config.moe.aux_loss_coef / max(1, documents)
            with in_lockstep(run):
                sums = window.replay(Documents(run), work_of(batches, [loss] * len(batches)))
            total = torch.zeros((), dtype=torch.float64, device=run.runtime.device)
            for part in sums:
                total += part["loss_sum"].double()
            if run.runtime.is_last_stage:
                dist.all_reduce(total, group=run.runtime.groups.dp_cp)
            total = from_last_stage(total, run.runtime)
        return float(total), tokens


def _mean_over(tokens: int) -> TokenLoss:
    """Cross entropy whose terms already carry 1 / (tokens of the window)."""

    def loss(logprob_S: Tensor, entropy_S: Tensor, index_S: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        total = -(logprob_S.sum() / tokens)
        return total, {"loss_sum": total.detach().clone()}

    return loss
