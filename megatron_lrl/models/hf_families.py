"""What is particular to a family: its names in config.json, its defaults, its layers' kinds.

Truth is transformers' config class (defaults) and modeling file (what a field does). Each reader below returns the
fields of `Architecture` in which its family differs from a plain dense decoder.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_lrl.errors import UserError
from megatron_lrl.layers.architecture import ATTENTION, MoESpec
from megatron_lrl.layers.gdn.sizes import GDN, GDNSpec
from megatron_lrl.layers.mla.sizes import MLA, MLASpec
from megatron_lrl.models.hf_fields import LARGEST, MOST_EXPERTS, MOST_LAYERS, boolean, integer, number

__all__ = ["FAMILIES", "Family", "default_of", "family_fields", "find_family"]

FAMILIES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "qwen3_5": "Qwen3_5ForCausalLM",
    "qwen3_5_moe": "Qwen3_5MoeForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "glm4_moe_lite": "Glm4MoeLiteForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
}
"""Family -> transformers' class of the language model alone."""

_CONFIG_CLASSES = {
    "llama": "LlamaConfig",
    "qwen2": "Qwen2Config",
    "qwen3": "Qwen3Config",
    "qwen3_moe": "Qwen3MoeConfig",
    "qwen3_next": "Qwen3NextConfig",
    "qwen3_5": "Qwen3_5TextConfig",
    "qwen3_5_moe": "Qwen3_5MoeTextConfig",
    "glm4": "Glm4Config",
    "glm4_moe": "Glm4MoeConfig",
    "glm4_moe_lite": "Glm4MoeLiteConfig",
    "deepseek_v3": "DeepseekV3Config",
}
# Set by the config classes while they run, so not readable as their attributes.
PARTIAL_ROTARY = {"qwen3_next": 0.25, "qwen3_5": 0.25, "qwen3_5_moe": 0.25, "glm4": 0.5, "glm4_moe": 0.5}
MROPE = frozenset({"qwen3_5", "qwen3_5_moe"})
LATENT = frozenset({"glm4_moe_lite", "deepseek_v3"})
_BIASED_ROUTERS = LATENT | {"glm4_moe"}


@dataclass(frozen=True)
class Family:
    """One spelling of a family in config.json.

    Attributes:
        name: the family, a key of `FAMILIES`.
        model_class: the class that `architectures` must name.
        wrapper: a vision-language config, whose language model stands in `text_config`.
    """

    name: str
    model_class: str
    wrapper: bool = False


_MODEL_TYPES = {
    **{name: Family(name, model_class) for name, model_class in FAMILIES.items() if name not in MROPE},
    "qwen3_5_text": Family("qwen3_5", FAMILIES["qwen3_5"]),
    "qwen3_5_moe_text": Family("qwen3_5_moe", FAMILIES["qwen3_5_moe"]),
    "qwen3_5": Family("qwen3_5", "Qwen3_5ForConditionalGeneration", wrapper=True),
    "qwen3_5_moe": Family("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration", wrapper=True),
}


def find_family(raw: Mapping[str, Any], source: str) -> Family:
    """The family that `model_type` names, or else `architectures`; the two must agree."""
    valid = ", ".join(_MODEL_TYPES)
    model_type, classes = raw.get("model_type"), raw.get("architectures") or []
    if not isinstance(classes, list):
        raise UserError(f"{source}: architectures = {classes!r} must be a list of class names")
    if model_type is None:
        named = [name for name, family in _MODEL_TYPES.items() if family.model_class in classes]
        if not named:
            raise UserError(
                f"{source}: neither model_type nor architectures names a supported family ({valid})"
            )
        model_type = named[0]
    if not isinstance(model_type, str) or model_type not in _MODEL_TYPES:
        raise UserError(f"{source}: model_type = {model_type!r} is not supported; valid: {valid}")
    family = _MODEL_TYPES[model_type]
    if classes and classes != [family.model_class]:
        raise UserError(
            f"{source}: architectures = {classes!r} does not fit model_type {model_type!r}; "
            f"valid: [{family.model_class!r}]"
        )
    return family


def default_of(family: str, name: str) -> Any:
    """transformers' default of a field that the file leaves out; None where its class has no such field."""
    import transformers

    return getattr(getattr(transformers, _CONFIG_CLASSES[family]), name, None)


