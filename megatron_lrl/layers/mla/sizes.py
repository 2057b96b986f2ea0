"""Sizes of latent attention, as a model's config.json gives them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_lrl.layers.architecture import Architecture
from megatron_lrl.layers.rope_spec import RopeSpec

MLA = "mla"
"""The kind's name in `Architecture.mixers` and `Architecture.sizes`."""
NORM_EPS = 1e-6
"""Of the norms of the latents in transformers' classes, whatever rms_norm_eps says of the others."""


@dataclass(frozen=True)
class MLASpec:
    """r latent of keys and values, dr rotated dims of the one key that all heads share, and each head's widths.

    ``query_rank``: latent of the queries; 0: they come from the hidden state directly.
    """

    latent: int
    rotary: int
    nope: int
    value: int
    query_rank: int

    @property
    def row(self) -> int:
        """c: numbers that stay resident of a token in a layer, [latent | rotated key]."""
        return self.latent + self.rotary

    @property
    def query(self) -> int:
        """Width of a head's query, and of the key that it would meet if it were expanded."""
        return self.nope + self.rotary

    @property
    def expanded(self) -> int:
        """Rows of a head in the projection that would expand a latent: its key without rotation, and its value."""
        return self.nope + self.value


def sizes_of(arch: Architecture) -> MLASpec:
    """A model's. Raises ValueError where it has no such layers."""
    spec = arch.sizes.get(MLA)
    if not isinstance(spec, MLASpec):
        raise ValueError("a latent attention layer without its sizes")
    return spec


def softmax_scale(spec: MLASpec, rope: RopeSpec) -> float:
    """What multiplies the scores: (width of a query) ** -0.5, and YaRN's temperature, squared, where it names one."""
    factor, all_dim = rope.parameters.get("factor", 1.0), rope.parameters.get("mscale_all_dim", 0)
    temperature = (
        0.1 * all_dim * math.log(factor) + 1.0 if rope.kind == "yarn" and all_dim and factor > 1 else 1.0
    )
    return spec.query**-0.5 * temperature**2


__all__ = ["MLA", "NORM_EPS", "MLASpec", "sizes_of", "softmax_scale"]
