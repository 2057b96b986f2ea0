"""The gated delta rule, parallel inside blocks of tokens, from a given state to the next one.

Within a block of c tokens the rule's c rank-one updates are one triangular system (the UT transform of DeltaNet,
arXiv 2406.06484, section 3, with decay as in arXiv 2412.06464, section 3.3); blocks are scanned in order. Where the
tokens are cut changes nothing but rounding: one token at a time, a prompt in chunks, a response at once.

    no graph, one token       the rule itself, on the state
    otherwise                 blocks of 64; under autograd only inputs are saved: the backward walks segments of 8
                              blocks in reverse and rebuilds one segment's graph at a time
    CUDA, half precision, flash-linear-attention installed     its kernels, which take and return the same states

Legend: b sequences, t tokens, n key heads, h value heads (h = n r), k key dim, v value dim, c tokens of a block,
z blocks. Inputs may have any float dtype; the arithmetic and the state are float32 (float64 where the state is).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from megatron_lrl.layers.gdn.reference import NORM_EPS, delta_rule_reference, unit

_BLOCK = 64
"""Tokens of a block: the triangular systems are 64 x 64."""
_SEGMENT = 8 * _BLOCK
"""Tokens whose graph exists at once in the backward."""


def gated_delta_rule(
    q_btnk: Tensor, k_btnk: Tensor, v_bthv: Tensor, g_bth: Tensor, beta_bth: Tensor, state_bhkv: Tensor
) -> tuple[Tensor, Tensor]:
    """Outputs [b, t, h, v] in v's dtype and the state [b, h, k, v] behind the last token.

    A token with g = 0 and beta = 0 leaves the state as it is: ragged batches are padded with such tokens.

    Args:
        q_btnk, k_btnk: brought to unit length here; the query is also divided by sqrt(k).
        g_bth: logarithm of the decay, <= 0, in the state's dtype.
        beta_bth: writing strength in [0, 1].
        state_bhkv: float32 or float64.
    """
    if _fla_takes(q_btnk, v_bthv, state_bhkv) and (fla := _fla()) is not None:
        return fla(q_btnk, k_btnk, v_bthv, g_bth, beta_bth, state_bhkv)
    inputs = (q_btnk, k_btnk, v_bthv, g_bth, beta_bth, state_bhkv)
    if torch.is_grad_enabled() and any(x.requires_grad for x in inputs):
        return _DeltaRule.apply(*inputs)
    if v_bthv.shape[1] == 1:
        out_bthv, state_bhkv = delta_rule_reference(*inputs)
    else:
        out_bthv, state_bhkv = _blocks(*inputs)
    return out_bthv.to(v_bthv.dtype), state_bhkv


class _DeltaRule(torch.autograd.Function):
    """Saves its inputs; the backward recomputes one segment of tokens at a time, newest first."""

    @staticmethod
    def forward(ctx: Any, q, k, v, g, beta, state):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(q, k, v, g, beta, state)
        out, state = _blocks(q, k, v, g, beta, state)
        return out.to(v.dtype), state

    @staticmethod
    def backward(ctx: Any, dout: Tensor, dstate: Tensor):  # type: ignore[no-untyped-def]
        *tokens, state = ctx.saved_tensors
        segments = list(zip(*(x.split(_SEGMENT, dim=1) for x in (*tokens, dout)), strict=True))
        states = [state]
        for q, k, v, g, beta, _ in segments[:-1]:
            states.append(_blocks(q, k, v, g, beta, states[-1])[1])
        gradients: list[tuple[Tensor, ...]] = []
        while segments:
            *inputs, segment_dout = segments.pop()
            leaves = [x.detach().requires_grad_() for x in (*inputs, states.pop())]
            with torch.enable_grad():
                out, last = _blocks(*leaves)
                out = out.to(segment_dout.dtype)
            *parts, dstate = torch.autograd.grad((out, last), leaves, (segment_dout, dstate))
            gradients.append(tuple(parts))
        joined = (torch.cat(parts, dim=1) for parts in zip(*reversed(gradients), strict=True))
        return (*joined, dstate)


def _blocks(
    q_btnk: Tensor, k_btnk: Tensor, v_bthv: Tensor, g_bth: Tensor, beta_bth: Tensor, state_bhkv: Tensor
) -> tuple[Tensor, Tensor]:
    """The rule by blocks, in the state's dtype."""
    tokens, repeats = v_bthv.shape[1], v_bthv.shape[2] // k_btnk.shape[2]
    if not tokens:
        return v_bthv.to(state_bhkv.dtype), state_bhkv
    size = min(_BLOCK, tokens)

    def blocked(x: Tensor) -> Tensor:
        """[b, t, h, ...] -> [b, h, z, c, ...], padded with zeros: no decay, nothing written."""
        x = x.to(state_bhkv.dtype).transpose(1, 2)
        pad = -tokens % size
        if pad:
            x = torch.cat([x, x.new_zeros(*x.shape[:2], pad, *x.shape[3:])], dim=2)
        return x.unflatten(2, (-1, size))

    q, k = (blocked(unit(x.to(state_bhkv.dtype))) for x in (q_btnk, k_btnk))
    q, k = (x.repeat_interleave(repeats, dim=1) if repeats > 1 else x for x in (q, k))
    q = q * q.shape[-1] ** -0.5
    v, g, beta = blocked(v_bthv), blocked(g_bth).cumsum(-1), blocked(beta_bth).unsqueeze(-1)

    # decay_ij: from behind token j to token i of a block; above the diagonal the exponent could overflow.
    decay_cc = (g.unsqueeze(-1) - g.unsqueeze(-2)).tril().exp().tril()
    system_cc = (beta * k) @ k.transpose(-1, -2) * decay_cc  # its strict lower triangle, ones on the diagonal
    # What each token writes is linear in the state the block starts from: u - w S.
    right = torch.cat([beta * v, beta * k * g.exp().unsqueeze(-1)], dim=-1)
    solved = torch.linalg.solve_triangular(system_cc, right, upper=False, unitriangular=True)
    u, w = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    attention_cc = q @ k.transpose(-1, -2) * decay_cc
    q_in = q * g.exp().unsqueeze(-1)
    k_out = (k * (g[..., -1:] - g).exp().unsqueeze(-1)).transpose(-1, -2)
    kept = g[..., -1].exp()[..., None, None]

    outputs, state = [], state_bhkv
    for z in range(v.shape[2]):
        written = u[:, :, z] - w[:, :, z] @ state
        outputs.append(q_in[:, :, z] @ state + attention_cc[:, :, z] @ written)
        state = state * kept[:, :, z] + k_out[:, :, z] @ written
    return torch.cat(outputs, dim=2)[:, :, :tokens].transpose(1, 2), state


