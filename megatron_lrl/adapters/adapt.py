"""A model with adapters: which parameters are trained, how they start, and the base seen through them.

[adapter] ── AdapterSpec ── adapt(model) ──► model.adapters   binding    parameters <-> peft's tensors
                 │                                            sharded()  what a training checkpoint holds
        identity, peft files                                  off()      the base: `Base`, the reference model
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from torch import Tensor

from megatron_lrl.adapters.low_rank import LowRank, attach
from megatron_lrl.adapters.table import Adapted, adaptable, adapted_weights
from megatron_lrl.checkpoint.binding import Binding, bind
from megatron_lrl.checkpoint.hf_import import ep_place
from megatron_lrl.checkpoint.table import Entry
from megatron_lrl.errors import UserError
from megatron_lrl.layers.architecture import Architecture
from megatron_lrl.layers.conversion import Sliceable
from megatron_lrl.runtime import Runtime, unwrap

_LAYER = re.compile(r"(?<=layers\.)\d+(?=\.)")

Given = Callable[[str, torch.Size], Sliceable]
"""Name and shape of an adapter's tensor -> the tensor, whole."""


@dataclass(frozen=True)
class AdapterSpec:
    """What an adapter is: of these modules (Hugging Face names), with products scaled by ``alpha / rank``.

    ``rooted``: scaled by alpha / sqrt(rank) instead (peft's use_rslora).
    """

    rank: int
    alpha: float
    modules: frozenset[str]
    rooted: bool = False

    @property
    def scale(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.rooted else self.rank)

    def weights(self, arch: Architecture) -> list[Adapted]:
        """The whole model's weights that have an adapter. Raises `UserError` for a module that the model lacks."""
        found = adapted_weights(arch, self.modules, self.rank)
        names = {w.weight.hf_names[i].removesuffix(".weight") for w in found for i in w.kept}
        if strangers := sorted(self.modules - names):
            raise UserError(
                f"the adapter has {len(strangers)} module(s) that the model lacks or that cannot have one, first: "
                f"{strangers[0]}"
            )
        return found

    def like(self, arch: Architecture) -> AdapterSpec:
        """The same adapter of a model with other layers of the same kinds: whatever the number of a layer."""
        names = {_LAYER.sub("", name) for name in self.modules}
        found = {name for _, name in adaptable(arch) if _LAYER.sub("", name) in names}
        return replace(self, modules=frozenset(found))

    def to_dict(self) -> dict[str, Any]:
        """JSON form; inverse of `from_dict`."""
        return {
            "rank": self.rank,
            "alpha": self.alpha,
            "modules": sorted(self.modules),
            "rooted": self.rooted,
        }

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> AdapterSpec:
        """Raises KeyError, TypeError or ValueError on a dictionary of another form."""
        modules = frozenset(str(name) for name in plain["modules"])
        return cls(int(plain["rank"]), float(plain["alpha"]), modules, bool(plain["rooted"]))

    def __str__(self) -> str:
        digest = hashlib.sha256("\n".join(sorted(self.modules)).encode()).hexdigest()[:12]
        return f"LoRA of rank {self.rank}, scale {self.scale:g}, modules {digest}"


