"""What only CUDA has, computed on the CPU after the checks that the CUDA kernels make.

The checks are those of PyTorch's flash attention (aten/src/ATen/native/transformers/cuda): half precision, head dims
that are a multiple of 8 and at most 256, a contiguous last axis, rows that begin at 16 bytes, as many heads of keys as
of queries here; a causal mask is aligned at the bottom right, the log-sum-exp is float32 [n, q, s], and the backward
reads it as contiguous memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

HALF = (torch.bfloat16, torch.float16)


def _flash_inputs(*tensors: Tensor) -> None:
    q = tensors[0]
    for x in tensors:
        if x.dim() != 4 or x.dtype not in HALF or x.dtype != q.dtype:
            raise RuntimeError(
                f"FlashAttention only supports fp16 and bf16 of 4 dimensions, not {x.dtype} {x.shape}"
            )
        if x.shape[-1] % 8 or x.shape[-1] > 256 or x.shape[-1] != q.shape[-1]:
            raise RuntimeError(
                f"head dim {x.shape[-1]}: must be a multiple of 8, at most 256, and the same for all"
            )
        if x.stride(-1) != 1:
            raise RuntimeError("input tensor must have a contiguous last dimension")
        strides = [s for s, n in zip(x.stride()[:-1], x.shape[:-1], strict=True) if n > 1]
        if any((s * x.element_size()) % 16 for s in strides) or (x.storage_offset() * x.element_size()) % 16:
            raise RuntimeError(f"misaligned rows: strides {x.stride()}, offset {x.storage_offset()}")
        if x.shape[0] != q.shape[0] or x.shape[1] != q.shape[1] or not x.numel():
            raise RuntimeError(
                f"batch and heads must be the query's, and not empty: {x.shape} against {q.shape}"
            )


def _probabilities(q: Tensor, k: Tensor, causal: bool, scale: float) -> Tensor:
    scores = q.float() @ k.float().transpose(-1, -2) * scale
    if causal:
        s, t = scores.shape[-2:]
        later = torch.arange(t) > torch.arange(s).unsqueeze(1) + (t - s)
        scores = scores.masked_fill(later, float("-inf"))
    return scores


def flash_forward(
    query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0, is_causal: bool = False,
    return_debug_mask: bool = False, *, scale: float | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """aten::_scaled_dot_product_flash_attention."""
    _flash_inputs(query, key, value)
    assert not dropout_p and not return_debug_mask and scale is not None
    scores = _probabilities(query, key, is_causal, scale)
    lse = scores.logsumexp(-1)
    o = ((scores - lse.unsqueeze(-1)).exp() @ value.float()).to(query.dtype)
    state = torch.empty(2, dtype=torch.uint64)
    return (
        o,
        lse,
        None,
        None,
        query.shape[2],
        key.shape[2],
        state,
        torch.empty((), dtype=torch.uint64),
        o.new_empty(0),
    )


def flash_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor,
    cum_seq_q: Any, cum_seq_k: Any, max_q: int, max_k: int, dropout_p: float, is_causal: bool,
    philox_seed: Tensor, philox_offset: Tensor, *, scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """aten::_scaled_dot_product_flash_attention_backward."""
    _flash_inputs(query, key, value, out, grad_out)
    if (
        logsumexp.dtype != torch.float32
        or not logsumexp.is_contiguous()
        or logsumexp.shape != query.shape[:3]
    ):
        raise RuntimeError(
            f"logsumexp must be contiguous float32 [n, q, s], not {logsumexp.dtype} {logsumexp.shape}"
        )
    if cum_seq_q is not None or cum_seq_k is not None or (max_q, max_k) != (query.shape[2], key.shape[2]):
        raise RuntimeError("lengths of packed sequences are not those of the tensors")
    assert not dropout_p and scale is not None
    p = (_probabilities(query, key, is_causal, scale) - logsumexp.unsqueeze(-1)).exp()
    do, delta = grad_out.float(), (grad_out.float() * out.float()).sum(-1, keepdim=True)
    ds = p * (do @ value.float().transpose(-1, -2) - delta) * scale
    grads = ds @ key.float(), ds.transpose(-1, -2) @ query.float(), p.transpose(-1, -2) @ do
    return tuple(x.to(query.dtype) for x in grads)  # type: ignore[return-value]


KERNELS: dict[str, Callable[..., Any]] = {
    "aten::_scaled_dot_product_flash_attention": flash_forward,
    "aten::_scaled_dot_product_flash_attention_backward": flash_backward,
}
