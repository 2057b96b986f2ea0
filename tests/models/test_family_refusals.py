"""Claim: mixtures of experts, Gated DeltaNet hybrids, GLM and vision-language configs that would compute something
other than what is implemented are refused, by file and key.

Why the tests show it: each refused setting is one that changes a module, a router or the weights' meaning in
transformers, or that its class would not know; the same config without it is read.
Not shown: settings nobody has thought of that are spelled null or false.
"""

from __future__ import annotations

from typing import Any

import pytest

from megatron_lrl.errors import UserError
from megatron_lrl.models.hf_config import architecture_from_dict
from models.family_configs import tiny_config

FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


@pytest.mark.parametrize(
    ("case_name", "fields", "message"),
    [
        (
            "qwen3_moe",
            {"quantization_config": {**FP8, "weight_block_size": [64, 64]}},
            "weight_block_size = [64, 64]",
        ),
        ("qwen3_moe", {"quantization_config": {"quant_method": "fp8"}}, "weight_block_size = None"),
        (
            "qwen3_moe",
            {"quantization_config": {**FP8, "activation_scheme": "static"}},
            "activation_scheme = 'static'",
        ),
        ("qwen3_moe", {"quantization_config": {**FP8, "scale_fmt": "ue8m0"}}, "scale_fmt = 'ue8m0'"),
        (
            "qwen3_5-vl",
            {"text_quantization_config": {"quant_method": "gptq"}},
            "text_config: quantization_config.quant",
        ),
        ("qwen3_moe", {"num_experts_per_tok": 9}, "num_experts_per_tok = 9 exceeds the 8 experts"),
        ("qwen3_moe", {"num_local_experts": 4}, "num_experts = 8 contradicts num_local_experts = 4"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step = 0 must be a positive integer"),
        ("qwen3_moe", {"mlp_only_layers": ["3"]}, "mlp_only_layers = ['3'] must be a list of layer numbers"),
        ("qwen3_moe", {"norm_topk_prob": 1}, "norm_topk_prob = 1 must be true or false"),
        (
            "qwen3_moe",
            {"shared_expert_intermediate_size": 8},
            "shared_expert_intermediate_size = 8 is an unknown",
        ),
        # what the family computes anyway is no contradiction (below); anything else is
        ("qwen3_moe", {"use_qk_norm": False}, "use_qk_norm = False is an unknown field of a qwen3_moe model"),
        ("qwen3_moe", {"qkv_bias": True}, "valid: false, which is computed anyway"),
        ("qwen3_moe", {"shared_expert_intermediate_size": False}, "valid: 0, which is computed anyway"),
        ("qwen3_moe", {"n_shared_experts": 1}, "n_shared_experts = 1 is an unknown field"),
        ("qwen3_moe", {"scoring_func": "sigmoid"}, 'valid: "softmax"'),
        ("qwen3_moe", {"routed_scaling_factor": 2.5}, "routed_scaling_factor = 2.5 is an unknown field"),
        ("qwen3_moe", {"first_k_dense_replace": 1}, "first_k_dense_replace = 1 is an unknown field"),
        ("qwen3_5", {"use_qk_norm": False}, "use_qk_norm = False is an unknown field"),
        ("glm4", {"use_qk_norm": True}, "valid: false, which is computed anyway"),
        ("glm4", {"scoring_func": "sigmoid"}, "valid: absent"),
        ("qwen3_moe", {"use_sliding_window": True}, "use_sliding_window = true"),
        ("qwen3_moe", {"layer_types": ["linear_attention"] * 4}, "layer_types[0] = 'linear_attention'"),
        ("qwen3_moe", {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5 is not supported"),
        ("glm4_moe", {"n_group": 3}, "n_group = 3 must divide n_routed_experts = 8"),
        ("glm4_moe", {"n_group": 8}, "into groups of at least 2"),
        ("glm4_moe", {"n_group": 2, "topk_group": 3}, "topk_group = 3 exceeds n_group = 2"),
        ("glm4_moe", {"n_group": 4, "num_experts_per_tok": 3}, "exceeds the 2 experts to choose from"),
        (
            "glm4_moe",
            {"scoring_func": "softmax"},
            "scoring_func = 'softmax' is not supported; valid: \"sigmoid\"",
        ),
        ("glm4_moe", {"routed_scaling_factor": 0}, "routed_scaling_factor = 0 must be a number"),
        ("glm4_moe", {"sliding_window": 64}, "sliding_window = 64 is not supported"),
        (
            "glm4_moe",
            {"first_k_dense_replace": -1},
            "first_k_dense_replace = -1 must be an integer of at least 0",
        ),
        ("glm4_moe", {"q_lora_rank": 64}, "q_lora_rank = 64 is an unknown field"),
        (
            "deepseek_v3",
            {"attention_bias": True},
            "attention_bias = true is not supported with latent attention",
        ),
        (
            "deepseek_v3",
            {"num_key_value_heads": 2},
            "num_key_value_heads = 2 means nothing in latent attention",
        ),
        ("deepseek_v3", {"kv_lora_rank": 0}, "kv_lora_rank = 0 must be a positive integer"),
        ("deepseek_v3", {"head_dim": 77}, "head_dim = 77 contradicts the other widths"),
        ("deepseek_v3", {"index_topk": 2048}, "index_topk = 2048 is an unknown field"),
        ("glm4_moe_lite", {"mlp_layer_types": ["dense"] * 3}, "for each layer (4)"),
        (
            "glm4_moe_lite",
            {"lastkv": {"chunk_size": 8, "blend": True}},
            "LastKV needs layers of softmax attention",
        ),
        ("glm4", {"num_experts": 8}, "num_experts = 8 is an unknown field"),
        (
            "glm4",
            {"rope_parameters": {"partial_rotary_factor": 0.2}},
            "must be at most 1 and give an even number",
        ),
        ("qwen3_5", {"partial_rotary_factor": 1.5}, "must be at most 1"),
        (
            "qwen3_5",
            {"partial_rotary_factor": 0.5, "rope_parameters": {"partial_rotary_factor": 0.25}},
            "contradicts",
        ),
        ("qwen3_5", {"attn_output_gate": False}, "attn_output_gate = False is not supported; valid: true"),
        ("qwen3_5", {"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype = 'bfloat16'"),
        ("qwen3_5", {"linear_num_value_heads": 6}, "linear_num_value_heads = 6 is not a multiple"),
        ("qwen3_5", {"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim = 1 must be at least 2"),
        ("qwen3_5", {"layer_types": ["linear_attention"] * 4}, "hold no full_attention layer"),
        ("qwen3_5", {"layer_types": ["sliding_attention"] * 4}, "'full_attention' or 'linear_attention'"),
        ("qwen3_5", {"num_experts": 8}, "num_experts = 8 is an unknown field"),
        ("qwen3_next", {"mrope_section": [1, 1, 0]}, "mrope_section = [1, 1, 0] is an unknown field"),
        (
            "qwen3_5_moe-vl",
            {"text_decoder_sparse_step": 2},
            "text_config: decoder_sparse_step = 2 is not supported",
        ),
        (
            "qwen3_5_moe-vl",
            {"text_norm_topk_prob": False},
            "norm_topk_prob = False is not supported; valid: true",
        ),
        ("qwen3_5-vl", {"text_config": None}, "text_config must be an object"),
        (
            "qwen3_5-vl",
            {"text_model_type": "qwen3"},
            "text_config.model_type = 'qwen3'; valid: 'qwen3_5_text'",
        ),
        (
            "qwen3_5-vl",
            {"text_tie_word_embeddings": True},
            "text_config.tie_word_embeddings = true contradicts",
        ),
        ("qwen3_5-vl", {"text_lastkv": {"chunk_size": 8, "blend": True}}, "must stand beside text_config"),
        ("qwen3_5-vl", {"audio_config": {"depth": 1}}, "audio_config = {'depth': 1} is an unknown field"),
        ("qwen3_5-vl", {"architectures": ["Qwen3_5ForCausalLM"]}, "does not fit model_type 'qwen3_5'"),
        ("qwen3_5-vl", {"text_hidden_size": 0}, "text_config: hidden_size = 0 must be a positive integer"),
        # JSON values that cannot be compared, hashed, counted up to or turned into a float
        ("qwen3_moe", {"model_type": ["qwen3_moe"]}, "model_type = ['qwen3_moe'] is not supported"),
        ("qwen3_5-vl", {"text_model_type": {}}, "text_config: model_type = {} is not supported"),
        (
            "qwen3_next",
            {"layer_types": [["full_attention"]] * 4},
            "layer_types[0] = ['full_attention'] is not",
        ),
        (
            "glm4_moe",
            {"n_routed_experts": [8], "num_local_experts": None},
            "n_routed_experts = [8] must be a positive",
        ),
        ("qwen3_moe", {"num_local_experts": [8]}, "num_experts = 8 contradicts num_local_experts = [8]"),
        ("qwen3_moe", {"num_hidden_layers": 10**30}, f"num_hidden_layers = {10**30} must be at most 10000"),
        (
            "qwen3_moe",
            {"num_experts": 2**15, "num_local_experts": None},
            "num_experts = 32768 must be at most 32767",
        ),
        (
            "glm4_moe",
            {"num_nextn_predict_layers": 10**9},
            "num_nextn_predict_layers = 1000000000 must be at most",
        ),
        ("glm4_moe", {"routed_scaling_factor": 10**400}, "must be a number between 0 and"),
    ],
)
def test_what_would_compute_something_else_is_refused(
    case_name: str, fields: dict[str, Any], message: str
) -> None:
    architecture_from_dict(tiny_config(case_name))
    with pytest.raises(UserError) as caught:
        architecture_from_dict(tiny_config(case_name, **fields), source="dir/config.json")
    assert str(caught.value).startswith("dir/config.json: ") and message in str(caught.value)


PUBLISHED_CODER = {  # fields of published Qwen3-Coder configs that transformers' class does not know
    "shared_expert_intermediate_size": 0,
    "use_qk_norm": True,
    "qkv_bias": False,
}


@pytest.mark.parametrize(
    ("case_name", "fields"),
    [
        ("qwen3_moe", PUBLISHED_CODER),
        ("qwen3_moe", {"scoring_func": "softmax", "n_group": 1, "topk_group": 1, "n_shared_experts": 0}),
        (
            "qwen3_moe",
            {"routed_scaling_factor": 1.0, "n_routed_experts": 8, "shared_expert_intermediate_size": None},
        ),
        (
            "glm4",
            {"num_experts": 0, "use_qk_norm": False, "moe_intermediate_size": 0, "rope_interleaved": True},
        ),
        ("qwen3_5", {"use_qk_norm": True, "num_experts": 0, "n_shared_experts": None}),
    ],
)
def test_what_is_computed_anyway_is_accepted(case_name: str, fields: dict[str, Any]) -> None:
    stated = architecture_from_dict(tiny_config(case_name, **fields))
    assert stated == architecture_from_dict(tiny_config(case_name))


@pytest.mark.parametrize(
    ("outer", "told"), [({}, "is absent, which means false"), ({"tie_word_embeddings": False}, "= false")]
)
def test_a_contradiction_quotes_what_stands_there(outer: dict[str, Any], told: str) -> None:
    raw = tiny_config("qwen3_5-vl", text_tie_word_embeddings=True)
    raw.pop("tie_word_embeddings", None)
    with pytest.raises(UserError) as caught:
        architecture_from_dict({**raw, **outer})
    assert f"config.json: tie_word_embeddings {told};" in str(caught.value)
