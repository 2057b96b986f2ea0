"""The fields of a config.json, one by one: which are read, which cannot matter, which are refused, and of what type.

A field that would change the computation and is not implemented is refused by name; one that says what the family
computes anyway is accepted.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from megatron_lrl.errors import UserError
from megatron_lrl.layers.architecture import Architecture

__all__ = [
    "LARGEST",
    "MOST_EXPERTS",
    "MOST_LAYERS",
    "boolean",
    "integer",
    "number",
    "refuse_contradictions",
    "refuse_quantization",
    "refuse_sliding_window",
    "refuse_unsupported",
]


LARGEST = 2**31 - 1  # of any size in config.json
MOST_LAYERS = 10_000
MOST_EXPERTS = 2**15 - 1  # recorded routing holds int16


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Fields without influence on logits: bookkeeping, tokenizer ids, initialisation, generation defaults, output
# flags.
INERT = _names("""
    architectures model_type transformers_version transformers.js_config torch_dtype dtype use_cache
    initializer_range pad_token_id bos_token_id eos_token_id sep_token_id decoder_start_token_id id2label
    label2id problem_type finetuning_task task_specific_params tokenizer_class prefix output_hidden_states
    output_attentions return_dict return_dict_in_generate output_scores torchscript chunk_size_feed_forward
    is_decoder is_llama_config unsloth_fixed unsloth_version max_window_layers use_bfloat16 tf_legacy_loss
    max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature
    top_k top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size
    bad_words_ids num_return_sequences forced_bos_token_id forced_eos_token_id remove_invalid_values
    exponential_decay_length_penalty suppress_tokens begin_suppress_tokens max_new_tokens
    """)
# Fields the reader of every family interprets.
READ = _names("""
    vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads
    head_dim hidden_act max_position_embeddings rms_norm_eps tie_word_embeddings attention_bias layer_types
    use_sliding_window sliding_window rope_parameters rope_scaling rope_theta partial_rotary_factor
    original_max_position_embeddings quantization_config lastkv
    """)
# Known fields with the only values that are implemented.
FIXED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "hidden_activation": ("silu",),
    "mlp_bias": (False,),
    "attention_dropout": (0, 0.0),
    "pretraining_tp": (1,),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "is_causal": (True,),
    "tie_encoder_decoder": (False,),
    "cross_attention_hidden_size": (),
    "pruned_heads": ({},),
    "auto_map": (),
}

_EXPERTS = _names("num_experts num_local_experts num_experts_per_tok moe_intermediate_size norm_topk_prob")
_SPARSITY = _names("decoder_sparse_step mlp_only_layers")
_DELTA_NET = _names("""
    full_attention_interval linear_conv_kernel_dim linear_key_head_dim linear_value_head_dim
    linear_num_key_heads linear_num_value_heads
    """)
_SHARED = _names("shared_expert_intermediate_size")
_GLM_EXPERTS = _names("""
    n_routed_experts n_shared_experts routed_scaling_factor n_group topk_group first_k_dense_replace
    num_nextn_predict_layers num_mtp_layers
    """)
_LATENT = _names("""
    kv_lora_rank q_lora_rank qk_rope_head_dim qk_nope_head_dim v_head_dim qk_head_dim rope_interleave
    """)
# Family -> what its reader interprets beyond `READ`.
FAMILY_READ: dict[str, frozenset[str]] = {
    "qwen3_moe": _EXPERTS | _SPARSITY,
    "qwen3_next": _EXPERTS | _SPARSITY | _DELTA_NET | _SHARED,
    "qwen3_5": _DELTA_NET,
    "qwen3_5_moe": (_EXPERTS - {"norm_topk_prob"}) | _DELTA_NET | _SHARED,
    "glm4_moe": (_EXPERTS - {"num_experts"}) | _GLM_EXPERTS | _names("use_qk_norm"),
    "glm4_moe_lite": (_EXPERTS - {"num_experts"}) | _GLM_EXPERTS | _LATENT | _names("mlp_layer_types"),
    "deepseek_v3": (_EXPERTS - {"num_experts"}) | _GLM_EXPERTS | _LATENT,
}
# The auxiliary loss acts on a training loss that transformers computes, not on logits.
_LOSS = _names("output_router_logits router_aux_loss_coef")
# How many multi-token-prediction layers there are: their tensors are carried, whatever their number.
_MTP = _names("mtp_num_hidden_layers num_nextn_predict_layers mtp_use_dedicated_embeddings")
FAMILY_INERT: dict[str, frozenset[str]] = {
    "qwen3_moe": _LOSS,
    "qwen3_next": _LOSS | _MTP,
    "qwen3_5": _MTP,
    "qwen3_5_moe": _LOSS | _MTP,
    "glm4_moe": _LOSS,
    "glm4_moe_lite": _LOSS | _names("ep_size seq_aux"),
    "deepseek_v3": _LOSS | _names("ep_size seq_aux aux_loss_alpha"),
}
_HYBRID_FIXED: dict[str, tuple[Any, ...]] = {
    "attn_output_gate": (True,),  # transformers' class knows no other kind
    "mamba_ssm_dtype": ("float32",),
}
FAMILY_FIXED: dict[str, dict[str, tuple[Any, ...]]] = {
    "qwen3_next": _HYBRID_FIXED,
    # transformers' Qwen3.5 has no such fields: every layer has the same kind of MLP
    "qwen3_5": {**_HYBRID_FIXED, "mlp_only_layers": ([],)},
    "qwen3_5_moe": {
        **_HYBRID_FIXED,
        "mlp_only_layers": ([],),
        "decoder_sparse_step": (1,),
        "norm_topk_prob": (True,),
    },
    **{
        name: {"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",), "moe_layer_freq": (1,)}
        for name in ("glm4_moe", "glm4_moe_lite", "deepseek_v3")
    },
}
# The outer level of a vision-language config: the text model's fields stand in `text_config`.
WRAPPER_INERT = _names("""
    vision_config image_token_id video_token_id vision_start_token_id vision_end_token_id
    """)
WRAPPER_READ = _names("text_config tie_word_embeddings quantization_config lastkv")


def _shared_experts(arch: Architecture) -> float:
    """How many experts wide the shared one is."""
    return arch.moe.shared_ffn_hidden_size / arch.moe.ffn_hidden_size if arch.moe else 0


def _leading_dense(arch: Architecture) -> int:
    """Layers before the first mixture."""
    return (*arch.moe_layers, True).index(True)


# Fields of other families' configs that say what this one computes anyway: accepted with that value alone.
COMPUTED: dict[str, Callable[[Architecture], Any]] = {
    "use_qk_norm": lambda arch: arch.qk_norm,
    "qk_norm": lambda arch: arch.qk_norm,
    "qkv_bias": lambda arch: arch.qkv_bias,
    "attn_output_gate": lambda arch: arch.output_gate,
    "rotary_dim": lambda arch: arch.rope.rotary_dim,
    "rope_interleaved": lambda arch: arch.rope.interleaved,
    "full_attention_interval": lambda arch: 1,  # of families whose layers all attend
    "num_experts": lambda arch: arch.moe.num_experts if arch.moe else 0,
    "num_local_experts": lambda arch: arch.moe.num_experts if arch.moe else 0,
    "n_routed_experts": lambda arch: arch.moe.num_experts if arch.moe else 0,
    "num_experts_per_tok": lambda arch: arch.moe.top_k if arch.moe else 0,
    "moe_intermediate_size": lambda arch: arch.moe.ffn_hidden_size if arch.moe else 0,
    "shared_expert_intermediate_size": lambda arch: arch.moe.shared_ffn_hidden_size if arch.moe else 0,
    "n_shared_experts": _shared_experts,
    "num_shared_experts": _shared_experts,
    "first_k_dense_replace": _leading_dense,
    "moe_layer_freq": lambda arch: 1 if arch.moe and all(arch.moe_layers[_leading_dense(arch) :]) else None,
    "norm_topk_prob": lambda arch: arch.moe.normalise if arch.moe else None,
    "scoring_func": lambda arch: arch.moe.score if arch.moe else None,
    "routed_scaling_factor": lambda arch: arch.moe.scale if arch.moe else None,
    "n_group": lambda arch: arch.moe.groups if arch.moe else None,
    "topk_group": lambda arch: arch.moe.top_groups if arch.moe else None,
}


def refuse_contradictions(fields: Mapping[str, Any], arch: Architecture, source: str) -> None:
    """Raise `UserError` for a field that the family does not read and whose value is not what `arch` computes."""
    read = READ | FAMILY_READ.get(arch.family, frozenset()) | FAMILY_FIXED.get(arch.family, {}).keys()
    for key in fields:
        if key not in COMPUTED or key in read or fields[key] is None:
            continue
        computed = COMPUTED[key](arch)
        if not _same(fields[key], computed):
            valid = "absent" if computed is None else f"{json.dumps(computed)}, which is computed anyway"
            raise UserError(
                f"{source}: {key} = {fields[key]!r} is an unknown field of a {arch.family} model and might change the "
                f"computation; valid: {valid}"
            )


def _same(value: Any, other: Any) -> bool:
    """Equal as JSON values: true is not 1."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def refuse_unsupported(raw: Mapping[str, Any], family: str, source: str, wrapper: bool = False) -> None:
    """Raise `UserError` for the first field that might change the computation and is not implemented.

    What `COMPUTED` names is left to `refuse_contradictions`. `wrapper`: `raw` is the outer level of a vision-language
    config.
    """
    if wrapper:
        read, inert, fixed = WRAPPER_READ, INERT | WRAPPER_INERT, FIXED
    else:
        read = READ | FAMILY_READ.get(family, frozenset())
        inert = INERT | FAMILY_INERT.get(family, frozenset())
        fixed = FIXED | FAMILY_FIXED.get(family, {})
    for key, value in raw.items():
        if key in fixed:
            allowed = fixed[key]
            if value is None and key not in ("hidden_act", "hidden_activation"):
                continue
            if not any(_same(value, a) for a in allowed):
                valid = " or ".join(json.dumps(a) for a in allowed[:1]) or "null"
                raise UserError(f"{source}: {key} = {value!r} is not supported; valid: {valid}")
        elif key in inert or key in read or key.startswith("_") or (key in COMPUTED and not wrapper):
            continue
        elif value is not None and value is not False:
            # A field unknown here may scale logits, change masks, add modules; transformers' own class for
            # this family would not know it either. Null and false mean "off".
            raise UserError(
                f"{source}: {key} = {value!r} is an unknown field and might change the computation; "
                "remove it if it has no effect on this model"
            )


