"""The fork server: one process imports torch and Megatron-Core once and forks the ranks of every world.

    test process --(a job per line on stdin)--> fork server --fork--> rank 0 .. n-1   (device "cpu")
                 <--(a verdict per line on stdout)--      \\--exec--> rank 0 .. n-1   (device "cuda")

The server itself starts no thread, no process group and no CUDA context, which is what makes its forks
safe; it checks the first of these before every fork. CUDA ranks are fresh interpreters, because a driver
does not survive a fork.

The server supervises what it started: a rank that fails takes the others with it after a short grace, a
rank that does not finish in time is asked for its stack and killed, and all ranks die with the server.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import pkgutil
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

GRACE_S = 3.0  # after the first failure: time for the other ranks to write their own tracebacks
STACK_S = 1.0  # after a timeout: time for the stack dumps to reach the logs
PRELOADED = [
    "torch",
    "torch.distributed",
    "numpy",
    "safetensors.torch",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.qwen3.modeling_qwen3",
]
MEGATRON = [
    "megatron.core",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.dist_checkpointing",
    "megatron.core.distributed",
    "megatron.core.optimizer",
    "megatron.core.pipeline_parallel.schedules",
]


def preload() -> None:
    """Imports what ranks need: Megatron-Core after the platform module, then the program itself.

    A module that fails to import is left to the ranks that need it, where the error has its place in a
    traceback.
    """
    for name in PRELOADED:
        importlib.import_module(name)
    import torch

    torch.set_num_threads(1)
    try:
        from megatron_lrl import platform_cpu

        platform_cpu.install()
    except ImportError:
        return
    for name in MEGATRON:
        importlib.import_module(name)
    import megatron_lrl

    for module in pkgutil.walk_packages(megatron_lrl.__path__, "megatron_lrl.", onerror=lambda _: None):
        if not module.name.endswith("__main__"):
            with contextlib.suppress(Exception):
                importlib.import_module(module.name)


def die_with_parent() -> None:
    """Asks Linux to kill this process when its parent ends; elsewhere a closed pipe tells."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1 = PR_SET_PDEATHSIG


def threads() -> int:
    """Threads of this process."""
    tasks = Path("/proc/self/task")
    return len(list(tasks.iterdir())) if tasks.exists() else 1


def start_rank(job: dict[str, Any], rank: int) -> tuple[int, int]:
    """Starts one rank. Returns its process id and a pipe that closes when the rank ends."""
    folder = Path(job["folder"])
    environment = {**job["env"], "RANK": str(rank), "LOCAL_RANK": str(rank)}
    ended, held = os.pipe()  # only this rank keeps `held` open, so `ended` reads end-of-file when it dies
    log = os.open(folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    if job["device"] == "cuda":
        os.set_inheritable(held, True)
        process = subprocess.Popen(
            [sys.executable, "-m", "harness.rank", str(folder), str(rank)],
            env={**os.environ, **environment}, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            pass_fds=[held], process_group=0,
        )  # fmt: skip
        pid = process.pid
        process.returncode = 0  # this module waits for it, not the Popen object
    else:
        if threads() > 1:
            raise RuntimeError(f"the fork server runs {threads()} threads: something it preloads starts one")
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                die_with_parent()
                os.setpgid(0, 0)
                os.close(ended)
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                os.dup2(log, 1)
                os.dup2(log, 2)
                os.environ.update(environment)
                from harness.rank import run_rank

                code = run_rank(folder, rank)
                sys.stdout.flush()
                sys.stderr.flush()
            finally:
                os._exit(code)
    with contextlib.suppress(OSError):  # the child may have done it, or be gone
        os.setpgid(pid, pid)
    os.close(held)
    os.close(log)
    return pid, ended


def supervise(job: dict[str, Any], master: int) -> dict[str, Any]:
    """Runs one job to its end. Returns exit codes by rank, who failed first, and whether time ran out."""
    alive: dict[int, tuple[int, int]] = {}  # pipe -> (rank, pid)
    exits: dict[int, int] = {}
    failed: list[int] = []
    timed_out = False
    deadline = time.monotonic() + job["timeout_s"]
    try:
        for rank in range(job["size"]):
            pid, ended = start_rank(job, rank)
            alive[ended] = (rank, pid)
        while alive:
            ready, _, _ = select.select([*alive, master], [], [], max(0.0, deadline - time.monotonic()))
            if master in ready and not os.read(master, 1):
                raise SystemExit("the test process is gone")
            for pipe in ready:
                if pipe == master:
                    continue
                rank, pid = alive.pop(pipe)
                os.close(pipe)
                exits[rank] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                if exits[rank] != 0 or not (Path(job["folder"]) / f"rank{rank}.pt").exists():
                    deadline = deadline if failed else min(deadline, time.monotonic() + GRACE_S)
                    failed.append(rank)
            if time.monotonic() >= deadline:
                timed_out = not failed
                break
        if timed_out:
            for _, pid in alive.values():
                os.kill(pid, signal.SIGUSR1)
            time.sleep(STACK_S)
    finally:
        for pipe, (rank, pid) in alive.items():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            exits[rank] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            os.close(pipe)
    killed = sorted(rank for rank, _ in alive.values())
    return {
        "exits": [exits[r] for r in range(job["size"])],
        "failed": failed,
        "killed": killed,
        "timed_out": timed_out,
    }


def serve() -> None:
    """Answers jobs until stdin closes."""
    die_with_parent()
    verdicts = os.fdopen(os.dup(1), "w")
    os.set_inheritable(verdicts.fileno(), False)
    os.dup2(2, 1)  # what an import prints must not look like a verdict
    started = time.monotonic()
    preload()
    print(json.dumps({"ready_s": time.monotonic() - started}), file=verdicts, flush=True)
    buffer = b""
    while True:
        block = os.read(0, 65536)
        if not block:
            return
        buffer += block
        while b"\n" in buffer:
            line, buffer = buffer.split(b"\n", 1)
            try:
                verdict = supervise(json.loads(line), master=0)
            except Exception as error:
                verdict = {"error": repr(error)}
            print(json.dumps(verdict), file=verdicts, flush=True)


if __name__ == "__main__":
    serve()
