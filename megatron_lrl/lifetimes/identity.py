"""What a resident prefix is a prefix of. Using it under any other identity is an error that names the difference."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields

import numpy as np


class IdentityMismatch(RuntimeError):
    """A resident prefix was asked to serve another model, prompt or layout than the one it was captured for."""


_VERSIONS = ("model_version", "adapter_version")


@dataclass(frozen=True)
class Identity:
    """Everything that determines the bytes of a resident prefix."""

    model_version: int  # bumped by every optimizer step and every load
    adapter_version: int  # moves with the model's where adapters are trained, else 0
    model: str  # fingerprint of the architecture
    tokens: str  # hash over the prefix's token ids, never over text
    start: int  # absolute position of the first token
    count: int  # tokens fed
    attention: str  # kind, with the LastKV boundaries if there are any
    rope: str
    precision: str
    routing: str
    layout: str
    max_staleness: int = 0  # optimizer steps that the model may be ahead of the prefix, by agreement

    def require(self, expected: Identity) -> None:
        """Raise `IdentityMismatch` naming each field that differs from ``expected``.

        The versions may be ahead by ``max_staleness``, if both agree on that bound.
        """
        ahead = {name: getattr(expected, name) - getattr(self, name) for name in _VERSIONS}
        differing = [
            f"{field.name}: resident {getattr(self, field.name)!r}, needed {getattr(expected, field.name)!r}"
            for field in fields(self)
            if getattr(self, field.name) != getattr(expected, field.name)
            and not 0 <= ahead.get(field.name, -1) <= self.max_staleness
        ]
        if differing:
            raise IdentityMismatch("resident prefix does not match: " + "; ".join(differing))

    def to_dict(self) -> dict[str, str | int]:
        return asdict(self)


def hash_tokens(ids: Sequence[int]) -> str:
    """sha256 over the ids as little-endian int64."""
    return hashlib.sha256(np.asarray(ids, dtype="<i8").tobytes()).hexdigest()