# What may stand beside `quant_method`: one meaning each. Layers that stay wide are seen in the files.
_FP8: dict[str, tuple[Any, ...]] = {
    "quant_method": ("fp8",),
    "weight_block_size": ([128, 128],),
    "activation_scheme": ("dynamic",),
    "fmt": ("e4m3",),
}
_FP8_LISTS = _names("modules_to_not_convert ignored_layers")


def refuse_quantization(raw: Mapping[str, Any], source: str) -> None:
    """Accept no quantization, or FP8 weights in 128 x 128 blocks, which are widened on import; refuse all others."""
    value = raw.get("quantization_config")
    if value is None:
        return
    valid = 'valid: null, or {"quant_method": "fp8", "weight_block_size": [128, 128]}'
    if not isinstance(value, dict):
        raise UserError(f"{source}: quantization_config = {value!r} is not supported; {valid}")
    for key, allowed in _FP8.items():
        needed = key in ("quant_method", "weight_block_size")
        if (needed or value.get(key) is not None) and value.get(key) not in allowed:
            raise UserError(
                f"{source}: quantization_config.{key} = {value.get(key)!r} is not supported; {valid}"
            )
    for key, entry in value.items():
        if key not in _FP8 and key not in _FP8_LISTS and entry not in (None, False):
            raise UserError(f"{source}: quantization_config.{key} = {entry!r} is not supported; {valid}")


