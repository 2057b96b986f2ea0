"""Claim: the key `lastkv` of config.json makes an architecture a LastKV one, is part of its identity, survives a
round trip through `raw`, and is refused when it says anything that is not understood.

Why the tests show it: architectures are read from configurations that differ in this key alone; fingerprints, words
and raw configurations are compared with the values written down here. The conversion table is held against the
parameters of a built model.
Not shown: files and weights (tests/checkpoint), the attention itself (tests/lastkv).
"""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
import torch
from oracle.tiny_models import FAMILIES

from megatron_lrl.checkpoint.binding import bind
from megatron_lrl.checkpoint.table import check_names, conversion_table, is_gate
from megatron_lrl.errors import UserError
from megatron_lrl.layers.kinds import describe_attention
from megatron_lrl.models.build import build_model
from megatron_lrl.models.hf_config import Architecture, LastKVSpec, architecture_from_dict
from megatron_lrl.precision import Precision
from megatron_lrl.runtime import Layout, runtime_scope


def _raw(family: str = "llama", **fields: Any) -> dict[str, Any]:
    return {
        "model_type": family,
        "vocab_size": 31,
        "hidden_size": 32,
        "intermediate_size": 20,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 4,
        **fields,
    }


def _read(family: str = "llama", **lastkv: Any) -> Architecture:
    return architecture_from_dict(_raw(family, **({"lastkv": lastkv} if lastkv else {})))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_key_is_read_and_written_back(family: str) -> None:
    plain = _read(family)
    assert plain.lastkv is None and describe_attention(plain) == "full" and "lastkv" not in plain.to_dict()
    for value, words in (
        ({"chunk_size": 512, "blend": True}, "lastkv C=512 blend"),
        ({"chunk_size": 1, "blend": False}, "lastkv C=1"),
    ):
        arch = _read(family, **value)
        assert arch.lastkv == LastKVSpec(**value) and describe_attention(arch) == words
        assert arch.to_dict()["lastkv"] == arch.raw["lastkv"] == arch.lastkv.to_dict() == value
        assert architecture_from_dict(arch.raw) == arch
        converted = plain.with_lastkv(LastKVSpec(**value))
        assert converted == arch and converted.raw == arch.raw
        assert arch.with_lastkv(None) == plain and arch.with_lastkv(None).raw == plain.raw
    assert architecture_from_dict(_raw(family, lastkv=None)) == plain


def test_chunk_size_and_blend_are_part_of_the_fingerprint() -> None:
    kinds = [
        _read(),
        _read(chunk_size=8, blend=True),
        _read(chunk_size=8, blend=False),
        _read(chunk_size=9, blend=True),
    ]
    for one, other in combinations(kinds, 2):
        assert one.fingerprint() != other.fingerprint() and describe_attention(one) != describe_attention(
            other
        )
    assert kinds[1].fingerprint() == _read(chunk_size=8, blend=True).fingerprint()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (True, "lastkv = True must be an object"),
        (False, "lastkv = False must be an object"),
        (512, "lastkv = 512 must be an object"),
        ([512, True], "must be an object"),
        ({}, "lastkv.chunk_size = None must be a positive integer"),
        ({"blend": True}, "lastkv.chunk_size = None must be a positive integer"),
        ({"chunk_size": 0, "blend": True}, "lastkv.chunk_size = 0 must be a positive integer"),
        ({"chunk_size": -8, "blend": True}, "lastkv.chunk_size = -8"),
        ({"chunk_size": True, "blend": True}, "lastkv.chunk_size = True"),
        ({"chunk_size": 8.0, "blend": True}, "lastkv.chunk_size = 8.0"),
        ({"chunk_size": "8", "blend": True}, "lastkv.chunk_size = '8'"),
        ({"chunk_size": 8}, "lastkv.blend = None must be true or false"),
        ({"chunk_size": 8, "blend": 1}, "lastkv.blend = 1 must be true or false"),
        ({"chunk_size": 8, "blend": "true"}, "lastkv.blend = 'true'"),
        ({"chunk_size": 8, "blend": True, "gate_init": 0.1}, "lastkv.gate_init is an unknown field"),
        ({"chunk_size": 8, "blend": True, "chunk": 8}, "lastkv.chunk is an unknown field"),
    ],
)
def test_what_is_not_understood_is_refused(value: Any, message: str) -> None:
    with pytest.raises(UserError) as error:
        architecture_from_dict(_raw(lastkv=value), source="here/config.json")
    assert message in str(error.value) and str(error.value).startswith("here/config.json: lastkv")
    assert 'valid: {"chunk_size": 512, "blend": true}' in str(error.value)


@pytest.mark.parametrize("family", FAMILIES)
def test_gates_are_in_the_table_and_in_the_model_with_the_key_only(family: str) -> None:
    plain, lastkv = _read(family), _read(family, chunk_size=8, blend=True)
    before, after = conversion_table(plain), conversion_table(lastkv)
    gates = [entry for entry in after if is_gate(entry.name)]
    assert [entry for entry in after if not is_gate(entry.name)] == list(before)
    assert [entry.hf_names for entry in gates] == [
        (f"model.layers.{layer}.self_attn.lastkv_gate",) for layer in range(3)
    ]
    for entry in gates:
        assert entry.hf_shapes == (torch.Size((4,)),)
        gate_M = torch.arange(4.0)
        shards = [entry.op.to_shard([gate_M], rank, 2, entry.width) for rank in range(2)]
        assert [shard.tolist() for shard in shards] == [[0, 1], [2, 3]]
        assert torch.equal(entry.op.from_shards(shards, entry.hf_shapes)[0], gate_M)

    names = {
        describe_attention(arch): [n for e in conversion_table(arch) for n in e.hf_names]
        for arch in (plain, lastkv)
    }
    with pytest.raises(
        UserError, match=r"3 tensor\(s\) missing, first: model\.layers\.0\.self_attn\.lastkv_gate"
    ):
        check_names(after, names["full"], lastkv, "source")
    with pytest.raises(UserError, match=r"3 tensor\(s\) left over.*model\.layers\.0\.self_attn\.lastkv_gate"):
        check_names(before, names[describe_attention(lastkv)], plain, "source")

    with runtime_scope(Layout()) as runtime:
        for arch, table in ((plain, before), (lastkv, after)):
            bound = bind(build_model(arch, runtime, Precision(torch.float32)), arch)
            assert [entry.name for entry, _ in bound.pairs] == [entry.name for entry in table]
            shapes = {tuple(parameter.shape) for entry, parameter in bound.pairs if is_gate(entry.name)}
            assert shapes == (set() if arch is plain else {(4,)})
