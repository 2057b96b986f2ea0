"""One rank of an audit: pretend CUDA, NCCL's rules, then command lines of the program, one after another.

    python -m cuda_audit.rank JOB.json RANK

The job holds `commands` (argument lists), `ports` (one a command) and `folder`; the rank leaves `rank{r}.json` there:
exit codes, output, the places where the host waited, the collectives of every group in order.
"""

from __future__ import annotations

import contextlib
import io
import json
import multiprocessing
import os
import sys
import traceback
from pathlib import Path
from typing import Any


def main(job_file: str, rank: int) -> None:
    """Run the job as ``rank``."""
    job = json.loads(Path(job_file).read_text())
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(job["size"]))
    from cuda_audit import nccl, torch_cuda

    pretence, rules = torch_cuda.install(rank), nccl.install()
    from megatron_lrl.cli import main as program

    results: list[dict[str, Any]] = []
    for arguments, port in zip(job["commands"], job["ports"], strict=True):
        if job["size"] > 1:
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        pretence.waits.clear()
        rules.calls.clear()
        rules.sequence.clear()
        out = io.StringIO()
        before, code, error = pretence.operations, 0, ""
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            try:
                code = program(arguments) or 0
            except SystemExit as leaving:
                code = int(leaving.code or 0)
            except BaseException:
                code, error = -1, traceback.format_exc()
        results.append(
            {
                "code": code,
                "output": out.getvalue() + error,
                "waits": dict(pretence.waits),
                "calls": dict(rules.calls),
                "sequence": {str(list(ranks)): calls for ranks, calls in rules.sequence.items()},
                "operations": pretence.operations - before,
            }
        )
        (Path(job["folder"]) / f"rank{rank}.json").write_text(json.dumps(results))
        if code < 0:
            break
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
    for child in multiprocessing.active_children():  # a checkpoint's manager would outlive this exit
        child.kill()
    os._exit(0)
