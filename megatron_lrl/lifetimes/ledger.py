"""Bytes by lifetime, measured.

run      parameters, gradient buffers, optimizer state          live tensors
window   recorded log-probabilities of the window                live tensors
group    resident prefixes (and adjoints)                        storage the states own
replay   saved-for-backward bytes at their peak                  each storage once, parameters and resident
                                                                 state left out
output   what a checkpoint or a gradient file takes on the       copies on their way into a file
         host while it is written, at its peak
process  all of it with the libraries, where no device has       the system's count
         memory of its own
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


def process_bytes() -> int:
    """Bytes that this process holds now; 0 where a device holds the tensors, whose allocator counts them alone."""
    if torch.cuda.is_available():
        return 0
    import psutil

    return int(psutil.Process().memory_info().rss)


def process_peak() -> int:
    """The most that this process ever held, loading included; 0 as for `process_bytes`."""
    if torch.cuda.is_available():
        return 0
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    # Linux moves its mark when memory is given back, so what is held now may lie above it.
    return max(process_bytes(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the distinct storages behind some tensors."""
    seen: dict[int, int] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        seen[storage._cdata] = storage.nbytes()
    return sum(seen.values())


def bytes_by_part(parts: Mapping[str, Iterable[Tensor]]) -> dict[str, int]:
    """Bytes of the distinct storages of each part; a storage that several parts name counts in the first."""
    totals: dict[str, int] = {}
    so_far: list[Tensor] = []
    for name, tensors in parts.items():
        before = storage_bytes(so_far)
        so_far += tensors
        totals[name] = storage_bytes(so_far) - before
    return totals


class _Saved:
    """A saved tensor whose storage is counted while autograd holds it."""

    __slots__ = ("key", "meter", "tensor")

    def __init__(self, tensor: Tensor, meter: SavedBytes) -> None:
        # Detached: an output saved by its own node would otherwise hold itself alive.
        self.tensor = tensor.detach()
        self.meter = meter
        self.key = meter._hold(tensor)

    def __del__(self) -> None:
        self.meter._release(self.key)


class SavedBytes:
    """Counts saved-for-backward bytes while active: each storage once, excluded storages not at all."""

    def __init__(self, excluded: Iterable[Tensor] = ()) -> None:
        # Storages are told apart by their handle: a planned tensor has no address.
        self._excluded = {tensor.untyped_storage()._cdata for tensor in excluded}
        self._held: dict[int, list[int]] = {}  # storage -> [holders, bytes]
        self.live = 0
        self.peak = 0

    @contextmanager
    def measure(self) -> Iterator[SavedBytes]:
        with saved_tensors_hooks(lambda tensor: _Saved(tensor, self), lambda saved: saved.tensor):
            yield self

    def _hold(self, tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._excluded or storage.nbytes() == 0:
            return 0
        entry = self._held.setdefault(key, [0, storage.nbytes()])
        if entry[0] == 0:
            self.live += entry[1]
            self.peak = max(self.peak, self.live)
        entry[0] += 1
        return key

    def _release(self, key: int) -> None:
        if key == 0:
            return
        entry = self._held[key]
        entry[0] -= 1
        if entry[0] == 0:
            self.live -= entry[1]
            del self._held[key]


@dataclass
class Ledger:
    """Measured bytes of this rank by lifetime: what lives now and the peak since the last `start_window`."""

    run: int = 0
    parts: dict[str, int] = field(default_factory=dict)
    """``run`` by what it is: parameters, gradients, optimizer, reference."""
    output: int = 0
    """No part of a window, and not reset by one."""
    libraries: int = 0
    """What the process held before its model came."""
    live: dict[str, int] = field(default_factory=lambda: {"window": 0, "group": 0, "replay": 0})
    peak: dict[str, int] = field(default_factory=lambda: {"window": 0, "group": 0, "replay": 0})

    def start_window(self) -> None:
        self.peak = dict(self.live)

    def add(self, lifetime: str, nbytes: int) -> None:
        """Bytes that came to life (negative: that died)."""
        self.live[lifetime] += nbytes
        self.peak[lifetime] = max(self.peak[lifetime], self.live[lifetime])

    def observe_peak(self, lifetime: str, nbytes: int) -> None:
        """A peak that was measured over a finished pass."""
        self.peak[lifetime] = max(self.peak[lifetime], self.live[lifetime] + nbytes)

    def metrics(self) -> dict[str, float]:
        """``bytes/<lifetime>`` peaks, and the device allocator's or process's own peak."""
        values = {"bytes/run": float(self.run)}
        values |= {f"bytes/{lifetime}": float(nbytes) for lifetime, nbytes in self.peak.items()}
        if self.output:
            values["bytes/output"] = float(self.output)
        if torch.cuda.is_available():
            values["bytes/allocator_peak"] = float(torch.cuda.max_memory_allocated())
        else:
            values["bytes/process"] = float(process_bytes())
            values["bytes/process_peak"] = max(float(process_peak()), values["bytes/process"])
        return values
