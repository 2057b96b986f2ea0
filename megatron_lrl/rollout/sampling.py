"""Drawing tokens: inverse CDF with uniforms that depend on nothing but their own key.

A draw is a function of (seed, update, group, branch, token index), so the layout, the batch and a resume do not change
what is sampled (up to the rounding of the probabilities).

Legend: n branches, V vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lrl.models.head import all_rows, gather_logits, local_logits, of_targets, output_weight


def uniform(seed: int, update: int, group: str, branch: int, index: int) -> float:
    """A number in [0, 1) with 53 random bits (BLAKE2b of the key)."""
    key = f"{seed}/{update}/{group}/{branch}/{index}".encode()
    return (int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 11) / 2.0**53


def draw(logits_nV: Tensor, uniform_n: Tensor, top_p: float) -> tuple[Tensor, Tensor]:
    """Sample one token per row of ``softmax(logits)``, or of its nucleus.

    The nucleus is the smallest set of most probable tokens whose probability reaches ``top_p`` (Holtzman et al.,
    arXiv 1904.09751), renormalised. Returns token_n int64 and its log-probability under the distribution it was drawn
    from.
    """
    logprob_nV = logits_nV.log_softmax(-1)
    p_nV = logprob_nV.exp().double()
    if top_p >= 1.0:
        cdf_nV = p_nV.cumsum(-1)
        token_n = _invert(cdf_nV, uniform_n)
        return token_n, _at(logprob_nV, token_n)
    sorted_nV, order_nV = p_nV.sort(dim=-1, descending=True, stable=True)
    before_nV = sorted_nV.cumsum(-1) - sorted_nV
    kept_nV = torch.where(before_nV < top_p, sorted_nV, 0)
    cdf_nV = kept_nV.cumsum(-1)
    rank_n = _invert(cdf_nV, uniform_n)
    token_n = _at(order_nV, rank_n)
    logprob_n = _at(kept_nV, rank_n).log() - cdf_nV[:, -1].log()
    return token_n, logprob_n.to(logits_nV.dtype)


def _invert(cdf_nV: Tensor, uniform_n: Tensor) -> Tensor:
    """First index whose cumulative probability exceeds u times the total, so zero-probability tokens never come."""
    target = (uniform_n.to(cdf_nV) * cdf_nV[:, -1]).unsqueeze(-1)
    return torch.searchsorted(cdf_nV, target, right=True).squeeze(-1).clamp(max=cdf_nV.shape[-1] - 1)


def _at(x_nV: Tensor, index_n: Tensor) -> Tensor:
    return x_nV.gather(-1, index_n.unsqueeze(-1)).squeeze(-1)


class SampleHead:
    """`advance` head of a decode step (one token per branch): draws the next token of this rank's branches.

    The result is [3, n] for the n branches whose token lies on this rank, in branch order: token, log-probability,
    entropy, all float64 (exact for token ids).
    """

    def __init__(self, uniforms: Callable[[int], Sequence[float]], temperature: float, top_p: float) -> None:
        """``uniforms(first)``: the numbers for branches from ``first`` on."""
        self.uniforms, self.temperature, self.top_p = uniforms, temperature, top_p

    def __call__(self, hidden_smh: Tensor, layout: Any, model: Any) -> Tensor:
        first, count = layout.local_start, layout.local_tokens
        hidden_nH = all_rows(hidden_smh, model)[:count]
        tp = model.pg_collection.tp
        logits_nv = local_logits(
            hidden_nH, output_weight(model), model.arch.vocab_size, tp.rank(), self.temperature
        )
        logits_nV = gather_logits(logits_nv, model.arch.vocab_size, tp)
        if count == 0:
            return logits_nV.new_zeros(3, 0, dtype=torch.float64)
        u_n = torch.tensor(list(self.uniforms(first))[:count], dtype=torch.float64)
        u_n = u_n.to(logits_nV.device, non_blocking=True)
        drawn_2n = torch.stack([x.double() for x in draw(logits_nV, u_n, self.top_p)])
        if tp.size() > 1:
            # CUDA may sum the same numbers in another order on each rank, and one draw in very many falls otherwise.
            dist.broadcast(drawn_2n, src=dist.get_global_rank(tp, 0), group=tp)
        token_n, logprob_n = drawn_2n
        scored_n, entropy_n, _ = of_targets(logits_nv, token_n.long(), tp)
        if self.top_p >= 1.0:  # by the scorer's way, so that it is the scorer's number
            logprob_n = scored_n.double()
        return torch.stack([token_n, logprob_n, entropy_n.double()])
