"""Directories as peft writes them: adapter_config.json and adapter_model.safetensors, read strictly and written.

A field that would change what the adapter computes and is not implemented is refused by name. Dropout acts in training
alone, and here never: sampler and trainer would evaluate different policies.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from megatron_lrl.adapters.adapt import AdapterSpec, Given
from megatron_lrl.adapters.table import PREFIX, adaptable
from megatron_lrl.checkpoint.safetensors_io import DTYPES, SafetensorsReader
from megatron_lrl.checkpoint.safetensors_writer import TensorPart, write_file
from megatron_lrl.errors import UserError
from megatron_lrl.layers.architecture import Architecture
from megatron_lrl.reading import read_object, shown

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
_PARTS = (".lora_A.weight", ".lora_B.weight")
# Fields that say nothing of the computation, or only of how the adapter started or is trained elsewhere.
_INERT = {
    "alora_invocation_tokens", "auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying",
    "eva_config", "inference_mode", "init_lora_weights", "layers_pattern", "loftq_config", "lora_dropout",
    "megatron_config", "megatron_core", "peft_version", "qalora_group_size", "revision", "runtime_config",
    "target_modules", "exclude_modules", "layers_to_transform", "task_type", "arrow_config", "lora_ga_config",
}  # fmt: skip
# Fields of which one value is implemented.
_FIXED: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "fan_in_fan_out": (False,),
    "use_dora": (False, None),
    "use_qalora": (False, None),
    "use_bdlora": (False, None),
    "lora_bias": (False, None),
    "modules_to_save": (None, []),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "target_parameters": (None, []),
    "layer_replication": (None,),
    "trainable_token_indices": (None,),
}


def read_spec(directory: str | Path) -> AdapterSpec:
    """What the adapter of a directory is, from its two files' headers.

    Raises `UserError` naming the file and the field or tensor: missing, damaged, or not implemented.
    """
    path = Path(directory) / CONFIG_FILE
    config = read_object(path)
    for field, value in config.items():
        if field in _FIXED:
            if value not in _FIXED[field]:
                raise UserError(
                    f"{path}: {field} = {shown(value)} is not implemented; valid: {shown(_FIXED[field][0])}"
                )
        elif (
            field not in _INERT
            and field not in {"r", "lora_alpha", "use_rslora"}
            and value not in (None, False, {}, [])
        ):
            raise UserError(f"{path}: {field} = {shown(value)} is not a field that is known here")
    if "peft_type" not in config:
        raise UserError(f'{path}: peft_type is missing; valid: "LORA"')
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise UserError(f"{path}: r = {shown(rank)} is not a rank; valid: an integer of at least 1")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or alpha <= 0:
        raise UserError(f"{path}: lora_alpha = {shown(alpha)} is not a scale; valid: a number above 0")
    with SafetensorsReader(directory, WEIGHTS_FILE) as reader:
        names = {record.name for record in reader.layout.tensors}
    modules = {
        name.removeprefix(PREFIX).removesuffix(part)
        for name in names
        for part in _PARTS
        if name.endswith(part)
    }
    expected = {f"{PREFIX}{module}{part}" for module in modules for part in _PARTS}
    if odd := sorted(names ^ expected):
        what = "missing" if odd[0] in expected else "not one of a LoRA adapter (A and B of modules)"
        raise UserError(f"{Path(directory) / WEIGHTS_FILE}: tensor {odd[0]} is {what}")
    if not modules:
        raise UserError(f"{Path(directory) / WEIGHTS_FILE}: no tensors")
    return AdapterSpec(rank, float(alpha), frozenset(modules), rooted=config.get("use_rslora") is True)


@contextmanager
def tensors_of(directory: str | Path) -> Iterator[Given]:
    """The tensors of a directory, checked for shape and dtype when they are asked for."""
    with SafetensorsReader(directory, WEIGHTS_FILE) as reader:

        def tensor(name: str, shape: torch.Size) -> Any:
            record = reader.record(name)
            if record.shape != tuple(shape) or record.dtype not in DTYPES:
                raise UserError(
                    f"{reader.path(name)}: tensor {name} is {record.dtype} {list(record.shape)}; this model and the "
                    f"directory's {CONFIG_FILE} need a floating one of {list(shape)}"
                )
            found = reader.tensor(name)[slice(None), slice(None)]
            if not bool(found.isfinite().all()):
                raise UserError(f"{reader.path(name)}: tensor {name} holds values that are NaN or infinite")
            return found

        yield tensor


def peft_config(spec: AdapterSpec, arch: Architecture, base: str) -> dict[str, Any]:
    """adapter_config.json of an adapter. ``base``: where its base model lies, for people and for peft."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": spec.rank,
        "lora_alpha": int(spec.alpha) if spec.alpha == int(spec.alpha) else spec.alpha,
        "use_rslora": spec.rooted,
        "target_modules": _targets(spec, arch),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }


def write_peft(
    directory: Path, spec: AdapterSpec, arch: Architecture, base: str, tensors: Any, dtype: torch.dtype
) -> None:
    """Write both files. ``tensors``: (name, tensor) in table order."""
    shapes = {
        name: (dtype, shape)
        for weight in spec.weights(arch)
        for entry in (weight.a, weight.b)
        for name, shape in zip(entry.hf_names, entry.hf_shapes, strict=True)
    }
    write_file(directory / WEIGHTS_FILE, shapes, (TensorPart(name, x, None) for name, x in tensors))
    text = json.dumps(peft_config(spec, arch, base), indent=2) + "\n"
    (directory / CONFIG_FILE).write_text(text, encoding="utf-8")


def _targets(spec: AdapterSpec, arch: Architecture) -> list[str]:
    """Last parts of names where they mean these modules and no others, else whole names."""
    leaves = {name.rpartition(".")[2] for name in spec.modules}
    meant = {name for _, name in adaptable(arch) if name.rpartition(".")[2] in leaves}
    alone = not arch.carried  # a vision tower has projections of the same names
    return sorted(leaves if alone and meant == spec.modules else spec.modules)