def _fla_takes(q_btnk: Tensor, v_bthv: Tensor, state_bhkv: Tensor) -> bool:
    """Whether flash-linear-attention's kernels compute this.

    They multiply in half precision (float32 inputs too, where they accept them), and hold a key dim of 256 at most.
    """
    half = v_bthv.dtype in (torch.bfloat16, torch.float16) and v_bthv.dtype == q_btnk.dtype
    return v_bthv.is_cuda and half and state_bhkv.dtype == torch.float32 and q_btnk.shape[-1] <= 256


@cache
def _fla() -> Callable[..., tuple[Tensor, Tensor]] | None:
    """The same function on flash-linear-attention's kernels; None where the package is not installed."""
    if importlib.util.find_spec("fla") is None:
        return None
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule

    def rule(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        repeats = v.shape[2] // k.shape[2]
        q, k = (unit(x.float()).to(x.dtype).repeat_interleave(repeats, dim=2) for x in (q, k))
        one = v.shape[1] == 1 and not torch.is_grad_enabled()
        kernel = fused_recurrent_gated_delta_rule if one else chunk_gated_delta_rule
        return kernel(q, k, v, g=g, beta=beta, initial_state=state, output_final_state=True)

    return rule


__all__ = ["NORM_EPS", "gated_delta_rule"]
