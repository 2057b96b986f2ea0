"""Claim: a directory with an adapter beside its weights is refused by every verb that opens it, by the file's name.

Why this shows it: the adapter's files are those that peft writes, put beside a model that loads without them; the verbs
run through the command line.
It does not show: adapters under names that peft does not use.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from oracle.tiny_models import make_hf_dir
from safetensors.torch import save_file

from megatron_lrl.cli import main
from megatron_lrl.errors import UserError
from megatron_lrl.models.hf_config import read_architecture


@pytest.fixture
def adapted(tmp_path: Path) -> Path:
    folder = make_hf_dir(tmp_path / "m", "qwen3", 0, layers=1)
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    weights = {
        f"base_model.model.model.layers.0.self_attn.{part}.lora_{ab}.weight": torch.randn(shape)
        for part, width in (("q_proj", 64), ("v_proj", 32))
        for ab, shape in (("A", (2, 32)), ("B", (width, 2)))
    }
    save_file(weights, folder / "adapter_model.safetensors")
    return folder


def test_an_adapter_is_refused_not_dropped(
    adapted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        with pytest.raises(UserError, match=f"{name}: an adapter beside the weights"):
            read_architecture(adapted)
        assert main(["import", str(adapted), str(tmp_path / "ckpt")]) == 2
        assert f"{adapted / name}: an adapter" in capsys.readouterr().err
        assert not (tmp_path / "ckpt").exists()
        (adapted / name).unlink()
    read_architecture(adapted)
