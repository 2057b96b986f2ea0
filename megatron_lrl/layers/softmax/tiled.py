"""Attention with its log-sum-exp by tiles of keys, from plain matrix products: what no fused CUDA kernel takes.

    scores of one tile ─ running maximum, sum and output (forward) | probabilities from the given lse (backward)

float32 and float64 in full, old GPUs, head dims that are no multiple of 8. Never more than one tile of scores exists.
Arithmetic is in float32, or float64 for float64 (no TensorFloat-32: `runtime` leaves it off).

Legend: n independent runs, q query heads, s query tokens, t key tokens, d head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_lrl.precision import accumulate_dtype


def _scores(q_nqsd: Tensor, k_nqtd: Tensor, start: int, causal: bool, scale: float) -> Tensor:
    """Scores against the keys from ``start`` on that are given; hidden ones are -inf."""
    scores = q_nqsd @ k_nqtd.transpose(-1, -2) * scale
    if causal:
        s, t = scores.shape[-2:]
        hidden = torch.ones(s, t, dtype=torch.bool, device=scores.device).triu(1 - start)
        scores.masked_fill_(hidden, float("-inf"))
    return scores


def attend(
    q_nqsd: Tensor, k_nqtd: Tensor, v_nqtd: Tensor, causal: bool, scale: float, tile: int
) -> tuple[Tensor, Tensor]:
    """Output in the query's dtype and log-sum-exp [n, q, s] over one segment. ``causal`` needs s == t."""
    q = q_nqsd.to(accumulate_dtype(q_nqsd.dtype))
    top = q.new_full(q.shape[:3], float("-inf"))
    total, o = torch.zeros_like(top), torch.zeros_like(q)
    for start in range(0, k_nqtd.shape[2], tile):
        k, v = (x[:, :, start : start + tile].to(q.dtype) for x in (k_nqtd, v_nqtd))
        scores = _scores(q, k, start, causal, scale)
        # Every query sees the first tile's first key, so `top` is finite from then on.
        higher = torch.maximum(top, scores.amax(-1))
        p = scores.sub_(higher.unsqueeze(-1)).exp_()
        kept = (top - higher).exp()
        total = total * kept + p.sum(-1)
        o = o.mul_(kept.unsqueeze(-1)).add_(p @ v)
        top = higher
    return o.div_(total.unsqueeze(-1)).to(q_nqsd.dtype), total.log() + top


def attend_backward(
    do_nqsd: Tensor,
    q_nqsd: Tensor,
    k_nqtd: Tensor,
    v_nqtd: Tensor,
    o_nqsd: Tensor,
    lse_nqs: Tensor,
    causal: bool,
    scale: float,
    tile: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv from the merged output and log-sum-exp; dk and dv keep the query heads' axis."""
    q, do = (x.to(accumulate_dtype(q_nqsd.dtype)) for x in (q_nqsd, do_nqsd))
    delta = (do * o_nqsd.to(q.dtype)).sum(-1, keepdim=True)
    dq, dks, dvs = torch.zeros_like(q), [], []
    for start in range(0, k_nqtd.shape[2], tile):
        k, v = (x[:, :, start : start + tile].to(q.dtype) for x in (k_nqtd, v_nqtd))
        p = _scores(q, k, start, causal, scale).sub_(lse_nqs.unsqueeze(-1)).exp_()
        dvs.append((p.transpose(-1, -2) @ do).to(v_nqtd.dtype))
        ds = (do @ v.transpose(-1, -2)).sub_(delta).mul_(p).mul_(scale)
        dq += ds @ k
        dks.append((ds.transpose(-1, -2) @ q).to(k_nqtd.dtype))
    return dq.to(q_nqsd.dtype), torch.cat(dks, dim=2), torch.cat(dvs, dim=2)
