"""Phases of one update against the arithmetic that it cannot do without, in CPU seconds.

    python tools/bench_floor.py --hf DIR --prompt 2011 --group 8 --response 16

The floor is plain transformers with sdpa on the same weights: `response_only` is one forward of the prompt and the
responses, forward and backward, on its cache; `exact` adds a second forward and one backward of the prompt. The same
process measures both in turn, so that a slow minute of the machine hits both.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch
from bench_common import link_model, trajectories

from megatron_lrl.config import load_config
from megatron_lrl.runtime import Layout, runtime_scope

CONTRACTS = ("response_only", "exact")
PHASES = ("capture", "replay", "sweep", "reduce", "step")


class Clock:
    """CPU seconds of this process by phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.process_time()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.process_time() - start

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


def floor(model: Any, prompt: torch.Tensor, responses: torch.Tensor, contract: str) -> Clock:
    """prompt [1, P], responses [G, R]; gradients are added to the model's."""
    clock, group = Clock(), responses.shape[0]
    model.zero_grad(set_to_none=False)
    with clock.phase("capture"), torch.no_grad():
        cache = model.model(prompt[:, :-1], use_cache=True).past_key_values
    with clock.phase("replay"):
        cache.batch_repeat_interleave(group)
        fed = torch.cat([prompt[:, -1:].expand(group, 1), responses[:, :-1]], 1)
        logits = model(fed, past_key_values=cache, use_cache=True).logits.float()
        logits.log_softmax(-1).gather(-1, responses.unsqueeze(-1)).mean().backward()
    if contract == "exact":
        with clock.phase("sweep"):
            cache = model.model(prompt[:, :-1], use_cache=True).past_key_values
            sum((layer.keys + layer.values).sum() for layer in cache.layers).backward()
    return clock


def ours(run: Any, prompt: list[int], responses: list[list[int]], contract: str) -> Clock:
    """One update of the run: capture, all responses in one replay, sweep, reduce, step."""
    from megatron_lrl.lifetimes.contributions import BranchKey
    from megatron_lrl.lifetimes.window import UpdateWindow
    from megatron_lrl.lifetimes.work import Branch, work_of

    clock = Clock()
    branches = [Branch(BranchKey("g", i), tuple(ids)) for i, ids in enumerate(responses)]

    def loss(logprob_S: torch.Tensor, *_: Any) -> tuple[torch.Tensor, dict]:
        return logprob_S.mean(), {}

    with UpdateWindow(run) as window:
        window.fix(branch.key for branch in branches)
        with closing(window.prompt_group("g", prompt, contract=contract)) as group:
            with clock.phase("capture"):
                group.capture()
            sweep: Callable[[], Any] = group.sweep

            def timed() -> Any:
                with clock.phase("sweep"):
                    return sweep()

            group.sweep = timed  # type: ignore[method-assign]
            with clock.phase("replay"):
                window.replay(group, work_of([branches], [loss]))
        clock.seconds["replay"] -= clock.seconds["sweep"]
        with clock.phase("reduce"):
            window.reduce()
        with clock.phase("step"):
            window.step()
    return clock


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--hf", required=True, type=Path, metavar="DIR", help="a Hugging Face model directory"
    )
    parser.add_argument("--prompt", type=int, default=2011, metavar="P")
    parser.add_argument("--response", type=int, default=16, metavar="R")
    parser.add_argument("--group", type=int, default=8, metavar="G")
    parser.add_argument("--chunk", type=int, default=2048, metavar="Z")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="the median is shown")
    parser.add_argument("--contracts", nargs="+", choices=CONTRACTS, default=list(CONTRACTS))
    options = parser.parse_args()
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as name, runtime_scope(Layout()) as runtime:
        from megatron_lrl.lifetimes.open import open_run

        vocab = link_model(Path(name) / "hf", options.hf, options.prompt + options.response)
        prompt, responses = trajectories(vocab, options.prompt, options.response, options.group)
        settings = [f"model.hf={name}/hf", "model.dtype=float32", f"prefix.chunk_size={options.chunk}"]
        config = Path(name) / "empty.toml"
        config.write_text("")
        plain = AutoModelForCausalLM.from_pretrained(
            f"{name}/hf", dtype=torch.float32, attn_implementation="sdpa", trust_remote_code=False
        )
        prompt_1P, responses_GR = torch.tensor([prompt]), torch.tensor(responses)
        found: dict[tuple[str, str], list[Clock]] = {}
        with open_run(load_config(config, settings), runtime, optimizer=True) as run:
            for repeat in range(options.repeats + 1):  # the first warms up, and is not counted
                for contract in options.contracts:
                    rows = (
                        floor(plain, prompt_1P, responses_GR, contract),
                        ours(run, prompt, responses, contract),
                    )
                    for side, clock in zip(("floor", "ours"), rows, strict=True):
                        if repeat:
                            found.setdefault((contract, side), []).append(clock)
    print(
        f"P = {options.prompt}, R = {options.response}, G = {options.group}, CPU seconds, median of {options.repeats}"
    )
    print(
        f"{'contract':<15}{'':<7}" + "".join(f"{phase:>9}" for phase in PHASES) + f"{'total':>9}{'ratio':>8}"
    )
    for contract in options.contracts:
        base = statistics.median(clock.total for clock in found[contract, "floor"])
        for side in ("floor", "ours"):
            clocks = found[contract, side]
            parts = [statistics.median(clock.seconds.get(phase, 0.0) for clock in clocks) for phase in PHASES]
            total = statistics.median(clock.total for clock in clocks)
            print(
                f"{contract:<15}{side:<7}"
                + "".join(f"{x:>9.2f}" for x in (*parts, total))
                + f"{total / base:>8.3f}"
            )


if __name__ == "__main__":
    main()
