"""Sizes of Gated DeltaNet layers, as a model's config.json gives them."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_lrl.layers.architecture import Architecture

GDN = "gdn"
"""The kind's name in `Architecture.mixers` and `Architecture.sizes`."""


@dataclass(frozen=True)
class GDNSpec:
    """Heads, dims and the width of the causal depthwise convolution.

    Value head i reads key head i // (value_heads / key_heads).
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_kernel: int

    @property
    def values(self) -> int:
        """Value channels of all heads."""
        return self.value_heads * self.value_dim

    @property
    def conv_channels(self) -> int:
        """Channels of the convolution: those of q, k and v."""
        return 2 * self.key_heads * self.key_dim + self.values


def sizes_of(arch: Architecture) -> GDNSpec:
    """A model's. Raises ValueError where it has no such layers."""
    spec = arch.sizes.get(GDN)
    if not isinstance(spec, GDNSpec):
        raise ValueError("a Gated DeltaNet layer without its sizes")
    return spec


__all__ = ["GDN", "GDNSpec", "sizes_of"]
