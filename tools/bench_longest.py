"""The longest prompt whose window fits a budget of process memory, by contract: `bench_replay.py --longest GIB`.

Each probe is one window in a process of its own, which reports the peak of its resident set during that window; it is
watched from outside and ended when far past the budget. What is reported as measured was run within the budget. The
peak grows linearly with P, so probes that fit predict the next one: four times the prompt until the limit is near, then
by the line through the two longest that fitted: three probes, started at a quarter of what `megatron-lrl plan` expects.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from bench_common import resident_set

from megatron_lrl.errors import UserError

GIB = 2**30
MARGIN = 0.03  # the search ends when its bracket is this narrow
POLL_SECONDS, REPORT_SECONDS = 0.1, 60
START_SLACK = 256 * 2**20
"""Bytes past the budget that end a probe early: loading may take more than a window, whose own peak decides."""


@dataclass(frozen=True)
class Probe:
    """One window: ``peak`` bytes of its process, None if it passed the budget; ``late`` if it took too long."""

    prompt: int
    peak: int | None
    seconds: float
    late: bool = False


@dataclass
class Search:
    """What is known of one contract: probes that fit, the shortest prompt that did not."""

    contract: str
    first: int  # smallest P that is tried
    fitting: list[Probe]
    over: int | None = None
    late: bool = False

    @property
    def best(self) -> Probe | None:
        return max(self.fitting, key=lambda probe: probe.prompt, default=None)

    def predicted(self, budget: float) -> float | None:
        """P at which the line through the two longest fitting probes meets the budget."""
        if len(self.fitting) < 2:
            return None
        (p1, m1), (p2, m2) = sorted((probe.prompt, probe.peak or 0) for probe in self.fitting)[-2:]
        return p2 + (budget - m2) * (p2 - p1) / (m2 - m1) if m2 > m1 else None

    def next_prompt(self, budget: float) -> int | None:
        """The P to try next, a multiple of 32, or None when the search is over."""
        if self.late or (self.over is not None and self.over <= self.first):
            return None
        if self.best is None:
            return self.first
        low = self.best.prompt
        if self.over is not None and self.over - low <= max(32, MARGIN * low):
            return None
        guess = self.predicted(budget)
        if guess is None or (self.over is None and guess > 8 * low):
            target = 4.0 * low if self.over is None else (low + self.over) / 2
        elif guess * (1 - MARGIN / 3) > low * (1 + MARGIN / 3):
            target = guess * (1 - MARGIN / 3)  # just below the line: expected to fit
        else:
            target = low * (1 + MARGIN)  # the line is reached: show that it ends here
        prompt = max(low + 32, round(target / 32) * 32)
        if self.over is not None and prompt >= self.over:
            prompt = (low + self.over) // 64 * 32  # halfway: more than one step lies between
        return prompt


def probe(options: argparse.Namespace, contract: str, prompt: int, budget: float) -> Probe:
    """One window in a process of its own. Raises `UserError` if that process fails for another reason than memory."""
    shape = {
        **vars(options),
        "contracts": [contract],
        "prompt": [prompt],
        "repeats": 1,
        "longest": None,
        "plot": None,
        "hf": options.hf and str(options.hf),
    }
    shape |= {key: shape[key][:1] for key in ("response", "group", "concurrent")}
    start, reported = time.monotonic(), 0.0
    with tempfile.TemporaryFile() as log:
        command = [
            sys.executable,
            str(Path(__file__).with_name("bench_replay.py")),
            "--probe",
            json.dumps(shape),
        ]
        child = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            while child.poll() is None:
                seconds = time.monotonic() - start
                now = resident_set("VmRSS", child.pid) or 0
                over = now > budget + START_SLACK
                if over or seconds > options.probe_seconds:
                    return Probe(prompt, None, seconds, late=not over)
                if seconds - reported > REPORT_SECONDS:
                    reported = seconds
                    print(
                        f"    P = {prompt}: {seconds:.0f} s, {now / GIB:.2f} GiB now",
                        file=sys.stderr,
                        flush=True,
                    )
                time.sleep(POLL_SECONDS)
        finally:
            child.kill()
            child.wait()
        log.seek(0)
        lines = log.read().decode(errors="replace").strip().splitlines()
    if child.returncode:
        raise UserError(f"the window of {contract} at P = {prompt} failed: {' | '.join(lines[-3:])}")
    peak = int(json.loads(lines[-1])["peak"])
    return Probe(prompt, peak if peak <= budget else None, time.monotonic() - start)


def search(options: argparse.Namespace, contract: str, first: int) -> Search:
    """Probe a contract until its limit is bracketed; every probe prints a line."""
    budget = options.longest * GIB
    found = Search(contract, first, [])
    while (prompt := found.next_prompt(budget)) is not None:
        result = probe(options, contract, prompt, budget)
        if result.late:
            found.late, outcome = True, f"ended after {options.probe_seconds:.0f} s (--probe-seconds)"
        elif result.peak is None:
            found.over, outcome = prompt, "does not fit"
        else:
            found.fitting.append(result)
            outcome = f"{result.peak / GIB:.3f} GiB"
        print(f"  {contract:<14} P = {prompt:>8}  {result.seconds:7.1f} s  {outcome}", flush=True)
    return found


def longest(options: argparse.Namespace) -> int:
    """Search each contract and print the limits, and exact's against conventional's. Returns the exit status."""
    if resident_set("VmHWM") is None:
        print(
            "error: --longest reads a process's memory from /proc, which this system lacks", file=sys.stderr
        )
        return 2
    try:
        starts = options.start * len(options.contracts) if len(options.start) == 1 else options.start
        if len(starts) != len(options.contracts) or min(starts) < 1:
            raise UserError("--start: one prompt length for all of --contracts, or one for each, at least 1")
        found = {c: search(options, c, first) for c, first in zip(options.contracts, starts, strict=True)}
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    budget = options.longest * GIB
    print(
        f"longest prompt within {options.longest:g} GiB of process memory, R = {options.response[0]}, "
        f"G = {options.group[0]}, K = {options.concurrent[0]}, Z = {options.chunk}"
    )
    limits: dict[str, float] = {}
    for contract, result in found.items():
        if result.best is None:
            print(f"  {contract:<14} not even {result.first} tokens")
            continue
        limits[contract] = result.best.prompt
        line = f"  {contract:<14} {result.best.prompt:>8} tokens, measured ({(result.best.peak or 0) / GIB:.3f} GiB)"
        if result.over is not None:
            line += f"; {result.over} do not fit"
        elif (guess := result.predicted(budget)) is not None:
            line += f"; NOT the limit: the search ran out of time, its line reaches the budget at {guess:.0f}"
        print(line)
    if {"conventional", "exact"} <= limits.keys():
        bound = ">= " if found["exact"].over is None else ""
        print(f"  ratio          {bound}{limits['exact'] / limits['conventional']:.1f} (measured prompts)")
    return 0