def family_fields(raw: Mapping[str, Any], family: str, num_layers: int, source: str) -> dict[str, Any]:
    """The fields of `Architecture` that depend on the family, for a model of `num_layers` layers.

    `raw` is the language model's part of the config. Raises `UserError` for sizes that do not fit each other.
    """
    bias = boolean(raw, "attention_bias", source, bool(default_of(family, "attention_bias")))
    if family == "qwen2":
        if "attention_bias" in raw and not bias:  # transformers' Qwen2 has biases whatever the field says
            raise UserError(
                f"{source}: attention_bias = false contradicts family qwen2, which always has q, k, v biases"
            )
        bias = True
    fields: dict[str, Any] = {
        "qkv_bias": bias,
        # GLM and Qwen2 bias q, k and v alone
        "attention_output_bias": bias and family not in ("qwen2", "glm4", "glm4_moe"),
        "qk_norm": family.startswith("qwen3"),
        "mixers": _mixers(raw, family, num_layers, source),
    }
    if family in ("qwen3_next", "qwen3_5", "qwen3_5_moe"):
        fields |= {"output_gate": True, "zero_centered_norm": True, "carried": (r"mtp\..*",)}
        if GDN in fields["mixers"]:
            fields["sizes"] = {GDN: _delta_net(raw, family, source)}
    if family == "glm4":
        fields |= {"sandwich_norms": True, "fused_gate_up": True}
    if family == "glm4_moe":
        fields["qk_norm"] = boolean(raw, "use_qk_norm", source, False)
    if family in LATENT:
        fields["sizes"] = {MLA: _latent(raw, family, source)}
    if family in _BIASED_ROUTERS:
        keys = ("num_nextn_predict_layers", "num_mtp_layers")
        extra = _alias(raw, keys, family, source, least=0, most=MOST_LAYERS)
        carried = range(num_layers, num_layers + extra)
        fields["carried"] = tuple(rf"model\.layers\.{layer}\..*" for layer in carried)
    moe_layers = _moe_layers(raw, family, num_layers, source)
    if any(moe_layers):
        fields |= {"moe_layers": moe_layers, "moe": _moe(raw, family, source)}
    return fields


def _mixers(raw: Mapping[str, Any], family: str, num_layers: int, source: str) -> tuple[str, ...]:
    if family in LATENT:
        return (MLA,) * num_layers
    hybrid = family in ("qwen3_next", "qwen3_5", "qwen3_5_moe")
    kinds = {"full_attention": ATTENTION, **({"linear_attention": GDN} if hybrid else {})}
    layer_types = raw.get("layer_types")
    if layer_types is None:
        if not hybrid:
            return (ATTENTION,) * num_layers
        interval = integer(raw, "full_attention_interval", source, 4)
        mixers = tuple(GDN if layer % interval else ATTENTION for layer in range(1, num_layers + 1))
    else:
        if not isinstance(layer_types, list) or len(layer_types) != num_layers:
            raise UserError(f"{source}: layer_types must list one kind per layer ({num_layers})")
        for index, kind in enumerate(layer_types):
            if not isinstance(kind, str) or kind not in kinds:
                valid = " or ".join(repr(name) for name in kinds)
                raise UserError(f"{source}: layer_types[{index}] = {kind!r} is not supported; valid: {valid}")
        mixers = tuple(kinds[kind] for kind in layer_types)
    if ATTENTION not in mixers:
        raise UserError(
            f"{source}: the {num_layers} layers hold no full_attention layer; one is needed at least"
        )
    return mixers


def _latent(raw: Mapping[str, Any], family: str, source: str) -> MLASpec:
    """Widths of latent attention. Raises `UserError` for biases and for sizes that do not fit each other."""

    def size(key: str) -> int:
        return integer(raw, key, source, default_of(family, key))

    if boolean(raw, "attention_bias", source, False):
        raise UserError(
            f"{source}: attention_bias = true is not supported with latent attention; valid: false"
        )
    rank = raw.get("q_lora_rank", default_of(family, "q_lora_rank"))
    spec = MLASpec(
        latent=size("kv_lora_rank"),
        rotary=size("qk_rope_head_dim"),
        nope=size("qk_nope_head_dim"),
        value=size("v_head_dim"),
        query_rank=0 if rank is None else integer({"q_lora_rank": rank}, "q_lora_rank", source),
    )
    # Published files name one of several widths of a head, or none; no class reads it.
    stated = {"qk_head_dim": (spec.query,), "head_dim": (spec.rotary, spec.query, spec.nope)}
    for key, valid in stated.items():
        if raw.get(key) is not None and raw[key] not in valid:
            raise UserError(f"{source}: {key} = {raw[key]!r} contradicts the other widths; valid: {valid[0]}")
    return spec


