"""How far two named sets of tensors are apart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Comparison:
    """Distances of `ours` to an oracle; computed in fp64."""

    cosine: float
    rel_l2: float  # over all tensors together
    worst_name: str
    worst_rel_l2: float  # of the tensor with the largest relative L2
    max_abs: float

    def __str__(self) -> str:
        return (
            f"cosine {self.cosine:.9f}  relative L2 {self.rel_l2:.2e}  "
            f"worst {self.worst_name} {self.worst_rel_l2:.2e}  max abs {self.max_abs:.2e}"
        )

    def require(self, rel_l2: float, worst: float, title: str = "") -> Comparison:
        """Raises AssertionError with every distance unless both bars hold; NaN fails. Returns itself."""
        if not (self.rel_l2 <= rel_l2 and self.worst_rel_l2 <= worst):
            raise AssertionError(
                f"{title}: bars are relative L2 {rel_l2:g}, worst tensor {worst:g}; measured {self}"
            )
        return self


def compare_tensors(ours: Mapping[str, torch.Tensor], oracle: Mapping[str, torch.Tensor]) -> Comparison:
    """Compares two sets with exactly the same names and shapes; AssertionError names what differs.

    A tensor's relative L2 is its difference's norm over the oracle tensor's norm. An oracle tensor smaller
    than 1e-6 of the oracle's whole norm (a query gradient where a token sees only itself is zero) is
    measured against that floor.
    """
    if set(ours) != set(oracle):
        missing, extra = sorted(set(oracle) - set(ours)), sorted(set(ours) - set(oracle))
        raise AssertionError(f"names differ: missing {missing}, unexpected {extra}")
    dot = ours_sq = oracle_sq = difference_sq = max_abs = 0.0
    norms: dict[str, tuple[float, float]] = {}
    for name in sorted(oracle):
        if ours[name].shape != oracle[name].shape:
            raise AssertionError(
                f"{name}: shape {tuple(ours[name].shape)}, oracle {tuple(oracle[name].shape)}"
            )
        a, b = ours[name].detach().double().flatten(), oracle[name].detach().double().flatten()
        difference = a - b
        dot += float(a @ b)
        ours_sq += float(a @ a)
        oracle_sq += float(b @ b)
        difference_sq += float(difference @ difference)
        norms[name] = (float(difference.norm()), float(b.norm()))
        if difference.numel():
            largest = float(difference.abs().max())
            max_abs = largest if not largest <= max_abs else max_abs  # NaN wins
    whole = oracle_sq**0.5
    if whole == 0.0:
        raise AssertionError("the oracle is zero everywhere: nothing is shown by comparing with it")
    relative = {name: d / max(n, 1e-6 * whole) for name, (d, n) in norms.items()}
    worst = max(relative, key=lambda name: (relative[name] != relative[name], relative[name]))
    cosine = dot / (ours_sq**0.5 * whole) if ours_sq else 0.0
    return Comparison(cosine, difference_sq**0.5 / whole, worst, relative[worst], max_abs)


def max_difference(ours: object, oracle: object) -> float:
    """The largest absolute difference of two equally nested lists of numbers."""
    if isinstance(oracle, (list, tuple)):
        if not isinstance(ours, (list, tuple)) or len(ours) != len(oracle):
            raise AssertionError(f"nesting differs: {ours!r} against {oracle!r}")
        differences = [max_difference(a, b) for a, b in zip(ours, oracle, strict=True)]
        return float(torch.tensor([0.0, *differences], dtype=torch.float64).max())  # max() would drop a NaN
    return abs(float(ours) - float(oracle))  # type: ignore[arg-type]
