"""Files beside config.json that would change the model, or run: refused by name.

An adapter's weights belong to the function that the directory stands for, and so does the code that `auto_map` names;
neither is read here, so a directory that has them is not opened as if it had not.
"""

from __future__ import annotations

import json
from pathlib import Path

from megatron_lrl.errors import UserError
from megatron_lrl.reading import read_object

__all__ = ["refuse_adapters", "refuse_code"]

_ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")
_WITH_CODE = ("config.json", "tokenizer_config.json")


def refuse_adapters(directory: Path) -> None:
    """Raise `UserError` if an adapter (as peft writes it) lies beside the weights."""
    for name in _ADAPTER_FILES:
        if (directory / name).exists():
            raise UserError(
                f"{directory / name}: an adapter beside the weights: which of the two is meant is not clear; move the "
                "adapter's files to a directory of their own and name it as adapter.path, merge them (peft: "
                "merge_and_unload), or take them away"
            )


def refuse_code(directory: Path) -> None:
    """Raise `UserError` if loading would need code of the directory (`auto_map`). It never runs."""
    for name in _WITH_CODE:
        path = directory / name
        named = read_object(path).get("auto_map") if path.is_file() else None
        if named:
            raise UserError(
                f"{path}: auto_map = {json.dumps(named)} names code of the directory, which never runs here; take "
                "auto_map out of the file if transformers' own classes do the same"
            )
