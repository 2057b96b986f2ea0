"""Which parameter of this rank's model stage is which entry of the conversion table."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch

from megatron_lrl.checkpoint.table import OUTPUT_LAYER, Entry, conversion_table
from megatron_lrl.models.hf_config import Architecture
from megatron_lrl.runtime import unwrap

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
# Routed experts in the local spec (a module each) and in Transformer Engine's (one module, a weight each).
_EXPERT = re.compile(r"(?P<before>\.mlp\.experts\.(local_experts\.|linear_fc[12]\.weight))(?P<number>\d+)")


ADAPTER = ".adapter."
"""In the names of parameters that stand beside a weight; their entries are the adapter's own."""


@dataclass(frozen=True)
class Binding:
    """Attributes:
    entries: the whole model's table.
    pairs: the stage's parameters, and buffers that hold weights, in table order.
    tied_head: the last stage's copy of a tied embedding when that stage is not the first, else None.
    """

    entries: tuple[Entry, ...]
    pairs: tuple[tuple[Entry, torch.Tensor], ...]
    tied_head: torch.nn.Parameter | None


def bind(
    model: torch.nn.Module, arch: Architecture, ep: tuple[int, int] = (0, 1), packed: bool = False
) -> Binding:
    """Match this rank's parameters with the table by global layer and global expert number.

    `ep`: this rank's place among the expert-parallel ranks, and their number; `packed` as in `conversion_table`.

    Raises:
        ValueError: a parameter no entry describes, or an entry of this rank without its parameter.
    """
    gpt = unwrap(model)
    entries = conversion_table(arch, packed)
    first_expert = 0 if arch.moe is None else ep[0] * (arch.moe.num_experts // ep[1])
    by_name = {name: entry for entry in entries for name in (entry.name, entry.te_name)}
    found: dict[str, torch.Tensor] = {}
    tied_head = None
    for name, parameter in gpt.named_parameters():
        if ADAPTER in name:
            continue
        if arch.tied and name == OUTPUT_LAYER:
            tied_head = parameter
            continue
        name = _global_name(gpt, name, first_expert)
        if name not in by_name:
            raise ValueError(f"parameter {name} has no entry in the {arch.family} conversion table")
        found[by_name[name].name] = parameter
    for name, buffer in gpt.named_buffers():
        name = _global_name(gpt, name, first_expert)
        if name in by_name and by_name[name].buffer:
            found[by_name[name].name] = buffer
    _check_stage(gpt, entries, found, arch, ep)
    pairs = tuple((entry, found[entry.name]) for entry in entries if entry.name in found)
    return Binding(entries, pairs, tied_head)


def expert_owner(entry: Entry, arch: Architecture, ep_size: int) -> int:
    """The expert-parallel rank that holds an entry; what is no expert counts as rank 0's."""
    if entry.expert is None or arch.moe is None:
        return 0
    return entry.expert // (arch.moe.num_experts // ep_size)


def _global_name(gpt: Any, name: str, first_expert: int) -> str:
    name = _LAYER.sub(lambda m: f"decoder.layers.{_global_layer(gpt, int(m[1]))}.", name)
    return _EXPERT.sub(lambda m: f"{m['before']}{first_expert + int(m['number'])}", name)


def _global_layer(gpt: Any, local: int) -> int:
    """0-based layer of the whole model: Megatron-Core numbers layers from 1 across stages."""
    return int(gpt.decoder.layers[local].layer_number) - 1


def _check_stage(
    gpt: Any,
    entries: tuple[Entry, ...],
    found: dict[str, torch.Tensor],
    arch: Architecture,
    ep: tuple[int, int],
) -> None:
    """Every entry of the stage's layers must be there: a missing one would keep its initial value."""
    layers = {_global_layer(gpt, i) for i in range(len(gpt.decoder.layers))}
    missing = [
        e.name
        for e in entries
        if e.layer in layers
        and (e.expert is None or expert_owner(e, arch, ep[1]) == ep[0])
        and e.name not in found
    ]
    if missing:
        raise ValueError(f"the model lacks {len(missing)} parameter(s) of the table, first: {missing[0]}")
