"""The slow oracle of segment attention: dense softmax, any device, float32 or float64.

Beside the per-segment functions (the same signatures as in `kernels`) stands `dense_attention`, which computes the
whole of one advance by a mask over absolute positions, with plain autograd, and knows nothing of segments.

Legend: n independent runs, q query heads, h KV heads, s query tokens, t key tokens, d head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor


def _scores(q_nqsd: Tensor, k_nqtd: Tensor, causal: bool, scale: float) -> Tensor:
    wide = torch.float64 if q_nqsd.dtype == torch.float64 else torch.float32
    scores = torch.einsum("nqsd,nqtd->nqst", q_nqsd.to(wide), k_nqtd.to(wide)) * scale
    if causal:
        s, t = scores.shape[-2:]
        hidden = torch.ones(s, t, dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    return scores


def attend(
    q_nqsd: Tensor, k_nqtd: Tensor, v_nqtd: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp over one segment, scores materialised."""
    scores = _scores(q_nqsd, k_nqtd, causal, scale)
    lse = scores.logsumexp(-1)
    o = torch.einsum("nqst,nqtd->nqsd", (scores - lse.unsqueeze(-1)).exp(), v_nqtd.to(scores.dtype))
    return o.to(q_nqsd.dtype), lse


def attend_backward(
    do_nqsd: Tensor,
    q_nqsd: Tensor,
    k_nqtd: Tensor,
    v_nqtd: Tensor,
    o_nqsd: Tensor,
    lse_nqs: Tensor,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv of one segment from the merged output and log-sum-exp, scores materialised."""
    scores = _scores(q_nqsd, k_nqtd, causal, scale)
    wide = scores.dtype
    p = (scores - lse_nqs.unsqueeze(-1)).exp()
    do, q, k, v = do_nqsd.to(wide), q_nqsd.to(wide), k_nqtd.to(wide), v_nqtd.to(wide)
    delta = (do * o_nqsd.to(wide)).sum(-1, keepdim=True)
    ds = p * (torch.einsum("nqsd,nqtd->nqst", do, v) - delta) * scale
    dq = torch.einsum("nqst,nqtd->nqsd", ds, k)
    dk = torch.einsum("nqst,nqsd->nqtd", ds, q)
    dv = torch.einsum("nqst,nqsd->nqtd", p, do)
    return dq.to(q_nqsd.dtype), dk.to(k_nqtd.dtype), dv.to(v_nqtd.dtype)


def dense_attention(
    q_sqd: Tensor,
    k_thd: Tensor,
    v_thd: Tensor,
    q_positions_s: Tensor,
    k_positions_t: Tensor,
    q_branch_s: Tensor,
    k_branch_t: Tensor,
    scale: float,
) -> Tensor:
    """All of one advance at once: a key is visible if its branch is the query's or -1 (shared) and it is not later.

    Plain autograd. Returns o_sqd.
    """
    groups = q_sqd.shape[1] // k_thd.shape[1]
    k = k_thd.repeat_interleave(groups, dim=1)
    v = v_thd.repeat_interleave(groups, dim=1)
    scores = torch.einsum("sqd,tqd->qst", q_sqd, k) * scale
    same = (k_branch_t == -1).unsqueeze(0) | (k_branch_t.unsqueeze(0) == q_branch_s.unsqueeze(1))
    visible = same & (k_positions_t.unsqueeze(0) <= q_positions_s.unsqueeze(1))
    scores = scores.masked_fill(~visible, float("-inf"))
    return torch.einsum("qst,tqd->sqd", scores.softmax(-1), v)
