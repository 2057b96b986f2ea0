"""Tiny random models of each family, written by transformers itself.

Weights are drawn so that a wrong one shows: attention scores and logits have a spread near 1 to 2, norms
and biases are random (a fresh model has ones and zeros there, which hides a missing or swapped tensor).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
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
    **fields: Any,
) -> Path:
    """Writes a random model of `family` as a Hugging Face directory and returns its path.

    Args:
        family: "llama", "qwen2" or "qwen3".
        seed: draws every weight.
        tied: whether the output layer is the embedding (then `lm_head.weight` is not on disk).
        rope: a name in `ROPE_KINDS`, or transformers' `rope_parameters`.
        vocab: 131 by default, a prime, so that no tp divides it.
        head_dim: by default hidden / heads, and 16 for qwen3, where it differs from that.
        max_shard_size: small values, e.g. "20KB", give an index and several shards.
        fields: more fields of the config class, e.g. `attention_bias=True`.
    """
    config_class, model_class = FAMILIES[family]
    if head_dim is None and family == "qwen3":
        head_dim = 16
    if head_dim is not None:
        fields["head_dim"] = head_dim
    config = config_class(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=max_positions,
        rope_parameters=dict(ROPE_KINDS[rope]) if isinstance(rope, str) else rope,
        tie_word_embeddings=tied,
        rms_norm_eps=1e-6,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=None,
        dtype="float32",
        **fields,
    )
    model = model_class(config)
    randomise(model, seed)
    path = Path(path)
    model.to(dtype).save_pretrained(path, max_shard_size=max_shard_size)
    return path


def randomise(model: PreTrainedModel, seed: int) -> None:
    """Redraws every parameter from `seed`, in the order of its names."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("norm.weight"):
                parameter.copy_(1.0 + 0.2 * noise)
            elif name.endswith("bias"):
                parameter.copy_(0.3 * noise)
            elif "embed_tokens" in name or "lm_head" in name:
                parameter.copy_(0.4 * noise)  # logits then spread by 0.4 * sqrt(hidden), about 2
            else:
                parameter.copy_(noise / parameter.shape[1] ** 0.5)


def write_case(root: Path | str, case: str, seed: int = 7) -> Path:
    """Writes one of `CASES` below `root` unless it is there already, and returns its directory."""
    path = Path(root) / case
    if not (path / "config.json").exists():
        family, variation = CASES[case]
        make_hf_dir(path, family, seed, **variation)
    return path
