"""Log-probabilities of the policy, vocabulary-parallel, a few rows at a time.

[R, vocab] logits never exist at once: rows are taken in chunks, forward and backward, and the backward computes each
chunk's logits again. Policy log-probabilities are ``log softmax(logits / temperature)`` over the true vocabulary; the
rows that pad the vocabulary to a multiple of tp have no probability.

Legend: m slots of this rank, n selected rows, H hidden size, V vocabulary, v = this tp rank's rows of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor

from megatron_lrl.layers.exchange import gather_tokens, group_size, in_rank_order
from megatron_lrl.layers.layout import TokenLayout, fill_rows
from megatron_lrl.precision import accumulate_dtype
from megatron_lrl.settings import Config

LOGITS_BYTES = 2**27
# What the forward holds at once for a logit: itself, its p and their product, and the narrow product it came from.
_BYTES_OF_LOGIT = {"float32": 3 * 4, "float64": 3 * 8, "bfloat16": 3 * 4 + 2}


def logits_rows(config: Config, vocab_size: int, tp: int) -> int:
    """Rows whose logits exist at once: replay.logits_chunk, or what fits `LOGITS_BYTES` on a tp rank (16 at least)."""
    if config.replay.logits_chunk:
        return config.replay.logits_chunk
    return max(16, LOGITS_BYTES // (_BYTES_OF_LOGIT[config.model.dtype] * -(-vocab_size // tp)))


def all_rows(hidden_smh: Tensor, model: Any) -> Tensor:
    """Final hidden states [m (/ tp), 1, H] -> [m, H] on every tp rank, with the matching gradient reduction."""
    config, group = model.config, model.pg_collection.tp
    if config.sequence_parallel:
        hidden_smh = gather_from_sequence_parallel_region(
            hidden_smh, tensor_parallel_output_grad=True, group=group
        )
    elif group.size() > 1:
        hidden_smh = copy_to_tensor_model_parallel_region(hidden_smh, group=group)
    return hidden_smh.squeeze(1)


def output_weight(model: Any) -> Tensor:
    """[v, H]: this tp rank's rows of the output projection (the embedding's, if tied)."""
    if model.share_embeddings_and_output_weights:
        return model.shared_embedding_or_output_weight()
    return model.output_layer.weight


def local_logits(
    hidden_nH: Tensor, weight_vH: Tensor, vocab_size: int, tp_rank: int, temperature: float
) -> Tensor:
    """[n, v] logits / temperature in the accumulation dtype; columns beyond the true vocabulary are -inf."""
    wide, n = accumulate_dtype(weight_vH.dtype), hidden_nH.shape[0]
    # A row's logits are the same numbers however many rows there are.
    logits_nv = (fill_rows(hidden_nH) @ weight_vH.t())[:n].to(wide)
    if temperature != 1.0:
        logits_nv = logits_nv / temperature
    valid = vocab_size - tp_rank * weight_vH.shape[0]
    if valid < weight_vH.shape[0]:
        logits_nv[:, max(0, valid) :] = float("-inf")
    return logits_nv


def gather_logits(logits_nv: Tensor, vocab_size: int, tp_group: Any) -> Tensor:
    """[n, v] of each tp rank -> [n, V] on all of them (for sampling: n is the number of branches)."""
    parts = gather_tokens(logits_nv, tp_group).view(tp_group.size(), *logits_nv.shape)
    return parts.transpose(0, 1).flatten(1)[:, :vocab_size]  # a cp rank may hold no branch: n = 0


def policy_logprobs(
    hidden_nH: Tensor,
    weight_vH: Tensor,
    target_n: Tensor,
    *,
    vocab_size: int,
    temperature: float,
    tp_group: Any,
    chunk: int,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target and entropy of each row's distribution.

    Args:
        hidden_nH: rows whose next token is scored; weight_vH: this tp rank's output rows.
        target_n: int64 token ids in [0, V).
        chunk: rows whose logits exist at once.

    Returns: logprob_n (differentiable) and entropy_n (a measurement, no gradient), float32 (float64 for float64).
    """
    return _PolicyLogprobs.apply(hidden_nH, weight_vH, target_n, vocab_size, temperature, tp_group, chunk)


