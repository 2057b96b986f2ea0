"""Claim: for mixtures of experts, Gated DeltaNet hybrids and GLM, `read_architecture` reads what transformers would
build, in both forms of Qwen3.5.

Why the tests show it: values are compared with the modules of transformers' own models, made from the same files, and
with its config classes where fields are absent; every tensor of the files is accounted for, as a parameter of the
language model or as carried.
Not shown: what is refused (test_family_refusals), that the built model computes the same (the score tests show that).
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import transformers
from oracle import hf_oracle
from oracle.tiny_families import FAMILIES, HYBRID_CASES, LATENT, MORE_CASES, WRAPPERS
from oracle.tiny_models import write_case

from megatron_lrl.layers.gdn.sizes import GDN, sizes_of
from megatron_lrl.layers.mla import sizes as mla_sizes
from megatron_lrl.layers.mla.sizes import MLA
from megatron_lrl.models.hf_config import (
    ATTENTION,
    Architecture,
    architecture_from_dict,
    read_architecture,
)
from models.family_configs import SIZES, TEXT_TYPES, tiny_config


@pytest.fixture(scope="module", params=MORE_CASES)
def case(request: pytest.FixtureRequest, session_dir: Path) -> tuple[Architecture, Any, Path]:
    path = write_case(session_dir / "hf", request.param)
    return read_architecture(path), hf_oracle.load(path), path


def _decoder(model: Any) -> Any:
    return getattr(model.model, "language_model", model.model)


def test_values_are_those_of_transformers_modules(case: tuple[Architecture, Any, Path]) -> None:
    arch, model, path = case
    decoder = _decoder(model)
    assert arch.num_layers == len(decoder.layers) == len(arch.mixers) == len(arch.moe_layers)
    assert (arch.vocab_size, arch.hidden_size) == tuple(decoder.embed_tokens.weight.shape)
    assert arch.tied == (model.lm_head.weight is decoder.embed_tokens.weight)
    assert arch.raw == json.loads((path / "config.json").read_text())
    assert arch.rope.rotary_dim == 2 * len(decoder.rotary_emb.inv_freq)
    for layer, mixer, is_moe in zip(decoder.layers, arch.mixers, arch.moe_layers, strict=True):
        if mixer == MLA:
            _check_latent(arch, layer.self_attn)
        elif mixer == ATTENTION:
            _check_attention(arch, layer.self_attn)
        else:
            _check_delta_net(arch, layer.linear_attn)
        if is_moe:
            _check_mixture(arch, layer.mlp)
        else:
            assert arch.ffn_hidden_size == layer.mlp.down_proj.in_features
            assert arch.fused_gate_up == hasattr(layer.mlp, "gate_up_proj")
        assert (
            arch.sandwich_norms
            == hasattr(layer, "post_mlp_layernorm")
            == hasattr(layer, "post_self_attn_layernorm")
        )
        norm = layer.input_layernorm
        assert arch.norm_eps == getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
        # a fresh zero-centred norm starts at weight 0, the others at 1: both multiply with one
        assert float(type(norm)(4).weight[0]) == (0.0 if arch.zero_centered_norm else 1.0)


def _check_attention(arch: Architecture, attention: Any) -> None:
    rows = arch.num_heads * arch.head_dim * (2 if arch.output_gate else 1)
    assert (rows, arch.hidden_size) == tuple(attention.q_proj.weight.shape)
    assert arch.num_kv_heads * arch.head_dim == attention.k_proj.out_features
    assert arch.qkv_bias == all(
        m.bias is not None for m in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    assert arch.attention_output_bias == (attention.o_proj.bias is not None)
    assert arch.qk_norm == hasattr(attention, "q_norm")


def _check_latent(arch: Architecture, attention: Any) -> None:
    sizes = mla_sizes.sizes_of(arch)
    assert (sizes.row, arch.hidden_size) == tuple(attention.kv_a_proj_with_mqa.weight.shape)
    assert (arch.num_heads * sizes.expanded, sizes.latent) == tuple(attention.kv_b_proj.weight.shape)
    assert arch.num_heads * sizes.value == attention.o_proj.in_features
    assert sizes.query_rank == (attention.q_a_proj.out_features if attention.q_a_proj is not None else 0)
    queries = attention.q_b_proj if sizes.query_rank else attention.q_proj
    assert arch.num_heads * sizes.query == queries.out_features
    assert mla_sizes.softmax_scale(sizes, arch.rope) == pytest.approx(attention.scaling)
    assert attention.kv_a_layernorm.variance_epsilon == mla_sizes.NORM_EPS
    assert arch.rope.interleaved == attention.config.rope_interleave


def _check_delta_net(arch: Architecture, layer: Any) -> None:
    sizes = sizes_of(arch)
    assert (sizes.key_heads, sizes.value_heads) == (layer.num_k_heads, layer.num_v_heads)
    assert (sizes.key_dim, sizes.value_dim) == (layer.head_k_dim, layer.head_v_dim)
    assert (sizes.conv_channels, 1, sizes.conv_kernel) == tuple(layer.conv1d.weight.shape)


def _check_mixture(arch: Architecture, mlp: Any) -> None:
    moe, router = arch.moe, mlp.gate
    assert moe is not None
    assert (moe.num_experts, arch.hidden_size) == tuple(router.weight.shape)
    assert (moe.num_experts, arch.hidden_size, moe.ffn_hidden_size) == tuple(mlp.experts.down_proj.shape)
    assert moe.top_k == router.top_k
    assert moe.normalise == getattr(router, "norm_topk_prob", True)
    assert (
        moe.bias == moe.wide_router == hasattr(router, "e_score_correction_bias") == (moe.score == "sigmoid")
    )
    assert moe.scale == getattr(router, "routed_scaling_factor", 1.0)
    assert (moe.groups, moe.top_groups) == (getattr(router, "num_group", 1), getattr(router, "topk_group", 1))
    shared = getattr(mlp, "shared_expert", getattr(mlp, "shared_experts", None))
    assert moe.shared_ffn_hidden_size == (shared.up_proj.out_features if shared is not None else 0)
    assert moe.shared_gate == hasattr(mlp, "shared_expert_gate")


def test_every_stored_tensor_is_the_models_or_carried(case: tuple[Architecture, Any, Path]) -> None:
    arch, model, path = case
    stored = hf_oracle.stored_names(path)
    carried = {name for name in stored if any(re.fullmatch(pattern, name) for pattern in arch.carried)}
    own = hf_oracle.named_as_stored(
        {n: p for n, p in model.named_parameters() if ".visual." not in n}, path
    ).keys()
    biases = {n for n, _ in model.named_buffers() if n.endswith("e_score_correction_bias")}
    assert carried | own | biases == stored and not carried & (own | biases)
    assert all(n.startswith(arch.hf_prefix) or n == "lm_head.weight" for n in own | biases)
    family, variation = MORE_CASES[path.name]
    assert any("visual" in name for name in carried) == variation.get("wrapper", False)
    assert any("visual" not in name for name in carried) == variation.get("mtp", False), family


@pytest.mark.parametrize("family", FAMILIES)
def test_absent_fields_take_transformers_defaults(family: str) -> None:
    # Latent attention has no groups of heads: their default number is that of the published model alone.
    sizes = {**SIZES, "num_key_value_heads": SIZES["num_attention_heads"]} if family in LATENT else SIZES
    config = getattr(transformers, FAMILIES[family][0])(**sizes, num_experts_per_tok=2)
    stated = {key: value for key, value in sizes.items() if key in config.to_dict()}
    arch = architecture_from_dict(
        {
            "model_type": TEXT_TYPES.get(family, family),
            **stated,
            **({"num_experts_per_tok": 2} if "moe" in family else {}),
        }
    )
    assert arch.num_kv_heads == config.num_key_value_heads
    assert arch.norm_eps == config.rms_norm_eps and arch.tied == config.tie_word_embeddings
    assert arch.qkv_bias == config.attention_bias
    assert arch.rope.theta == config.rope_parameters["rope_theta"]
    assert arch.rope.rotary_dim == int(
        arch.rope.head_dim * config.rope_parameters.get("partial_rotary_factor", 1.0)
    )
    if family in ("qwen3_next", "qwen3_5", "qwen3_5_moe"):
        kinds = {"linear_attention": GDN, "full_attention": ATTENTION}
        assert (
            arch.mixers
            == tuple(kinds[kind] for kind in config.layer_types)
            == ((GDN,) * 3 + (ATTENTION,)) * 2
        )
        assert sizes_of(arch).key_heads == config.linear_num_key_heads
    if family == "glm4_moe":
        assert arch.moe_layers == (False,) + (True,) * 7 and arch.carried == (r"model\.layers\.8\..*",)
    if arch.moe is not None:
        assert arch.moe.num_experts == config.to_dict().get(
            "n_routed_experts", getattr(config, "num_experts", None)
        )
        assert arch.moe.ffn_hidden_size == config.moe_intermediate_size


def test_published_spellings_mean_the_same() -> None:
    """Fields as the published configs have them, beside transformers' own spelling."""
    inert = {
        "attn_output_gate": True,
        "mamba_ssm_dtype": "float32",
        "mtp_num_hidden_layers": 1,
        "mlp_only_layers": [],
    }
    mrope = {"mrope_interleaved": True, "mrope_section": [1, 1, 0], "rope_type": "default", "rope_theta": 1e7}
    plain = architecture_from_dict(tiny_config("qwen3_5", rope_theta=1e7))
    published = architecture_from_dict(
        tiny_config(
            "qwen3_5",
            rope_parameters={**mrope, "partial_rotary_factor": 0.25},
            full_attention_interval=4,
            **inert,
        )
    )
    assert published == plain and published.rope.rotary_dim == 4
    interval = tiny_config("qwen3_5", full_attention_interval=2)
    del interval["layer_types"]
    assert architecture_from_dict(interval).mixers == (GDN, ATTENTION) * 2 == plain.mixers
    alias = tiny_config("qwen3_moe")
    alias["num_local_experts"] = alias.pop("num_experts")
    assert architecture_from_dict(alias) == architecture_from_dict(tiny_config("qwen3_moe"))
    assert architecture_from_dict(
        tiny_config("glm4_moe", scoring_func="sigmoid", topk_method="noaux_tc")
    ) == (architecture_from_dict(tiny_config("glm4_moe")))


