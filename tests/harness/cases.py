"""Rank functions for the harness's own tests."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
import torch.distributed as dist

from harness.worlds import World


def total(world: World, cases: list[float]) -> dict[str, Any]:
    """Sums each case times (rank + 1) over the ranks."""
    dist.init_process_group("gloo")
    sums = []
    for case in cases:
        value = torch.tensor([case * (dist.get_rank() + 1)], dtype=torch.float64)
        dist.all_reduce(value)
        sums.append(value)
    return {
        "rank": dist.get_rank(),
        "size": dist.get_world_size(),
        "name": world.name,
        "sums": torch.cat(sums),
    }


def misbehave(world: World, rank: int, how: str) -> None:
    """On one rank: raise, leave the interpreter, or hang, while the other ranks wait in a collective."""
    dist.init_process_group("gloo")
    if dist.get_rank() == rank:
        print(f"rank {rank} is about to {how}")
        if how == "raise":
            raise ValueError("the seeded failure")
        if how == "leave":
            os._exit(0)
        time.sleep(600)
    dist.barrier()


def process_ids(world: World, rank: int, path: str) -> None:
    """Writes every rank's process id, then hangs on one rank."""
    with open(f"{path}.{os.environ['RANK']}", "w") as out:
        out.write(str(os.getpid()))
    misbehave(world, rank, "hang")


def threads(world: World) -> int:
    """The thread count that torch would use."""
    return torch.get_num_threads()


def cuda_total(world: World, cases: list[float]) -> dict[str, Any]:
    """Sums each case over the ranks with nccl."""
    dist.init_process_group("nccl")
    value = torch.tensor(cases, device="cuda")
    dist.all_reduce(value)
    return {"device": torch.cuda.current_device(), "sums": value.tolist()}