def of_targets(logits_nv: Tensor, target_n: Tensor, tp_group: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probability of each row's target, the row's entropy and its log-sum-exp, from this tp rank's columns.

    The one way from logits to log-probabilities, for sampler and scorer. Overwrites ``logits_nv``. ``tp_group`` None:
    these columns alone.
    """
    v = logits_nv.shape[1]
    first = 0 if tp_group is None else tp_group.rank() * v
    top = logits_nv.amax(-1)
    if group_size(tp_group) > 1:
        dist.all_reduce(top, op=dist.ReduceOp.MAX, group=tp_group)
    p = (logits_nv - top.unsqueeze(-1)).exp_()
    mine = (target_n >= first) & (target_n < first + v)
    index = (target_n - first).clamp(0, v - 1).unsqueeze(-1)
    chosen = torch.where(mine, logits_nv.gather(-1, index).squeeze(-1), 0)
    weighted = (p * logits_nv.masked_fill_(logits_nv == float("-inf"), 0)).sum(-1)
    sums = torch.stack([p.sum(-1), weighted, chosen])
    sums = in_rank_order(gather_tokens(sums, tp_group).unflatten(0, (-1, 3)))
    lse = sums[0].log() + top
    return sums[2] - lse, lse - sums[1] / sums[0], lse


class _PolicyLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_nH, weight_vH, target_n, vocab_size, temperature, tp_group, chunk):
        tp_rank = tp_group.rank()
        logprobs, entropies, normalisers = [], [], []
        for hidden, target in zip(hidden_nH.split(chunk), target_n.split(chunk), strict=True):
            logits = local_logits(hidden, weight_vH, vocab_size, tp_rank, temperature)
            logprob, entropy, lse = of_targets(logits, target, tp_group)
            logprobs.append(logprob)
            entropies.append(entropy)
            normalisers.append(lse)
            del logits  # or they stand beside the next rows'
        wide = accumulate_dtype(weight_vH.dtype)
        empty = hidden_nH.new_empty(0, dtype=wide)
        logprob_n, entropy_n, lse_n = (
            torch.cat(parts) if parts else empty for parts in (logprobs, entropies, normalisers)
        )
        ctx.save_for_backward(hidden_nH, weight_vH, target_n, lse_n)
        ctx.settings = (vocab_size, temperature, tp_rank, chunk)
        ctx.mark_non_differentiable(entropy_n)
        return logprob_n, entropy_n

    @staticmethod
    def backward(ctx, dlogprob_n, _entropy):
        hidden_nH, weight_vH, target_n, lse_n = ctx.saved_tensors
        vocab_size, temperature, tp_rank, chunk = ctx.settings
        first, wide = tp_rank * weight_vH.shape[0], lse_n.dtype
        dhidden_nH = torch.empty_like(hidden_nH)
        dweight_vH, trained = None, ctx.needs_input_grad[1]
        for start in range(0, hidden_nH.shape[0], chunk):
            rows = slice(start, start + chunk)
            hidden, target = hidden_nH[rows], target_n[rows]
            logits = local_logits(hidden, weight_vH, vocab_size, tp_rank, temperature)
            scale = (dlogprob_n[rows] / temperature).unsqueeze(-1)
            dlogits = logits.sub_(lse_n[rows].unsqueeze(-1)).exp_().mul_(-scale)
            mine = (target >= first) & (target < first + weight_vH.shape[0])
            index = (target - first).clamp(0, weight_vH.shape[0] - 1).unsqueeze(-1)
            dlogits.scatter_add_(-1, index, scale * mine.unsqueeze(-1))
            dlogits = dlogits.to(weight_vH.dtype)
            dhidden_nH[rows] = dlogits @ weight_vH
            if not trained:
                continue
            if dweight_vH is not None and dweight_vH.dtype == dlogits.dtype == wide:
                dweight_vH.addmm_(dlogits.t(), hidden)  # no second [v, H]
            else:
                part = dlogits.t() @ hidden
                dweight_vH = part if dweight_vH is None else dweight_vH.to(wide).add_(part)
        if trained:
            dweight_vH = torch.zeros_like(weight_vH) if dweight_vH is None else dweight_vH.to(weight_vH.dtype)
        return dhidden_nH, dweight_vH, None, None, None, None, None


class Targets:
    """What each response token's predecessor must predict, by absolute position.

    Branch j's token at position ``first[j] + i`` is scored on ``ids[j][i]``, unless ``masks[j][i]`` is 0. Positions,
    not places in a batch, so that an advance may be cut in any way.
    """

    def __init__(
        self,
        first: Sequence[int],
        ids: Sequence[Sequence[int]],
        masks: Sequence[Sequence[int] | None] | None = None,
    ) -> None:
        self.first, self.ids = tuple(first), [torch.as_tensor(branch, dtype=torch.long) for branch in ids]
        self.scored = [
            None if mask is None else torch.as_tensor(mask, dtype=torch.bool)
            for mask in masks or [None] * len(ids)
        ]
        self.offsets = (0, *accumulate(len(branch) for branch in ids))

    @property
    def tokens(self) -> int:
        """N: response tokens of all branches."""
        return self.offsets[-1]

    def local(self, layout: TokenLayout) -> tuple[Tensor, Tensor, Tensor]:
        """This rank's scored slots: rows_S in its slice, target_S, and index_S among the N response tokens."""
        rows, targets, indices = [torch.arange(0)], [self.ids[0][:0]], [torch.arange(0)]
        first_slot, end_slot = layout.local_start, layout.local_start + layout.local_tokens
        for j, (start, length) in enumerate(zip(layout.starts, layout.lengths, strict=True)):
            offset = layout.offsets[j] + self.first[j] - start  # slot of the token that ids[j][0] follows
            low = max(0, start - self.first[j], first_slot - offset)
            high = min(len(self.ids[j]), start + length - self.first[j], end_slot - offset)
            if low < high:
                place = torch.arange(low, high)
                scored = self.scored[j]
                if scored is not None:
                    place = place[scored[low:high]]
                rows.append(place + (offset - first_slot))
                targets.append(self.ids[j][place])
                indices.append(place + self.offsets[j])
        return torch.cat(rows), torch.cat(targets), torch.cat(indices)


class LogprobHead:
    """`advance` head: log-probabilities and entropies of the tokens that have a target.

    The result is [2, S] for the S scored slots of this rank: row 0 differentiable log-probabilities, row 1 entropies.
    ``index_S`` then says which of the N response tokens they are.
    """

    def __init__(self, targets: Targets, temperature: float, chunk: int) -> None:
        self.targets, self.temperature, self.chunk = targets, temperature, chunk
        self._indices: list[Tensor] = []

    @property
    def index_S(self) -> Tensor:
        """Places among the N response tokens of everything scored so far, in the order of the results."""
        return torch.cat(self._indices)

    def __call__(self, hidden_smh: Tensor, layout: TokenLayout, model: Any) -> Tensor:
        device = hidden_smh.device
        rows_S, target_S, index_S = (x.to(device, non_blocking=True) for x in self.targets.local(layout))
        self._indices.append(index_S)
        # Rows are selected even when there are none, so that every rank takes part in the backward's collectives.
        hidden_SH = all_rows(hidden_smh, model).index_select(0, rows_S)
        logprob_S, entropy_S = policy_logprobs(
            hidden_SH,
            output_weight(model),
            target_S,
            vocab_size=model.arch.vocab_size,
            temperature=self.temperature,
            tp_group=model.pg_collection.tp,
            chunk=self.chunk,
        )
        return torch.stack([logprob_S, entropy_S])
