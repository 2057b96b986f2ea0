"""Which parameter of this rank's model stage is which entry of the conversion table."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch

from megatron_lrl.checkpoint.table import OUTPUT_LAYER, Entry, conversion_table
from megatron_lrl.models.hf_config import Architecture

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")


@dataclass(frozen=True)
class Binding:
    """Attributes:
    entries: the whole model's table.
    pairs: the stage's parameters, in table order.
    tied_head: the last stage's copy of a tied embedding when that stage is not the first, else None.
    """

    entries: tuple[Entry, ...]
    pairs: tuple[tuple[Entry, torch.nn.Parameter], ...]
    tied_head: torch.nn.Parameter | None


def unwrap(model: Any) -> Any:
    """The GPTModel inside DDP and precision wrappers."""
    while not hasattr(model, "decoder") and hasattr(model, "module"):
        model = model.module
    return model


def bind(model: torch.nn.Module, arch: Architecture) -> Binding:
    """Match this rank's parameters with the table by global layer number.

    Raises:
        ValueError: a parameter no entry describes, or of another shape than its entry gives it.
    """
    gpt = unwrap(model)
    entries = conversion_table(arch)
    by_name = {name: entry for entry in entries for name in (entry.name, entry.te_name)}
    found: dict[str, torch.nn.Parameter] = {}
    tied_head = None
    for name, parameter in gpt.named_parameters():
        if arch.tied and name == OUTPUT_LAYER:
            tied_head = parameter
            continue
        name = _LAYER.sub(lambda m: f"decoder.layers.{_global_layer(gpt, int(m[1]))}.", name)
        if name not in by_name:
            raise ValueError(f"parameter {name} has no entry in the {arch.family} conversion table")
        found[by_name[name].name] = parameter
    _check_stage(gpt, entries, found)
    pairs = tuple((entry, found[entry.name]) for entry in entries if entry.name in found)
    return Binding(entries, pairs, tied_head)


def _global_layer(gpt: Any, local: int) -> int:
    """0-based layer of the whole model: Megatron-Core numbers layers from 1 across stages."""
    return int(gpt.decoder.layers[local].layer_number) - 1


def _check_stage(gpt: Any, entries: tuple[Entry, ...], found: dict[str, torch.nn.Parameter]) -> None:
    """Every entry of the stage's layers must be there: a missing one would keep its initial value."""
    layers = {_global_layer(gpt, i) for i in range(len(gpt.decoder.layers))}
    missing = [e.name for e in entries if e.layer in layers and e.name not in found]
    if missing:
        raise ValueError(f"the model lacks {len(missing)} parameter(s) of the table, first: {missing[0]}")
