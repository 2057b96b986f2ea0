"""A plain fp64 transformer for every family, from the Hugging Face files alone.

transformers computes norms, softmax, RoPE and Gated DeltaNet in fp32 whatever the dtype, so it cannot judge an fp64
path. This one is fp64 throughout: weights are widened on load, RoPE frequencies and angles are computed in fp64. It is
written to be read against the papers (RMSNorm 1910.07467, RoPE 2104.09864, GQA 2305.13245, YaRN 2309.00071; the other
layers stand in `plain_layers`), one sequence, no batch.

Shapes: S new tokens, T all tokens so far, H hidden, N query heads, G key-value heads, D head width, R of which
rotate, V vocabulary.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from oracle.objective import Objective, advantages, window_term
from oracle.plain_layers import delta_net, mixture, silu
from oracle.tiny_families import LATENT, is_mtp
from oracle.trajectories import Group

Weights = Mapping[str, torch.Tensor]
# per layer: keys after norm and RoPE, and values, [T, G, D] each; of Gated DeltaNet `plain_layers.DeltaState`
LayerStates = list[tuple[torch.Tensor, torch.Tensor]]
HYBRIDS = ("qwen3_next", "qwen3_5", "qwen3_5_moe")


class PlainModel:
    """Configuration and weights of one Hugging Face directory, every number in fp64."""

    def __init__(self, hf_dir: Path | str) -> None:
        folder = Path(hf_dir)
        config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        self.prefix = "model.language_model." if "text_config" in config else "model."
        self.config: dict[str, Any] = config.get("text_config", config)
        self.family: str = self.config["model_type"].removesuffix("_text")
        if self.family not in ("llama", "qwen2", "qwen3", "qwen3_moe", "glm4", "glm4_moe", *LATENT, *HYBRIDS):
            raise ValueError(f"no plain implementation of {self.family!r}")
        self.weights: dict[str, torch.Tensor] = {}
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118
                    if ".visual." in name or is_mtp(name, self.config["num_hidden_layers"]):
                        continue
                    weight = tensors.get_tensor(name).double()
                    self.weights[name] = weight.requires_grad_(not name.endswith("e_score_correction_bias"))
        heads = self.config["num_attention_heads"]
        self.head_dim: int = self.config.get("head_dim") or self.config["hidden_size"] // heads
        rope = self.config["rope_parameters"]
        rotary_dim = int(self.head_dim * rope.get("partial_rotary_factor", 1.0))
        self.inv_freq, self.rope_scale = rope_frequencies(rope, rotary_dim)

    def forward(
        self, ids: Sequence[int], past: LayerStates | None = None
    ) -> tuple[torch.Tensor, LayerStates]:
        """Logits [S, V], and the state of every layer after all tokens so far. `past` is read, never changed."""
        w = self.weights
        layers = self.config["num_hidden_layers"]
        kinds = self.config.get("layer_types") or ["full_attention"] * layers
        start = past[kinds.index("full_attention")][0].shape[0] if past else 0
        angles_SR = self.rotation(start, len(ids))
        x_SH = w[self.prefix + "embed_tokens.weight"][torch.tensor(ids)]
        grown: LayerStates = []
        for layer in range(layers):
            at = f"{self.prefix}layers.{layer}."
            h_SH = self.norm(x_SH, at + "input_layernorm")
            before = past[layer] if past else None
            if kinds[layer] == "linear_attention":
                y_SH, state = delta_net(h_SH, w, at + "linear_attn.", self.config, before)
            elif self.family in LATENT:
                y_SH, state = self.latent_attention(h_SH, at + "self_attn.", angles_SR, start, before)
            else:
                y_SH, state = self.attention(h_SH, at + "self_attn.", angles_SR, start, before)
            grown.append(state)
            x_SH = x_SH + self.sandwiched(y_SH, at + "post_self_attn_layernorm")
            h_SH = self.norm(x_SH, at + "post_attention_layernorm")
            x_SH = x_SH + self.sandwiched(self.mlp(h_SH, at + "mlp."), at + "post_mlp_layernorm")
        head = w.get("lm_head.weight", w[self.prefix + "embed_tokens.weight"])
        return self.norm(x_SH, self.prefix + "norm") @ head.T, grown

    def attention(
        self,
        h_SH: torch.Tensor,
        at: str,
        angles_SR: tuple[torch.Tensor, torch.Tensor],
        start: int,
        past: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        """Attention's output [S, H], and the keys and values of all tokens so far."""
        q_SND, k_SGD, v_SGD = (self.heads(h_SH, at + which) for which in ("q", "k", "v"))
        gate_SND = None
        if self.family in HYBRIDS:  # each head's query is followed by its gate
            q_SND, gate_SND = q_SND.flatten(1).unflatten(1, (-1, 2 * self.head_dim)).chunk(2, dim=-1)
        if at + "q_norm.weight" in self.weights:
            q_SND, k_SGD = self.norm(q_SND, at + "q_norm"), self.norm(k_SGD, at + "k_norm")
        q_SND, k_SGD = (rotate(x, *angles_SR, interleaved=self.family == "glm4") for x in (q_SND, k_SGD))
        k_TGD, v_TGD = k_SGD, v_SGD
        if past is not None:
            k_TGD, v_TGD = torch.cat([past[0], k_SGD]), torch.cat([past[1], v_SGD])
        o_SND = attend(q_SND, k_TGD, v_TGD, start)
        if gate_SND is not None:
            o_SND = o_SND * torch.sigmoid(gate_SND)
        return linear(o_SND.flatten(1), self.weights, at + "o_proj"), (k_TGD, v_TGD)

    def latent_attention(
        self,
        h_SH: torch.Tensor,
        at: str,
        angles_SR: tuple[torch.Tensor, torch.Tensor],
        start: int,
        past: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        """DeepSeek-V2, 2405.04434, equations 9 to 19, with keys and values of every head expanded.

        Returns the output [S, H], and the normed latents and the rotated keys of all tokens so far.
        """
        w, config = self.weights, self.config
        rank, turning, nope = config["kv_lora_rank"], config["qk_rope_head_dim"], config["qk_nope_head_dim"]
        pairs = config.get("rope_interleave", True)
        q_SH = h_SH
        if at + "q_a_proj.weight" in w:
            q_SH = rms_norm(linear(h_SH, w, at + "q_a_proj"), w[at + "q_a_layernorm.weight"], 1e-6)
        name = at + ("q_b_proj" if at + "q_a_proj.weight" in w else "q_proj")
        q_SND = linear(q_SH, w, name).unflatten(1, (-1, nope + turning))
        q_SND = torch.cat(
            [q_SND[..., :nope], rotate(q_SND[..., nope:], *angles_SR, interleaved=pairs)], dim=-1
        )
        latent_Sr, key_SR = linear(h_SH, w, at + "kv_a_proj_with_mqa").split([rank, turning], dim=-1)
        latent_Tr = rms_norm(latent_Sr, w[at + "kv_a_layernorm.weight"], 1e-6)
        key_TR = rotate(key_SR[:, None], *angles_SR, interleaved=pairs)[:, 0]
        if past is not None:
            latent_Tr, key_TR = torch.cat([past[0], latent_Tr]), torch.cat([past[1], key_TR])
        heads = q_SND.shape[1]
        k_TND, v_TND = (
            linear(latent_Tr, w, at + "kv_b_proj").unflatten(1, (heads, -1)).tensor_split([nope], dim=-1)
        )
        k_TND = torch.cat([k_TND, key_TR[:, None].expand(-1, heads, -1)], dim=-1)
        o_SND = attend(q_SND * self.latent_temperature, k_TND, v_TND, start)
        return linear(o_SND.flatten(1), w, at + "o_proj"), (latent_Tr, key_TR)

    @property
    def latent_temperature(self) -> float:
        """What YaRN adds to the scores of latent attention."""
        rope = self.config["rope_parameters"]
        over_all = rope.get("mscale_all_dim", 0) if rope["rope_type"] == "yarn" else 0
        return yarn_scale(rope["factor"], over_all) ** 2 if over_all else 1.0

    def mlp(self, h_SH: torch.Tensor, at: str) -> torch.Tensor:
        """[S, H]: a mixture where the layer has a router, else a SwiGLU MLP."""
        w = self.weights
        if at + "gate.weight" in w:
            return mixture(h_SH, w, at, self.config)
        if at + "gate_up_proj.weight" in w:
            gate_SF, up_SF = linear(h_SH, w, at + "gate_up_proj").chunk(2, dim=-1)
        else:
            gate_SF, up_SF = linear(h_SH, w, at + "gate_proj"), linear(h_SH, w, at + "up_proj")
        return linear(silu(gate_SF) * up_SF, w, at + "down_proj")

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """RMSNorm by a named weight, which hybrids store minus one."""
        weight = self.weights[name + ".weight"]
        return rms_norm(x, 1.0 + weight if self.family in HYBRIDS else weight, self.config["rms_norm_eps"])

    def sandwiched(self, y_SH: torch.Tensor, name: str) -> torch.Tensor:
        """What joins the residual: normed first in models that have such a norm."""
        return self.norm(y_SH, name) if name + ".weight" in self.weights else y_SH

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
        prefix_state: LayerStates | None = None,
        live: int = 0,
    ) -> torch.Tensor:
        """Log-probabilities [R] of the response, with their graph.

        Args:
            detach_prefix: hold the state of prompt[:-1] constant (the `response_only` contract), except
                those of its newest `live` tokens (the `truncated` contract).
            prefix_state: use this state of prompt[:-1] instead (then they are held constant).
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


def rotate(
    x_SND: torch.Tensor, cos_SR: torch.Tensor, sin_SR: torch.Tensor, interleaved: bool = False
) -> torch.Tensor:
    """RoPE on the first R dimensions, with pairs (i, i + R/2), or, interleaved, (2i, 2i + 1)."""
    x_SNR, rest = x_SND[..., : cos_SR.shape[1]], x_SND[..., cos_SR.shape[1] :]
    if interleaved:
        x_SNR = torch.cat([x_SNR[..., 0::2], x_SNR[..., 1::2]], dim=-1)
    first, second = x_SNR.chunk(2, dim=-1)
    turned_SNR = x_SNR * cos_SR[:, None] + torch.cat([-second, first], dim=-1) * sin_SR[:, None]
    if interleaved:
        turned_SNR = torch.stack(turned_SNR.chunk(2, dim=-1), dim=-1).flatten(-2)
    return torch.cat([turned_SNR, rest], dim=-1)


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
            reference_R = None if reference is None else reference[number][branch]
            window_term(logprobs_R, groups, response, advantage, objective, reference_R).backward()
    return {
        name: torch.zeros_like(w) if w.grad is None else w.grad
        for name, w in model.weights.items()
        if w.requires_grad
    }
