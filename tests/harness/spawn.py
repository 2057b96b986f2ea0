"""`run_world`: call one function on every rank of a world, get its results, never hang.

    results = run_world(World(tp=2), "layers.softmax.ranks:merge_cases", cases=[...])    # one value a rank

The function is named, not passed: it lives in an importable module below tests/ that every rank imports for
itself. It receives the `World` and the keyword arguments, and sets up the process group (`RANK`,
`WORLD_SIZE`, `LOCAL_RANK`, `MASTER_ADDR`, `MASTER_PORT` are set as torchrun sets them). Arguments and
results are plain Python values and tensors. Hand a function a list of cases: a world costs about as much as
setting up its process groups.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

TESTS = Path(__file__).resolve().parents[1]
START_S = 300.0  # for the imports, on a slow and busy machine
LOG_TAIL = 4000


class RankFailure(Exception):
    """A world did not finish. `rank` failed first (or hung); the message holds its traceback or stack and
    its last output.
    """

    def __init__(self, message: str, rank: int | None, timed_out: bool) -> None:
        super().__init__(message)
        self.rank = rank
        self.timed_out = timed_out


class ForkServer:
    """The client's side of `harness.forkserver`; one a test process, started on first use."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="megatron-lrl-worlds-"))
        self.log = self.folder / "server.log"
        paths = [str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(p for p in paths if p),
            "PYTHONWARNINGS": "ignore",
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",  # CPU worlds stay on the CPU; CUDA ranks have their own
        }
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "harness.forkserver"],
                env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
            )  # fmt: skip
        self._unread = b""
        self.ready_s = float(self.answer(START_S)["ready_s"])

    def answer(self, timeout_s: float) -> dict[str, Any]:
        """The server's next line; RuntimeError when it is gone or silent."""
        assert self.process.stdout is not None
        pipe = self.process.stdout.fileno()
        while b"\n" not in self._unread:
            ready, _, _ = select.select([pipe], [], [], timeout_s)
            block = os.read(pipe, 65536) if ready else b""
            if not block:
                self.process.kill()
                state = "ended" if ready else f"was silent for {timeout_s:.0f} s"
                raise RuntimeError(f"the fork server {state}; its output ends:\n{tail(self.log)}")
            self._unread += block
        line, self._unread = self._unread.split(b"\n", 1)
        return json.loads(line)

    def run(self, job: dict[str, Any]) -> dict[str, Any]:
        """Runs one job, see `harness.forkserver.supervise`."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(job).encode() + b"\n")
        self.process.stdin.flush()
        try:
            verdict = self.answer(job["timeout_s"] + 60.0)
        except (
            BaseException
        ):  # an interrupted test (Ctrl-C, a test's own timeout) must not leave a verdict to the next
            self.process.kill()
            self.process.wait()
            raise
        if "error" in verdict:
            raise RuntimeError(f"the fork server could not run the job: {verdict['error']}")
        return verdict

    def close(self) -> None:
        """Ends the server and removes its job folders."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


_server: ForkServer | None = None


def server() -> ForkServer:
    """The test process's fork server; a new one when the last has died."""
    global _server
    if _server is None or _server.process.poll() is not None:
        _server = ForkServer()
        atexit.register(_server.close)
    return _server


def run_world(
    world: Sequence[int], target: str, *, device: str = "cpu", timeout_s: float = 300.0, **kwargs: Any
) -> list[Any]:
    """Calls `target` ("module:function") as `function(world, **kwargs)` on every rank.

    Args:
        world: a `World`, or its four sizes.
        target: the module is imported from tests/ on each rank.
        device: "cpu" (gloo, CUDA hidden, forked ranks) or "cuda" (a device a rank, nccl, fresh interpreters).
        timeout_s: seconds for the whole world, after which every rank prints its stack and is killed.
        kwargs: plain values and tensors.

    Returns:
        The ranks' return values, in order of rank.

    Raises:
        RankFailure: a rank raised, left without a result, was killed, or did not finish in time. The other
            ranks are ended.
    """
    from harness.worlds import World

    world = World(*world)
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device must be cpu or cuda, not {device!r}")
    host = server()
    folder = Path(tempfile.mkdtemp(dir=host.folder, prefix=f"{world.name}-"))
    (folder / "job.json").write_text(json.dumps({"target": target, "world": list(world)}))
    torch.save(kwargs, folder / "kwargs.pt")
    environment = {
        "WORLD_SIZE": str(world.size),
        "LOCAL_WORLD_SIZE": str(world.size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    }
    if device == "cuda":
        visible = [str(i) for i in range(torch.cuda.device_count())]
        if len(visible) < world.size:
            raise ValueError(
                f"{world.name} needs {world.size} CUDA devices, this machine shows {len(visible)}"
            )
        environment["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(visible)
    job = {
        "folder": str(folder),
        "size": world.size,
        "device": device,
        "timeout_s": timeout_s,
        "env": environment,
    }
    verdict = host.run(job)
    results = [folder / f"rank{rank}.pt" for rank in range(world.size)]
    if any(verdict["exits"]) or verdict["timed_out"] or not all(path.exists() for path in results):
        raise failure(world, target, folder, verdict, timeout_s)
    values = [torch.load(path, weights_only=True) for path in results]
    shutil.rmtree(folder, ignore_errors=True)
    return values


def failure(world: Any, target: str, folder: Path, verdict: dict[str, Any], timeout_s: float) -> RankFailure:
    """The exception for a world that did not finish, the culprit's traceback first."""
    title = f"{target} in world {world.name}"
    if verdict["timed_out"]:
        lines = [f"{title}: ranks {verdict['killed']} did not finish in {timeout_s:g} s and were killed"]
        for rank in verdict["killed"]:
            lines.append(f"--- rank {rank} stood here ---\n{tail(folder / f'rank{rank}.log')}")
        return RankFailure("\n".join(lines), verdict["killed"][0], True)
    rank = verdict["failed"][0] if verdict["failed"] else None
    lines = [title if rank is None else f"{title}: rank {rank} failed first, exit {verdict['exits'][rank]}"]
    for failed in verdict["failed"]:
        error = folder / f"rank{failed}.error"
        shown = tail(error) if error.exists() else "it left no traceback"
        log = tail(folder / f"rank{failed}.log") if failed == rank else ""
        lines.append(f"--- rank {failed} ---\n{shown}" + (f"\n--- its output ends ---\n{log}" if log else ""))
    if verdict["killed"]:
        lines.append(f"--- ended because of it: ranks {verdict['killed']} ---")
    return RankFailure("\n".join(lines), rank, False)


def tail(path: Path) -> str:
    """The last characters of a text file, or nothing."""
    return path.read_text(errors="replace")[-LOG_TAIL:].strip() if path.exists() else ""


def free_port() -> int:
    """A TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
