"""Next-token training: ``train.objective = "lm"``. The same window, step, checkpoints and tracking as GRPO.

A packed sequence is one micro-batch; its documents are branches that start at position 0. Held-out documents are
packed alike and scored without a graph.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lrl.errors import UserError
from megatron_lrl.lifetimes.contributions import BranchKey
from megatron_lrl.lifetimes.node import Documents
from megatron_lrl.lifetimes.replay import NonFiniteLoss, Replay
from megatron_lrl.lifetimes.retry import Retry
from megatron_lrl.lifetimes.run import Run
from megatron_lrl.lifetimes.window import UpdateWindow, WindowPhase
from megatron_lrl.lifetimes.work import Branch, TokenLoss, work_of
from megatron_lrl.passes.schedule import from_last_stage, in_lockstep
from megatron_lrl.rl.lm_data import Corpus
from megatron_lrl.rl.stopwatch import Stopwatch


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
        "lm/held_out_loss_start", that of the model as loaded. Raises `UserError` on all ranks if the loss or gradient
        is not finite and train.on_nonfinite is "stop".
        """
        run, watch, what = self.run, Stopwatch(), f"update {number + 1}"
        result = fault = None
        start = self._evaluate(watch) if number == 0 else {}
        with UpdateWindow(run) as window:
            loss_sum, tokens, finite = self.retry.until_reduced(
                window, lambda: self._attempt(window, number, watch), what
            )
            if not finite:
                fault = "the loss or the gradient is not finite"
                if run.config.train.on_nonfinite == "stop":
                    raise UserError(f"{what}: {fault}; no parameter was changed")
            else:
                with watch.timed("step"):
                    result = window.step()
        seconds = watch.total - watch.seconds.get("held_out", 0.0)
        metrics = {
            "lm/loss": loss_sum,
            "lm/perplexity": math.exp(min(loss_sum, 50.0)),
            "lm/tokens": float(tokens),
            "optimizer/grad_norm": result.grad_norm if result else float("nan"),
            "optimizer/lr": result.lr if result else 0.0,
            "update/skipped": float(fault is not None),
            "window/restarts": float(self.retry.restarts),
            "pipeline/bubble": run.pipeline_use.bubble,
            "speed/tokens_per_second": tokens / seconds,
            "speed/updates_per_hour": 3600.0 / seconds,
            "seconds/update": seconds,
        }
        metrics |= run.ledger.metrics() | {f"{name}_start": loss for name, loss in start.items()}
        done, every = number + 1, run.config.lm.eval_every
        if done == run.config.train.updates or (every and done % every == 0):
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

    def _attempt(self, window: UpdateWindow, number: int, watch: Stopwatch) -> tuple[float, int, bool]:
        """Accumulate and reduce the update's sequences; ends in a collective over the world.

        Returns the mean loss (nats per token), the token count, and whether loss and gradient are finite.
        """
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
        with watch.timed("reduce"):
            try:
                window.reduce()
            except NonFiniteLoss:  # on all ranks alike
                return float("nan"), tokens, False
            return float(total), tokens, window.gradient_finite()


def _mean_over(tokens: int) -> TokenLoss:
    """Cross entropy whose terms already carry 1 / (tokens of the window)."""

    def loss(logprob_S: Tensor, entropy_S: Tensor, index_S: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        total = -(logprob_S.sum() / tokens)
        return total, {"loss_sum": total.detach().clone()}

    return loss
