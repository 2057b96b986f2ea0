"""Megatron-Core's DDP, optimizer and learning-rate schedule, set up for sums with final weights."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

from megatron_lrl.runtime import Runtime
from megatron_lrl.settings import Config

_FUSED_DEVICES = _get_fused_kernels_supported_devices()


def wrap_ddp(model: Any, runtime: Runtime, shard_optimizer: bool) -> DistributedDataParallel:
    """The model with contiguous gradient buffers, reduced once per window when the window asks for it.

    Buffers are float32 (float64 for a float64 model). ``shard_optimizer``: reduce-scatter for the distributed
    optimizer instead of all-reduce; each rank then holds a reduced gradient only of its optimizer shard.
    """
    config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=model.config.params_dtype != torch.float64,
        overlap_grad_reduce=False,
        use_distributed_optimizer=shard_optimizer,
    )
    return DistributedDataParallel(config=model.config, ddp_config=config, module=model)


def gradient_buffers(ddp: DistributedDataParallel) -> list[Any]:
    """All gradient buffers: those of dense parameters, and those of experts, which are summed over other ranks."""
    return [*ddp.buffers, *ddp.expert_parallel_buffers]


def build_optimizer(
    ddp: DistributedDataParallel, config: Config, shard_optimizer: bool, gloo_groups: bool = True
) -> tuple[MegatronOptimizer, OptimizerParamScheduler]:
    """AdamW with float32 master weights and moments, and its schedule (one step per optimizer step).

    ``gloo_groups``: whether Megatron-Core made its gloo groups beside the others (a planned world has none).
    """
    settings, dtype = config.optimizer, ddp.config.params_dtype
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=settings.lr,
            min_lr=settings.min_lr,
            weight_decay=settings.weight_decay,
            adam_beta1=settings.betas[0],
            adam_beta2=settings.betas[1],
            adam_eps=settings.eps,
            clip_grad=settings.clip_grad,
            bf16=dtype == torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=shard_optimizer,
        ),
        [ddp],
        use_gloo_process_groups=gloo_groups,
    )
    _fuse(optimizer)
    steps = config.train.updates
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0 if settings.warmup_updates else settings.lr,
        max_lr=settings.lr,
        min_lr=settings.min_lr,
        lr_warmup_steps=settings.warmup_updates,
        lr_decay_steps=steps,
        lr_decay_style=settings.decay,
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=steps,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=False,
    )
    return optimizer, scheduler


def _fuse(optimizer: MegatronOptimizer) -> None:
    """Let torch's AdamW (used where neither Transformer Engine's nor Apex's is installed) step in its fused kernel.

    Megatron-Core has no setting for it; the flag is read at each step, as if it had been given to the constructor.
    """
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        inner = part.optimizer
        for group in inner.param_groups if isinstance(inner, torch.optim.Adam) else ():
            group["fused"] = all(p.device.type in _FUSED_DEVICES for p in group["params"])
