"""A plain fp64 transformer for llama, qwen2 and qwen3, from the Hugging Face files alone.

transformers computes norms, softmax and RoPE in fp32 whatever the model's dtype, so it cannot judge an fp64
path. This one is fp64 throughout: weights are widened on load, RoPE frequencies and angles are computed in
fp64. It is written to be read against the papers (RMSNorm 1910.07467, RoPE 2104.09864, GQA 2305.13245, YaRN
2309.00071), one sequence, no batch.

Shapes: S new tokens, T all tokens so far, H hidden, N query heads, G key-value heads, D head width, V
vocabulary.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from oracle.objective import Objective, advantages, response_loss, token_weight
from oracle.trajectories import Group

Weights = Mapping[str, torch.Tensor]
# per layer: keys after norm and RoPE, and values; [T, G, D] each
KeysValues = list[tuple[torch.Tensor, torch.Tensor]]


class PlainModel:
    """Configuration and weights of one Hugging Face directory, every number in fp64."""

    def __init__(self, hf_dir: Path | str) -> None:
        folder = Path(hf_dir)
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        if self.config["model_type"] not in ("llama", "qwen2", "qwen3"):
            raise ValueError(f"no plain implementation of {self.config['model_type']!r}")
        self.weights: dict[str, torch.Tensor] = {}
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118
                    self.weights[name] = tensors.get_tensor(name).double().requires_grad_()
        heads = self.config["num_attention_heads"]
        self.head_dim: int = self.config.get("head_dim") or self.config["hidden_size"] // heads
        self.inv_freq, self.rope_scale = rope_frequencies(self.config["rope_parameters"], self.head_dim)

    def forward(self, ids: Sequence[int], past: KeysValues | None = None) -> tuple[torch.Tensor, KeysValues]:
        """Logits [S, V], and the keys and values of all tokens so far. `past` is read, never changed."""
        w, eps = self.weights, self.config["rms_norm_eps"]
        start = past[0][0].shape[0] if past else 0
        cos_SD, sin_SD = self.rotation(start, len(ids))
        x_SH = w["model.embed_tokens.weight"][torch.tensor(ids)]
        grown: KeysValues = []
        for layer in range(self.config["num_hidden_layers"]):
            at = f"model.layers.{layer}."
            h_SH = rms_norm(x_SH, w[at + "input_layernorm.weight"], eps)
            q_SND, k_SGD, v_SGD = (self.heads(h_SH, at + f"self_attn.{which}") for which in ("q", "k", "v"))
            if at + "self_attn.q_norm.weight" in w:
                q_SND = rms_norm(q_SND, w[at + "self_attn.q_norm.weight"], eps)
                k_SGD = rms_norm(k_SGD, w[at + "self_attn.k_norm.weight"], eps)
            q_SND, k_SGD = rotate(q_SND, cos_SD, sin_SD), rotate(k_SGD, cos_SD, sin_SD)
            k_TGD, v_TGD = k_SGD, v_SGD
            if past:
                k_TGD, v_TGD = torch.cat([past[layer][0], k_SGD]), torch.cat([past[layer][1], v_SGD])
            grown.append((k_TGD, v_TGD))
            o_SH = attend(q_SND, k_TGD, v_TGD, start).flatten(1)
            x_SH = x_SH + linear(o_SH, w, at + "self_attn.o_proj")
            h_SH = rms_norm(x_SH, w[at + "post_attention_layernorm.weight"], eps)
            gate_SF, up_SF = linear(h_SH, w, at + "mlp.gate_proj"), linear(h_SH, w, at + "mlp.up_proj")
            x_SH = x_SH + linear(gate_SF * torch.sigmoid(gate_SF) * up_SF, w, at + "mlp.down_proj")
        head = w.get("lm_head.weight", w["model.embed_tokens.weight"])
        return rms_norm(x_SH, w["model.norm.weight"], eps) @ head.T, grown

    def heads(self, h_SH: torch.Tensor, name: str) -> torch.Tensor:
        """A projection split into heads, [S, heads, D]."""
        return linear(h_SH, self.weights, f"{name}_proj").unflatten(1, (-1, self.head_dim))

    def rotation(self, start: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin [S, D] for absolute positions from `start`."""
        angle_SD = torch.outer(torch.arange(start, start + count).double(), self.inv_freq).repeat(1, 2)
        return angle_SD.cos() * self.rope_scale, angle_SD.sin() * self.rope_scale

    def logprobs(
        self,
        prompt: Sequence[int],
        response: Sequence[int],
        temperature: float = 1.0,
        detach_prefix: bool = False,
        prefix_state: KeysValues | None = None,
        live: int = 0,
    ) -> torch.Tensor:
        """Log-probabilities [R] of the response, with their graph.

        Args:
            detach_prefix: hold the keys and values of prompt[:-1] constant (the `response_only` contract), except
                those of its newest `live` tokens (the `truncated` contract).
            prefix_state: use these keys and values of prompt[:-1] instead (then they are held constant).
        """
        constant = 0 if prefix_state is None else len(prompt) - 1
        if prefix_state is None and detach_prefix and len(prompt) > 1 + live:
            constant = len(prompt) - 1 - live
            with torch.no_grad():
                prefix_state = self.forward(prompt[:constant])[1]
        logits_SV = self.forward([*prompt[constant:], *response[:-1]], prefix_state)[0]
        logits_RV = logits_SV[-len(response) :]
        table_RV = torch.log_softmax(logits_RV / temperature, dim=-1)
        return table_RV[torch.arange(len(response)), torch.tensor(response)]


