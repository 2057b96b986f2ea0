"""`audit`: command lines of the program in a world of ranks that take their machine for one with GPUs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.spawn import TESTS, free_port, tail


def audit(
    folder: Path, commands: Sequence[Sequence[str]], size: int = 1, timeout_s: float = 300.0
) -> list[list[dict[str, Any]]]:
    """By rank and command: what `cuda_audit.rank` recorded.

    Raises AssertionError with a rank's output if a rank died, hung, or a command raised or left with a status other
    than 0.
    """
    folder.mkdir(parents=True, exist_ok=True)
    job = folder / "job.json"
    ports = [free_port() for _ in commands]
    job.write_text(
        json.dumps(
            {
                "commands": [list(map(str, c)) for c in commands],
                "ports": ports,
                "size": size,
                "folder": str(folder),
            }
        )
    )
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(TESTS), str(TESTS.parent))),
        "OMP_NUM_THREADS": "1",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "PYTHONWARNINGS": "ignore",
    }
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK"):
        environment.pop(name, None)
    ranks, logs = [], [folder / f"rank{rank}.log" for rank in range(size)]
    for rank, log in enumerate(logs):
        with log.open("wb") as sink:
            words = [sys.executable, "-m", "cuda_audit.rank", str(job), str(rank)]
            ranks.append(subprocess.Popen(words, env=environment, stdout=sink, stderr=sink))
    deadline = time.monotonic() + timeout_s
    try:
        while any(rank.poll() is None for rank in ranks):
            failed = any(rank.poll() not in (None, 0) for rank in ranks)
            assert time.monotonic() < deadline and not failed, _story(folder, logs)
            time.sleep(0.1)
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
            rank.wait()
    found = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(size)]
    for rank, results in enumerate(found):
        assert len(results) == len(commands), f"rank {rank}: {results[-1]['output'][-6000:]}"
        for command, result in zip(commands, results, strict=True):
            assert result["code"] == 0, f"rank {rank}: {command}\n{result['output'][-6000:]}"
    return found


def _story(folder: Path, logs: list[Path]) -> str:
    parts = []
    for rank, log in enumerate(logs):
        done = folder / f"rank{rank}.json"
        last = json.loads(done.read_text())[-1]["output"][-3000:] if done.exists() else ""
        parts.append(f"--- rank {rank} ---\n{last}\n{tail(log)}")
    return "\n".join(parts)
