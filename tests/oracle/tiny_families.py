"""Tiny models of the families beyond Llama: mixtures of experts, Gated DeltaNet hybrids, GLM; and what their
published files hold beside the language model.

Experts: 8, of which a token takes 2. Gated DeltaNet: 4 key heads and 8 value heads, so that tp * cp = 4 cuts them.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

EXPERTS = 8
FAMILIES = {
    "glm4": ("Glm4Config", "Glm4ForCausalLM"),
    "glm4_moe": ("Glm4MoeConfig", "Glm4MoeForCausalLM"),
    "glm4_moe_lite": ("Glm4MoeLiteConfig", "Glm4MoeLiteForCausalLM"),
    "deepseek_v3": ("DeepseekV3Config", "DeepseekV3ForCausalLM"),
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM"),
    "qwen3_next": ("Qwen3NextConfig", "Qwen3NextForCausalLM"),
    "qwen3_5": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM"),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM"),
}
WRAPPERS = {
    "qwen3_5": ("Qwen3_5Config", "Qwen3_5ForConditionalGeneration"),
    "qwen3_5_moe": ("Qwen3_5MoeConfig", "Qwen3_5MoeForConditionalGeneration"),
}
HYBRIDS = ("qwen3_next", "qwen3_5", "qwen3_5_moe")

_EXPERTS = {"num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_DELTA_NET = {
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
}
_ROUTED = {"n_routed_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
# Widths that no other width equals.
_LATENT = {
    "q_lora_rank": 20, "kv_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 10,
}  # fmt: skip
LATENT = ("glm4_moe_lite", "deepseek_v3")
_SHARED = {"shared_expert_intermediate_size": 24}
FIELDS: dict[str, dict[str, Any]] = {
    "glm4": {},
    "glm4_moe": {
        "n_routed_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 0,
    },
    "glm4_moe_lite": {**_ROUTED, **_LATENT},
    "deepseek_v3": {
        **_ROUTED,
        **_LATENT,
        "first_k_dense_replace": 1,
        "num_mtp_layers": 0,
        "n_group": 4,
        "topk_group": 2,
    },
    "qwen3_moe": {**_EXPERTS, "norm_topk_prob": True},
    "qwen3_next": {**_EXPERTS, **_DELTA_NET, **_SHARED},
    "qwen3_5": _DELTA_NET,
    "qwen3_5_moe": {**_EXPERTS, **_DELTA_NET, **_SHARED},
}
# The published models: 3 Gated DeltaNet layers for each attention layer.
THREE_TO_ONE = ["linear_attention"] * 3 + ["full_attention"]
VISION = {
    "depth": 1,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_heads": 2,
    "num_position_embeddings": 4,
    "patch_size": 2,
    "temporal_patch_size": 1,
}

# id -> (family, variation of `make_hf_dir`); every case has norms, biases and router biases that are not trivial
GLM_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "glm4": ("glm4", {}),
    "glm4-tied-nobias": ("glm4", {"tied": True, "attention_bias": False}),
}
MOE_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("qwen3_moe", {}),
    # layers 1 and 3 would be mixtures, 3 is exempt; weights as softmax gives them
    "qwen3_moe-sparse": (
        "qwen3_moe",
        {
            "tied": True,
            "packed": True,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
            "norm_topk_prob": False,
        },
    ),
    "glm4_moe": ("glm4_moe", {"use_qk_norm": True, "mtp": True}),
    "glm4_moe-groups": (
        "glm4_moe",
        {
            "packed": True,
            "attention_bias": True,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
            "n_shared_experts": 2,
        },
    ),
}
LATENT_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "glm4_moe_lite": ("glm4_moe_lite", {}),
    "deepseek_v3": ("deepseek_v3", {"packed": True, "mtp": True}),
    # queries without a latent; YaRN with a temperature; halves paired
    "deepseek_v3-direct": (
        "deepseek_v3",
        {
            "q_lora_rank": None,
            "tied": True,
            "rope_interleave": False,
            "rope": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "mscale": 0.7,
                "mscale_all_dim": 1.0,
                "original_max_position_embeddings": 256,
            },
        },
    ),
}
HYBRID_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_next": ("qwen3_next", {"mtp": True}),
    "qwen3_5": ("qwen3_5", {}),
    "qwen3_5-vl": ("qwen3_5", {"wrapper": True, "mtp": True, "tied": True, "layer_types": THREE_TO_ONE}),
    "qwen3_5_moe-vl": ("qwen3_5_moe", {"wrapper": True, "packed": True, "mtp": True}),
}
MORE_CASES = {**GLM_CASES, **MOE_CASES, **LATENT_CASES, **HYBRID_CASES}


def build(
    family: str, common: dict[str, Any], fields: dict[str, Any], wrapper: bool
) -> transformers.PreTrainedModel:
    """An uninitialised model of one of `FAMILIES`.

    Args:
        common: fields that every config class knows.
        fields: the family's own, over its defaults in `FIELDS`.
        wrapper: the vision-language class around it, with a tower of one layer.
    """
    config_name, model_name = FAMILIES[family]
    own = {**({} if family in LATENT else {"head_dim": 16}), **FIELDS[family], **fields}
    if family in LATENT:
        common = {**common, "num_key_value_heads": common["num_attention_heads"]}
    if family == "qwen3_5_moe":
        common = {key: value for key, value in common.items() if key != "intermediate_size"}
    if not wrapper:
        config = getattr(transformers, config_name)(**common, **own)
        return getattr(transformers, model_name)(config)
    config_name, model_name = WRAPPERS[family]
    tied = common["tie_word_embeddings"]
    text = {**common, **own, "tie_word_embeddings": tied}
    vision = {**VISION, "out_hidden_size": common["hidden_size"]}
    config = getattr(transformers, config_name)(
        text_config=text, vision_config=vision, tie_word_embeddings=tied, dtype=common["dtype"]
    )
    return getattr(transformers, model_name)(config)


def mtp_tensors(family: str, hidden: int, layers: int, seed: int) -> dict[str, torch.Tensor]:
    """Tensors of multi-token-prediction layers, which published files hold and transformers' models do not."""
    draw = torch.Generator().manual_seed(seed)
    if family in ("glm4_moe", *LATENT):
        at = f"model.layers.{layers}."
        names = {
            f"{at}eh_proj.weight": (hidden, 2 * hidden),
            f"{at}enorm.weight": (hidden,),
            f"{at}self_attn.q_proj.weight": (64, hidden),
            f"{at}mlp.experts.0.up_proj.weight": (16, hidden),
            f"{at}mlp.gate.e_score_correction_bias": (EXPERTS,),
            f"{at}shared_head.norm.weight": (hidden,),
        }
    else:
        names = {
            "mtp.fc.weight": (hidden, 2 * hidden),
            "mtp.pre_fc_norm_embedding.weight": (hidden,),
            "mtp.layers.0.self_attn.q_proj.weight": (64, hidden),
            "mtp.layers.0.mlp.up_proj.weight": (16, hidden),
        }
    return {name: torch.randn(shape, generator=draw) for name, shape in names.items()}


