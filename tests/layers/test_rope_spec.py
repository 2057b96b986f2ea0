"""Claim: the rotary settings of a config.json give transformers' frequencies bit by bit, in float64 the
same formulas without rounding to float32, in both spellings; settings that would change the rotation in an
unknown way are refused.

Why the tests show it: float32 is compared with the buffers of transformers' own model classes; float64 with
formulas written here from the papers. Not shown: that attention applies the frequencies (the score tests
show that).
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import transformers
from oracle import tiny_families
from oracle.tiny_models import FAMILIES, ROPE_KINDS

from megatron_lrl.errors import UserError
from megatron_lrl.layers.rope_spec import RopeSpec
from megatron_lrl.models.hf_config import architecture_from_dict, describe_rope

D = 16
KINDS: dict[str, dict[str, Any]] = {
    **ROPE_KINDS,
    "yarn-mscale": {**ROPE_KINDS["yarn"], "mscale": 1.0, "mscale_all_dim": 0.5, "truncate": False},
    "yarn-factor": {**ROPE_KINDS["yarn"], "attention_factor": 1.25},
}


def _config(family: str = "llama", **fields: Any) -> Any:
    config_class, _ = FAMILIES[family]
    sizes = {"vocab_size": 31, "hidden_size": 64, "intermediate_size": 8, "num_hidden_layers": 1}
    heads = {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": D,
        "max_position_embeddings": 1024,
    }
    return config_class(**sizes, **heads, **fields)


def _raw(**fields: Any) -> dict[str, Any]:
    raw = _config().to_dict()
    raw.pop("rope_parameters")
    return {**raw, **fields}


def _formula(parameters: dict[str, Any]) -> torch.Tensor:
    """Frequencies in float64, from the papers (position interpolation, Llama 3.1, YaRN)."""
    exponent = torch.arange(0, D, 2, dtype=torch.float64) / D
    plain = parameters["rope_theta"] ** -exponent
    factor = parameters.get("factor", 1.0)
    if parameters["rope_type"] in ("default", "linear"):
        return plain / factor
    length = parameters["original_max_position_embeddings"]
    turns = length * plain / (2 * math.pi)
    if parameters["rope_type"] == "llama3":
        low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
        kept = ((turns - low) / (high - low)).clamp(0, 1)
    else:
        theta = math.log(parameters["rope_theta"])

        def dimension(rotations: float) -> float:
            return D * math.log(length / (rotations * 2 * math.pi)) / (2 * theta)

        first, last = dimension(parameters["beta_fast"]), dimension(parameters["beta_slow"])
        if parameters.get("truncate", True):
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, D - 1)
        kept = 1 - ((torch.arange(D // 2, dtype=torch.float64) - first) / (last - first)).clamp(0, 1)
    return plain * kept + plain / factor * (1 - kept)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_float32_is_transformers_bit_by_bit(family: str, kind: str) -> None:
    config = _config(family, rope_parameters=dict(KINDS[kind]))
    rotary = FAMILIES[family][1](config).model.rotary_emb
    spec = architecture_from_dict(config.to_dict()).rope
    inv_freq, factor = spec.inv_freq()
    assert inv_freq.dtype == torch.float32 and torch.equal(inv_freq, rotary.inv_freq)
    assert factor == rotary.attention_scaling == spec.attention_factor


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", tiny_families.FAMILIES)
def test_the_rotating_part_is_transformers_bit_by_bit(family: str, kind: str) -> None:
    """GLM rotates half of each head and Qwen's hybrids a quarter, whether or not the file says so."""
    config_name, model_name = tiny_families.FAMILIES[family]
    fields = {"vocab_size": 31, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 2}
    latent = family in tiny_families.LATENT  # one key for all heads, which rotates whole
    width = {"qk_rope_head_dim": 32} if latent else {"head_dim": 32}
    fields |= {**tiny_families.FIELDS[family], "num_key_value_heads": 2, **width}
    if family != "qwen3_5_moe":
        fields["intermediate_size"] = 8
    config = getattr(transformers, config_name)(
        **fields, max_position_embeddings=1024, rope_parameters=dict(KINDS[kind]), pad_token_id=None
    )
    rotary = getattr(transformers, model_name)(config).model.rotary_emb
    spec = architecture_from_dict(config.to_dict()).rope
    inv_freq, factor = spec.inv_freq()
    assert torch.equal(inv_freq, rotary.inv_freq) and factor == rotary.attention_scaling
    share = 1.0 if latent else {"qwen3_moe": 1.0, "glm4": 0.5, "glm4_moe": 0.5}.get(family, 0.25)
    assert spec.rotary_dim == 2 * len(inv_freq) == int(32 * share)
    assert spec.interleaved == (family == "glm4" or latent)
    unsaid = config.to_dict()
    unsaid["rope_parameters"].pop("partial_rotary_factor", None)
    assert architecture_from_dict(unsaid).rope == spec
    assert spec.inv_freq(torch.float64)[0].shape == inv_freq.shape


