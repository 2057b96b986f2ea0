"""Model weights in Megatron-Core's distributed checkpoint format (`dist_checkpointing`), any layout to any
other."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megatron_lrl import platform_cpu
from megatron_lrl.checkpoint.unpickling import reading_checkpoint
from megatron_lrl.errors import UserError
from megatron_lrl.runtime import Runtime, unwrap

platform_cpu.install()

from megatron.core import dist_checkpointing  # noqa: E402
from megatron.core.dist_checkpointing.core import CheckpointingException  # noqa: E402
from torch.distributed.checkpoint.api import CheckpointException  # noqa: E402

# torch's own derives from BaseException; it gathers what went wrong on any rank and is raised on all
FAILURES = (CheckpointException, CheckpointingException, OSError, EOFError, KeyError, RuntimeError)


def weights_state_dict(model: torch.nn.Module) -> dict[str, Any]:
    """Sharded state dict of the parameters, with Megatron-Core's own keys.

    Extra states are left out: they are empty in the dtypes we train in, and they exist under Transformer
    Engine only, which would tie a checkpoint to the modules that wrote it.
    """
    core = unwrap(model)
    if core.adapters is not None:  # what is trained; the base stays where it came from
        return core.adapters.sharded()
    # Layers of several kinds cannot share a tensor with a layer axis: each has keys of its own.
    state = core.sharded_state_dict(metadata={"non_homogeneous_layers": True} if core.arch.hybrid else None)
    return {key: value for key, value in state.items() if not key.endswith("_extra_state")}


@torch.no_grad()
def load_weights(
    model: torch.nn.Module,
    ckpt_dir: str | Path,
    runtime: Runtime,
    skip: Callable[[str], bool] = lambda _: False,
) -> None:
    """Read this rank's shards; collective. Values are cast to the parameters' dtype.

    `skip`: the names of parameters that keep their values.

    Raises:
        UserError: the directory is not a distributed checkpoint, lacks tensors of the model, or holds one with a
            value that is NaN or infinite.
    """

    def read() -> None:
        state = {key: value for key, value in weights_state_dict(model).items() if not skip(key)}
        with reading_checkpoint(ckpt_dir), warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch's, about its own argument order
            loaded = dist_checkpointing.load({"model": state}, str(ckpt_dir))
        for key, value in loaded["model"].items():
            require_finite(value, key, ckpt_dir)
        core = unwrap(model)
        result = core.load_state_dict(loaded["model"], strict=False)
        # An adapter's base is in place already.
        missing = result.missing_keys if core.adapters is None else state.keys() & set(result.missing_keys)
        left = [
            key
            for key in (*missing, *result.unexpected_keys)
            if not key.endswith("_extra_state") and not skip(key)
        ]
        if left:
            raise UserError(f"{ckpt_dir}: tensors missing or left over: {', '.join(left[:3])}")

    runtime.together(read)


@torch.no_grad()
def all_finite(x: torch.Tensor) -> bool:
    """Whether every element is finite, in one pass without a temporary: NaN and infinity reach the extremes."""
    return not x.numel() or all(math.isfinite(end.item()) for end in torch.aminmax(x))


def require_finite(values: Any, name: str, ckpt_dir: str | Path) -> None:
    """Raise `UserError` naming the tensor if a checkpoint's values are not all finite."""
    if isinstance(values, torch.Tensor) and values.is_floating_point() and not all_finite(values):
        raise UserError(f"{ckpt_dir}: tensor {name} holds values that are NaN or infinite")
