"""The recipe of a model's numbers: what it computes in, what that tells Megatron-Core, and its name in an identity.

[model] dtype, residual_dtype ── Precision ─┬─> settings()     arguments of TransformerConfig
                                            ├─> accumulation   sums, adjoints, log-probabilities
                                            └─> str()          what a resident prefix was computed in
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from megatron_lrl.settings import Config

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
"""Dtypes of parameters, by the names that settings and manifests give them."""


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32, or float64 where the input is: nothing is rounded below it on the way."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class Precision:
    """Dtypes of one model."""

    dtype: torch.dtype  # parameters and activations
    residual: torch.dtype | None = None  # the stream between layers and stages, where it is another one

    @classmethod
    def of(cls, config: Config) -> Precision:
        """That of a run's settings."""
        residual = config.model.residual_dtype
        return cls(DTYPES[config.model.dtype], None if residual == "model" else DTYPES[residual])

    @property
    def wide_residual(self) -> bool:
        """Whether layers add to a float32 stream. Megatron-Core's setting casts to float32 whatever the model: it is
        for narrower models alone."""
        return self.residual == torch.float32 and self.dtype == torch.bfloat16

    @property
    def accumulation(self) -> torch.dtype:
        """Dtype of sums over tokens: adjoints, log-probabilities, gradients."""
        return accumulate_dtype(self.dtype)

    def settings(self) -> dict[str, Any]:
        """Arguments of Megatron-Core's TransformerConfig."""
        return {
            "params_dtype": self.dtype,
            "pipeline_dtype": torch.float32 if self.wide_residual else self.dtype,
            "fp32_residual_connection": self.wide_residual,
            "bf16": self.dtype == torch.bfloat16,
        }

    def __str__(self) -> str:
        name = next(name for name, dtype in DTYPES.items() if dtype == self.dtype)
        return name + (", float32 residuals" if self.wide_residual else "")
