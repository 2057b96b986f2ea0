"""Claim: a directory appears whole or not at all, only files that belong to a model travel with it, and a
model that does not fit the conversion table is noticed.

Why the tests show it: the block that fills the directory is made to fail, and the file system is looked at;
the carried names are compared with a list; parameters are added to and taken from a stand-in model. Not
shown: power loss.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron_lrl.checkpoint.binding import bind
from megatron_lrl.checkpoint.publish import carry_files, new_directory
from megatron_lrl.checkpoint.table import conversion_table
from megatron_lrl.errors import UserError
from megatron_lrl.models.hf_config import Architecture, architecture_from_dict


def test_a_failed_block_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="half way"):
        with new_directory(tmp_path / "out") as partial:
            (partial / "file").write_text("half")
            raise RuntimeError("half way")
    assert list(tmp_path.iterdir()) == []


def test_a_finished_block_is_published(tmp_path: Path) -> None:
    with new_directory(tmp_path / "deep" / "out") as partial:
        (partial / "file").write_text("whole")
        assert not (tmp_path / "deep" / "out").exists()
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["out"]
    with pytest.raises(UserError, match="not an empty directory"):
        with new_directory(tmp_path / "deep" / "out"):
            pytest.fail("the block must not run")


def test_only_files_of_the_model_travel(tmp_path: Path) -> None:
    carried = ["LICENSE", "README.md", "config.json", "merges.txt", "tokenizer.json", "tokenizer.model"]
    left = [
        "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "modeling_custom.py",
        "weights.gguf", ".hidden.json",
    ]  # fmt: skip
    source = tmp_path / "source"
    (source / "onnx").mkdir(parents=True)
    for name in carried + left:
        (source / name).write_text(name)
    assert carry_files(source, tmp_path / "target") == carried
    assert sorted(p.name for p in (tmp_path / "target").iterdir()) == carried


def _arch() -> Architecture:
    sizes = {"vocab_size": 5, "hidden_size": 8, "intermediate_size": 4, "num_hidden_layers": 2}
    return architecture_from_dict({"model_type": "llama", **sizes, "num_attention_heads": 2})


def _stage(names: list[str], first_layer: int) -> SimpleNamespace:
    """A stand-in for one stage of a model with one layer; only the names matter to `bind`."""
    named = [(name, torch.nn.Parameter(torch.zeros(1))) for name in names]
    decoder = SimpleNamespace(layers=[SimpleNamespace(layer_number=first_layer + 1)])
    return SimpleNamespace(decoder=decoder, named_parameters=lambda: named, named_buffers=lambda: [])


@pytest.mark.parametrize("transformer_engine", [False, True])
def test_parameters_bind_by_global_layer(transformer_engine: bool) -> None:
    entries = [e for e in conversion_table(_arch()) if e.layer == 1]
    names = [(e.te_name if transformer_engine else e.name).replace("layers.1.", "layers.0.") for e in entries]
    stage = _stage(names, first_layer=1)
    for model in (stage, SimpleNamespace(module=SimpleNamespace(module=stage))):  # bare, and wrapped twice
        assert [entry for entry, _ in bind(model, _arch()).pairs] == entries


def test_parameters_outside_the_table_and_absent_ones_are_errors() -> None:
    names = [e.name for e in conversion_table(_arch()) if e.layer == 0]
    with pytest.raises(ValueError, match=r"parameter decoder\.layers\.0\.extra has no entry"):
        bind(_stage([*names, "decoder.layers.0.extra"], 0), _arch())
    with pytest.raises(ValueError, match=r"lacks 1 parameter.*linear_fc2"):
        bind(_stage([n for n in names if "linear_fc2" not in n], 0), _arch())