_PER_EXPERT = re.compile(r"(.+\.mlp\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")
_PACKED = re.compile(r"(.+\.mlp\.experts)\.(gate_up_proj|down_proj)")


def is_mtp(name: str, layers: int) -> bool:
    """Whether a tensor of a file belongs to a multi-token-prediction layer."""
    return name.startswith(("mtp.", f"model.layers.{layers}."))


def pack_experts(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """One tensor per layer and projection: gate_up_proj [E, 2F, H], gate first, and down_proj [E, H, F].

    Multi-token-prediction tensors, of which only a sample is there, stay as they are.
    """
    packed, experts = {}, {}
    for name, tensor in tensors.items():
        match = _PER_EXPERT.fullmatch(name)
        if match and f"{match[1]}.{EXPERTS - 1}.down_proj.weight" in tensors:
            experts[match[1], int(match[2]), match[3]] = tensor
        else:
            packed[name] = tensor
    for at in {key[0] for key in experts}:
        each = range(EXPERTS)
        gate_up = [torch.cat([experts[at, e, "gate_proj"], experts[at, e, "up_proj"]]) for e in each]
        packed[f"{at}.gate_up_proj"] = torch.stack(gate_up)
        packed[f"{at}.down_proj"] = torch.stack([experts[at, e, "down_proj"] for e in each])
    return packed


def unpack_experts(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The inverse of `pack_experts`."""
    unpacked = {}
    for name, tensor in tensors.items():
        match = _PACKED.fullmatch(name)
        if not match:
            unpacked[name] = tensor
            continue
        for expert, weight in enumerate(tensor):
            at = f"{match[1]}.{expert}"
            if match[2] == "down_proj":
                unpacked[f"{at}.down_proj.weight"] = weight
            else:
                unpacked[f"{at}.gate_proj.weight"], unpacked[f"{at}.up_proj.weight"] = weight.chunk(2)
    return unpacked


def rewrite(path: Path, *, packed: bool, extra: dict[str, torch.Tensor]) -> None:
    """Stores a saved model's experts packed or one by one, and `extra` tensors with it, in as many shards as before."""
    files = sorted(path.glob("*.safetensors"))
    tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
    tensors = pack_experts(unpack_experts(tensors)) if packed else unpack_experts(tensors)
    tensors |= extra
    for file in files:
        file.unlink()
    names = sorted(tensors)
    place = {name: files[index * len(files) // len(names)].name for index, name in enumerate(names)}
    for file in files:
        held = {name: tensors[name].contiguous() for name in names if place[name] == file.name}
        save_file(held, file, metadata={"format": "pt"})
    if len(files) > 1:
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        index = {"metadata": {"total_size": size}, "weight_map": place}
        (path / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
