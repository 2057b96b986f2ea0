"""What one rank of a world does: import the target, call it, store its result or its traceback.

A job folder holds `job.json` (target, world), `kwargs.pt`, and for every rank r: `rank{r}.log` (its
output), then `rank{r}.pt` (its result) or `rank{r}.error` (its traceback). Run as a program:
`python -m harness.rank FOLDER RANK`.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import json
import os
import signal
import sys
import traceback
from pathlib import Path


def run_rank(folder: Path, rank: int) -> int:
    """Runs the folder's job as `rank`, with torchrun's variables set, and returns the exit code."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # how a hanging rank shows where it stands
    try:
        import torch

        from harness.worlds import World

        torch.set_num_threads(1)
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        job = json.loads((folder / "job.json").read_text())
        kwargs = torch.load(folder / "kwargs.pt", weights_only=True)
        module, _, function = job["target"].partition(":")
        result = getattr(importlib.import_module(module), function)(World(*job["world"]), **kwargs)
        unfinished = folder / f"rank{rank}.pt.part"
        torch.save(result, unfinished)
        os.replace(unfinished, folder / f"rank{rank}.pt")
    except BaseException:  # SystemExit too: a rank that leaves early has failed
        (folder / f"rank{rank}.error").write_text(traceback.format_exc())
        return 1
    leave_together()
    return 0


def leave_together() -> None:
    """Keeps rank 0's store alive until all are done; errors are dropped, a failed peer has its traceback."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        with contextlib.suppress(Exception):
            dist.barrier()
            dist.destroy_process_group()


if __name__ == "__main__":
    code = run_rank(Path(sys.argv[1]), int(sys.argv[2]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a half-dead process group must not keep the interpreter from ending
