"""Gated DeltaNet and mixtures of experts for the plain fp64 model, token by token and expert by expert.

Gated DeltaNet: 2412.06464, equation 10, with normalised queries and keys, a decay and a step size per value head, a
causal depthwise convolution before and a gated RMSNorm after. Mixtures: softmax scores (Qwen), or sigmoid scores with a
bias on the choice and groups of experts (2412.19437, section 2.1.2; GLM).

Shapes: S new tokens, H hidden, C convolution channels, w kernel width, M key heads, N value heads, K and D widths of
their heads, E experts, F expert width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

Weights = Mapping[str, torch.Tensor]
# (last w - 1 inputs of the convolution [w - 1, C], recurrent state [N, K, D])
DeltaState = tuple[torch.Tensor, torch.Tensor]


def silu(x: torch.Tensor) -> torch.Tensor:
    """x · sigmoid(x)."""
    return x * torch.sigmoid(x)


def delta_net(
    h_SH: torch.Tensor, w: Weights, at: str, config: Mapping[str, Any], past: DeltaState | None
) -> tuple[torch.Tensor, DeltaState]:
    """The layer's output [S, H] and its state after the last token. `past` is read, never changed."""
    key_heads, value_heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    key_dim, value_dim = config["linear_key_head_dim"], config["linear_value_head_dim"]
    qkv_SC, z_SND, b_SN, a_SN = project(h_SH, w, at, key_heads, value_heads, key_dim, value_dim)

    kernel_Cw = w[at + "conv1d.weight"].squeeze(1)
    width = kernel_Cw.shape[1]
    tail_wC = qkv_SC.new_zeros(width - 1, qkv_SC.shape[1]) if past is None else past[0]
    padded_C = torch.cat([tail_wC, qkv_SC])
    mixed_SC = silu(sum(padded_C[j : j + len(h_SH)] * kernel_Cw[:, j] for j in range(width)))

    parts = [key_heads * key_dim, key_heads * key_dim, value_heads * value_dim]
    q_SMK, k_SMK, v_SND = (
        part.unflatten(1, (-1, dim))
        for part, dim in zip(mixed_SC.split(parts, dim=1), (key_dim, key_dim, value_dim), strict=True)
    )
    repeat = value_heads // key_heads
    q_SNK = unit(q_SMK).repeat_interleave(repeat, dim=1) / key_dim**0.5
    k_SNK = unit(k_SMK).repeat_interleave(repeat, dim=1)
    step_SN = torch.sigmoid(b_SN)
    rate_SN = a_SN + w[at + "dt_bias"]
    decay_SN = torch.exp(-torch.exp(w[at + "A_log"]) * torch.log1p(torch.exp(rate_SN)))

    state_NKD = h_SH.new_zeros(value_heads, key_dim, value_dim) if past is None else past[1]
    outputs = []
    for t in range(len(h_SH)):
        state_NKD = state_NKD * decay_SN[t, :, None, None]
        recalled_ND = torch.einsum("nk,nkd->nd", k_SNK[t], state_NKD)
        correction_ND = step_SN[t, :, None] * (v_SND[t] - recalled_ND)
        state_NKD = state_NKD + k_SNK[t, :, :, None] * correction_ND[:, None]
        outputs.append(torch.einsum("nk,nkd->nd", q_SNK[t], state_NKD))
    o_SND = torch.stack(outputs)
    scale_SN1 = torch.sqrt((o_SND * o_SND).mean(-1, keepdim=True) + config["rms_norm_eps"])
    gated_SND = o_SND / scale_SN1 * w[at + "norm.weight"] * silu(z_SND)
    return gated_SND.flatten(1) @ w[at + "out_proj.weight"].T, (padded_C[len(h_SH) :], state_NKD)


