"""Measure the gradient of one window under each contract: seconds, saved-for-backward bytes, resident bytes.

    python tools/bench_replay.py --prompt 2048 --response 64 --group 8 --concurrent 1 2
    torchrun --nproc-per-node 2 tools/bench_replay.py --prompt 8192 --set parallel.cp=2

A random model is written to a temporary folder, so no file is needed. All combinations run in one process, and each
repeat goes through all of them before the next starts, so that a slow minute of the machine hits all alike.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from tqdm import tqdm

from megatron_lrl.config import load_config
from megatron_lrl.errors import UserError
from megatron_lrl.runtime import Layout, runtime_scope

CONTRACTS = ("conventional", "response_only", "exact", "truncated")
MIB = 2**20


@dataclass
class Case:
    """One row of the table and what was measured for it, one value per repeat."""

    contract: str
    prompt: int
    response: int
    group: int
    concurrent: int
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)  # of this process: steady on a shared machine
    saved: int = 0  # bytes, the peak of saved-for-backward tensors
    resident: int = 0  # bytes, prefix state and its adjoint
    process: int | None = None  # bytes above what the process held before the window

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.prompt, self.response, self.group, self.concurrent


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    about = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0], formatter_class=about)
    several = {"type": int, "nargs": "+", "metavar": "N"}
    parser.add_argument(
        "--contracts", nargs="+", choices=CONTRACTS, default=["conventional", "response_only", "exact"]
    )
    parser.add_argument("--prompt", default=[512], help="P, prompt tokens", **several)
    parser.add_argument("--response", default=[32], help="R, response tokens", **several)
    parser.add_argument("--group", default=[4], help="G, responses of the prompt", **several)
    parser.add_argument("--concurrent", default=[1], help="K, responses replayed at once", **several)
    parser.add_argument("--chunk", type=int, default=2048, metavar="N", help="Z, capture chunk size")
    parser.add_argument("--truncate", type=int, default=1024, metavar="N", help="T of the truncated contract")
    parser.add_argument(
        "--repeats", type=int, default=3, metavar="N", help="windows per row; the median is shown"
    )
    parser.add_argument("--layers", type=int, default=4, metavar="N")
    parser.add_argument("--hidden", type=int, default=64, metavar="N")
    parser.add_argument("--intermediate", type=int, default=176, metavar="N")
    parser.add_argument("--heads", type=int, default=4, metavar="N", help="query heads")
    parser.add_argument("--kv-heads", type=int, default=2, metavar="N")
    parser.add_argument("--vocab", type=int, default=512, metavar="N")
    parser.add_argument("--set", nargs="+", default=[], metavar="TABLE.KEY=VALUE", help="further settings")
    return parser.parse_args(arguments)


def write_model(folder: Path, options: argparse.Namespace) -> None:
    """A random llama as a Hugging Face directory, with transformers' initialisation."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=options.vocab,
        hidden_size=options.hidden,
        intermediate_size=options.intermediate,
        num_hidden_layers=options.layers,
        num_attention_heads=options.heads,
        num_key_value_heads=options.kv_heads,
        max_position_embeddings=max(options.prompt) + max(options.response),
        tie_word_embeddings=True,
        dtype="float32",
    )
    LlamaForCausalLM(config).save_pretrained(folder)


class ProcessPeak:
    """Peak memory of a block above what was held before it: the CUDA allocator's, or Linux's resident set."""

    def __init__(self) -> None:
        self.bytes: int | None = None

    @contextlib.contextmanager
    def measure(self) -> Iterator[None]:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            yield
            self.bytes = torch.cuda.max_memory_allocated() - before
            return
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)  # freed memory of earlier rows would hide new memory
        reset = self._reset()
        before = self._status("VmRSS") if reset else None
        yield
        if before is not None and (peak := self._status("VmHWM")) is not None:
            self.bytes = max(0, peak - before)

    @staticmethod
    def _reset() -> bool:
        """Start VmHWM afresh (proc(5), clear_refs); False where the system has no such thing."""
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:
            return False
        return True

    @staticmethod
    def _status(key: str) -> int | None:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(key + ":"):
                return int(line.split()[1]) * 1024
        return None


