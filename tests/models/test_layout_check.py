"""Claim: `check_layout` accepts exactly the layouts that cut a model into equal parts, and a refusal names
the key, the sizes it must divide and every value that would do.

Why the tests show it: the cuts are found by enumeration (lists of heads, columns and layers dealt to ranks),
not by the divisibility rule under test; the values that a message calls valid are fed back one by one, and
every other value up to twice the size is refused. Not shown: that an accepted layout computes the right
numbers.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_lrl.errors import UserError
from megatron_lrl.layers.gdn.sizes import GDN, GDNSpec
from megatron_lrl.models.build import check_layout as check_layout_of_build
from megatron_lrl.models.hf_config import (
    ATTENTION,
    Architecture,
    LastKVSpec,
    MoESpec,
    architecture_from_dict,
)
from megatron_lrl.models.layout_check import check_layout
from megatron_lrl.runtime import Layout

ARCH = architecture_from_dict(
    {
        "model_type": "llama",
        "vocab_size": 31,
        "hidden_size": 40,
        "head_dim": 6,
        "intermediate_size": 96,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    }
)


def equal_parts(count: int, ranks: int) -> bool:
    """Deal `count` things to `ranks` one by one: does each rank get the same number, and at least one?"""
    hands = [list(range(count))[rank::ranks] for rank in range(ranks)]
    return len({len(hand) for hand in hands}) == 1 and bool(hands[0])


def accepts(arch: Architecture, layout: Layout) -> bool:
    try:
        check_layout(arch, layout)
    except UserError:
        return False
    return True


@given(
    tp=st.integers(1, 9),
    cp=st.integers(1, 3),
    pp=st.integers(1, 13),
    kv_heads=st.integers(1, 8),
    per_group=st.integers(1, 3),
    width=st.integers(1, 48),
    layers=st.integers(1, 12),
)
def test_layouts_that_cut_evenly_are_accepted_and_no_others(
    tp: int, cp: int, pp: int, kv_heads: int, per_group: int, width: int, layers: int
) -> None:
    arch = replace(
        ARCH, num_heads=kv_heads * per_group, num_kv_heads=kv_heads, ffn_hidden_size=width, num_layers=layers
    )
    sharded = (arch.num_heads, kv_heads, width)
    even = all(equal_parts(count, tp) for count in sharded) and equal_parts(layers, pp)
    assert accepts(arch, Layout(tp=tp, cp=cp, pp=pp)) == even


@pytest.mark.parametrize(
    ("layout", "sizes", "expected"),
    [
        (
            Layout(tp=8),
            {},
            "parallel.tp = 8 must divide the model's KV heads (4); valid with this model: 1, 2, 4",
        ),
        (
            Layout(tp=3),
            {},
            "parallel.tp = 3 must divide the model's attention heads (8), KV heads (4); valid",
        ),
        (Layout(tp=4), {"ffn_hidden_size": 98}, "parallel.tp = 4 must divide the model's MLP width (98)"),
        (
            Layout(pp=4),
            {},
            "parallel.pp = 4 must divide the model's layers (6); valid with this model: 1, 2, 3, 6",
        ),
        (Layout(tp=2, ep=2), {}, "parallel.ep = 2, but the model is dense and has no experts; valid: 1"),
    ],
)
def test_messages_name_the_key_and_what_it_must_divide(
    layout: Layout, sizes: dict[str, Any], expected: str
) -> None:
    with pytest.raises(UserError, match=re.escape(expected)):
        check_layout(replace(ARCH, **sizes), layout)


@pytest.mark.parametrize("sizes", [{}, {"ffn_hidden_size": 98}, {"num_kv_heads": 8}, {"num_layers": 7}])
@pytest.mark.parametrize("key", ["tp", "pp"])
def test_the_values_called_valid_are_all_that_are_accepted(key: str, sizes: dict[str, Any]) -> None:
    arch = replace(ARCH, **sizes)
    with pytest.raises(UserError) as caught:
        check_layout(arch, Layout(**{key: 17}))
    called_valid = [int(n) for n in str(caught.value).split("valid with this model: ")[1].split(", ")]
    most = 2 * max(arch.num_heads, arch.num_layers)
    assert called_valid == [n for n in range(1, most + 1) if accepts(arch, Layout(**{key: n}))]


MIXTURE = replace(
    ARCH,
    moe=MoESpec(num_experts=12, top_k=2, ffn_hidden_size=24, shared_ffn_hidden_size=40),
    moe_layers=(False,) + (True,) * 5,
)
HYBRID = replace(
    ARCH, sizes={GDN: GDNSpec(4, 8, 8, 8, 4)}, mixers=(GDN, GDN, ATTENTION, GDN, ATTENTION, ATTENTION)
)


@given(
    tp=st.integers(1, 9),
    ep=st.integers(1, 13),
    experts=st.integers(2, 12),
    width=st.integers(1, 24),
    shared=st.integers(0, 12),
    all_mixtures=st.booleans(),
)
def test_mixtures_are_cut_by_expert_and_by_width(
    tp: int, ep: int, experts: int, width: int, shared: int, all_mixtures: bool
) -> None:
    moe = MoESpec(experts, 2, width, shared_ffn_hidden_size=shared)
    arch = replace(MIXTURE, moe=moe, moe_layers=(all_mixtures,) + (True,) * 5, ffn_hidden_size=36)
    cut = [
        arch.num_heads,
        arch.num_kv_heads,
        width,
        *([shared] if shared else []),
        *([] if all_mixtures else [36]),
    ]
    even = all(equal_parts(count, tp) for count in cut) and equal_parts(experts, ep)
    assert accepts(arch, Layout(tp=tp, ep=ep)) == even


@given(tp=st.integers(1, 9), cp=st.integers(1, 9), key_heads=st.integers(1, 8), repeat=st.integers(1, 3))
def test_delta_net_heads_are_dealt_over_tp_and_cp(tp: int, cp: int, key_heads: int, repeat: int) -> None:
    arch = replace(HYBRID, sizes={GDN: GDNSpec(key_heads, key_heads * repeat, 8, 8, 4)})
    attention = equal_parts(arch.num_kv_heads, tp) and equal_parts(arch.ffn_hidden_size, tp)
    dealt = equal_parts(key_heads, tp * cp) and equal_parts(key_heads * repeat, tp * cp)
    assert accepts(arch, Layout(tp=tp, cp=cp)) == (attention and dealt)


def test_with_lastkv_every_stage_of_a_hybrid_holds_attention() -> None:
    lastkv = replace(HYBRID, lastkv=LastKVSpec(8, True))
    for pp in (1, 2, 3, 6):
        stages = [HYBRID.mixers[i : i + 6 // pp] for i in range(0, 6, 6 // pp)]
        assert accepts(HYBRID, Layout(pp=pp))
        assert accepts(lastkv, Layout(pp=pp)) == all(ATTENTION in stage for stage in stages)
    assert accepts(replace(ARCH, lastkv=LastKVSpec(8, True)), Layout(pp=6))


@pytest.mark.parametrize(
    ("arch", "layout", "expected"),
    [
        (
            MIXTURE,
            Layout(ep=5),
            "parallel.ep = 5 must divide the model's experts (12); valid with this model: 1, 2",
        ),
        (
            replace(MIXTURE, moe=MoESpec(12, 2, 25, shared_ffn_hidden_size=40)),
            Layout(tp=2),
            "parallel.tp = 2 must divide the model's expert width (25); valid with this model: 1",
        ),
        (
            replace(MIXTURE, moe=MoESpec(12, 2, 24, shared_ffn_hidden_size=42)),
            Layout(tp=4),
            "shared expert width (42)",
        ),
        (
            HYBRID,
            Layout(tp=2, cp=4),
            "parallel.cp = 4: tp x cp = 8 must divide the model's Gated DeltaNet key heads (4)",
        ),
        (HYBRID, Layout(tp=2, cp=4), "valid with this model and parallel.tp = 2: 1, 2"),
        (
            replace(HYBRID, sizes={GDN: GDNSpec(2, 8, 8, 8, 4)}),
            Layout(tp=4),
            "parallel.tp = 4 must divide the model's Gated DeltaNet key heads (2); valid with this model: 1, 2",
        ),
        (
            replace(HYBRID, lastkv=LastKVSpec(8, True)),
            Layout(pp=6),
            "parallel.pp = 6: with LastKV every pipeline stage needs an attention layer; valid with this model: 1, 2",
        ),
    ],
)
def test_messages_of_mixtures_and_hybrids(arch: Architecture, layout: Layout, expected: str) -> None:
    with pytest.raises(UserError, match=re.escape(expected)):
        check_layout(arch, layout)


def test_the_sizes_that_are_padded_or_never_split_are_free() -> None:
    odd = replace(ARCH, hidden_size=37, vocab_size=29)
    assert accepts(odd, Layout(tp=4, cp=3, pp=3))


def test_the_builder_uses_this_check() -> None:
    assert check_layout_of_build is check_layout
