"""`model.same_bits`: what it needs of a model and a layout, and whether this machine's kernels keep to it.

Kernels are probed with the shapes of the model: rows of one batch must be `torch.equal` to the same rows of another,
at other places and beside other rows. What a library or processor does about it is measured, not assumed.

Legend: M rows, k inputs, n outputs of a projection; h KV heads of g query heads, d head dim; v logits of a tp rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import RowParallelLinear
from torch import Tensor

from megatron_lrl.errors import UserError
from megatron_lrl.layers.activation import silu
from megatron_lrl.layers.architecture import ATTENTION, Architecture
from megatron_lrl.layers.layout import ROWS, TILE, with_whole_rows
from megatron_lrl.layers.moe.same_bits import keep_bits, release_bits
from megatron_lrl.layers.ordered_sums import keep_order, release_order
from megatron_lrl.layers.softmax import invariant
from megatron_lrl.models.head import of_targets
from megatron_lrl.runtime import Layout, Runtime
from megatron_lrl.settings import Config

_ROWS = tuple(ROWS * n for n in (1, 2, 3, 4, 8, 13))
_OPERATIONS = 2e10
"""Floating point operations that the probe of one product may take: it bounds the rows of the largest batch."""


def obstacles(config: Config, arch: Architecture, layout: Layout, device: torch.device) -> list[str]:
    """What of the model or the layout stands against the same bits, whatever the machine's kernels do."""
    found = []
    if layout.tp > 2 and config.adapter.on:
        found.append(f"[adapter] with parallel.tp = {layout.tp} (valid: 1, 2): its sums have no fixed order")
    if layout.tp > 2 and arch.moe is not None:
        found.append(f"experts with parallel.tp = {layout.tp} (valid: 1, 2): their sums have no fixed order")
    if strangers := sorted(set(arch.mixers) - {ATTENTION}):
        found.append(f"layers of kind {', '.join(strangers)}: prefill and one-token step are different sums")
    if arch.moe is not None and device.type == "cuda":
        found.append("experts on CUDA: grouped products were not shown to keep the bits")
    return found


def wants_same_bits(config: Config, arch: Architecture, layout: Layout, device: torch.device) -> bool:
    """Whether the model is built to keep the bits; `settle_same_bits` then asks the machine."""
    return config.model.same_bits != "off" and not obstacles(config, arch, layout, device)


def check_same_bits(config: Config, arch: Architecture, runtime: Runtime) -> None:
    """Raise `UserError` where ``model.same_bits = "on"`` cannot be kept, with what would be valid."""
    if config.model.same_bits == "on" and (found := obstacles(config, arch, runtime.layout, runtime.device)):
        raise UserError(
            f'model.same_bits = "on" is not possible with {"; ".join(found)}; set model.same_bits = "off"'
        )


def settle_same_bits(config: Config, arch: Architecture, runtime: Runtime, model: Any) -> str:
    """Probe every rank's kernels; what the run says about its bits ("" where it was not asked).

    Collective. Where a rank's kernels do not keep to it: `UserError` for "on"; for "auto" the model is set to go
    without.
    """
    if config.model.same_bits == "off":
        return ""
    if not model.same_bits:
        return f"same bits: off: {'; '.join(obstacles(config, arch, runtime.layout, runtime.device))}"
    rows = max(_ROWS[-1], config.prefix.chunk_size)
    failed = next((name for name in runtime.gather_objects(failing_operation(model, rows)) if name), None)
    if failed is None:
        return "same bits: on: every kernel was probed and keeps its rows' bits in any company"
    reason = f"on this machine {failed} gives a row other bits beside other rows"
    if config.model.same_bits == "on":
        raise UserError(f'model.same_bits = "on": {reason}; set model.same_bits = "off"')
    keep_same_bits(model, False)
    return f"same bits: off: {reason}"


def keep_same_bits(model: Any, on: bool) -> None:
    """Let a `PolicyModel` give a token the same bits in any company, or stop."""
    model.same_bits = on
    if next(model.parameters()).device.type == "cuda":
        invariant_products(on)
    ordered = model.pg_collection.tp.size() > 2
    for module in model.modules():
        if ordered and isinstance(module, RowParallelLinear):
            (keep_order if on else release_order)(module)
        if getattr(module, "config", None) is not None:
            module.config.activation_func = silu if on else F.silu
        if hasattr(module, "token_dispatcher"):
            (keep_bits if on else release_bits)(module)


