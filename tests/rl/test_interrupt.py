"""Claim: a signal lets the update finish, the same wish repeated by a launcher too; a later one ends a run that hangs.

Why it shows it: a process of its own hangs as a reward would, under the handler that `train` uses, and is signalled.
Not shown: a function that never lets go of Python's lock; only SIGKILL ends that.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

_HANGS = """
import time
from megatron_lrl.rl.interrupt import interruptible
with interruptible(True) as interrupt:
    print("ready", flush=True)
    while True:
        try:
            time.sleep(3600)
        except BaseException:
            pass
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_later_signal_ends_what_hangs(number: signal.Signals) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", _HANGS], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        process.send_signal(number)
        time.sleep(0.2)
        process.send_signal(number)  # as torchrun passes a terminal's on
        time.sleep(1.2)
        assert process.poll() is None
        process.send_signal(number)
        _, said = process.communicate(timeout=10)
    finally:
        process.kill()
    assert process.returncode == -number
    assert said.split("\n")[1:4:2] == [
        f"{number.name}: stops after the current update, with a checkpoint; once more ends it now",
        f"{number.name} again: ends now; the same command resumes from the newest checkpoint",
    ]
