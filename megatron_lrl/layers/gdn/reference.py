"""The gated delta rule token by token, as its definition reads (Gated DeltaNet, arXiv 2412.06464, equation 10).

    S_t = exp(g_t) S_{t-1} (I - beta_t k_t k_t^T) + beta_t v_t k_t^T        o_t = S_t q_t / sqrt(d_k)

with k and q of unit length. Slow; made to be read and compared with.

Legend: b sequences, t tokens, n key heads, h value heads (h = n r), k key dim, v value dim. The state is stored
transposed: [b, h, k, v].
"""

from __future__ import annotations

import torch
from torch import Tensor

NORM_EPS = 1e-6
"""Added to a key's or query's squared length before its root is taken."""


def delta_rule_reference(
    q_btnk: Tensor, k_btnk: Tensor, v_bthv: Tensor, g_bth: Tensor, beta_bth: Tensor, state_bhkv: Tensor
) -> tuple[Tensor, Tensor]:
    """Outputs of all tokens and the state behind the last one, in the state's dtype.

    ``g_bth`` is the logarithm of the decay (<= 0), ``beta_bth`` the writing strength. Key head i serves the value
    heads i r .. (i + 1) r - 1.
    """
    dtype, repeats = state_bhkv.dtype, v_bthv.shape[2] // k_btnk.shape[2]
    q, k = (unit(x.to(dtype)).repeat_interleave(repeats, dim=2) for x in (q_btnk, k_btnk))
    v, g, beta = (x.to(dtype) for x in (v_bthv, g_bth, beta_bth))
    state, outputs = state_bhkv, []
    for t in range(v.shape[1]):
        state = state * g[:, t].exp()[..., None, None]
        read_bhv = torch.einsum("bhk,bhkv->bhv", k[:, t], state)
        write_bhv = beta[:, t, :, None] * (v[:, t] - read_bhv)
        state = state + k[:, t, :, :, None] * write_bhv[:, :, None, :]
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state) * q.shape[-1] ** -0.5)
    return torch.stack(outputs, dim=1) if outputs else v, state


def unit(x: Tensor) -> Tensor:
    """Vectors along the last axis at unit length."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + NORM_EPS)
