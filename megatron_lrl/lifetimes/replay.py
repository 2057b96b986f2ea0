"""Replay: the live graphs of K responses at a time, against the resident prefix.

A replay feeds ``[last prompt token] + response[:-1]`` and scores ``response``; under the conventional contract it feeds
the whole sequence. Each micro-batch of K responses is one graph; it is freed as soon as its gradient is in the buffers.

Legend: N response tokens of a micro-batch, one response after another; S those scored on this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_lrl.lifetimes.contributions import BranchKey
from megatron_lrl.lifetimes.group import PromptGroup
from megatron_lrl.lifetimes.ledger import SavedBytes
from megatron_lrl.lifetimes.schedule import from_last_stage, run_schedule, sum_over_cp
from megatron_lrl.models.head import LogprobHead
from megatron_lrl.state import advance
from megatron_lrl.state.advance import token_layout

TokenLoss = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, dict[str, Tensor]]]
"""``loss(logprob_S, entropy_S, index_S)``: final-weight loss sum and metric sums of the tokens scored on this rank.
``index_S`` are their places among the micro-batch's N response tokens."""


@dataclass(frozen=True)
class Branch:
    """A recorded response of a group."""

    key: BranchKey
    ids: tuple[int, ...]


class NonFiniteLoss(FloatingPointError):
    """A replay's loss is NaN or infinite; the message names the branches."""


class Replay:
    """Passes of responses over one prompt group."""

    def __init__(self, group: PromptGroup) -> None:
        self.group, self.run = group, group.run

    def gradient(
        self, batches: Sequence[Sequence[Branch]], losses: Sequence[TokenLoss]
    ) -> list[dict[str, Tensor]]:
        """Add the gradient of each micro-batch to the buffers. Returns this rank's metric sums (last stage only).

        Raises `NonFiniteLoss` before the micro-batch's backward runs.
        """
        # Resident state is referenced, not saved; parameters and tied views are the run's.
        meter = SavedBytes([*self.run.core(self.group.model).parameters()])
        passes = [self._pass(batch, loss) for batch, loss in zip(batches, losses, strict=True)]
        with meter.measure():
            metrics = run_schedule(self.group.model, passes, backward=True)
        self.run.ledger.observe_peak("replay", meter.peak)
        return metrics

    def score(self, batches: Sequence[Sequence[Branch]]) -> list[list[tuple[Tensor, Tensor]]]:
        """Log-probabilities and entropies of every response token, on every rank of the replica.

        Returns, per batch and branch, (logprob_R, entropy_R) in float32 (float64 for float64), on the CPU.
        """
        parts = run_schedule(self.group.model, [self._pass(batch, None) for batch in batches], backward=False)
        results = []
        for i, batch in enumerate(batches):
            lengths = [len(branch.ids) for branch in batch]
            full = torch.zeros(2, sum(lengths), dtype=self.run.wide, device=self.run.runtime.device)
            if parts:
                values_2S, index_S = parts[i]
                full[:, index_S] = values_2S
            full = from_last_stage(sum_over_cp(full, self.run.runtime), self.run.runtime).cpu()
            results.append(list(zip(full[0].split(lengths), full[1].split(lengths), strict=True)))
        return results

    def _pass(self, batch: Sequence[Branch], loss: TokenLoss | None) -> Callable[[Any], tuple[Tensor, Any]]:
        def micro_batch(model: Any) -> tuple[Tensor, Any]:
            group, config = self.group, self.run.config
            prompt = group.prompt_ids if group.conventional else group.prompt_ids[-1:]
            state = group.fork(len(batch))
            core = self.run.core(model)
            layout = token_layout(core, state, [len(prompt) - 1 + len(branch.ids) for branch in batch])
            tokens = [(*prompt, *branch.ids[:-1]) for branch in batch]
            unscored = (-1,) * (len(prompt) - 1)
            flat = torch.tensor([t for branch in batch for t in (*unscored, *branch.ids)])
            places = (flat >= 0).cumsum(0) - 1
            targets_m = layout.slice_local(flat, fill=-1).to(self.run.runtime.device)
            index_S = layout.slice_local(places, fill=-1).to(targets_m.device)[targets_m >= 0]
            head = LogprobHead(targets_m, config.rollout.temperature, config.replay.logits_chunk)
            output = advance(model, state, tokens, head)

            def finish(values_2S: Tensor) -> Any:
                if loss is None:
                    return values_2S, index_S
                total, metrics = loss(values_2S[0], values_2S[1].detach(), index_S)
                if not torch.isfinite(total):
                    names = ", ".join(str(branch.key) for branch in batch)
                    raise NonFiniteLoss(f"the loss of {names} is {total.item()}")
                return total, metrics

            return output, finish

        return micro_batch


def batches_of(branches: Iterable[Branch], size: int) -> list[list[Branch]]:
    """Cut branches into micro-batches of at most ``size``, in order."""
    branches = list(branches)
    return [branches[i : i + size] for i in range(0, len(branches), size)]