def _delta_net(raw: Mapping[str, Any], family: str, source: str) -> GDNSpec:
    def size(key: str) -> int:
        return integer(raw, key, source, default_of(family, key))

    spec = GDNSpec(
        key_heads=size("linear_num_key_heads"),
        value_heads=size("linear_num_value_heads"),
        key_dim=size("linear_key_head_dim"),
        value_dim=size("linear_value_head_dim"),
        conv_kernel=size("linear_conv_kernel_dim"),
    )
    if spec.value_heads % spec.key_heads:
        raise UserError(
            f"{source}: linear_num_value_heads = {spec.value_heads} is not a multiple of "
            f"linear_num_key_heads = {spec.key_heads}"
        )
    if spec.conv_kernel < 2:
        raise UserError(f"{source}: linear_conv_kernel_dim = {spec.conv_kernel} must be at least 2")
    return spec


def _moe_layers(raw: Mapping[str, Any], family: str, num_layers: int, source: str) -> tuple[bool, ...]:
    """For each layer, whether its MLP is a mixture."""
    if family == "qwen3_5_moe":
        return (True,) * num_layers
    if family == "glm4_moe_lite":
        kinds = raw.get("mlp_layer_types")
        if kinds is None:
            dense = integer(raw, "first_k_dense_replace", source, 1, least=0)
            return tuple(layer >= dense for layer in range(num_layers))
        if not isinstance(kinds, list) or len(kinds) != num_layers or set(kinds) - {"dense", "sparse"}:
            raise UserError(
                f'{source}: mlp_layer_types must list "dense" or "sparse" for each layer ({num_layers})'
            )
        return tuple(kind == "sparse" for kind in kinds)
    if family in _BIASED_ROUTERS:
        default = default_of(family, "first_k_dense_replace")
        dense = integer(raw, "first_k_dense_replace", source, default, least=0)
        return tuple(layer >= dense for layer in range(num_layers))
    if family not in ("qwen3_moe", "qwen3_next"):
        return (False,) * num_layers
    step = integer(raw, "decoder_sparse_step", source, 1)
    only_mlp = raw.get("mlp_only_layers") or []
    if not isinstance(only_mlp, list) or any(isinstance(n, bool) or not isinstance(n, int) for n in only_mlp):
        raise UserError(f"{source}: mlp_only_layers = {only_mlp!r} must be a list of layer numbers from 0")
    return tuple(layer not in only_mlp and (layer + 1) % step == 0 for layer in range(num_layers))


def _moe(raw: Mapping[str, Any], family: str, source: str) -> MoESpec:
    def size(key: str) -> int:
        return integer(raw, key, source, default_of(family, key))

    glm = family in _BIASED_ROUTERS
    keys = ("n_routed_experts" if glm else "num_experts", "num_local_experts")
    experts = _alias(raw, keys, family, source, most=MOST_EXPERTS)
    width = size("moe_intermediate_size")
    normalise = True  # of qwen3_5_moe, whatever the config says
    if family != "qwen3_5_moe":
        normalise = boolean(raw, "norm_topk_prob", source, default_of(family, "norm_topk_prob"))
    spec = MoESpec(
        num_experts=experts, top_k=size("num_experts_per_tok"), ffn_hidden_size=width, normalise=normalise
    )
    if glm:
        spec = MoESpec(
            **{
                **vars(spec),
                "shared_ffn_hidden_size": width * size("n_shared_experts"),
                "score": "sigmoid",
                "scale": number(raw, "routed_scaling_factor", source, 1.0, 0.0, math.inf),
                "bias": True,
                "groups": size("n_group"),
                "top_groups": size("topk_group"),
                "wide_router": True,
            }
        )
        if experts % spec.groups or experts // spec.groups < 2:
            raise UserError(
                f"{source}: n_group = {spec.groups} must divide {keys[0]} = {experts} into groups of at least 2"
            )
        if spec.top_groups > spec.groups:
            raise UserError(f"{source}: topk_group = {spec.top_groups} exceeds n_group = {spec.groups}")
    elif family != "qwen3_moe":
        shared = size("shared_expert_intermediate_size")
        spec = MoESpec(**{**vars(spec), "shared_ffn_hidden_size": shared, "shared_gate": True})
    choice = experts // spec.groups * spec.top_groups
    if spec.top_k > choice:
        raise UserError(
            f"{source}: num_experts_per_tok = {spec.top_k} exceeds the {choice} experts to choose from"
        )
    return spec


def _alias(
    raw: Mapping[str, Any],
    keys: tuple[str, str],
    family: str,
    source: str,
    least: int = 1,
    most: int = LARGEST,
) -> int:
    """A field that transformers writes under either of two names."""
    stated = [key for key in keys if raw.get(key) is not None]
    if any(raw[key] != raw[stated[0]] for key in stated):
        raise UserError(f"{source}: {keys[0]} = {raw[keys[0]]!r} contradicts {keys[1]} = {raw[keys[1]]!r}")
    default = next((value for key in keys if (value := default_of(family, key)) is not None), least)
    return integer({} if not stated else raw, stated[0] if stated else keys[0], source, default, least, most)
