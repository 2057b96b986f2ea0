"""Entries of an adapter's parameters, derived from those of the weights that they stand beside.

    Entry of W   sources q, k, v  [o_q, i] …   op (axis 0)      Entry of A   q.lora_A … [r, i]    one under the other
                                                                 Entry of B   q.lora_B … [o_q, r]  the same op
    Entry of W   source down      [o, i]       Split(axis 1)     Entry of A   the same op          Entry of B   whole

so export, gradients and training checkpoints of an adapter are exact in every layout where those of the weights are.
Names are peft's: base_model.model.<module>.lora_A.weight.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from megatron_lrl.checkpoint.table import Entry, conversion_table
from megatron_lrl.errors import UserError
from megatron_lrl.layers.architecture import Architecture
from megatron_lrl.layers.conversion import Copy, Op, Piece

PREFIX = "base_model.model."
PARTS = ("lora_A", "lora_B")
_WEIGHT = ".weight"


@dataclass(frozen=True)
class Stack(Op):
    """Sources [length, …] one under the other, whole on every rank."""

    length: int
    count: int

    @property
    def replicated(self) -> bool:
        return True

    def pieces(self, rank: int, size: int) -> tuple[Piece, ...]:
        return tuple(Piece(source, 0, self.length) for source in range(self.count))


@dataclass(frozen=True)
class Only(Op):
    """Another op with some of its sources, which become 0, 1, …"""

    whole: Op
    kept: tuple[int, ...]

    def pieces(self, rank: int, size: int) -> tuple[Piece, ...]:
        return tuple(
            replace(piece, source=self.kept.index(piece.source))
            for piece in self.whole.pieces(rank, size)
            if piece.source in self.kept
        )


@dataclass(frozen=True)
class Adapted:
    """One weight with an adapter: its entry, its projections that have one, and the entries of A and B."""

    weight: Entry
    kept: tuple[int, ...]
    a: Entry
    b: Entry

    @property
    def column(self) -> bool:
        """Whether tensor parallelism cuts the layer's outputs, not its inputs."""
        return self.weight.op.axis == 0

    def rows(self, rank: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """For each row of a rank's B: the output row it adds to, and the number of its projection."""
        if not self.column:
            return torch.arange(self.weight.hf_shapes[0][0]), torch.zeros(0, dtype=torch.long)
        rows, owners, offset = [], [], 0
        for piece in self.weight.op.pieces(rank, size):
            if piece.source in self.kept:
                rows.append(torch.arange(offset, offset + piece.length))
                owners.append(torch.full((piece.length,), self.kept.index(piece.source)))
            offset += piece.length
        return torch.cat(rows), torch.cat(owners)


def adaptable(arch: Architecture) -> Iterator[tuple[Entry, str]]:
    """Every projection that can have an adapter: the entry of its weight, and its module's Hugging Face name.

    Those are the matrices of layers that tensor parallelism cuts: no router, no convolution.
    """
    for entry in conversion_table(arch):
        if entry.layer is not None and not entry.op.replicated and len(entry.hf_shapes[0]) == 2:
            for name in entry.hf_names:
                yield entry, name.removesuffix(_WEIGHT)


def chosen_modules(arch: Architecture, targets: Sequence[str], experts: bool) -> frozenset[str]:
    """Names of the modules that ``targets`` (last parts of names; none: all) mean.

    Raises `UserError` for a target that the model does not have.
    """
    found = {name for entry, name in adaptable(arch) if experts or entry.expert is None}
    leaves = {name.rpartition(".")[2] for name in found}
    if strangers := [target for target in targets if target not in leaves]:
        routed = "" if experts or arch.moe is None else "; routed experts need adapter.experts = true"
        raise UserError(
            f"adapter.targets: the model's layers have no {', '.join(strangers)}; valid with this model: "
            f"{', '.join(sorted(leaves))}{routed}"
        )
    return frozenset(name for name in found if not targets or name.rpartition(".")[2] in targets)


def adapted_weights(arch: Architecture, modules: frozenset[str], rank: int) -> list[Adapted]:
    """The weights of the whole model that get an adapter, in table order."""
    found = []
    for entry in {entry.name: entry for entry, _ in adaptable(arch)}.values():
        kept = tuple(i for i, name in enumerate(entry.hf_names) if name.removesuffix(_WEIGHT) in modules)
        if kept:
            found.append(_adapted(entry, kept, rank))
    return found


def _adapted(weight: Entry, kept: tuple[int, ...], rank: int) -> Adapted:
    shapes = [weight.hf_shapes[i] for i in kept]
    names = [f"{PREFIX}{weight.hf_names[i].removesuffix(_WEIGHT)}" for i in kept]
    column = weight.op.axis == 0
    op = weight.op if len(kept) == len(weight.hf_names) else Only(weight.op, kept)
    ops = (Stack(rank, len(kept)), op) if column else (weight.op, Copy(shapes[0][0]))
    sizes = ([(rank, shape[1]) for shape in shapes], [(shape[0], rank) for shape in shapes])
    a, b = (
        replace(
            weight,
            name=f"{weight.name.removesuffix(_WEIGHT)}.adapter.{part}",
            te_name="",
            hf_names=tuple(f"{name}.{part}.weight" for name in names),
            hf_shapes=tuple(torch.Size(size) for size in of_part),
            op=part_op,
            wide=False,
        )
        for part, of_part, part_op in zip(PARTS, sizes, ops, strict=True)
    )
    return Adapted(weight, kept, a, b)