def linear(x: torch.Tensor, weights: Weights, name: str) -> torch.Tensor:
    """x Wᵀ, plus the bias where the model has one."""
    y = x @ weights[f"{name}.weight"].T
    return y + weights[f"{name}.bias"] if f"{name}.bias" in weights else y


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x²) + eps) · weight over the last axis."""
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def rotate(x_SND: torch.Tensor, cos_SD: torch.Tensor, sin_SD: torch.Tensor) -> torch.Tensor:
    """RoPE with half-split pairs (i, i + D/2)."""
    first, second = x_SND.chunk(2, dim=-1)
    return x_SND * cos_SD[:, None] + torch.cat([-second, first], dim=-1) * sin_SD[:, None]


def attend(q_SND: torch.Tensor, k_TGD: torch.Tensor, v_TGD: torch.Tensor, start: int) -> torch.Tensor:
    """Causal grouped-query attention [S, N, D] of the tokens at positions `start`, `start` + 1, …"""
    repeat = q_SND.shape[1] // k_TGD.shape[1]
    k_TND, v_TND = k_TGD.repeat_interleave(repeat, dim=1), v_TGD.repeat_interleave(repeat, dim=1)
    scores_NST = torch.einsum("snd,tnd->nst", q_SND, k_TND) / math.sqrt(q_SND.shape[-1])
    later_ST = torch.arange(k_TGD.shape[0])[None] > torch.arange(start, start + q_SND.shape[0])[:, None]
    weights_NST = torch.softmax(scores_NST.masked_fill(later_ST, -math.inf), dim=-1)
    return torch.einsum("nst,tnd->snd", weights_NST, v_TND)


def rope_frequencies(parameters: Mapping[str, Any], dim: int) -> tuple[torch.Tensor, float]:
    """Inverse frequencies [dim / 2] in fp64, and the factor on cos and sin."""
    if parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError("the three families rotate whole heads")
    kind, theta = parameters["rope_type"], float(parameters["rope_theta"])
    plain = [theta ** (-2 * i / dim) for i in range(dim // 2)]
    scale = 1.0
    if kind == "default":
        frequencies = plain
    elif kind == "linear":
        frequencies = [f / parameters["factor"] for f in plain]
    elif kind == "llama3":
        frequencies = [llama3_frequency(f, parameters) for f in plain]
    elif kind == "yarn":
        frequencies, scale = yarn_frequencies(plain, theta, dim, parameters)
    else:
        raise ValueError(f"no plain RoPE of kind {kind!r}")
    return torch.tensor(frequencies, dtype=torch.float64), scale


def llama3_frequency(frequency: float, parameters: Mapping[str, Any]) -> float:
    """Short waves stay, long ones are stretched by `factor`, those between are blended."""
    turns = parameters["original_max_position_embeddings"] * frequency / (2 * math.pi)
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    keep = min(1.0, max(0.0, (turns - low) / (high - low)))
    return keep * frequency + (1.0 - keep) * frequency / parameters["factor"]


def yarn_frequencies(
    plain: Sequence[float], theta: float, dim: int, parameters: Mapping[str, Any]
) -> tuple[list[float], float]:
    """YaRN's ramp between kept and interpolated frequencies, and its factor on cos and sin."""
    factor, original = parameters["factor"], parameters["original_max_position_embeddings"]

    def index_of(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = index_of(parameters.get("beta_fast") or 32), index_of(parameters.get("beta_slow") or 1)
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low or 0.001
    ramp = [min(1.0, max(0.0, (i - low) / width)) for i in range(len(plain))]
    frequencies = [f / factor * r + f * (1.0 - r) for f, r in zip(plain, ramp, strict=True)]
    scale = parameters.get("attention_factor")
    if scale is None:
        mscale, over_all = parameters.get("mscale"), parameters.get("mscale_all_dim")
        scale = yarn_scale(factor)
        if mscale and over_all:
            scale = yarn_scale(factor, mscale) / yarn_scale(factor, over_all)
    return frequencies, float(scale)


def yarn_scale(factor: float, mscale: float = 1.0) -> float:
    """0.1 · mscale · ln(factor) + 1 when the context is stretched."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def score(hf_dir: Path | str, groups: Sequence[Group], temperature: float = 1.0) -> list[list[list[float]]]:
    """fp64 log-probabilities by group, response and token."""
    model = PlainModel(hf_dir)
    with torch.no_grad():
        return [
            [model.logprobs(g["prompt_ids"], r["ids"], temperature).tolist() for r in g["responses"]]
            for g in groups
        ]


def grad(
    hf_dir: Path | str,
    groups: Sequence[Group],
    objective: Objective | None = None,
    detach_prefix: bool = False,
    reference: Sequence[Sequence[Sequence[float]]] | None = None,
    live: int = 0,
) -> dict[str, torch.Tensor]:
    """The fp64 gradient of the window loss by parameter name; for `detach_prefix` and `live` see `logprobs`."""
    objective = objective or Objective()
    model = PlainModel(hf_dir)
    for number, group in enumerate(groups):
        for branch, (response, advantage) in enumerate(
            zip(group["responses"], advantages(group, objective.advantage), strict=True)
        ):
            logprobs_R = model.logprobs(
                group["prompt_ids"], response["ids"], objective.temperature, detach_prefix, live=live
            )
            weight = token_weight(groups, len(response["ids"]), objective.aggregate)
            reference_R = None if reference is None else reference[number][branch]
            old_R = response.get("logprobs")
            response_loss(logprobs_R, advantage, weight, objective, old_R, reference_R).backward()
    return {name: torch.zeros_like(w) if w.grad is None else w.grad for name, w in model.weights.items()}
