"""Partial attention with its log-sum-exp, and the flash backward of one segment.

Every call returns what can be merged exactly: an output normalised over the segment's own keys, and the log-sum-exp of
its scores. The backward takes the *merged* output and log-sum-exp (of all segments), so the probabilities it rebuilds
are those of the whole softmax and no segment's scores are stored (FlashAttention-2, arXiv 2307.08691, section 3.1).

Legend: n independent runs, q query heads, h KV heads (q = h g), s query tokens, t key tokens, d head dim.
Outputs keep the input dtype, the log-sum-exp is float32 (float64 for float64).
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from megatron_lrl.layers.softmax import tiled
from megatron_lrl.precision import accumulate_dtype

_TILE_BYTES = {"cpu": 1 << 20}
"""Scores of one tile by device: on a CPU they stay in the cache of one core (measured best between 256 KiB and 8 MiB,
at 36 to 3,072 query rows and head dims 16 to 128)."""
_TILE_BYTES_ELSEWHERE = 64 << 20


def _flash_cuda(q: Tensor) -> bool:
    """Whether the fused CUDA kernel takes these inputs; what it refuses is computed by tiles.

    ``scaled_dot_product_attention`` pads head dims to a multiple of 8; the operator below it, which gives the
    log-sum-exp, refuses others. Compute capability 8.0 (Ampere) is the oldest that it runs on.
    """
    return (
        q.is_cuda
        and q.dtype in (torch.bfloat16, torch.float16)
        and q.shape[-1] <= 256
        and q.shape[-1] % 8 == 0
        and _ampere(q.get_device())
    )


@cache
def _ampere(device: int) -> bool:
    return torch.cuda.get_device_capability(device) >= (8, 0)


def _tile(q: Tensor) -> int:
    """Keys of one tile of scores."""
    rows = q.shape[0] * q.shape[1] * q.shape[2]
    tile_bytes = _TILE_BYTES.get(q.device.type, _TILE_BYTES_ELSEWHERE)
    return max(64, tile_bytes // max(1, rows * accumulate_dtype(q.dtype).itemsize))


def attend(
    q_nqsd: Tensor, k_nqtd: Tensor, v_nqtd: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention over one segment. ``causal`` needs s == t and aligns both ends.

    Keys and values carry as many heads as the queries (stride 0 along a KV group is fine).
    Returns o_nqsd, lse_nqs.
    """
    if q_nqsd.device.type in ("cpu", "meta"):  # meta: only shapes
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q_nqsd, k_nqtd, v_nqtd, 0.0, causal, scale=scale
        )
    if _flash_cuda(q_nqsd):
        o, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
            q_nqsd, k_nqtd, v_nqtd, 0.0, causal, False, scale=scale
        )
        return o, lse
    return tiled.attend(q_nqsd, k_nqtd, v_nqtd, causal, scale, _tile(q_nqsd))


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
    return tiled.attend_backward(
        do_nqsd, q_nqsd, k_nqtd, v_nqtd, o_nqsd, lse_nqs, causal, scale, _tile(q_nqsd)
    )


def constant_backward(
    do_nqsd: Tensor,
    q_nqsd: Tensor,
    k_nqtd: Tensor,
    v_nqtd: Tensor,
    o_nqsd: Tensor,
    lse_nqs: Tensor,
    scale: float,
) -> Tensor:
    """dq alone, for a fully visible segment whose keys and values are constant.

    Three of the five matrix products of the full backward, tile by tile over the keys, in the accumulation dtype
    throughout. Where a fused kernel does all five, that one is faster. Returns dq in the accumulation dtype.
    """
    wide = accumulate_dtype(q_nqsd.dtype)
    if _flash_cuda(q_nqsd):
        return attend_backward(do_nqsd, q_nqsd, k_nqtd, v_nqtd, o_nqsd, lse_nqs, False, scale)[0].to(wide)
    q, k, v, do = (x.flatten(0, 1) for x in (q_nqsd, k_nqtd, v_nqtd, do_nqsd))
    q, do = q.to(wide), do.to(wide)
    minus_lse = lse_nqs.flatten(0, 1).unsqueeze(-1).neg()
    minus_delta = (do * o_nqsd.flatten(0, 1)).sum(-1, keepdim=True).neg_()
    tile = _tile(q_nqsd)
    dq = torch.zeros_like(q)
    for start in range(0, k.shape[1], tile):
        k_tile, v_tile = (x[:, start : start + tile].to(wide) for x in (k, v))
        p = torch.baddbmm(minus_lse, q, k_tile.transpose(1, 2), alpha=scale).exp_()
        ds = torch.baddbmm(minus_delta, do, v_tile.transpose(1, 2)).mul_(p)
        dq.baddbmm_(ds, k_tile)
    return dq.mul_(scale).view(q_nqsd.shape)


__all__ = ["attend", "attend_backward", "constant_backward"]
