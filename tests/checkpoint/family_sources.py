"""Hugging Face directories of the families with experts, recurrent layers and carried tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from oracle.tiny_families import MORE_CASES
from oracle.tiny_models import make_hf_dir
from safetensors import safe_open
from safetensors.torch import load_file, save_file

INDEX = "model.safetensors.index.json"

# id -> (family, variation): the cases of the score tests, and others that only a conversion can tell apart.
SOURCES: dict[str, tuple[str, dict[str, Any]]] = {
    **MORE_CASES,
    # bfloat16, router weight and bias in float32 as GLM publishes them; several shards
    "glm4_moe-bf16": (
        "glm4_moe",
        {
            "dtype": torch.bfloat16,
            "wide": ("e_score_correction_bias", "gate.weight"),
            "max_shard_size": "40KB",
            "mtp": True,
        },
    ),
    # bfloat16 throughout: what the model keeps wide comes back narrow
    "qwen3_5-vl-bf16": (
        "qwen3_5",
        {"wrapper": True, "mtp": True, "dtype": torch.bfloat16, "wide": (), "max_shard_size": "30KB"},
    ),
    # bfloat16 with A_log in float32
    "qwen3_next-bf16": (
        "qwen3_next",
        {"packed": True, "mtp": True, "dtype": torch.bfloat16, "wide": ("A_log",), "max_shard_size": "60KB"},
    ),
}


def write_source(root: Path, case: str, seed: int = 7) -> Path:
    """Writes one of `SOURCES` below `root` unless it is there, and returns its directory."""
    path = root / case
    if not path.exists():
        family, variation = SOURCES[case]
        make_hf_dir(path, family, seed, **variation)
    return path


def stored(directory: Path) -> dict[str, tuple[str, torch.Tensor]]:
    """Name -> (file, tensor) of all safetensors files of a directory."""
    tensors = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="pt") as handle:
            tensors |= {name: (path.name, handle.get_tensor(name)) for name in handle.keys()}  # noqa: SIM118
    return tensors


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal dtype, shape and bytes, whatever the dtype."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(
        one.contiguous().reshape(-1).view(torch.uint8), other.contiguous().reshape(-1).view(torch.uint8)
    )


def assert_same_directory(found: Path, expected: Path) -> None:
    """Same files; every tensor in the same file with the same bits, every other file with the same bytes."""
    assert sorted(p.name for p in found.iterdir()) == sorted(p.name for p in expected.iterdir())
    ours, theirs = stored(found), stored(expected)
    assert ours.keys() == theirs.keys() and len(theirs) > 20
    for name, (file, tensor) in theirs.items():
        assert ours[name][0] == file and same_bits(ours[name][1], tensor), f"{expected.name} {name}"
    for path in expected.iterdir():
        if path.suffix == ".json" and path.name == INDEX:
            assert json.loads((found / path.name).read_text()) == json.loads(path.read_text())
        elif path.suffix != ".safetensors":
            assert (found / path.name).read_bytes() == path.read_bytes(), path.name


def edit(directory: Path, change: Any) -> None:
    """Rewrites the single file of a directory: `change` gets its tensors and returns the new ones."""
    path = directory / "model.safetensors"
    save_file(
        {n: t.contiguous() for n, t in change(load_file(path)).items()}, path, metadata={"format": "pt"}
    )


def quantise(directory: Path, names: list[str], seed: int = 3) -> dict[str, torch.Tensor]:
    """Stores tensors as FP8 with a scale per 128 x 128 block; returns what they mean in bfloat16.

    Written without the code under test: scales are spread over whole tensors.
    """
    draw = torch.Generator().manual_seed(seed)
    meant = {}

    def change(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        for name in names:
            weight = tensors[name].float()
            rows, columns = weight.shape[-2:]
            blocks = (*weight.shape[:-2], -(-rows // 128), -(-columns // 128))
            scale = torch.rand(blocks, generator=draw) * 0.01 + 0.001
            spread = scale.repeat_interleave(128, -2).repeat_interleave(128, -1)[..., :rows, :columns]
            tensors[name] = (weight / spread).clamp(-448, 448).to(torch.float8_e4m3fn)
            tensors[name + "_scale_inv"] = scale
            meant[name] = (tensors[name].float() * spread).to(torch.bfloat16)
        return tensors

    edit(directory, change)
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (directory / "config.json").write_text(json.dumps(config))
    return meant
