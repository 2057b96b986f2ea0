"""Claim: rotary angles at explicit positions and RMSNorm are transformers' own, for every supported RoPE
kind.

Why the tests show it: cos and sin of our angles, times the attention factor, are compared bit for bit in
float32 with transformers' Llama rotary module at positions that are neither contiguous nor small; the
rotation itself, as Megatron-Core applies it, is compared with transformers' `apply_rotary_pos_emb`. RMSNorm
is compared with transformers' LlamaRMSNorm and, in float64, with the formula.

Not shown: what a config.json may say (test_rope_spec, test_hf_config).
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd
from oracle.tiny_models import ROPE_KINDS
from transformers import Glm4Config, Glm4MoeConfig, LlamaConfig
from transformers.models.glm4 import modeling_glm4
from transformers.models.glm4_moe import modeling_glm4_moe
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

from megatron_lrl.layers.rope_spec import RopeSpec, read_rope
from megatron_lrl.layers.rotary import PositionRotaryEmbedding
from megatron_lrl.models.norm import RMSNorm

D = 16
POSITIONS = torch.tensor([0, 1, 2, 255, 256, 257, 1023, 5, 5, 70_000])
CPU = torch.device("cpu")


def spec_of(kind: str) -> RopeSpec:
    raw = {"rope_parameters": dict(ROPE_KINDS[kind])}
    return read_rope(raw, head_dim=D, max_positions=1024, theta=10_000.0, source="config.json")


def transformers_rotary(kind: str) -> LlamaRotaryEmbedding:
    return LlamaRotaryEmbedding(
        LlamaConfig(
            hidden_size=D,
            num_attention_heads=1,
            max_position_embeddings=1024,
            rope_parameters=dict(ROPE_KINDS[kind]),
        )
    )


def angles(kind: str, dtype: torch.dtype) -> torch.Tensor:
    rotary = PositionRotaryEmbedding(spec_of(kind), dtype, CPU)
    advance = SimpleNamespace(positions_m=POSITIONS)
    return rotary(rotary.get_rotary_seq_len(None, None, None, None, advance))


@pytest.mark.parametrize("kind", ROPE_KINDS)
def test_cos_and_sin_are_transformers_bit_for_bit(kind: str) -> None:
    ours, factor = angles(kind, torch.float32), spec_of(kind).attention_factor
    assert ours.shape == (len(POSITIONS), 1, 1, D)
    cos, sin = transformers_rotary(kind)(torch.zeros(1), POSITIONS[None])
    assert torch.equal(ours[:, 0, 0].cos() * factor, cos[0])
    assert torch.equal(ours[:, 0, 0].sin() * factor, sin[0])


@pytest.mark.parametrize("kind", ROPE_KINDS)
def test_megatron_core_applies_the_same_rotation(kind: str) -> None:
    factor = spec_of(kind).attention_factor
    q_mhd = torch.randn(len(POSITIONS), 3, D, generator=torch.Generator().manual_seed(0))
    ours = _apply_rotary_pos_emb_bshd(q_mhd.unsqueeze(1), angles(kind, torch.float32), mscale=factor).squeeze(
        1
    )
    q_bhsd = q_mhd.transpose(0, 1).unsqueeze(0)
    theirs, _ = apply_rotary_pos_emb(q_bhsd, q_bhsd, *transformers_rotary(kind)(q_bhsd, POSITIONS[None]))
    assert torch.allclose(ours, theirs[0].transpose(0, 1), rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", ROPE_KINDS)
def test_float64_angles_are_computed_in_float64(kind: str) -> None:
    ours = angles(kind, torch.float64)
    assert ours.dtype == torch.float64
    inv_freq, _ = spec_of(kind).inv_freq(torch.float64)
    assert torch.equal(ours[-1, 0, 0, : D // 2], 70_000 * inv_freq)
    single = angles(kind, torch.float32)[-1, 0, 0, 0]
    assert abs(float(single) - 70_000 * float(inv_freq[0])) < 70_000 * 2.0**-23


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_part_of_the_head_rotates_as_transformers_does(interleaved: bool) -> None:
    """GLM: half of the head, pairs of neighbours in glm4 and pairs of halves in glm4_moe; the rest stays."""
    module = modeling_glm4 if interleaved else modeling_glm4_moe
    config_class, rotary_class = (
        (Glm4Config, modeling_glm4.Glm4RotaryEmbedding)
        if interleaved
        else (Glm4MoeConfig, modeling_glm4_moe.Glm4MoeRotaryEmbedding)
    )
    theirs = rotary_class(config_class(hidden_size=D, num_attention_heads=1, head_dim=D))
    spec = read_rope(
        {}, head_dim=D, max_positions=1024, theta=1e4, source="", partial=0.5, interleaved=interleaved
    )
    rotary = PositionRotaryEmbedding(spec, torch.float32, CPU)
    assert rotary.rotary_interleaved is interleaved
    angles_m11r = rotary(POSITIONS)
    assert angles_m11r.shape == (len(POSITIONS), 1, 1, D // 2)
    q_mhd = torch.randn(len(POSITIONS), 3, D, generator=torch.Generator().manual_seed(0))
    ours = _apply_rotary_pos_emb_bshd(
        q_mhd.unsqueeze(1), angles_m11r, rotary_interleaved=interleaved
    ).squeeze(1)
    q_bhsd = q_mhd.transpose(0, 1).unsqueeze(0)
    expected, _ = module.apply_rotary_pos_emb(q_bhsd, q_bhsd, *theirs(q_bhsd, POSITIONS[None]))
    assert torch.allclose(ours, expected[0].transpose(0, 1), rtol=0, atol=1e-6)
    assert torch.equal(ours[..., D // 2 :], q_mhd[..., D // 2 :])
    other = _apply_rotary_pos_emb_bshd(q_mhd.unsqueeze(1), angles_m11r, rotary_interleaved=not interleaved)
    assert not torch.allclose(other.squeeze(1), ours, atol=1e-2)  # the layouts differ, so the flag matters


def norm(dtype: torch.dtype, sequence_parallel: bool = False) -> RMSNorm:
    config = SimpleNamespace(
        params_dtype=dtype, sequence_parallel=sequence_parallel, layernorm_zero_centered_gamma=False
    )
    module = RMSNorm(config, D, eps=1e-6)
    with torch.no_grad():
        module.weight.copy_(1 + 0.2 * torch.randn(D, generator=torch.Generator().manual_seed(1)))
    return module


@pytest.mark.parametrize(("dtype", "bar"), [(torch.float32, 3e-7), (torch.bfloat16, 2.0**-7)], ids=str)
def test_rms_norm_equals_transformers(dtype: torch.dtype, bar: float) -> None:
    """bfloat16: transformers rounds once more before it multiplies with the weight, so two roundings of 2^-8."""
    ours, theirs = norm(dtype), LlamaRMSNorm(D, eps=1e-6).to(dtype)
    theirs.load_state_dict(ours.state_dict())
    x = (3 * torch.randn(9, D, generator=torch.Generator().manual_seed(2))).to(dtype)
    a, b = ours(x).float(), theirs(x).float()
    assert float((a - b).norm() / b.norm()) <= bar
    assert ours(x).dtype == dtype


def test_rms_norm_is_float64_for_float64() -> None:
    module = norm(torch.float64)
    x = torch.randn(9, D, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    expected = x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * module.weight
    assert float((module(x) - expected).abs().max()) < 1e-14


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_megatron_core_learns_who_sums_the_weight_gradient(sequence_parallel: bool) -> None:
    assert norm(torch.float32, sequence_parallel).weight.sequence_parallel is sequence_parallel