def measure(case: Case, run: object, options: argparse.Namespace) -> None:
    """One window: capture, replay, sweep, reduce. The optimizer has no part in it."""
    from megatron_lrl.lifetimes.contributions import BranchKey
    from megatron_lrl.lifetimes.replay import Branch, batches_of
    from megatron_lrl.lifetimes.run import Run

    assert isinstance(run, Run)
    draw = torch.Generator().manual_seed(1)
    prompt = torch.randint(options.vocab, (case.prompt,), generator=draw).tolist()
    branches = [
        Branch(
            BranchKey("g", i), tuple(torch.randint(options.vocab, (case.response,), generator=draw).tolist())
        )
        for i in range(case.group)
    ]
    batches = batches_of(branches, case.concurrent)
    weight = 1.0 / (case.group * case.response)

    def loss(
        logprob_S: torch.Tensor, _entropy: torch.Tensor, _index: torch.Tensor
    ) -> tuple[torch.Tensor, dict]:
        return -weight * logprob_S.sum(), {}

    peak = ProcessPeak()
    run.runtime.barrier()
    with peak.measure():
        start, cpu_start = time.perf_counter(), time.process_time()
        with run.update_window() as window:
            window.fix(branch.key for branch in branches)
            with window.prompt_group("g", prompt, contract=case.contract) as group:
                window.replay(group, batches, [loss] * len(batches))
            window.reduce()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            case.seconds.append(time.perf_counter() - start)
            case.cpu_seconds.append(time.process_time() - cpu_start)
    case.saved = run.ledger.peak["replay"]
    case.resident = run.ledger.peak["group"]
    case.process = peak.bytes


def table(cases: Sequence[Case]) -> str:
    """Rows of equal shape together; ratios against the conventional row of the same shape, if it was measured."""
    head = (
        f"{'contract':<14} {'P':>7} {'R':>5} {'G':>4} {'K':>3} {'s/window':>9} {'ratio':>7} "
        f"{'CPU s':>8} {'ratio':>7} "
        f"{'saved MiB':>10} {'ratio':>7} {'resident MiB':>13} {'process MiB':>12}"
    )
    lines = [head, "-" * len(head)]
    base = {case.shape: case for case in cases if case.contract == "conventional"}
    for case in cases:
        seconds, cpu = statistics.median(case.seconds), statistics.median(case.cpu_seconds)
        ratios = ["-"] * 3
        if (reference := base.get(case.shape)) is not None:
            ratios = [
                f"{seconds / statistics.median(reference.seconds):.3f}",
                f"{cpu / statistics.median(reference.cpu_seconds):.3f}",
                f"{case.saved / reference.saved:.4f}",
            ]
        process = "-" if case.process is None else f"{case.process / MIB:.1f}"
        lines.append(
            f"{case.contract:<14} {case.prompt:>7} {case.response:>5} {case.group:>4} {case.concurrent:>3} "
            f"{seconds:>9.3f} {ratios[0]:>7} {cpu:>8.3f} {ratios[1]:>7} "
            f"{case.saved / MIB:>10.2f} {ratios[2]:>7} {case.resident / MIB:>13.2f} {process:>12}"
        )
    return "\n".join(lines)


def bench(options: argparse.Namespace, folder: Path) -> str:
    """All cases on this rank. Raises `UserError` for settings that do not fit the model or the world."""
    write_model(folder / "hf", options)
    (folder / "bench.toml").write_text("")
    settings = [f"model.hf={folder / 'hf'}", f"prefix.chunk_size={options.chunk}"]
    settings += [f"prefix.truncate_tokens={options.truncate}", *options.set]
    config = load_config(folder / "bench.toml", settings)
    parallel = config.parallel
    shapes = itertools.product(options.prompt, options.response, options.group, options.concurrent)
    cases = [Case(contract, *shape) for shape in shapes for contract in options.contracts]
    with runtime_scope(Layout(parallel.tp, parallel.cp, parallel.pp, parallel.ep)) as runtime:
        from megatron_lrl.lifetimes.run import open_run

        with open_run(config, runtime, gradients=True) as run:
            for contract in options.contracts:  # touch the gradient buffers and load what loads lazily
                measure(Case(contract, 16, 4, 1, 1), run, options)
            rounds = [case for _ in range(options.repeats) for case in cases]
            for case in tqdm(rounds, unit="window", leave=False, disable=not runtime.is_main):
                measure(case, run, options)
            return table(cases) if runtime.is_main else ""


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    with tempfile.TemporaryDirectory(prefix="bench-replay-") as folder:
        try:
            print(bench(options, Path(folder)), flush=True)
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