def refuse_sliding_window(
    raw: Mapping[str, Any], family: str, num_layers: int, defaults: Mapping[str, Any], source: str
) -> None:
    """Raise `UserError` if transformers would put a sliding window on any layer."""
    window = raw.get("sliding_window", defaults["sliding_window"])
    if family in ("llama", "glm4", "glm4_moe", "glm4_moe_lite", "deepseek_v3"):
        if window is not None:
            raise UserError(f"{source}: sliding_window = {window!r} is not supported; valid: null")
        if raw.get("use_sliding_window") not in (None, False):
            raise UserError(f"{source}: use_sliding_window = true is not supported; valid: false")
        return
    enabled = boolean(raw, "use_sliding_window", source, False) and window is not None
    first_windowed = raw.get("max_window_layers", defaults["max_window_layers"])
    if family in ("qwen2", "qwen3"):  # the others know no first windowed layer
        enabled = enabled and raw.get("layer_types") is None
        if isinstance(first_windowed, int) and first_windowed >= num_layers:
            return
    if enabled:
        raise UserError(
            f"{source}: use_sliding_window = true with max_window_layers = {first_windowed!r} puts a sliding "
            f"window on some of the {num_layers} layers, which is not supported; "
            "valid: use_sliding_window = false"
        )


def integer(
    raw: Mapping[str, Any],
    key: str,
    source: str,
    default: int | None = None,
    least: int = 1,
    most: int = LARGEST,
) -> int:
    """The integer `raw[key]`, or the default where the key is absent; outside `least` to `most` is a `UserError`."""
    kind = "a positive integer" if least == 1 else f"an integer of at least {least}"
    value = raw.get(key, default)
    if key not in raw and default is None:
        raise UserError(f"{source}: the field {key} is missing; expected {kind}")
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UserError(f"{source}: {key} = {value!r} must be {kind}")
    if value > most:
        raise UserError(f"{source}: {key} = {value} must be at most {most}")
    return value


def boolean(raw: Mapping[str, Any], key: str, source: str, default: bool) -> bool:
    """The truth value `raw[key]`; null and absent give the default."""
    value = raw.get(key, default)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise UserError(f"{source}: {key} = {value!r} must be true or false")
    return value


def number(raw: Mapping[str, Any], key: str, source: str, default: float, least: float, most: float) -> float:
    """The number `raw[key]`, strictly between `least` and `most`."""
    value = raw.get(key, default)
    most = min(most, 1e300)  # JSON's integers may exceed what a float holds
    if isinstance(value, bool) or not isinstance(value, int | float) or not least < value < most:
        raise UserError(f"{source}: {key} = {value!r} must be a number between {least:g} and {most:g}")
    return float(value)
