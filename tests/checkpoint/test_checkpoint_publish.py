"""Claim: a directory appears whole or not at all, only files that belong to a model travel with it, and a
model that does not fit the conversion table is noticed.

Why the tests show it: directories are filled and published, or discarded, and the file system is looked at;
the carried names are compared with a list; parameters are added to and taken from a stand-in model. Not
shown: power loss.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron_lrl.checkpoint.binding import bind
from megatron_lrl.checkpoint.publish import carry_files, discard, prepare, publish
from megatron_lrl.checkpoint.table import conversion_table
from megatron_lrl.errors import UserError
from megatron_lrl.models.hf_config import Architecture, architecture_from_dict


def test_what_is_discarded_leaves_nothing(tmp_path: Path) -> None:
    (prepare(tmp_path / "out") / "file").write_text("half")
    discard(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_what_is_finished_is_published(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "out"
    (prepare(target) / "of an interrupted run").write_text("half")
    (prepare(target) / "file").write_text("whole")
    assert not target.exists()
    publish(target)
    discard(target)
    assert [str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*")] == [
        "deep",
        "deep/out",
        "deep/out/file",
    ]
    with pytest.raises(UserError, match="not an empty directory"):
        prepare(target)


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
