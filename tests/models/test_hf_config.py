"""Claim: `read_architecture` reads what transformers would build, and refuses, by file and key, every
setting that would make the model compute something else.

Why the tests show it: values are compared with transformers' config classes and with the modules of its
models; each refused setting is one that transformers honours or that other code is known to honour. Not
shown: that the built model computes the same (the score tests show that), and settings nobody has thought
of that are spelled null or false.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from oracle.tiny_models import CASES, FAMILIES, write_case

from megatron_lrl.errors import UserError
from megatron_lrl.models.hf_config import architecture_from_dict, read_architecture

SMALL = {
    "vocab_size": 31,
    "hidden_size": 64,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}


@pytest.mark.parametrize("case", CASES)
def test_values_are_those_of_transformers_modules(case: str, tmp_path: Path) -> None:
    path = write_case(tmp_path, case)
    arch = read_architecture(path)
    _, model_class = FAMILIES[arch.family]
    model = model_class.from_pretrained(path)
    layer = model.model.layers[0]
    assert arch.num_layers == len(model.model.layers)
    assert (arch.vocab_size, arch.hidden_size) == tuple(model.model.embed_tokens.weight.shape)
    assert (arch.num_heads * arch.head_dim, arch.hidden_size) == tuple(layer.self_attn.q_proj.weight.shape)
    assert arch.num_kv_heads * arch.head_dim == layer.self_attn.k_proj.weight.shape[0]
    assert arch.ffn_hidden_size == layer.mlp.up_proj.weight.shape[0]
    assert arch.head_dim == layer.self_attn.head_dim
    assert arch.norm_eps == layer.input_layernorm.variance_epsilon
    assert arch.qkv_bias == (layer.self_attn.q_proj.bias is not None)
    assert arch.attention_output_bias == (layer.self_attn.o_proj.bias is not None)
    assert arch.qk_norm == hasattr(layer.self_attn, "q_norm")
    assert arch.tied == (model.lm_head.weight is model.model.embed_tokens.weight)
    assert arch.max_positions >= model.config.max_position_embeddings
    assert arch.raw == json.loads((path / "config.json").read_text())


@pytest.mark.parametrize("family", FAMILIES)
def test_absent_fields_take_transformers_defaults(family: str) -> None:
    stated = {**SMALL, "hidden_size": 128, "num_attention_heads": 32}
    config = FAMILIES[family][0](**stated)
    arch = architecture_from_dict({"model_type": family, **stated})
    assert arch.num_kv_heads == config.num_key_value_heads
    assert arch.norm_eps == config.rms_norm_eps
    assert arch.tied == config.tie_word_embeddings
    assert arch.max_positions == config.max_position_embeddings
    assert arch.head_dim == getattr(config, "head_dim", 4)


def _raw(family: str = "llama", **fields: Any) -> dict[str, Any]:
    raw = {"model_type": family, "architectures": [FAMILIES[family][1].__name__], **SMALL}
    return {**raw, "num_key_value_heads": 2, "head_dim": 16, **fields}


def test_the_family_may_come_from_the_class_name_alone() -> None:
    raw = _raw("qwen3")
    del raw["model_type"]
    assert architecture_from_dict(raw).family == "qwen3"


def test_fields_without_influence_are_accepted() -> None:
    inert = {
        "is_llama_config": True,
        "rope_interleaved": False,
        "transformers.js_config": {"kv_cache_dtype": {"fp16": "float16"}},
        "use_mrope": False,
        "sliding_window": None,
        "torch_dtype": "bfloat16",
        "_name_or_path": "somewhere",
        "quantization_config": None,
        "temperature": 0.7,
        "bos_token_id": 1,
        "eos_token_id": [1, 2],
    }
    assert architecture_from_dict(_raw(**inert)) == architecture_from_dict(_raw())
    windows = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 1}
    assert architecture_from_dict(_raw("qwen2", **windows)) == architecture_from_dict(_raw("qwen2"))
    above = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 3}
    assert architecture_from_dict(_raw("qwen3", **above)) == architecture_from_dict(_raw("qwen3"))


@pytest.mark.parametrize(
    ("family", "fields", "message"),
    [
        (
            "llama",
            {"model_type": "mistral"},
            "model_type = 'mistral' is not supported; valid: llama, qwen2, qwen3",
        ),
        ("llama", {"model_type": None, "architectures": None}, "neither model_type nor architectures"),
        ("llama", {"architectures": ["LlamaForSequenceClassification"]}, "architectures = "),
        ("llama", {"architectures": "LlamaForCausalLM"}, "must be a list"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported; valid: \"silu\""),
        ("llama", {"mlp_bias": True}, "mlp_bias = True is not supported; valid: false"),
        ("llama", {"pretraining_tp": 2}, "pretraining_tp = 2 is not supported; valid: 1"),
        ("llama", {"attention_dropout": 0.1}, "attention_dropout = 0.1"),
        ("llama", {"quantization_config": {"bits": 4}}, "quantization_config.quant_method = None is not"),
        ("llama", {"auto_map": {"AutoModel": "code.Model"}}, "auto_map = "),
        ("llama", {"is_encoder_decoder": True}, "is_encoder_decoder = True"),
        ("llama", {"sliding_window": 128}, "sliding_window = 128 is not supported"),
        ("llama", {"logit_scale": 0.5}, "logit_scale = 0.5 is an unknown field"),
        ("llama", {"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0 is an unknown field"),
        ("llama", {"embedding_multiplier": 12}, "embedding_multiplier = 12 is an unknown field"),
        ("qwen2", {"attention_bias": False}, "contradicts family qwen2"),
        (
            "qwen2",
            {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
            "use_sliding_window = true",
        ),
        ("qwen3", {"use_sliding_window": True, "max_window_layers": 0}, "with max_window_layers = 0"),
        (
            "qwen3",
            {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
            "layer_types[1]",
        ),
        ("qwen3", {"layer_types": ["full_attention"]}, "layer_types must list one kind per layer (3)"),
        (
            "llama",
            {"num_key_value_heads": 3},
            "num_attention_heads = 4 is not a multiple of num_key_value_heads = 3",
        ),
        ("llama", {"head_dim": 15}, "head_dim = 15 must be even"),
        ("llama", {"head_dim": None, "hidden_size": 66}, "hidden_size = 66 is not a multiple"),
        ("llama", {"vocab_size": "31"}, "vocab_size = '31' must be a positive integer"),
        ("llama", {"num_hidden_layers": True}, "num_hidden_layers = True must be a positive integer"),
        ("llama", {"hidden_size": 0}, "hidden_size = 0 must be a positive integer"),
        ("llama", {"rms_norm_eps": 0}, "rms_norm_eps = 0 must be a number between 0 and 1"),
        ("llama", {"tie_word_embeddings": "no"}, "tie_word_embeddings = 'no' must be true or false"),
    ],
)
def test_what_would_compute_something_else_is_refused(
    family: str, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError) as caught:
        architecture_from_dict(_raw(family, **fields), source="dir/config.json")
    assert str(caught.value).startswith("dir/config.json: ") and message in str(caught.value)


@pytest.mark.parametrize("key", sorted(SMALL))
def test_sizes_must_be_stated(key: str) -> None:
    raw = _raw()
    del raw[key]
    with pytest.raises(UserError, match=f"the field {key} is missing"):
        architecture_from_dict(raw)


DAMAGED = {
    "cut": ("{", "not valid JSON"),
    "list": ("[]", "must hold a JSON object"),
    "deep": ("[" * 100_000, "nested more than 100 deep"),
    "digits": ('{"vocab_size": 1' + "0" * 5000 + "}", "not valid JSON"),
}


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").symlink_to("/proc/self/mem")  # a regular file that even root cannot read
    with pytest.raises(UserError, match=r"config\.json: cannot be read: "):
        read_architecture(tmp_path)


@pytest.mark.parametrize(("content", "message"), DAMAGED.values(), ids=DAMAGED.keys())
def test_a_damaged_file_is_named(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(UserError, match=message) as caught:
        read_architecture(tmp_path)
    assert "config.json" in str(caught.value)


def test_the_fingerprint_follows_the_computation_only() -> None:
    base = architecture_from_dict(_raw()).fingerprint()
    assert architecture_from_dict(_raw(bos_token_id=5, use_cache=False)).fingerprint() == base
    for change in (
        {"rms_norm_eps": 1e-5},
        {"rope_theta": 2e4},
        {"tie_word_embeddings": True},
        {"vocab_size": 32},
    ):
        assert architecture_from_dict(_raw(**change)).fingerprint() != base


@pytest.mark.parametrize(("tp", "rows"), [(1, 31), (2, 32), (4, 32), (5, 35), (31, 31)])
def test_the_vocabulary_is_padded_to_a_multiple_of_tp(tp: int, rows: int) -> None:
    assert architecture_from_dict(_raw()).padded_vocab_size(tp) == rows