@pytest.mark.parametrize("kind", KINDS)
def test_float64_is_the_formula(kind: str) -> None:
    spec = architecture_from_dict(_raw(rope_parameters=dict(KINDS[kind]))).rope
    inv_freq, factor = spec.inv_freq(torch.float64)
    assert inv_freq.dtype == torch.float64
    torch.testing.assert_close(inv_freq, _formula(KINDS[kind]), rtol=1e-13, atol=0)
    assert factor == spec.attention_factor
    if kind == "yarn":
        assert factor == pytest.approx(0.1 * math.log(4.0) + 1.0, abs=1e-15)
        assert bool((inv_freq != spec.inv_freq()[0].double()).any())  # float64 is not float32 made wider


def test_half_precision_frequencies_are_refused() -> None:
    with pytest.raises(ValueError, match="float32 or float64"):
        architecture_from_dict(_raw()).rope.inv_freq(torch.bfloat16)


@pytest.mark.parametrize("kind", ROPE_KINDS)
@pytest.mark.parametrize("type_key", ["type", "rope_type"])
def test_the_older_spelling_means_the_same(kind: str, type_key: str) -> None:
    new = architecture_from_dict(_raw(rope_parameters=dict(ROPE_KINDS[kind]))).rope
    scaling = {k: v for k, v in ROPE_KINDS[kind].items() if k not in ("rope_type", "rope_theta")}
    old = _raw(rope_theta=ROPE_KINDS[kind]["rope_theta"], rope_scaling={type_key: kind, **scaling})
    assert architecture_from_dict(old).rope == new


def test_absent_settings_are_the_default_kind() -> None:
    assert architecture_from_dict(_raw()).rope == RopeSpec("default", 10_000.0, D, 1024)
    assert architecture_from_dict(_raw(rope_scaling=None, rope_theta=5e5)).rope.theta == 5e5


def test_the_original_length_may_stand_at_the_top_level() -> None:
    inner = {k: v for k, v in ROPE_KINDS["yarn"].items() if k != "original_max_position_embeddings"}
    top = architecture_from_dict(_raw(rope_parameters=inner, original_max_position_embeddings=256)).rope
    assert top == architecture_from_dict(_raw(rope_parameters=dict(ROPE_KINDS["yarn"]))).rope
    assert (
        architecture_from_dict(_raw(rope_parameters=inner)).rope.parameters[
            "original_max_position_embeddings"
        ]
        == 1024
    )  # transformers' rule: the model's own length


def test_scaling_stretches_the_positions() -> None:
    def positions(kind: str) -> int:
        return architecture_from_dict(_raw(rope_parameters=dict(ROPE_KINDS[kind]))).max_positions

    assert positions("default") == positions("llama3") == 1024
    assert positions("linear") == 2560
    assert positions("yarn") == 1024  # 4 x 256 is what config.json states already


def test_the_printed_line_names_kind_and_numbers() -> None:
    line = describe_rope(architecture_from_dict(_raw(rope_parameters=dict(ROPE_KINDS["yarn"]))))
    assert "\n" not in line
    for part in ("RoPE yarn", "theta=10000", "factor=4.0", "original_max_position_embeddings=256", "1.13863"):
        assert part in line


