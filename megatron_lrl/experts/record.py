"""The recorded routing of a response as an immutable value, and its JSON form.

    {"layers": [1, 2, 3], "top_k": 2, "experts": "<base64>", "weights": "<base64>", "dtype": "float32"}

`layers` are 0-based numbers of the expert layers (model.layers.{i}). `experts` are int16 [R, L, k], the ids in the
order of the router's choice; `weights` are float32 (float64 of a float64 model) of the same shape; both little-endian.
Row i belongs to the token whose output predicts token i of the response: row 0 to the last prompt token.

Legend: R response tokens, L expert layers, k experts of a token.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_lrl.errors import UserError

_KEYS = {"layers", "top_k", "experts", "weights", "dtype"}
_DTYPES = {"float32": "<f4", "float64": "<f8"}


@dataclass(frozen=True)
class RoutingShape:
    """What a model's records look like: 0-based expert layers, experts in all, experts of a token."""

    layers: tuple[int, ...]
    experts: int
    top_k: int


@dataclass(frozen=True)
class Routing:
    """Experts and weights of a response's tokens, as bytes: equal records compare equal."""

    layers: tuple[int, ...]
    top_k: int
    experts: bytes
    weights: bytes
    dtype: str = "float32"

    @classmethod
    def of(cls, layers: tuple[int, ...], expert_RLk: Tensor, weight_RLk: Tensor) -> Routing:
        """From int64 ids and float32 or float64 weights, both [R, L, k] on the CPU."""
        dtype = str(weight_RLk.dtype).removeprefix("torch.")
        return cls(
            layers,
            expert_RLk.shape[-1],
            expert_RLk.numpy().astype("<i2").tobytes(),
            weight_RLk.numpy().astype(_DTYPES[dtype]).tobytes(),
            dtype,
        )

    def tensors(self) -> tuple[Tensor, Tensor]:
        """expert_RLk int64 and weight_RLk, on the CPU."""
        shape = (-1, len(self.layers), self.top_k)
        experts = np.frombuffer(self.experts, "<i2").astype(np.int64).reshape(shape)
        weights = np.frombuffer(self.weights, _DTYPES[self.dtype]).astype(self.dtype).reshape(shape)
        return torch.from_numpy(experts), torch.from_numpy(weights)

    def rows(self, first: int, tokens: int) -> Routing:
        """Of ``tokens`` of the response's tokens from number ``first`` on."""

        def cut(data: bytes, width: int) -> bytes:
            row = len(self.layers) * self.top_k * width
            return data[first * row : (first + tokens) * row]

        weights = cut(self.weights, np.dtype(_DTYPES[self.dtype]).itemsize)
        return replace(self, experts=cut(self.experts, 2), weights=weights)

    def to_json(self) -> dict[str, Any]:
        """The JSON object."""
        return {
            "layers": list(self.layers),
            "top_k": self.top_k,
            "experts": base64.b64encode(self.experts).decode(),
            "weights": base64.b64encode(self.weights).decode(),
            "dtype": self.dtype,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Routing:
        """The inverse of `to_json`, for records whose bytes are known to be whole; else see `routing_of`."""
        experts, weights = (base64.b64decode(value[key]) for key in ("experts", "weights"))
        return cls(tuple(value["layers"]), value["top_k"], experts, weights, value["dtype"])


def routing_of(value: Any, tokens: int, where: str, shape: RoutingShape | None) -> Routing:
    """Read and check a record of a response of ``tokens`` tokens.

    ``shape``: the model's; None if it has no experts. Raises `UserError` that begins with ``where``.
    """
    where = f'{where}: "routing"'
    if shape is None:
        raise UserError(f"{where} is recorded, but the model is dense and has no experts")
    if not isinstance(value, Mapping) or set(value) != _KEYS:
        raise UserError(f"{where} must be an object with exactly the keys {', '.join(sorted(_KEYS))}")
    if value["layers"] != list(shape.layers) or value["top_k"] != shape.top_k:
        raise UserError(
            f"{where} has layers {value['layers']!r} and top_k {value['top_k']!r}; the model has "
            f"{list(shape.layers)} and {shape.top_k}"
        )
    if not isinstance(value["dtype"], str) or value["dtype"] not in _DTYPES:
        raise UserError(f"{where}.dtype = {value['dtype']!r}; valid: {', '.join(_DTYPES)}")
    parts: list[bytes] = []
    for key, width in (("experts", 2), ("weights", int(_DTYPES[value["dtype"]][-1]))):
        try:
            data = base64.b64decode(value[key], validate=True)
        except (TypeError, ValueError, binascii.Error):
            raise UserError(f"{where}.{key} is not base64") from None
        wanted = tokens * len(shape.layers) * shape.top_k * width
        if len(data) != wanted:
            raise UserError(
                f"{where}.{key} holds {len(data)} bytes; {tokens} tokens of this model take {wanted}"
            )
        parts.append(data)
    routing = Routing(shape.layers, shape.top_k, parts[0], parts[1], value["dtype"])
    expert_RLk, weight_RLk = routing.tensors()
    if tokens and not 0 <= int(expert_RLk.min()) <= int(expert_RLk.max()) < shape.experts:
        raise UserError(f"{where}.experts names experts outside 0 to {shape.experts - 1}")
    ordered = expert_RLk.sort(-1)[0]
    if bool((ordered[..., 1:] == ordered[..., :-1]).any()):
        raise UserError(f"{where}.experts names an expert twice for one token")
    if not bool(torch.isfinite(weight_RLk).all()):
        raise UserError(f"{where}.weights must be finite")
    if bool((weight_RLk < 0).any()):
        raise UserError(f"{where}.weights must be at least 0")
    return routing
