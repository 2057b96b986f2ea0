"""Comparing accumulated gradients where they lie, sharded, without gathering them.

Works on the reduced buffers of a window, whether every rank holds the whole gradient of its parameters
(`grad`, `check`) or only its shard (`train` with a distributed optimizer).

Legend: a is the gradient under test, b the one it is compared with.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared
from torch import Tensor

from megatron_lrl.layers.kinds import KINDS
from megatron_lrl.lifetimes.optim import gradient_buffers
from megatron_lrl.runtime import Runtime, unwrap


def _groups() -> tuple[tuple[str, str], ...]:
    """(name, regular expression) of the groups in which parameters are compared; the first that matches counts."""
    return (
        ("embedding", r"embedding\."),
        ("output", r"output_layer\."),
        ("router", r"router\."),
        ("experts", r"\.experts\."),
        ("mlp", r"linear_fc[12]\.(weight|bias)|gate_weight"),
        *(group for kind in KINDS.values() for group in kind.parameters),
        ("norms", r"norm"),
    )


_ADAPTED = re.compile(r"\.adapter\.lora_[AB]$")  # an adapter's parameters count as the weight's beside them


@dataclass(frozen=True)
class GradientComparison:
    """How gradient a stands to gradient b over a set of parameters."""

    cosine: float
    relative_l2: float  # |a - b| / |b|
    max_abs: float
    norm: float  # |b|

    def __str__(self) -> str:
        return f"cosine {self.cosine:.6f}  relative L2 {self.relative_l2:.3e}  max {self.max_abs:.3e}"


def snapshot(model: Any) -> dict[str, Tensor]:
    """Copies of the reduced gradients of this rank's parameters that no other rank of the replica holds too."""
    return {name: gradient.clone() for name, gradient in _owned(model)}


def compare_gradients(
    model: Any, reference: Mapping[str, Tensor], runtime: Runtime
) -> dict[str, GradientComparison]:
    """The model's reduced gradients against a `snapshot`, over "all" and by kind of parameter; same on every rank."""
    kinds = ("all", *(kind for kind, _ in _groups()))
    # Index 0: dense parameters, 1: experts. a.b, a.a, b.b, (a-b).(a-b)
    sums = torch.zeros(2, len(kinds), 4, dtype=torch.float64)
    largest = torch.zeros(len(kinds), dtype=torch.float64)
    experts = {name for name, parameter in unwrap(model).named_parameters() if is_expert(parameter)}
    for name, gradient in _owned(model):
        a, b = gradient.double(), reference[name].double()
        difference = a - b
        part = torch.stack([a @ b, a @ a, b @ b, difference @ difference]).cpu()
        for row in (0, kinds.index(kind_of(name))):
            sums[int(name in experts), row] += part
            if difference.numel():
                largest[row] = torch.maximum(largest[row], difference.abs().max().cpu())
    sums, largest = sums.to(runtime.device), largest.to(runtime.device)
    # Replicas hold equal reduced gradients, of which only the shards of one replica add up, or else one shard each.
    # Experts are cut over ep besides, which runs over ranks that hold the same dense parameters.
    groups, sharded = runtime.groups, model.ddp_config.use_distributed_optimizer
    for part, own, copies in ((sums[0], (), groups.dp_cp), (sums[1], (groups.ep,), groups.expt_dp)):
        for group in (groups.tp, groups.pp, *own, *([copies] if sharded else [])):
            dist.all_reduce(part, group=group)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    sums = sums.sum(0)
    result = {}
    for kind, (ab, aa, bb, dd), top in zip(kinds, sums.tolist(), largest.tolist(), strict=True):
        if bb > 0:
            cosine = ab / (aa * bb) ** 0.5 if aa > 0 else 0.0
            result[kind] = GradientComparison(cosine, (dd / bb) ** 0.5, top, bb**0.5)
    return result


def is_expert(parameter: Any) -> bool:
    """Whether a parameter is cut over ep, and its gradient summed over the ranks that hold the same experts."""
    return not getattr(parameter, "allreduce", True)


def kind_of(name: str) -> str:
    """Which row of the report a parameter belongs to."""
    weight = _ADAPTED.sub(".weight", name)
    return next((kind for kind, pattern in _groups() if re.search(pattern, weight)), "norms")


def _owned(model: Any) -> Iterator[tuple[str, Tensor]]:
    """The reduced gradients that this rank alone holds within its replica, flat.

    Under the distributed optimizer each rank has reduced only its shard of every bucket.
    """
    shards = _shards(model) if model.ddp_config.use_distributed_optimizer else None
    for name, parameter in unwrap(model).named_parameters():
        if not parameter.requires_grad:
            continue
        if param_is_not_shared(parameter) and param_is_not_tensor_parallel_duplicate(parameter):
            gradient = parameter.main_grad.flatten()
            yield name, gradient if shards is None else gradient[shards[parameter]]


def _shards(model: Any) -> dict[Any, slice]:
    """Which elements of each flattened gradient lie in this rank's shard of its bucket."""
    shards = {}
    for buffer in gradient_buffers(model):
        rank, size = buffer.data_parallel_group.rank(), buffer.data_parallel_group.size()
        for parameter, (start, end, number) in buffer.param_index_map.items():
            bucket = buffer.buckets[number]
            share = bucket.grad_data.numel() // size
            low = bucket.offset + rank * share
            first = min(max(low - start, 0), end - start)
            shards[parameter] = slice(first, max(first, min(low + share, end) - start))
    return shards
