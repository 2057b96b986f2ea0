"""Tiny configs of the families beyond Llama, as dictionaries, with fields changed."""

from __future__ import annotations

from typing import Any

from oracle.tiny_families import FIELDS, LATENT, MORE_CASES, WRAPPERS

# Config classes whose text model stands alone, by model_type.
TEXT_TYPES = {"qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text"}
SIZES = {
    "vocab_size": 31,
    "hidden_size": 256,
    "num_hidden_layers": 8,
    "num_attention_heads": 32,
    "max_position_embeddings": 512,
    "intermediate_size": 24,
}


def tiny_config(case: str, **fields: Any) -> dict[str, Any]:
    """A tiny config of a case, as its directory would hold it, with fields changed; "text_" reaches the inner level."""
    family, variation = MORE_CASES[case]
    wrapper = variation.get("wrapper", False)
    sizes = {
        **SIZES,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
    }
    if family in LATENT:
        sizes = {**sizes, "num_key_value_heads": 4}
        del sizes["head_dim"]
    text = {**sizes, **FIELDS[family]}
    inside = [key for key in fields if key.startswith("text_") and key != "text_config"]
    inner = {key.removeprefix("text_"): fields[key] for key in inside}
    outer = {key: value for key, value in fields.items() if key not in inside}
    if not wrapper:
        return {"model_type": TEXT_TYPES.get(family, family), **text, **inner, **outer}
    text = {"model_type": TEXT_TYPES[family], **text, **inner}
    named = {"model_type": family, "architectures": [WRAPPERS[family][1]]}
    return {**named, "vision_config": {"depth": 1}, "image_token_id": 5, "text_config": text, **outer}