def project(
    h_SH: torch.Tensor, w: Weights, at: str, key_heads: int, value_heads: int, key_dim: int, value_dim: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v side by side [S, C], z [S, N, D], b and a [S, N].

    Qwen3.5 stores them one after the other; Qwen3-Next stores, for each key head, its q, k, v, z and its b, a.
    """
    if at + "in_proj_qkv.weight" in w:
        qkv_SC, z, b_SN, a_SN = (h_SH @ w[f"{at}in_proj_{part}.weight"].T for part in ("qkv", "z", "b", "a"))
        return qkv_SC, z.unflatten(1, (value_heads, value_dim)), b_SN, a_SN
    repeat = value_heads // key_heads
    qkvz = (h_SH @ w[at + "in_proj_qkvz.weight"].T).unflatten(1, (key_heads, -1))
    q, k, v, z = qkvz.split([key_dim, key_dim, repeat * value_dim, repeat * value_dim], dim=2)
    b, a = (h_SH @ w[at + "in_proj_ba.weight"].T).unflatten(1, (key_heads, -1)).chunk(2, dim=2)
    qkv_SC = torch.cat([part.flatten(1) for part in (q, k, v)], dim=1)
    return qkv_SC, z.flatten(1).unflatten(1, (value_heads, value_dim)), b.flatten(1), a.flatten(1)


def unit(x: torch.Tensor) -> torch.Tensor:
    """x / sqrt(Σ x² + 1e-6) over the last axis."""
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def swiglu(
    h_SH: torch.Tensor, gate_FH: torch.Tensor, up_FH: torch.Tensor, down_HF: torch.Tensor
) -> torch.Tensor:
    """(silu(h gateᵀ) · h upᵀ) downᵀ."""
    return (silu(h_SH @ gate_FH.T) * (h_SH @ up_FH.T)) @ down_HF.T


def mixture(h_SH: torch.Tensor, w: Weights, at: str, config: Mapping[str, Any]) -> torch.Tensor:
    """[S, H]: every expert sees every token, with weight zero where it was not chosen, plus the shared expert."""
    weights_SE = routing(h_SH, w, at, config)
    mixed_SH = torch.zeros_like(h_SH)
    for expert in range(weights_SE.shape[1]):
        if at + "experts.gate_up_proj" in w:
            gate, up = w[at + "experts.gate_up_proj"][expert].chunk(2)
            down = w[at + "experts.down_proj"][expert]
        else:
            names = (f"{at}experts.{expert}.{part}_proj.weight" for part in ("gate", "up", "down"))
            gate, up, down = (w[name] for name in names)
        mixed_SH = mixed_SH + weights_SE[:, expert, None] * swiglu(h_SH, gate, up, down)
    for shared in (at + "shared_expert.", at + "shared_experts."):
        if shared + "up_proj.weight" in w:
            weights = (w[f"{shared}{part}_proj.weight"] for part in ("gate", "up", "down"))
            shared_SH = swiglu(h_SH, *weights)
            if at + "shared_expert_gate.weight" in w:
                shared_SH = torch.sigmoid(h_SH @ w[at + "shared_expert_gate.weight"].T) * shared_SH
            mixed_SH = mixed_SH + shared_SH
    return mixed_SH


def routing(h_SH: torch.Tensor, w: Weights, at: str, config: Mapping[str, Any]) -> torch.Tensor:
    """The weight of each expert for each token [S, E], zero where it was not chosen."""
    logits_SE, top_k = h_SH @ w[at + "gate.weight"].T, config["num_experts_per_tok"]
    if at + "gate.e_score_correction_bias" not in w:
        scores_SE = torch.softmax(logits_SE, dim=-1)
        chosen_SE = largest(scores_SE, top_k)
    else:
        scores_SE = torch.sigmoid(logits_SE)
        biased_SE = (scores_SE + w[at + "gate.e_score_correction_bias"]).detach()
        of_group_SGe = biased_SE.unflatten(1, (config["n_group"], -1))
        group_SG = of_group_SGe.sort(dim=-1).values[..., -2:].sum(-1)
        open_SG1 = largest(group_SG, config["topk_group"])[..., None]
        chosen_SE = largest(of_group_SGe.masked_fill(~open_SG1, -torch.inf).flatten(1), top_k)
    weights_SE = scores_SE * chosen_SE
    if config.get("norm_topk_prob", True):  # Qwen3.5's router has no such setting: it always does
        weights_SE = weights_SE / weights_SE.sum(-1, keepdim=True)
    return weights_SE * config.get("routed_scaling_factor", 1.0)


def largest(x_SE: torch.Tensor, count: int) -> torch.Tensor:
    """True for the `count` largest of each row."""
    return torch.zeros_like(x_SE, dtype=torch.bool).scatter(1, x_SE.topk(count).indices, True)
