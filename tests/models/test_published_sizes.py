"""Claim: published configs, in the spelling of their own config.json, become architectures of the published sizes.

Why the tests show it: parameters are counted twice, by a formula over `Architecture` that is written out here and by
transformers' own model on the meta device, and compared with the published totals of Qwen3.6-27B (26.896 billion in
the language model) and GLM-4.5-Air (106 billion).
Not shown: that such a model fits anywhere (`plan` says that).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from megatron_lrl.layers.gdn.sizes import sizes_of
from megatron_lrl.layers.mla.sizes import MLA
from megatron_lrl.layers.mla.sizes import sizes_of as mla_sizes_of
from megatron_lrl.models.hf_config import ATTENTION, Architecture, architecture_from_dict, describe_rope

QWEN36_27B: dict[str, Any] = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "model_type": "qwen3_5",
    "image_token_id": 248056,
    "language_model_only": False,
    "text_config": {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_output_gate": True,
        "dtype": "bfloat16",
        "eos_token_id": 248044,
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_act": "silu",
        "hidden_size": 5120,
        "initializer_range": 0.02,
        "intermediate_size": 17408,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 16,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 48,
        "linear_value_head_dim": 128,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 262144,
        "model_type": "qwen3_5_text",
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "num_attention_heads": 24,
        "num_hidden_layers": 64,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000000,
            "rope_type": "default",
        },
        "tie_word_embeddings": False,
        "use_cache": True,
        "vocab_size": 248320,
    },
    "tie_word_embeddings": False,
    "transformers_version": "4.57.0.dev0",
    "video_token_id": 248057,
    "vision_config": {"depth": 27, "hidden_size": 1152, "model_type": "qwen3_5"},
    "vision_end_token_id": 248054,
    "vision_start_token_id": 248053,
}
GLM45_AIR: dict[str, Any] = {
    "architectures": ["Glm4MoeForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": [151329, 151336, 151338],
    "first_k_dense_replace": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 10944,
    "max_position_embeddings": 131072,
    "model_type": "glm4_moe",
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 96,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 46,
    "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1,
    "pad_token_id": 151329,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "routed_scaling_factor": 1.0,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.54.0",
    "use_cache": True,
    "use_qk_norm": False,
    "vocab_size": 151552,
}


GLM47_FLASH: dict[str, Any] = {
    "architectures": ["Glm4MoeLiteForCausalLM"],
    "model_type": "glm4_moe_lite",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "dtype": "bfloat16",
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 10240,
    "kv_lora_rank": 512,
    "max_position_embeddings": 202752,
    "moe_intermediate_size": 1536,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 20,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 47,
    "num_key_value_heads": 20,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000,
    "routed_scaling_factor": 1.8,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "v_head_dim": 256,
    "vocab_size": 154880,
}


def parameters(arch: Architecture) -> int:
    """Trained numbers of the language model, added up from the sizes."""
    hidden, head = arch.hidden_size, arch.head_dim
    total = arch.vocab_size * hidden * (1 if arch.tied else 2) + hidden
    for mixer, is_moe in zip(arch.mixers, arch.moe_layers, strict=True):
        total += (4 if arch.sandwich_norms else 2) * hidden
        if mixer == MLA:
            s, heads = mla_sizes_of(arch), arch.num_heads
            total += hidden * (s.query_rank + s.row) + s.query_rank + s.latent
            total += heads * (s.query_rank * s.query + s.latent * s.expanded + s.value * hidden)
        elif mixer == ATTENTION:
            queries, keys = arch.num_heads * head, arch.num_kv_heads * head
            projected = queries * (2 if arch.output_gate else 1) + 2 * keys
            total += hidden * (projected + queries)
            total += (projected if arch.qkv_bias else 0) + (hidden if arch.attention_output_bias else 0)
            total += 2 * head if arch.qk_norm else 0
        else:
            gdn = sizes_of(arch)
            values = gdn.value_heads * gdn.value_dim
            total += hidden * (gdn.conv_channels + 2 * values + 2 * gdn.value_heads)
            total += gdn.conv_channels * gdn.conv_kernel + 2 * gdn.value_heads + gdn.value_dim
        if is_moe:
            assert arch.moe is not None
            width = arch.moe.num_experts * arch.moe.ffn_hidden_size + arch.moe.shared_ffn_hidden_size
            total += 3 * hidden * width + hidden * (arch.moe.num_experts + arch.moe.shared_gate)
        else:
            total += 3 * hidden * arch.ffn_hidden_size
    return total


@pytest.mark.parametrize(
    ("raw", "config", "model", "billions"),
    [
        (QWEN36_27B, "Qwen3_5TextConfig", "Qwen3_5ForCausalLM", 26.896),
        (GLM45_AIR, "Glm4MoeConfig", "Glm4MoeForCausalLM", 106.9),
        (GLM47_FLASH, "Glm4MoeLiteConfig", "Glm4MoeLiteForCausalLM", 29.943),
    ],
    ids=["Qwen3.6-27B", "GLM-4.5-Air", "GLM-4.7-Flash"],
)
def test_parameters_are_those_of_transformers(
    raw: dict[str, Any], config: str, model: str, billions: float
) -> None:
    arch = architecture_from_dict(raw)
    fields = raw.get("text_config", raw)
    with torch.device("meta"):
        theirs = getattr(transformers, model)(getattr(transformers, config)(**fields))
    counted = sum(parameter.numel() for parameter in theirs.parameters())
    assert parameters(arch) == counted
    assert counted / 1e9 == pytest.approx(billions, abs=0.06 if billions > 100 else 5e-4)


def test_qwen36_27b() -> None:
    arch = architecture_from_dict(QWEN36_27B)
    assert arch.mixers.count(ATTENTION) == 16 and arch.last_attention_layer == 64 and arch.hybrid
    assert (arch.num_heads // arch.num_kv_heads, arch.rope.rotary_dim, arch.max_positions) == (6, 64, 262144)
    assert arch.hf_prefix == "model.language_model." and arch.output_gate and arch.zero_centered_norm
    assert "head_dim=256 of which 64 rotate" in describe_rope(arch)


def test_glm45_air() -> None:
    arch = architecture_from_dict(GLM45_AIR)
    assert arch.moe_layers == (False,) + (True,) * 45 and arch.carried == (r"model\.layers\.46\..*",)
    assert arch.qkv_bias and not arch.attention_output_bias and not arch.qk_norm
    assert arch.moe is not None and arch.moe.wide_router and arch.moe.shared_ffn_hidden_size == 1408
    line = describe_rope(arch)
    assert "head_dim=128 of which 64 rotate" in line and "neighbours" not in line
