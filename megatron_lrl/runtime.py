"""Device, backend, process groups and seeds: the one place that knows where a run executes.

`init_runtime` brings up torch.distributed and Megatron-Core's parallel state; everything else asks the
`Runtime` it returns. On a machine with CUDA that means NCCL and one device per local rank, elsewhere gloo on
the CPU.
"""

from __future__ import annotations

import logging
import os
import random
import re
import sys
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import chain
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from megatron_lrl import platform_cpu
from megatron_lrl.errors import RankFailure, UserError
from megatron_lrl.table import MOST_RANKS

T = TypeVar("T")

COLLECTIVE_TIMEOUT = timedelta(minutes=30)


@dataclass(frozen=True)
class Layout:
    """Parallel sizes. ``dp`` follows from the world: world / (tp cp pp).

    ``ep`` cuts no replica smaller: a stage's experts are spread over ep of its cp and dp ranks, cp first.
    """

    tp: int = 1
    cp: int = 1
    pp: int = 1
    ep: int = 1

    @property
    def model_size(self) -> int:
        """Ranks that hold one replica of the model and its state."""
        return self.tp * self.cp * self.pp


@dataclass(frozen=True)
class World:
    """All ranks of this launch, before any layout is known."""

    device: torch.device
    rank: int
    world_size: int

    @property
    def is_main(self) -> bool:
        """True on the one rank that prints and writes logs."""
        return self.rank == 0

    def barrier(self) -> None:
        if self.world_size > 1:
            dist.barrier()

    def together(self, action: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run ``action`` on every rank; if it fails on any, fail on all with the first failing message.

        Collective over the world. Raises the rank's own exception where it happened, `UserError` elsewhere (its
        subclass `RankFailure` for any other kind).
        """
        result: T | None = None
        failure: Exception | None = None
        try:
            result = action(*args, **kwargs)
        except Exception as error:  # every rank must learn of any failure, whatever its kind
            failure = error
        self.agree(failure)
        return result  # type: ignore[return-value]

    def agree(self, failure: Exception | None) -> None:
        """Collective: raise on all ranks if any rank reports a failure."""
        if self.world_size > 1:
            messages: list[tuple[bool, str] | None] = [None] * self.world_size
            mine = None if failure is None else (isinstance(failure, UserError), _describe(failure))
            dist.all_gather_object(messages, mine)
            if failure is None:
                for rank, message in enumerate(messages):
                    if message is not None:
                        expected, text = message
                        if expected:
                            raise UserError(text)
                        raise RankFailure(f"rank {rank} failed: {text}")
        if failure is not None:
            raise failure

    def gather_objects(self, value: T, group: Any = None) -> list[T]:
        """``value`` of every rank of ``group`` (default: the world), in rank order, on every rank."""
        size = self.world_size if group is None else group.size()
        if size == 1:
            return [value]
        values: list[Any] = [None] * size
        dist.all_gather_object(values, value, group=group)
        return values


@dataclass(frozen=True)
class Runtime(World):
    """Where this rank runs, its layout and its process groups."""

    layout: Layout
    groups: Any  # megatron.core ProcessGroupCollection

    def in_order(self, mine: Sequence[tuple[int, T]]) -> list[T]:
        """What the replicas made of their items, each given with its place, in the order of places on every rank."""
        everyone = self.gather_objects(list(mine) if self.is_replica_leader else [])
        return [value for _, value in sorted(chain.from_iterable(everyone), key=lambda item: item[0])]

    @property
    def dp(self) -> int:
        return self.world_size // self.layout.model_size

    @property
    def tp_rank(self) -> int:
        return self.groups.tp.rank()

    @property
    def cp_rank(self) -> int:
        return self.groups.cp.rank()

    @property
    def pp_rank(self) -> int:
        return self.groups.pp.rank()

    @property
    def dp_rank(self) -> int:
        return self.groups.dp.rank()

    @property
    def ep_rank(self) -> int:
        return self.groups.ep.rank()

    @property
    def is_replica_leader(self) -> bool:
        """True on one rank of each dp replica."""
        return self.tp_rank == self.cp_rank == self.pp_rank == 0

    @property
    def is_first_stage(self) -> bool:
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pp_rank == self.layout.pp - 1


def _describe(error: Exception) -> str:
    return str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"


_LOST = re.compile(
    r"gloo.*(closed by peer|reset by peer|broken pipe|socket closed|timed? ?out)"
    r"|ncclRemoteError|remote process exited|nccl communicator was aborted|remote server shutdown",
    re.IGNORECASE | re.DOTALL,
)


def lost_connection(error: BaseException) -> str | None:
    """What to tell the user where an error means that another rank is gone; None for any other error.

    A connection's end does not say whose it was: ranks are numbered among the living only where there are two.
    """
    text = str(error)
    if not isinstance(error, RuntimeError) or not _LOST.search(text):
        return None
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    who = f"rank {1 - rank}" if size == 2 else "another rank"
    return f"rank {rank} lost its connection to {who}, which was killed, failed or does not answer"


def quiet_libraries() -> None:
    """Keep other libraries' start-up warnings out of the user's terminal."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("GLOO_LOG_LEVEL", "ERROR")
    warnings.filterwarnings("ignore", module=r"megatron\.")
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=SyntaxWarning)  # of modules that were not compiled at install
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    for name in ("megatron", "torch.distributed", "torch.utils.cpp_extension", "transformers"):
        logging.getLogger(name).setLevel(logging.ERROR)
    # What it logs as an error it raises too.
    writer = "megatron.core.dist_checkpointing.strategies.filesystem_async"
    logging.getLogger(writer).setLevel(logging.CRITICAL)


