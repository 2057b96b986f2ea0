"""How much rounding moves a model's numbers: the scale that `check` judges by.

Two evaluations of one function differ by rounding, and by how much depends on the model: its depth, its logits, a bias
that all keys share. So the model is asked: every weight moves by one unit in its last place, up or down by chance, and
what that changes is measured. A correct evaluation cannot be expected to be closer than a small multiple of it.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

MULTIPLE = 6.0
"""Two evaluations round independently, at every operation and a long sum by more than one ulp, where the perturbation
moves the weights alone: SmolLM2-135M in float32 comes to 3.3, of which most is its sampler's distance from float64.
"""
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_BLOCK = 1 << 22  # weights moved at once


@dataclass(frozen=True)
class Bar:
    """One comparison: what was measured, what rounding gives, and what it means.

    rounding: the same quantity between the model and the model with its weights moved by an ulp.
    power: 2 of a quantity that grows with the square of the difference.
    """

    measured: float
    rounding: float
    what: str
    power: int = 1

    @property
    def bar(self) -> float:
        """The most that passes."""
        return MULTIPLE**self.power * self.rounding

    @property
    def passed(self) -> bool:
        """NaN does not pass."""
        return self.measured <= self.bar

    def __str__(self) -> str:
        verdict = "pass" if self.passed else "FAIL"
        meaning = "no more than rounding" if self.passed else "more than rounding can explain"
        return (
            f"{verdict}  {self.what}: {self.measured:.2e}, bar {self.bar:.2e} = {MULTIPLE**self.power:g} x "
            f"{self.rounding:.2e}, what one ulp of the weights does: {meaning}"
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        return {"measured": self.measured, "rounding": self.rounding, "bar": self.bar, "passed": self.passed}


@contextmanager
def moved_by_an_ulp(model: torch.nn.Module, seed: int = 0) -> Iterator[None]:
    """In the block every weight is its neighbour in its dtype, above or below; afterwards each has its bits again.

    The choice depends on seed, the parameter's name and the place in this rank's shard, so that copies on other ranks
    stay copies. Zeros stay.
    """
    _move(model, seed)
    try:
        yield
    finally:
        _move(model, seed)


@torch.no_grad()
def _move(model: torch.nn.Module, seed: int) -> None:
    for name, parameter in model.named_parameters():
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{name}".encode()))
        bits_N = parameter.data.view(_BITS[parameter.element_size()]).view(-1)
        for block in bits_N.split(_BLOCK):
            up = torch.randint(0, 2, block.shape, generator=generator, dtype=torch.int8)
            block.copy_(_neighbour(block, up.to(block.device, block.dtype)))


def _neighbour(bits: Tensor, up: Tensor) -> Tensor:
    """The bit patterns next to `bits`: pairs (2k, 2k + 1) swap where `up` is 0, pairs (2k - 1, 2k) where it is 1.

    Applied twice it gives `bits` again. Patterns of one sign are ordered as their values are.
    """
    magnitude = bits & torch.iinfo(bits.dtype).max
    return torch.where(magnitude + up <= 1, bits, ((bits + up) ^ 1) - up)
