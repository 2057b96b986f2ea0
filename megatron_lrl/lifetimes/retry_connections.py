"""How ranks that wait for a failed one are released, meet again and reconnect.

A rank that fails in the middle of a pass leaves the others inside collectives that it will never enter. It reports to
the store that launched the world (which no collective uses), then closes its connections: whoever waits for it gets an
error, reports and closes its own, and so on. At the store all ranks meet, read all reports, and decide alike.

    failed rank   report ─ sever ─────────────┐
    waiting rank  (error) ─ report ─ sever ───┼─ meet ─ all reports ─┬─ reconnect: new process groups
    computing rank … (error) ─ report ─ sever ┘                      └─ or leave, all with one message

This needs TCP connections that belong to the process groups alone: gloo. Under NCCL a failed rank ends its process,
and the launcher restarts the world.
"""

from __future__ import annotations

import json
import os
import socket
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from megatron_lrl.errors import UserError
from megatron_lrl.runtime import COLLECTIVE_TIMEOUT, Runtime, model_parallel_groups

_MEETING_S = 600.0
"""How long a rank waits for the others: one of them may compute for minutes before it enters its next collective."""
_SLICE_S = 1.0
"""Between looks at signals: a wait at the store is deaf to them."""

Address = tuple[Any, Any]  # of a connection: own end, peer's end


@dataclass(frozen=True)
class Report:
    """Why a rank left its pass."""

    rank: int
    order: int  # 1 = the first rank to report: the one that failed, not one that was released
    message: str
    fatal: bool  # no other attempt can help


class Connections:
    """The store and the sockets behind a runtime's process groups."""

    def __init__(self, runtime: Runtime) -> None:
        """Call while no connection is open but those of torch.distributed: right after `init_runtime`."""
        self.runtime = runtime
        self._meetings = 0
        self._store = distributed_c10d._get_default_store()
        self._port = _port(self._store)
        self._ours = set(self._connected())

    @classmethod
    def of(cls, runtime: Runtime) -> Connections | None:
        """None where a world of several ranks cannot be reconnected (any backend but gloo) or has nothing to."""
        if runtime.world_size == 1 or dist.get_backend() != "gloo":
            return None
        return cls(runtime)

    def meet(self, message: str, fatal: bool, abandon: Callable[[], bool]) -> list[Report]:
        """Report this rank's failure, release whoever waits for it, and wait for all ranks' reports.

        Returns the reports, the first failure first. Raises `UserError` if a rank does not come, or if ``abandon()``
        says so while waiting (a signal, for instance).
        """
        runtime = self.runtime
        self._meetings += 1
        store = dist.PrefixStore(f"meeting-{self._meetings}", self._store)
        # Counted before any connection is cut, so that the first in order is the cause.
        order = store.add("arrived", 1)
        store.set(f"rank-{runtime.rank}", json.dumps(asdict(Report(runtime.rank, order, message, fatal))))
        if store.add("reported", 1) == runtime.world_size:
            store.set("complete", "1")
        self.sever()
        deadline = time.monotonic() + _MEETING_S
        while not _arrives(store, "complete", _SLICE_S):
            if abandon() or time.monotonic() > deadline:
                present = [rank for rank in range(runtime.world_size) if store.check([f"rank-{rank}"])]
                absent = sorted(set(range(runtime.world_size)) - set(present))
                who = f"rank {absent[0]} does" if len(absent) == 1 else f"ranks {absent} do"
                raise UserError(
                    f"{who} not answer after a failure: killed, or still busy ({message}); start the same command "
                    "again: it resumes from the newest checkpoint"
                )
        names = [f"rank-{rank}" for rank in range(runtime.world_size)]
        return sorted((Report(**json.loads(store.get(name))) for name in names), key=lambda r: r.order)

    def sever(self) -> None:
        """Close every connection of the process groups; the store's stay."""
        for address, handle in self._sockets():
            if address in self._ours:
                with handle:
                    handle.shutdown(socket.SHUT_RDWR)
            else:
                handle.close()

    def reconnect(self) -> None:
        """New process groups for the same runtime object; collective over all ranks that met."""
        from megatron.core import parallel_state

        runtime, foreign = self.runtime, set(self._connected()) - self._ours
        parallel_state.destroy_model_parallel()
        if dist.is_initialized():
            dist.destroy_process_group()
        try:
            dist.init_process_group(
                "gloo",
                store=dist.PrefixStore(f"connection-{self._meetings}", self._store),
                rank=runtime.rank,
                world_size=runtime.world_size,
                timeout=COLLECTIVE_TIMEOUT,
            )
            # Everything holds this Runtime and asks it for groups when it needs one.
            object.__setattr__(runtime, "groups", model_parallel_groups(runtime.layout))
        finally:
            self._ours = set(self._connected()) - foreign

    def _connected(self) -> Iterator[Address]:
        for address, handle in self._sockets():
            handle.close()
            yield address

    def _sockets(self) -> Iterator[tuple[Address, socket.socket]]:
        """A duplicate of each connected TCP socket of this process, except those to and of the store."""
        for name in os.listdir("/dev/fd"):
            try:
                if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                    continue
                handle = socket.socket(fileno=os.dup(int(name)))
            except OSError:  # the descriptor of the listing itself
                continue
            try:
                own, peer = handle.getsockname(), handle.getpeername()
            except OSError:  # listens, or is closed already
                handle.close()
                continue
            internet = handle.family in (socket.AF_INET, socket.AF_INET6)
            if internet and self._port not in (own[1], peer[1]):
                yield (own, peer), handle
            else:
                handle.close()


def _port(store: Any) -> int:
    """The port of the TCP store under any prefixes."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return int(store.port)


def _arrives(store: Any, key: str, seconds: float) -> bool:
    try:
        store.wait([key], timedelta(seconds=seconds))
    except dist.DistStoreError:
        return False
    return True
