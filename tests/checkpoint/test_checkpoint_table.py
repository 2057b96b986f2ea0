"""Claim: the table of each family names exactly the tensors, with the shapes, that transformers saves for
that family.

Why the tests show it: names and shapes are compared with the state dict of transformers' own model class,
over the options that add or remove tensors; every Megatron parameter appears once. Not shown: what the
tensors mean (the score tests show that) and the Transformer Engine names, which are held against Megatron-
Core's own key map only.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracle.tiny_models import FAMILIES

from megatron_lrl.checkpoint.table import HF_HEAD, Entry, check_names, conversion_table
from megatron_lrl.errors import UserError
from megatron_lrl.models.hf_config import Architecture, architecture_from_dict

OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"tie_word_embeddings": True}),
    ("llama", {"attention_bias": True, "head_dim": 12}),
    ("qwen2", {}),
    ("qwen2", {"tie_word_embeddings": True}),
    ("qwen3", {"head_dim": 12}),
    ("qwen3", {"head_dim": 16, "attention_bias": True, "tie_word_embeddings": True}),
]


def _model(family: str, options: dict[str, Any]) -> tuple[Architecture, dict[str, torch.Size]]:
    config_class, model_class = FAMILIES[family]
    config = config_class(
        vocab_size=31,
        hidden_size=32,
        intermediate_size=20,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        **options,
    )
    with torch.device("meta"):
        state = model_class(config).state_dict()
    tied = options.get("tie_word_embeddings", False)
    shapes = {name: tensor.shape for name, tensor in state.items() if not (tied and name == HF_HEAD)}
    return architecture_from_dict(config.to_dict()), shapes


@pytest.mark.parametrize(("family", "options"), OPTIONS)
def test_names_and_shapes_are_those_of_transformers(family: str, options: dict[str, Any]) -> None:
    arch, expected = _model(family, options)
    table = conversion_table(arch)
    found = {name: shape for e in table for name, shape in zip(e.hf_names, e.hf_shapes, strict=True)}
    assert found == expected
    assert len({e.name for e in table}) == len(table) == len({e.te_name for e in table})
    check_names(table, expected, arch, "source")


def test_fused_norm_names_are_megatrons_own() -> None:
    from megatron_lrl.platform_cpu import install

    install()
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_submodules

    key_map = get_gpt_layer_local_submodules(normalization="RMSNorm").sharded_state_dict_keys_map
    renamed = {e.name: e.te_name for e in _table() if e.name != e.te_name}
    assert len(renamed) == 2 * 2
    for local, fused in renamed.items():
        prefix = ".".join(local.split(".")[:3]) + "."
        (mapped,) = [
            to + local.removeprefix(prefix + key)
            for key, to in key_map.items()
            if local.startswith(prefix + key)
        ]
        assert prefix + mapped == fused


def _table() -> tuple[Entry, ...]:
    return conversion_table(_model("llama", {})[0])


def test_missing_and_left_over_tensors_are_errors() -> None:
    arch, shapes = _model("qwen3", {})
    table = conversion_table(arch)
    with pytest.raises(
        UserError, match=r"dir: 1 tensor\(s\) missing, first: model.layers.1.self_attn.k_norm.weight"
    ):
        check_names(table, set(shapes) - {"model.layers.1.self_attn.k_norm.weight"}, arch, "dir")
    with pytest.raises(UserError, match=r"left over .*model.layers.2.mlp.up_proj.weight"):
        check_names(table, {*shapes, "model.layers.2.mlp.up_proj.weight"}, arch, "dir")
    with pytest.raises(UserError, match=r"left over .*model.layers.0.self_attn.rotary_emb.inv_freq_extra"):
        check_names(table, {*shapes, "model.layers.0.self_attn.rotary_emb.inv_freq_extra"}, arch, "dir")
    # recomputed buffers are the one exception
    check_names(table, {*shapes, "model.layers.0.self_attn.rotary_emb.inv_freq"}, arch, "dir")


def test_a_tied_head_may_be_stored_and_an_untied_one_must() -> None:
    tied, shapes = _model("llama", {"tie_word_embeddings": True})
    check_names(conversion_table(tied), {*shapes, HF_HEAD}, tied, "dir")
    untied, shapes = _model("llama", {})
    with pytest.raises(UserError, match=r"missing, first: lm_head\.weight"):
        check_names(conversion_table(untied), set(shapes) - {HF_HEAD}, untied, "dir")