YARN, LLAMA3 = ROPE_KINDS["yarn"], ROPE_KINDS["llama3"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
            "rope_parameters.rope_type = dynamic is not",
        ),
        (
            {"rope_scaling": {"type": "longrope"}},
            "rope_scaling.rope_type = longrope is not supported; valid: default",
        ),
        ({"rope_parameters": {"rope_type": 3}}, "rope_type = 3 is not supported"),
        ({"rope_parameters": {"rope_type": "linear"}}, "'linear' needs the field(s) factor"),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": "2"}},
            "rope_parameters.factor = '2' must be a number",
        ),
        ({"rope_parameters": {"rope_type": "linear", "factor": True}}, "factor = True must be a number"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 0.5}}, "factor = 0.5 must be at least 1"),
        (
            {"rope_parameters": {"rope_type": "default", "factor": 2.0}},
            "factor = 2.0 is not a field of RoPE kind 'default'",
        ),
        (
            {"rope_parameters": {**YARN, "mrope_section": [2, 3, 3]}},
            "mrope_section = [2, 3, 3] is not a field",
        ),
        ({"rope_parameters": {**YARN, "truncate": 1}}, "truncate = 1 must be true or false"),
        ({"rope_parameters": {**LLAMA3, "high_freq_factor": 1.0}}, "high_freq_factor must be larger"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor = 0.5 is not supported"),
        ({"partial_rotary_factor": 0.25}, "partial_rotary_factor = 0.25 is not supported"),
        ({"rope_parameters": {"rope_theta": 1e4}, "rope_theta": 1e6}, "contradicts"),
        ({"rope_parameters": {"rope_theta": 0}}, "rope_theta = 0.0 must be larger than 1"),
        (
            {"rope_parameters": {"rope_type": "yarn", "type": "linear", "factor": 2.0}},
            "rope_type and type contradict",
        ),
        ({"rope_parameters": YARN, "rope_scaling": LLAMA3}, "rope_parameters and rope_scaling contradict"),
        ({"rope_parameters": YARN, "original_max_position_embeddings": 512}, "contradicts"),
        ({"original_max_position_embeddings": 512}, "has no meaning for RoPE kind 'default'"),
        ({"rope_parameters": {**YARN, "beta_fast": -1.0}}, "rope_parameters cannot be evaluated"),
        ({"rope_parameters": {**LLAMA3, "low_freq_factor": 0}}, "rope_parameters cannot be evaluated"),
        ({"rope_parameters": {"rope_type": "linear", "factor": float("inf")}}, "must be a finite number"),
        ({"rope_theta": float("nan")}, "must be a finite number"),
        ({"rope_parameters": [1]}, "rope_parameters must be an object"),
    ],
)
def test_settings_that_are_not_understood_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        architecture_from_dict(_raw(**fields), source="config.json")
    assert "config.json" in str(caught.value) and message in str(caught.value)


def test_what_transformers_does_not_read_has_no_effect_and_is_named() -> None:
    """DeepSeek-R1-0528-Qwen3-8B holds attn_factor; transformers' attention factor comes from `factor` alone."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    stated = {**yarn, "attn_factor": 0.8782488562869419}
    with_it = architecture_from_dict(_raw(rope_scaling=stated, rope_theta=10_000.0))
    without = architecture_from_dict(_raw(rope_scaling=yarn, rope_theta=10_000.0))
    assert with_it.rope == without.rope and with_it.fingerprint() == without.fingerprint()
    module = transformers.LlamaForCausalLM(_config(rope_parameters={**stated, "rope_theta": 10_000.0}))
    rotary = module.model.rotary_emb
    assert with_it.rope.attention_factor == rotary.attention_scaling
    assert torch.equal(with_it.rope.inv_freq()[0], rotary.inv_freq)
    assert "attn_factor=0.8782488562869419 has no effect" in describe_rope(with_it)
    with pytest.raises(UserError, match="attn_factor = 'x' must be a number"):
        architecture_from_dict(_raw(rope_scaling={**yarn, "attn_factor": "x"}, rope_theta=10_000.0))
    with pytest.raises(UserError, match="is not a field of RoPE kind"):
        architecture_from_dict(_raw(rope_scaling={"rope_type": "linear", "factor": 2.0, "attn_factor": 1.0}))
