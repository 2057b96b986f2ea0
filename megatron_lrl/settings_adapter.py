"""Settings of a low-rank adapter on a frozen base: the table [adapter]."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, model_validator

from megatron_lrl.table import Table, key

# TOML has arrays only; under strict typing they do not become tuples by themselves.
Names = Annotated[tuple[str, ...], BeforeValidator(lambda v: tuple(v) if isinstance(v, list) else v)]


class AdapterTable(Table):
    """LoRA: low-rank products beside frozen weights. Off unless rank or path is set."""

    rank: int = key(0, "r, rows of A and columns of B; 0 = no adapter: every parameter is trained", ge=0)
    alpha: float = key(32.0, "the product B A x is scaled by alpha / rank", gt=0)
    targets: Names = key(
        (),
        "projections that get an A and a B of their own, by the last part of their Hugging Face names, as in "
        '["q_proj", "v_proj"]; [] = all of the layers\' but routers\' and routed experts\'',
    )
    experts: bool = key(False, "the projections of routed experts too, an A and a B for each expert")
    init: Literal["kaiming", "gaussian"] = key(
        "kaiming",
        "where A starts: uniform within 1 / sqrt(inputs), or normal with a deviation of 1 / rank; B starts at zero, so "
        "the first policy is the base",
    )
    dtype: Literal["float32", "model"] = key(
        "float32",
        'of A, B and their products: float32, or "model": model.dtype (with float32 master weights)',
    )
    path: str | None = key(
        None,
        "directory that peft wrote (adapter_config.json, adapter_model.safetensors) to start from; rank, alpha and "
        "targets are then its own",
        min_length=1,
    )

    @property
    def on(self) -> bool:
        """Whether the run trains an adapter and not the model."""
        return self.rank > 0 or self.path is not None

    @model_validator(mode="after")
    def _one_source(self) -> AdapterTable:
        if self.path is not None:
            own = {"rank", "alpha", "targets", "experts", "init"} & self.model_fields_set
            if own:
                raise ValueError(
                    f"adapter.path = {self.path}: adapter.{min(own)} is the directory's own; leave the key out"
                )
        return self
