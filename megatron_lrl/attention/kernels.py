"""Partial attention with its log-sum-exp, and the flash backward of one segment.

Every call returns what can be merged exactly: an output normalised over the segment's own keys, and the log-sum-exp of
its scores. The backward takes the *merged* output and log-sum-exp (of all segments), so the probabilities it rebuilds
are those of the whole softmax and no segment's scores are stored (FlashAttention-2, arXiv 2307.08691, section 3.1).

Legend: n independent runs, q query heads, h KV heads (q = h g), s query tokens, t key tokens, d head dim.
Outputs keep the input dtype, the log-sum-exp is float32 (float64 for float64).
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_lrl.attention import reference

_TILE_BYTES = 8 << 20
"""Scores of one tile in `constant_backward`: small enough for a cache, large enough for the matrix units."""


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32, or float64 where the input is: nothing is rounded below it on the way."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _flash_cuda(q: Tensor) -> bool:
    return q.is_cuda and q.dtype in (torch.bfloat16, torch.float16) and q.shape[-1] <= 256


def attend(q_nqsd: Tensor, k_nqtd: Tensor, v_nqtd: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Attention over one segment. ``causal`` needs s == t and aligns both ends.

    Keys and values carry as many heads as the queries (stride 0 along a KV group is fine).
    Returns o_nqsd, lse_nqs.
    """
    if q_nqsd.device.type == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q_nqsd, k_nqtd, v_nqtd, 0.0, causal, scale=scale
        )
    if _flash_cuda(q_nqsd):
        o, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
            q_nqsd, k_nqtd, v_nqtd, 0.0, causal, False, scale=scale
        )
        return o, lse
    return reference.attend(q_nqsd, k_nqtd, v_nqtd, causal, scale)


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
    """dq, dk, dv of one segment, given the merged output and log-sum-exp. dk and dv keep the query heads' axis."""
    if q_nqsd.device.type == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            do_nqsd, q_nqsd, k_nqtd, v_nqtd, o_nqsd, lse_nqs, 0.0, causal, scale=scale
        )
    if _flash_cuda(q_nqsd):
        seed = torch.zeros((), dtype=torch.int64, device=q_nqsd.device)  # no dropout: read by nothing
        return torch.ops.aten._scaled_dot_product_flash_attention_backward(
            do_nqsd, q_nqsd, k_nqtd, v_nqtd, o_nqsd, lse_nqs.contiguous(), None, None,
            q_nqsd.shape[2], k_nqtd.shape[2], 0.0, causal, seed, seed, scale=scale,
        )  # fmt: skip
    return reference.attend_backward(do_nqsd, q_nqsd, k_nqtd, v_nqtd, o_nqsd, lse_nqs, causal, scale)


def constant_backward(
    do_nqsd: Tensor,
    q_nqsd: Tensor,
    k_nqtd: Tensor,
    v_nqtd: Tensor,
    delta_nqs: Tensor,
    lse_nqs: Tensor,
    scale: float,
) -> Tensor:
    """dq alone, for a fully visible segment whose keys and values are constant.

    Three of the five matrix products of the full backward, tile by tile over the keys. ``delta`` is the row sum of
    dO · O over the merged output. Returns dq in the accumulation dtype.
    """
    wide = accumulate_dtype(q_nqsd.dtype)
    rows = max(1, q_nqsd.shape[0] * q_nqsd.shape[1] * q_nqsd.shape[2])
    tile = max(64, _TILE_BYTES // (rows * torch.finfo(wide).bits // 8))
    dq = torch.zeros(q_nqsd.shape, dtype=wide, device=q_nqsd.device)
    lse, delta = lse_nqs.unsqueeze(-1), delta_nqs.unsqueeze(-1)
    for start in range(0, k_nqtd.shape[2], tile):
        k, v = k_nqtd[:, :, start : start + tile], v_nqtd[:, :, start : start + tile]
        p = (q_nqsd @ k.transpose(-1, -2)).to(wide).mul_(scale).sub_(lse).exp_()
        ds = (do_nqsd @ v.transpose(-1, -2)).to(wide).sub_(delta).mul_(p)
        dq += ds.to(q_nqsd.dtype) @ k
    return dq.mul_(scale)
