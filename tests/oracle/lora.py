"""The oracle of adapters: a merged model and the chain rule, no low-rank product anywhere.

The function of W + s B A is that of a plain model with these weights, so its log-probabilities are transformers' and

    dA = s Bᵀ dW        dB = s dW Aᵀ

with dW from plain autograd through the merged model. Directories are written as peft writes them.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from oracle.tiny_families import pack_experts, unpack_experts

PREFIX = "base_model.model."


def weights_of(hf_dir: Path) -> dict[str, torch.Tensor]:
    """All tensors of a directory, experts one by one."""
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(hf_dir.glob("*.safetensors")):
        tensors |= load_file(file)
    return unpack_experts(tensors)


def write_adapter(
    hf_dir: Path, out: Path, leaves: Sequence[str], *, rank: int = 3, alpha: float = 5.0, seed: int = 1,
    experts: bool = False, **fields: Any,
) -> Path:  # fmt: skip
    """An adapter with random A and B on every matrix of the layers whose name ends in one of ``leaves``."""
    draw, tensors = torch.Generator().manual_seed(seed), {}
    for name, weight in weights_of(hf_dir).items():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] not in leaves or weight.dim() != 2 or "visual" in name or "mtp." in name:
            continue
        if ".experts." in name and not experts:
            continue
        outs, ins = weight.shape
        tensors[f"{PREFIX}{module}.lora_A.weight"] = torch.randn(rank, ins, generator=draw) / ins**0.5
        tensors[f"{PREFIX}{module}.lora_B.weight"] = torch.randn(outs, rank, generator=draw) / (4 * rank)
    out.mkdir(parents=True, exist_ok=True)
    save_file(tensors, out / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": str(hf_dir), "r": rank,
        "lora_alpha": alpha, "target_modules": list(leaves), "lora_dropout": 0.0, "bias": "none",
        "fan_in_fan_out": False, "inference_mode": True, **fields,
    }  # fmt: skip
    (out / "adapter_config.json").write_text(json.dumps(config))
    return out


def pairs_of(adapter: Path) -> tuple[float, dict[str, tuple[torch.Tensor, torch.Tensor]]]:
    """The scale, and module -> (A, B)."""
    config = json.loads((adapter / "adapter_config.json").read_text())
    root = config["r"] ** 0.5 if config.get("use_rslora") else config["r"]
    tensors = load_file(adapter / "adapter_model.safetensors")
    modules = sorted({name.removeprefix(PREFIX).rsplit(".lora_", 1)[0] for name in tensors})
    return config["lora_alpha"] / root, {
        m: (tensors[f"{PREFIX}{m}.lora_A.weight"], tensors[f"{PREFIX}{m}.lora_B.weight"]) for m in modules
    }


def merged(hf_dir: Path, adapter: Path, out: Path, widen: bool = False) -> Path:
    """The directory of the model with W + s B A in W's place, added in float64; ``widen``: and stored so."""
    scale, pairs = pairs_of(adapter)
    weights = weights_of(hf_dir)
    if widen:
        weights = {name: weight.double() for name, weight in weights.items()}
    for module, (a, b) in pairs.items():
        weight = weights[f"{module}.weight"]
        weights[f"{module}.weight"] = (weight.double() + scale * b.double() @ a.double()).to(weight.dtype)
    shutil.copytree(hf_dir, out, ignore=shutil.ignore_patterns("*.safetensors*"), dirs_exist_ok=True)
    packed = any(".experts.gate_up_proj" in n for f in hf_dir.glob("*.safetensors") for n in load_file(f))
    save_file(
        pack_experts(weights) if packed else weights, out / "model.safetensors", metadata={"format": "pt"}
    )
    return out


def chain(gradients: Mapping[str, torch.Tensor], adapter: Path) -> dict[str, torch.Tensor]:
    """The gradient of A and B, from the gradient of the merged model's weights by their names."""
    scale, pairs = pairs_of(adapter)
    gradients = unpack_experts(dict(gradients))
    found = {}
    for module, (a, b) in pairs.items():
        dw = gradients[f"{module}.weight"].double()
        found[f"{PREFIX}{module}.lora_A.weight"] = scale * b.double().t() @ dw
        found[f"{PREFIX}{module}.lora_B.weight"] = scale * dw @ a.double().t()
    return found
