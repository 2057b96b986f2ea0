"""Tiny random models of each family, written by transformers itself.

Weights are drawn so that a wrong one shows: attention scores and logits have a spread near 1 to 2, norms
and biases are random (a fresh model has ones and zeros there, which hides a missing or swapped tensor).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.utils import logging

from oracle import tiny_families
from oracle.tiny_families import MORE_CASES

logging.disable_progress_bar()

FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}

THETA = 10_000.0
ROPE_KINDS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": THETA},
    "linear": {"rope_type": "linear", "rope_theta": THETA, "factor": 2.5},
    # bands chosen so that a 16-wide head has kept, blended and stretched frequencies
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": THETA,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": THETA,
        "factor": 4.0,
        "original_max_position_embeddings": 256,
        "beta_fast": 8.0,
        "beta_slow": 1.0,
    },
}

# The cases every checkpoint, score and gradient claim is shown for: id -> (family, variation).
# Each family tied and untied, and every RoPE kind somewhere.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied-llama3": ("llama", {"tied": True, "rope": "llama3"}),
    "qwen2": ("qwen2", {"rope": "linear"}),
    "qwen2-tied": ("qwen2", {"tied": True}),
    "qwen3": ("qwen3", {}),
    "qwen3-tied-yarn": ("qwen3", {"tied": True, "rope": "yarn"}),
}


def make_hf_dir(
    path: Path | str,
    family: str,
    seed: int,
    *,
    tied: bool = False,
    rope: str | dict[str, Any] = "default",
    vocab: int = 131,
    hidden: int = 32,
    intermediate: int = 48,
    layers: int = 4,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int | None = None,
    max_positions: int = 1024,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "5GB",
    wide: tuple[str, ...] = ("e_score_correction_bias",),
    packed: bool = False,
    mtp: bool = False,
    wrapper: bool = False,
    **fields: Any,
) -> Path:
    """Writes a random model of `family` as a Hugging Face directory and returns its path.

    Args:
        family: a key of `FAMILIES` or of `tiny_families.FAMILIES`.
        seed: draws every weight.
        tied: whether the output layer is the embedding (then `lm_head.weight` is not on disk).
        rope: a name in `ROPE_KINDS`, or transformers' `rope_parameters`.
        vocab: 131 by default, a prime, so that no tp divides it.
        head_dim: by default hidden / heads, and 16 for all but llama and qwen2, where it differs from that.
        max_shard_size: small values, e.g. "20KB", give an index and several shards.
        wide: endings of the names that stay in float32 whatever `dtype`, as published files have them.
        packed: whether a layer's experts are stored as two tensors, not one by one.
        mtp: whether the files hold multi-token-prediction tensors too.
        wrapper: whether the language model stands inside a vision-language one.
        fields: more fields of the config class, e.g. `attention_bias=True`.
    """
    if head_dim is None and family == "qwen3":
        head_dim = 16
    if head_dim is not None:
        fields["head_dim"] = head_dim
    common = {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": max_positions,
        "rope_parameters": dict(ROPE_KINDS[rope]) if isinstance(rope, str) else rope,
        "tie_word_embeddings": tied,
        "rms_norm_eps": fields.pop("rms_norm_eps", 1e-2 if family in tiny_families.HYBRIDS else 1e-6),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": None,
        "dtype": "float32",
    }
    if family in FAMILIES:
        config_class, model_class = FAMILIES[family]
        model = model_class(config_class(**common, **fields))
    else:
        if mtp and family in ("glm4_moe", "deepseek_v3"):
            fields["num_nextn_predict_layers" if family == "glm4_moe" else "num_mtp_layers"] = 1
        model = tiny_families.build(family, common, fields, wrapper)
    randomise(model, seed)
    path = Path(path)
    held = {name: tensor.clone() for name, tensor in model.state_dict().items() if name.endswith(wide)}
    model.to(dtype)
    for name, tensor in held.items():
        module = model.get_submodule(name.rpartition(".")[0])
        getattr(module, name.rpartition(".")[2]).data = tensor
    model.save_pretrained(path, max_shard_size=max_shard_size)
    if family not in FAMILIES:
        extra = tiny_families.mtp_tensors(family, hidden, layers, seed + 1) if mtp else {}
        extra = {n: t if n.endswith(wide) else t.to(dtype) for n, t in extra.items()}
        tiny_families.rewrite(path, packed=packed, extra=extra)
    return path


def randomise(model: PreTrainedModel, seed: int) -> None:
    """Redraws every parameter and stored buffer from `seed`, in the order of its names.

    Router logits spread by about 2, so that the experts' order is clear (`hf_oracle.routing_margin` measures it);
    Gated DeltaNet remembers some 3 to 100 tokens, differently in each head. Its output, a sum over a few 8-wide heads,
    can be close to zero, where its RMSNorm magnifies rounding a hundredfold. So hybrids get an epsilon of 0.01, a wide
    residual stream and smaller logits: float32 then meets the bars of the other families.
    """
    generator = torch.Generator().manual_seed(seed)
    hybrid = any("linear_attn" in name for name, _ in model.named_parameters())
    tied = all(not name.startswith("lm_head") for name, _ in model.named_parameters())
    buffers = [(name, b) for name, b in model.named_buffers() if name.endswith("e_score_correction_bias")]
    with torch.no_grad():
        for name, parameter in [*sorted(model.named_parameters()), *sorted(buffers)]:
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("norm.weight"):
                # hybrids multiply with 1 + weight, except in the norm of Gated DeltaNet's output
                zero_centred = hybrid and not name.endswith("linear_attn.norm.weight")
                parameter.copy_(0.2 * noise + (0.0 if zero_centred else 1.0))
            elif name.endswith("A_log"):
                parameter.copy_(noise - 2.5)
            elif name.endswith("bias"):
                parameter.copy_(0.3 * noise)
            elif name.endswith("mlp.gate.weight"):
                parameter.copy_(2.0 * noise / parameter.shape[-1] ** 0.5)
            elif hybrid and ("embed_tokens" in name or "lm_head" in name):
                parameter.copy_((0.3 if tied else 0.2 if "lm_head" in name else 1.0) * noise)
            elif "embed_tokens" in name or "lm_head" in name:
                parameter.copy_(0.4 * noise)  # logits then spread by 0.4 * sqrt(hidden), about 2
            else:
                parameter.copy_(noise / parameter.shape[-1] ** 0.5)


def write_case(root: Path | str, case: str, seed: int = 7) -> Path:
    """Writes one of `CASES` or `MORE_CASES` below `root` unless it is there already, and returns its directory."""
    path = Path(root) / case
    if not (path / "config.json").exists():
        family, variation = {**CASES, **MORE_CASES}[case]
        make_hf_dir(path, family, seed, **variation)
    return path


def write_offset_case(root: Path | str, case: str, seed: int = 5) -> Path:
    """`write_case` with key biases near +60 and -60 and query biases of 4, as published Qwen2.5 models come near to:
    all scores of a query share an offset of hundreds."""
    path = Path(root) / case
    if not (path / "config.json").exists():
        file = write_case(root, case) / "model.safetensors"
        tensors, generator = load_file(file), torch.Generator().manual_seed(seed)
        for name in sorted(name for name in tensors if name.endswith(("q_proj.bias", "k_proj.bias"))):
            sign, noise = (torch.randn(tensors[name].shape, generator=generator) for _ in range(2))
            tensors[name] = 60 * sign.sign() + noise if "k_proj" in name else 4 * noise
        save_file(tensors, file, metadata={"format": "pt"})
    return path