def test_the_width_of_mlps_that_do_not_exist_is_no_part_of_the_model() -> None:
    base = architecture_from_dict(tiny_config("qwen3_moe"))
    assert (
        architecture_from_dict(tiny_config("qwen3_moe", intermediate_size=999)).fingerprint()
        == base.fingerprint()
    )
    sparse = architecture_from_dict(tiny_config("qwen3_moe", decoder_sparse_step=2, mlp_only_layers=[3]))
    assert sparse.moe_layers == (False, True, False, False) and sparse.ffn_hidden_size == 24


@pytest.mark.parametrize("family", WRAPPERS)
def test_a_wrapper_is_its_text_model_with_another_prefix(family: str) -> None:
    name = next(n for n, (f, v) in HYBRID_CASES.items() if f == family and v.get("wrapper"))
    wrapped = architecture_from_dict(tiny_config(name, lastkv={"chunk_size": 8, "blend": True}))
    text = architecture_from_dict(
        {**tiny_config(name)["text_config"], "lastkv": {"chunk_size": 8, "blend": True}}
    )
    assert wrapped.hf_prefix == "model.language_model." and text.hf_prefix == "model."
    assert wrapped.carried == (*text.carried, r"model\.visual\..*")
    same = Architecture(**{**vars(wrapped), "hf_prefix": text.hf_prefix, "carried": text.carried})
    assert same == text and wrapped.fingerprint() != text.fingerprint()
    assert architecture_from_dict(tiny_config(name, tie_word_embeddings=True)).tied  # the outer field ties
    assert wrapped.with_lastkv(None).raw == tiny_config(name)


@pytest.mark.parametrize("quantization", [None, {"quant_method": "fp8", "weight_block_size": [128, 128]}])
def test_block_quantised_weights_are_the_same_model(quantization: dict[str, Any] | None) -> None:
    more = {"activation_scheme": "dynamic", "fmt": "e4m3", "modules_to_not_convert": ["lm_head"]}
    given = None if quantization is None else {**quantization, **more}
    arch = architecture_from_dict(tiny_config("glm4_moe", quantization_config=given))
    assert arch.fingerprint() == architecture_from_dict(tiny_config("glm4_moe")).fingerprint()
    vl = architecture_from_dict(tiny_config("qwen3_5-vl", quantization_config=given))
    assert vl.fingerprint() == architecture_from_dict(tiny_config("qwen3_5-vl")).fingerprint()
