"""Claim: the objectives "gspo" and "cispo" have the value and gradient of their papers' formulas.

Why the tests show it: each is written down once more in plain Python, response by response, with the gradient in
closed form, and both agree in fp64 on random windows that clip on both sides; a window of recorded responses goes
through `grad` against plain autograd of transformers with the formula.
Not shown: that one of them learns better than another.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from harness import ONE, World, run_world
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from oracle import hf_oracle, tiny_models, trajectories
from oracle.compare import compare_tensors
from oracle.objective import scored
from safetensors.torch import load_file

from megatron_lrl.rl.loss import policy_loss
from megatron_lrl.settings import LossTable

token = st.tuples(st.floats(-3, 0), st.floats(-3, 0), st.floats(0.01, 1))
responses = st.lists(st.lists(token, min_size=1, max_size=5), min_size=1, max_size=4)
CLIP = {"gspo": (0.05, 0.08), "cispo": (0.3, 0.2)}


def plain(
    objective: str, window: list, advantage: list[float], low: float, high: float
) -> tuple[float, list[float]]:
    """Loss and slope at every token. gspo: s = exp(mean(log pi - log old)); -w min(s A, clip(s) A), slope -w s A unless
    clipped. cispo: -w clip(r) A log pi, slope -w clip(r) A."""
    loss, slopes = 0.0, []
    for response, a in zip(window, advantage, strict=True):
        mean = sum(logprob - old for logprob, old, _ in response) / len(response)
        for logprob, old, weight in response:
            if objective == "gspo":
                ratio = math.exp(mean)
                clipped = min(max(ratio, 1 - low), 1 + high)
                loss -= weight * min(ratio * a, clipped * a)
                slopes.append(-weight * ratio * a if ratio * a <= clipped * a else 0.0)
            else:
                clipped = min(max(math.exp(logprob - old), 1 - low), 1 + high)
                loss -= weight * clipped * a * logprob
                slopes.append(-weight * clipped * a)
    return loss, slopes


@pytest.mark.parametrize("objective", CLIP)
@settings(max_examples=100, deadline=None)
@given(window=responses, seed=st.integers(0, 9))
def test_value_and_gradient(objective: str, window: list, seed: int) -> None:
    low, high = CLIP[objective]
    advantage = [math.sin(seed + 2.3 * i) for i in range(len(window))]
    means = [sum(t[0] - t[1] for t in response) / len(response) for response in window]
    assume(all(min(abs(math.exp(m) - 1 + low), abs(math.exp(m) - 1 - high)) > 1e-9 for m in means))
    expected, slopes = plain(objective, window, advantage, low, high)
    columns = [
        torch.tensor([t[i] for response in window for t in response], dtype=torch.float64) for i in range(3)
    ]
    counts = torch.tensor([len(response) for response in window])
    spread = [torch.tensor(x, dtype=torch.float64).repeat_interleave(counts) for x in (advantage, means)]
    leaf = columns[0].requires_grad_()
    table = LossTable(objective=objective, clip_low=low, clip_high=high)
    loss, metrics = policy_loss(leaf, columns[1], spread[0], columns[2], None, table, None, spread[1])
    (gradient,) = torch.autograd.grad(loss, leaf)
    torch.testing.assert_close(
        loss.detach(), torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-12
    )
    torch.testing.assert_close(gradient, torch.tensor(slopes, dtype=torch.float64), rtol=1e-12, atol=1e-12)
    assert torch.isfinite(torch.stack(list(metrics.values()))).all()


@pytest.mark.parametrize("world", [ONE, World(cp=2, dp=2)], ids=lambda world: world.name)
def test_a_window_against_plain_autograd(world: World, tmp_path: Path, session_dir: Path) -> None:
    """Old log-probabilities that are off by up to 0.6, tokens that are masked, every response with an advantage."""
    hf = tiny_models.write_case(session_dir / "objectives", "qwen2")
    bare = trajectories.window(5, shape=((23, (5, 1, 9)), (6, (3, 8))))
    groups = trajectories.with_logprobs(bare, hf_oracle.score(hf, bare), shift=0.6, seed=1)
    groups[0]["responses"][2]["mask"] = [1, 1, 0, 0, 0, 1, 1, 1, 0]
    recorded = trajectories.write_jsonl(tmp_path / "window.jsonl", groups)
    cases, outs = [], {name: tmp_path / f"{name}.safetensors" for name in CLIP}
    for name, out in outs.items():
        low, high = CLIP[name]
        values = {"loss.objective": f'"{name}"', "loss.clip_low": low, "loss.clip_high": high}
        files = {"hf": str(hf), "trajectories": str(recorded), "out": str(out)}
        overrides = ["prefix.chunk_size=7", *(f"{key}={value}" for key, value in values.items())]
        cases.append({"verb": "grad", "settings": overrides, **files})
    run_world(world, "worlds.ranks:run_verbs", cases=cases)
    for name, out in outs.items():
        compare_tensors(load_file(out), autograd(name, hf, groups)).require(1e-5, 1e-4)


def autograd(name: str, hf: Path, groups: list[trajectories.Group]) -> dict[str, torch.Tensor]:
    """The gradient of the formula through transformers; the mean over the window's scored tokens."""
    model, (low, high) = hf_oracle.load(hf), CLIP[name]
    total = sum(len(scored(response)) for group in groups for response in group["responses"])
    for group in groups:
        for response in group["responses"]:
            kept = scored(response)
            logprob = hf_oracle.full_logprobs(model, group["prompt_ids"], response["ids"], 1.0)[kept]
            old = torch.tensor([response["logprobs"][i] for i in kept])
            a = response["advantage"]
            if name == "gspo":
                ratio = torch.exp((logprob - old).mean().detach() + logprob - logprob.detach())
                value = torch.minimum(ratio * a, ratio.clamp(1 - low, 1 + high) * a)
            else:
                value = (logprob - old).exp().clamp(1 - low, 1 + high).detach() * a * logprob
            (-value.sum() / total).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