def init_distributed() -> World:
    """Bring up torch.distributed from torchrun's environment, or alone; safe to call again.

    Raises `UserError` if the environment is that of a launcher but incomplete.
    """
    quiet_libraries()
    cuda = torch.cuda.is_available()
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local_rank % torch.cuda.device_count()) if cuda else torch.device("cpu")
    if cuda:
        _check_devices(local_rank)
        torch.cuda.set_device(device)
        full_float32()
    elif world_size > 1 and "OMP_NUM_THREADS" not in os.environ:
        per_rank = max(1, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", str(world_size))))
        torch.set_num_threads(per_rank)
    if not dist.is_initialized():
        backend = "nccl" if cuda else "gloo"
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            store = _fresh_store(rank, world_size)
            dist.init_process_group(
                backend, store=store, rank=rank, world_size=world_size, timeout=COLLECTIVE_TIMEOUT
            )
        elif "MASTER_ADDR" in os.environ:
            dist.init_process_group(backend, rank=rank, world_size=world_size, timeout=COLLECTIVE_TIMEOUT)
        elif world_size == 1:
            dist.init_process_group(
                backend, store=dist.HashStore(), rank=0, world_size=1, timeout=COLLECTIVE_TIMEOUT
            )
        else:
            raise UserError("WORLD_SIZE is set but MASTER_ADDR is not: launch with torchrun")
    return World(device, rank, world_size)


def _check_devices(local_rank: int) -> None:
    """Raise `UserError` if ranks of torchrun, which all see the same devices, would share one: NCCL cannot."""
    devices, ranks = torch.cuda.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if "TORCHELASTIC_RUN_ID" in os.environ and local_rank >= devices:
        raise UserError(
            f"{ranks} ranks on a machine that shows {devices} CUDA device{'s' * (devices > 1)}: each rank needs its "
            f"own; launch {devices}, or hide the devices (CUDA_VISIBLE_DEVICES=) to run on the CPU"
        )


def full_float32() -> None:
    """float32 on CUDA means float32: by default cuDNN's convolutions (Gated DeltaNet has one) use TensorFloat-32."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False


def _fresh_store(rank: int, world_size: int) -> dist.Store:
    """The store of torchrun's agent, under a prefix that is new with every start of the world.

    The agent's store outlives a restart of its workers and still holds the addresses of the dead; whoever reads one
    waits for a connection that never comes. Restart counts may differ between nodes, so rank 0 draws the prefix, and
    hands it to every rank that greets it with a name of its own. No wait here can be answered by what a dead rank left.
    """
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, is_master=False, timeout=COLLECTIVE_TIMEOUT)
    name = uuid.uuid4().hex
    if rank == 0:
        answered: dict[int, str] = {0: name}
        greeted: set[int] = {0}
        while len(greeted) < world_size:
            for other in range(1, world_size):
                key = f"megatron_lrl/hello/{other}"
                if other in greeted or not store.check([key]):
                    continue
                seen = store.get(key).decode()
                if answered.get(other) != seen:  # again, if it changed: the first may have been a dead rank's
                    answered[other] = seen
                    store.set(f"megatron_lrl/welcome/{seen}", name)
                if store.check([f"megatron_lrl/thanks/{name}/{seen}"]):
                    greeted.add(other)
            time.sleep(0.05)
        return dist.PrefixStore(f"megatron_lrl/{name}", store)
    store.set(f"megatron_lrl/hello/{rank}", name)
    prefix = store.get(f"megatron_lrl/welcome/{name}").decode()  # waits
    store.set(f"megatron_lrl/thanks/{prefix}/{name}", "1")
    return dist.PrefixStore(f"megatron_lrl/{prefix}", store)


def check_world(layout: Layout, world_size: int) -> None:
    """Raise `UserError` naming the keys and the valid multiple if ``layout`` does not divide the world."""
    size = layout.model_size
    if world_size > MOST_RANKS:
        raise UserError(f"a world of {world_size} ranks; valid: at most {MOST_RANKS}")
    if world_size < 1 or world_size % size:
        raise UserError(
            f"parallel.tp = {layout.tp}, parallel.cp = {layout.cp}, parallel.pp = {layout.pp} need a "
            f"multiple of {size} ranks, but the world has {world_size}; launch so many or change the layout"
        )
    # Megatron-Core splits a pipeline stage's ranks once more, into tp x ep, for the experts.
    experts = layout.tp * layout.pp * layout.ep
    if world_size % experts:
        raise UserError(
            f"parallel.tp = {layout.tp}, parallel.pp = {layout.pp}, parallel.ep = {layout.ep} need a "
            f"multiple of {experts} ranks, but the world has {world_size}: experts are spread over the ranks of "
            f"parallel.cp and data parallelism, here {world_size // (layout.tp * layout.pp)}; parallel.ep must divide "
            "that (1 for dense models)"
        )


def init_runtime(layout: Layout, seed: int = 0) -> Runtime:
    """Initialise torch.distributed, Megatron-Core's parallel state and all seeds.

    Raises `UserError` when the layout does not divide the world, before any model-parallel group exists.
    """
    world = init_distributed()
    platform_cpu.install()
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    check_world(layout, world.world_size)
    groups = model_parallel_groups(layout)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)
    return Runtime(world.device, world.rank, world.world_size, layout, groups)


def model_parallel_groups(layout: Layout, gloo_groups: bool = True) -> Any:
    """Megatron-Core's process groups of a layout, created; torch.distributed is up, and no such groups exist.

    ``gloo_groups``: with its gloo groups beside the others (a planned world cannot have them).
    """
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        create_gloo_process_groups=gloo_groups,
    )
    return ProcessGroupCollection.use_mpu_process_groups()


def shutdown_runtime() -> None:
    """Tear down process groups; a later `init_runtime` in the same process starts afresh."""
    if not dist.is_initialized():
        return
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


@contextmanager
def runtime_scope(layout: Layout, seed: int = 0) -> Iterator[Runtime]:
    """`init_runtime`, and `shutdown_runtime` at the end of the block, whatever happened inside.

    Where another rank is gone, one line says so and the process exits with status 1.
    """
    try:
        yield init_runtime(layout, seed)
    except RuntimeError as error:
        told = lost_connection(error)
        if told is None:
            raise
        # Each survivor for itself: the rank that usually prints may be the one that is gone.
        print(f"error: {told}; start the same command again", file=sys.stderr, flush=True)
        raise SystemExit(1) from None
    finally:
        shutdown_runtime()


def unwrap(model: Any) -> Any:
    """The model inside the wrappers that hold its gradient buffers (Megatron-Core's DDP), or the model itself."""
    while not hasattr(model, "decoder") and hasattr(model, "module"):
        model = model.module
    return model