class Adapters:
    """The adapters of one rank's model stage; `model.adapters`."""

    def __init__(
        self, model: Any, arch: Architecture, spec: AdapterSpec, runtime: Runtime, dtype: torch.dtype | None
    ) -> None:
        """Freezes the model and puts an A and a B beside each chosen weight, uninitialised.

        ``dtype``: of A and B; None: that of the weight.
        """
        self.spec, self.runtime, self.model = spec, runtime, model
        self.modules: list[LowRank] = []
        weights = spec.weights(arch)
        linears = {id(m.weight): m for m in model.modules() if isinstance(getattr(m, "weight", None), Tensor)}
        held = {e.name: p for e, p in bind(model, arch, ep_place(runtime)).pairs}
        model.requires_grad_(False)
        pairs: list[tuple[Entry, Tensor]] = []
        size, rank = runtime.layout.tp, runtime.tp_rank
        for adapted in weights:
            if adapted.weight.name not in held:
                continue
            linear: Any = linears[id(held[adapted.weight.name])]
            a, b = (e.op.shard_shape(rank, size, e.width) for e in (adapted.a, adapted.b))
            low_rank = LowRank(
                linear, a, b, *adapted.rows(rank, size), rank=spec.rank, scale=spec.scale,
                column=adapted.column, dtype=dtype or linear.weight.dtype,
            )  # fmt: skip
            attach(linear, low_rank)
            self.modules.append(low_rank)
            pairs += [(adapted.a, low_rank.lora_A), (adapted.b, low_rank.lora_B)]
        self.binding = Binding(tuple(e for w in weights for e in (w.a, w.b)), tuple(pairs), None)
        if model.pre_process:  # frozen parameters make no graph: the first layer's state has one all the same
            model.embedding.register_forward_hook(_start_graph)

    @cached_property
    def names(self) -> dict[int, str]:
        """`id` of a parameter -> its name in this rank's model."""
        return {id(p): name for name, p in self.model.named_parameters()}

    @torch.no_grad()
    def fill(self, given: Given) -> None:
        """Set this rank's A and B from whole tensors."""
        tp, size = self.runtime.tp_rank, self.runtime.layout.tp
        for entry, parameter in self.binding.pairs:
            sources = [given(n, s) for n, s in zip(entry.hf_names, entry.hf_shapes, strict=True)]
            parameter.copy_(entry.op.to_shard(sources, tp, size, entry.width))

    def sharded(self) -> dict[str, ShardedTensorFactory]:
        """Parameter name -> what a distributed checkpoint holds of it: peft's tensors, whatever the layout."""
        groups, size = self.runtime.groups, self.runtime.layout.tp
        found = {}
        for entry, parameter in self.binding.pairs:
            copies = groups.dp_cp if getattr(parameter, "allreduce", True) else groups.expt_dp
            replica = (0, self.runtime.tp_rank if entry.op.replicated else 0, copies.rank())
            build = partial(_stored, entry, self.runtime.tp_rank, size)
            join = partial(_joined, entry)
            found[self.names[id(parameter)]] = ShardedTensorFactory(
                "adapter", parameter.detach(), build, join, replica
            )
        return found

    @contextmanager
    def off(self) -> Iterator[None]:
        """The base alone."""
        for module in self.modules:
            module.enabled = False
        try:
            yield
        finally:
            for module in self.modules:
                module.enabled = True


def _start_graph(_embedding: Any, _inputs: Any, output: Tensor) -> Tensor:
    return output.requires_grad_() if torch.is_grad_enabled() and output.is_leaf else output


class Base:
    """A model with its adapters off, in the place of a second model: it shares every parameter."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._model.adapters.off():
            return self._model(*args, **kwargs)


def adapt(
    model: Any, arch: Architecture, spec: AdapterSpec, runtime: Runtime, dtype: torch.dtype | None = None
) -> Adapters:
    """Freeze a model and give it adapters, uninitialised (see `Adapters.fill`). Raises `UserError` as `AdapterSpec`."""
    core = unwrap(model)
    core.adapters = Adapters(core, arch, spec, runtime, dtype)
    return core.adapters


def initial(kind: str, seed: int) -> Given:
    """How an adapter starts: A random, by name and seed alone, so that it is the same in every layout; B zero."""

    def tensor(name: str, shape: torch.Size) -> Tensor:
        if ".lora_B." in name:
            return torch.zeros(shape)
        digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big", signed=True))
        if kind == "gaussian":
            return torch.randn(shape, generator=generator) / shape[0]
        # torch's and peft's start of a linear layer, kaiming-uniform with a = sqrt(5)
        return (torch.rand(shape, generator=generator) * 2 - 1) / math.sqrt(shape[1])

    return tensor


def _stored(
    entry: Entry, rank: int, size: int, key: str, data: Tensor, replica_id: Any, _range: Any
) -> dict[str, Any]:
    """Pieces of peft's tensors out of this rank's shard: views of it, so that they can be written from elsewhere.

    A checkpoint knows regular grids alone: a tensor is cut into parts of one length, which divides every piece.
    """
    axis, offset = entry.op.axis, 0
    found: dict[str, Any] = {}
    grid = _grid(entry, size)
    for piece in entry.op.pieces(rank, size):
        assert piece.source is not None
        step = grid[piece.source]
        for start in range(piece.start, piece.stop, step):
            found[str(len(found))] = dist_checkpointing.ShardedTensor.from_rank_offsets(
                f"{key}.{entry.hf_names[piece.source]}",
                data.narrow(axis, offset, step),
                (axis, start // step, entry.hf_shapes[piece.source][axis] // step),
                replica_id=replica_id,
            )
            offset += step
    return found


def _grid(entry: Entry, size: int) -> list[int]:
    """For each source, the length of the parts that every rank's pieces are made of."""
    steps = [shape[entry.op.axis] for shape in entry.hf_shapes]
    for rank in range(size):
        for piece in entry.op.pieces(rank, size):
            if piece.source is not None:
                steps[piece.source] = math.gcd(steps[piece.source], piece.start, piece.length)
    return steps


def _joined(entry: Entry, parts: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([parts[str(place)] for place in range(len(parts))], dim=entry.op.axis)


__all__ = ["AdapterSpec", "Adapters", "Base", "adapt", "initial"]
