"""Whether a model can be cut the way a layout asks. Pure arithmetic: no Megatron-Core, no process group.

Whether the layout fits the number of ranks is `megatron_lrl.runtime.check_world`.
"""

from __future__ import annotations

import math

from megatron_lrl.errors import UserError
from megatron_lrl.layers.architecture import ATTENTION, Architecture
from megatron_lrl.runtime import Layout

__all__ = ["check_layout"]


def check_layout(arch: Architecture, layout: Layout) -> None:
    """Raise `UserError` naming the parallel size that does not divide the model, and all that do.

    Nothing is asked of the hidden size, the vocabulary or sequence lengths: hidden states are never split by
    column, vocabularies and sequences are padded.
    """
    valid = "valid with this model:"
    widths = {"attention heads": arch.num_heads, "KV heads": arch.num_kv_heads}
    if not all(arch.moe_layers):
        widths["MLP width"] = arch.ffn_hidden_size
    if arch.moe is not None:  # experts are split over tp as a dense MLP is
        widths["expert width"] = arch.moe.ffn_hidden_size
        if arch.moe.shared_ffn_hidden_size:
            widths["shared expert width"] = arch.moe.shared_ffn_hidden_size
    if arch.gdn is not None:
        widths |= {"Gated DeltaNet key heads": arch.gdn.key_heads, "value heads": arch.gdn.value_heads}
    uneven = [f"{what} ({count})" for what, count in widths.items() if count % layout.tp]
    if uneven:
        raise UserError(
            f"parallel.tp = {layout.tp} must divide the model's {', '.join(uneven)}; "
            f"{valid} {_divisors(math.gcd(*widths.values()))}"
        )
    if arch.gdn is not None:
        # Gated DeltaNet exchanges heads for tokens over cp: what tp left of the heads is dealt to the cp ranks
        heads = math.gcd(arch.gdn.key_heads, arch.gdn.value_heads) // layout.tp
        if heads % layout.cp:
            raise UserError(
                f"parallel.cp = {layout.cp}: tp x cp = {layout.tp * layout.cp} must divide the model's Gated DeltaNet "
                f"key heads ({arch.gdn.key_heads}) and value heads ({arch.gdn.value_heads}); "
                f"valid with this model and parallel.tp = {layout.tp}: {_divisors(heads)}"
            )
    if arch.num_layers % layout.pp:
        raise UserError(
            f"parallel.pp = {layout.pp} must divide the model's layers ({arch.num_layers}); "
            f"{valid} {_divisors(arch.num_layers)}"
        )
    if arch.lastkv is not None and not _attention_everywhere(arch, layout.pp):
        usable = [
            pp for pp in range(1, layout.pp) if not arch.num_layers % pp and _attention_everywhere(arch, pp)
        ]
        raise UserError(
            f"parallel.pp = {layout.pp}: with LastKV every pipeline stage needs an attention layer; "
            f"{valid} {', '.join(map(str, usable))}"
        )
    if arch.moe is None:
        if layout.ep != 1:
            raise UserError(f"parallel.ep = {layout.ep}, but the model is dense and has no experts; valid: 1")
    elif arch.moe.num_experts % layout.ep:
        raise UserError(
            f"parallel.ep = {layout.ep} must divide the model's experts ({arch.moe.num_experts}); "
            f"{valid} {_divisors(arch.moe.num_experts)}"
        )


def _attention_everywhere(arch: Architecture, pp: int) -> bool:
    """Whether each of pp equal stages holds an attention layer."""
    if not arch.hybrid:
        return True
    per_stage = arch.num_layers // pp
    return all(ATTENTION in arch.mixers[stage * per_stage :][:per_stage] for stage in range(pp))


def _divisors(count: int) -> str:
    return ", ".join(str(n) for n in range(1, count + 1) if count % n == 0)