def invariant_products(on: bool) -> None:
    """On CUDA, in the whole process: Megatron-Core's batch-invariant kernels in the place of cuBLAS's products of two
    matrices, log-softmax, means and Transformer Engine's own. What they leave (batched products) the probe judges."""
    from megatron.core.transformer.custom_layers import (
        batch_invariant_kernels as kernels,
    )  # Triton's: CUDA alone

    if on:
        kernels.enable_batch_invariant_mode()
    else:
        kernels.disable_batch_invariant_mode()


@torch.no_grad()
def failing_operation(model: Any, rows: int) -> str | None:
    """The first operation whose rows depend on their neighbours on this machine, in batches up to ``rows``."""
    for name, operation, make in _operations(model, rows):
        if not _rows_agree(operation, make):
            return name
    config = model.config
    h = config.num_query_groups // config.tensor_model_parallel_size
    g, d = config.num_attention_heads // config.num_query_groups, config.kv_channels
    if not _attention_agrees(h, g, d, next(model.parameters())):
        return f"attention over tiles of {TILE} keys, head dim {d}"
    return None


def _operations(
    model: Any, rows: int
) -> Iterator[tuple[str, Callable[[Tensor], Tensor], Callable[[torch.Generator], Tensor]]]:
    """Name, operation of [M, ...] and maker of its largest input, for every shape that this rank's layers have."""

    def maker(width: int, like: Tensor, count: int) -> Callable[[torch.Generator], Tensor]:
        return lambda generator: torch.randn(count, width, generator=generator).to(like)

    # An adapter's B is multiplied as `LowRank.expanded` lays it out.
    expanded = [m.expanded() for m in (() if model.adapters is None else model.adapters.modules)]
    weights = {(tuple(p.shape), p.dtype): p for p in (*model.parameters(), *expanded) if p.dim() == 2}
    for ((n, k), dtype), weight_nk in weights.items():
        count = with_whole_rows(max(_ROWS[-1], min(rows, int(_OPERATIONS / (2 * n * k)))))
        name = f"the product [M, {k}] x [{k}, {n}] in {str(dtype).removeprefix('torch.')}"
        yield name, partial(F.linear, weight=weight_nk), maker(k, weight_nk, count)
    like = next(model.parameters())
    hidden = model.config.hidden_size
    width = model.config.ffn_hidden_size // model.config.tensor_model_parallel_size
    yield "SiLU", silu, maker(width + width % 2 + 1, like, rows)  # an odd width: no vector ends with a row
    yield "RMSNorm", lambda x_MH: F.rms_norm(x_MH, (hidden,)), maker(hidden, like, rows)
    if model.post_process:
        tp = model.pg_collection.tp
        v = model.arch.padded_vocab_size(tp.size()) // tp.size()
        wide = like.new_empty(0, dtype=torch.promote_types(like.dtype, torch.float32))

        def logprobs(logits_Mv: Tensor) -> Tensor:
            target_M = torch.zeros(logits_Mv.shape[0], dtype=torch.long, device=logits_Mv.device)
            return of_targets(logits_Mv.clone(), target_M, None)[0]

        yield f"the log-softmax of {v} logits", logprobs, maker(v, wide, _ROWS[-1])


def _rows_agree(operation: Callable[[Tensor], Tensor], make: Callable[[torch.Generator], Tensor]) -> bool:
    x = make(torch.Generator().manual_seed(0))
    whole, count = operation(x), x.shape[0]
    return all(
        torch.equal(operation(x[first : first + rows]), whole[first : first + rows])
        for rows in (*_ROWS, count - ROWS)
        for first in {min(1, count - rows), (count - rows) // 2 if rows < 32 else 0}
    )


def _attention_agrees(h: int, g: int, d: int, like: Tensor) -> bool:
    generator = torch.Generator().manual_seed(0)
    tokens = TILE + 70
    q, k, v = (
        torch.randn(1, h, tokens, *rest, generator=generator).to(like) for rest in ((g, d), (d,), (d,))
    )
    whole, _ = invariant.attend(q, [invariant.Source(k, v)], range(1, tokens + 1), d**-0.5)
    for start in (0, 1, TILE - 1, TILE, tokens - 9):
        for length in (1, 4, 9):
            end = start + length
            sources = [invariant.Source(k[:, :, :end], v[:, :, :end])]
            visible = range(start + 1, end + 1)
            o, _ = invariant.attend(q[:, :, start:end], sources, visible, d**-0.5)
            if not torch.equal(o, whole[:, :, start:end]):
                return False
    return True
