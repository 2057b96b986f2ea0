"""Whether a model can be cut the way a layout asks. Pure arithmetic: no Megatron-Core, no process group.

Whether the layout fits the number of ranks is `megatron_lrl.runtime.check_world`.
"""

from __future__ import annotations

import math

from megatron_lrl.errors import UserError
from megatron_lrl.layers.architecture import Architecture
from megatron_lrl.layers.kinds import kinds_of
from megatron_lrl.layers.moe import kind as moe
from megatron_lrl.runtime import Layout

__all__ = ["check_layout"]


def check_layout(arch: Architecture, layout: Layout) -> None:
    """Raise `UserError` naming the parallel size that does not divide the model, and all that do.

    Nothing is asked of the hidden size, the vocabulary or sequence lengths: hidden states are never split by
    column, vocabularies and sequences are padded.
    """
    valid = "valid with this model:"
    widths = {what: count for kind in kinds_of(arch) for what, count in kind.widths(arch).items()}
    if not all(arch.moe_layers):
        widths["MLP width"] = arch.ffn_hidden_size
    if arch.moe is not None:
        widths |= moe.widths(arch.moe)
    uneven = [f"{what} ({count})" for what, count in widths.items() if count % layout.tp]
    if uneven:
        raise UserError(
            f"parallel.tp = {layout.tp} must divide the model's {', '.join(uneven)}; "
            f"{valid} {_divisors(math.gcd(*widths.values()))}"
        )
    if arch.num_layers % layout.pp:
        raise UserError(
            f"parallel.pp = {layout.pp} must divide the model's layers ({arch.num_layers}); "
            f"{valid} {_divisors(arch.num_layers)}"
        )
    for kind in kinds_of(arch):
        kind.check_layout(arch, layout)
    moe.check_layout(arch, layout)


def _divisors(count: int) -> str:
    return ", ".join(str(n) for n in range(1, count + 1) if count % n == 0)
