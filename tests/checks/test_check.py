"""Claim: `check` passes a correct model in float32 and bfloat16, large common key biases included, and fails one whose
sampler or whose `exact` gradient is off by ten times rounding; rounding is measured by moving every weight to its
neighbour, which leaves no trace.

Why this shows it: `torch.nextafter` says what a neighbour is; the command runs on tiny models as it is, and with
weights disturbed in one of the two things that it compares, by as many ulps as move the model ten times as far as its
own rounding does (more where scores share an offset, whose rounding outweighs an ulp of the weights).
It does not show: faults between rounding and six times rounding, which pass.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle.tiny_models import make_hf_dir
from safetensors.torch import load_file, save_file

from megatron_lrl.checks import report as check_report
from megatron_lrl.checks.rounding import moved_by_an_ulp
from megatron_lrl.cli import main


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_every_weight_moves_to_a_neighbour_and_back(dtype: torch.dtype) -> None:
    model = torch.nn.Linear(200, 100, dtype=dtype)
    with torch.no_grad():
        model.weight[0, :4] = torch.tensor([0.0, -0.0, 1.0, -2.0])
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with moved_by_an_ulp(model):
        for name, moved in model.named_parameters():
            old = before[name]
            up, down = (
                torch.nextafter(old, torch.full_like(old, end)) for end in (float("inf"), -float("inf"))
            )
            zero = old == 0
            assert torch.equal(moved == up, ~zero & (moved > old)) and torch.equal(moved == down, moved < old)
            assert torch.equal(moved == old, zero)
            share, sigmas = float((moved > old).double().mean()), 5
            assert abs(share - 0.5) < sigmas * 0.5 * moved.numel() ** -0.5
    for name, moved in model.named_parameters():
        assert torch.equal(moved.view(torch.int8), before[name].view(torch.int8))


ULPS = {0.0: (10, 10), 60.0: (30, 70)}
"""By key bias: what makes a fault of some ten times rounding, in log-probabilities and in the gradient."""


@contextmanager
def disturbed(model: torch.nn.Module, ulps: int) -> Iterator[None]:
    """Every weight off by so many ulps, up or down by chance."""
    held = [p.detach().clone() for p in model.parameters()]
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in model.parameters():
            sign = torch.randint(0, 2, p.shape, generator=generator) * 2 - 1
            p.mul_(1 + ulps * torch.finfo(p.dtype).eps * sign.to(p.dtype))
    yield
    with torch.no_grad():
        for p, before in zip(model.parameters(), held, strict=True):
            p.copy_(before)


def no_fault(_: pytest.MonkeyPatch, ulps: int) -> None:
    pass


def fault_of_the_sampler(monkeypatch: pytest.MonkeyPatch, ulps: int) -> None:
    right: Callable[..., Any] = check_report.sample_and_score

    def wrong(run: Any, prompts: Any) -> Any:
        with disturbed(run.model, ulps):
            return right(run, prompts)

    monkeypatch.setattr(check_report, "sample_and_score", wrong)


def fault_of_exact(monkeypatch: pytest.MonkeyPatch, ulps: int) -> None:
    right: Callable[..., Any] = check_report._window

    def wrong(run: Any, groups: Any, contract: str, *rest: Any) -> Any:
        if contract != "exact":
            return right(run, groups, contract, *rest)
        with disturbed(run.model, ulps):
            return right(run, groups, contract, *rest)

    monkeypatch.setattr(check_report, "_window", wrong)


@pytest.mark.parametrize(
    ("fault", "failing"),
    [
        (no_fault, set()),
        (fault_of_the_sampler, {"sampler log-probabilities", "sampler KL"}),
        (fault_of_exact, {"exact gradient"}),
    ],
)
@pytest.mark.parametrize(("dtype", "bias"), [("float32", 0.0), ("float32", 60.0), ("bfloat16", 0.0)])
def test_what_is_judged_by_rounding(
    dtype: str,
    bias: float,
    fault: Callable[[pytest.MonkeyPatch, int], None],
    failing: set[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    report: Any,
) -> None:
    hf = make_hf_dir(tmp_path / "m", "qwen2", 5)
    if bias:  # published Qwen2.5 models look so: scores share an offset in the hundreds
        tensors = load_file(hf / "model.safetensors")
        generator = torch.Generator().manual_seed(0)
        for name, tensor in tensors.items():
            if name.endswith("k_proj.bias"):
                tensor.copy_(torch.randn(tensor.shape, generator=generator).sign() * bias + tensor)
            if name.endswith("q_proj.bias"):
                tensor.copy_(4 * torch.randn(tensor.shape, generator=generator))
        save_file(tensors, hf / "model.safetensors", metadata={"format": "pt"})
    config, out = tmp_path / "c.toml", tmp_path / "r.json"
    config.write_text(
        f"[model]\nhf = {str(hf)!r}\ndtype = '{dtype}'\n[rollout]\ngroup_size = 4\nmax_new_tokens = 8\n"
        "[data]\nreward = 'megatron_lrl.rl.rewards:exact_match'\n"
    )
    fault(monkeypatch, ULPS[bias][fault is fault_of_exact])
    code = main(["check", str(config), "--out", str(out)])
    bars = json.loads(out.read_text())["bars"]
    printed = capsys.readouterr().out
    times = {name: bar["measured"] / bar["rounding"] for name, bar in bars.items()}
    times["sampler KL"] **= 0.5  # a square
    for name, value in times.items():
        report(f"check, {dtype}, key bias {bias:g}, {fault.__name__}: {name}, in roundings", value)
    failed = {name for name, bar in bars.items() if not bar["passed"]}
    assert failed >= failing and (failing or not failed), times
    assert all(6 < times[name] < 20 for name in failing), times
    assert code == (1 if failing else 0), printed
    assert all(
        f"{bar['bar']:.2e} = " in printed and f"{bar['measured']:.2e}, bar" in printed
        for bar in bars.values()
    )
