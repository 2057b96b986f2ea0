"""A run's objects built anew on new process groups, around the values they had.

Megatron-Core's modules, gradient buffers and optimizers keep the process groups they were built with. After
`Connections.reconnect` they are built again and take over parameters, master weights, moments and step counts, bit for
bit; gradients start at zero.
"""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import torch

from megatron_lrl.checkpoint.rng_state import pack_rng, unpack_rng
from megatron_lrl.lifetimes.optim import build_optimizer, wrap_ddp
from megatron_lrl.models.build import configured_model

if TYPE_CHECKING:
    from megatron_lrl.lifetimes.run import Run


def reopen(run: Run) -> None:
    """Rebuild the run's model, gradient buffers, optimizer and reference model; collective.

    Holds the parameters twice for a moment; until all is built the run keeps what it had. No prefix may be open.
    """
    rng = pack_rng(run.runtime)  # building draws initial weights
    model, reference = _rebuilt(run, run.core(run.model)), run.reference
    optimizer, scheduler = run.optimizer, run.scheduler
    if reference is not None:
        reference = _rebuilt(run, reference).requires_grad_(False)
    if run.model is not run.core(run.model):
        sharded = run.model.ddp_config.use_distributed_optimizer
        model = wrap_ddp(model, run.runtime, sharded)
        if optimizer is not None:
            optimizer, scheduler = build_optimizer(model, run.config, sharded)
            _take_over(run.optimizer, optimizer)
            scheduler.num_steps = 0
            scheduler.step(increment=int(run.scheduler.num_steps))
    unpack_rng(rng, run.runtime)
    run.model, run.reference, run.optimizer, run.scheduler = model, reference, optimizer, scheduler
    gc.collect()  # Megatron-Core's modules refer to themselves; the old parameters should go now
    run.measure_run_bytes()


def _rebuilt(run: Run, old: Any) -> Any:
    """A model like ``old`` with its parameters and buffers."""
    new = configured_model(run.config, run.arch, run.runtime)
    new.load_state_dict(old.state_dict())
    return new


@torch.no_grad()
def _take_over(old: Any, new: Any) -> None:
    """Master weights and state of every parameter of one optimizer, into another of the same layout."""
    for source, target in zip(_parts(old), _parts(new), strict=True):
        groups = zip(source.optimizer.param_groups, target.optimizer.param_groups, strict=True)
        for before, after in groups:
            for old_main, new_main in zip(before["params"], after["params"], strict=True):
                new_main.copy_(old_main)
                if old_main in source.optimizer.state:
                    target.optimizer.state[new_main] = source.optimizer.state[old_main]
            after.update({key: value for key, value in before.items() if key != "params"})


def _parts(optimizer: Any) -> list[Any]:
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))
