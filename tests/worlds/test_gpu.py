"""Claim: on CUDA with NCCL the program scores, differentiates, samples, trains and saves as it does on the CPU.

Why the tests show it: the same command lines run on both, from the same files. In float32 scores agree to 2e-5 and
gradients to 1e-5 relative L2 with the CPU's, which agree with transformers' (the other tests of this room); sampled ids
are equal. Models: dense with yarn, LastKV, Gated DeltaNet with experts, experts with groups. In bfloat16 the bars are
those of its rounding. Worlds of two devices run where there are as many.
Not shown: several machines, Transformer Engine, models that fill a device.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import ONE, World
from harness.verbs import run_verb
from layers.lastkv.tiny import write_lastkv
from oracle import tiny_models, trajectories
from oracle.compare import compare_tensors
from safetensors.torch import load_file

pytestmark = [pytest.mark.gpu, pytest.mark.every_world]

SHAPE = ((37, (1, 7, 2)), (11, (13, 5)), (1, (4,)))
MODELS = ["qwen3-tied-yarn", "lastkv-qwen3", "qwen3_5_moe-vl", "glm4_moe-groups"]
CONTRACTS = ["exact", "response_only", "conventional"]
PAIRS = [World(tp=2), World(cp=2), World(pp=2), World(dp=2)]


class Inputs:
    """A model's files and the command lines over them."""

    def __init__(self, root: Path, model: str, *settings: str) -> None:
        self.root = root
        lastkv = model.startswith("lastkv-")
        if lastkv:
            self.hf = write_lastkv(root, model.removeprefix("lastkv-"), 8)
        else:
            self.hf = tiny_models.write_case(root / "hf", model)
        self.window = trajectories.write_jsonl(root / "window.jsonl", trajectories.window(3, shape=SHAPE))
        records = [{"id": f"p{i}", "prompt_ids": list(range(3, 3 + n))} for i, n in enumerate((23, 1, 11))]
        self.prompts = trajectories.write_jsonl(root / "prompts.jsonl", records)
        self.config = root / "config.toml"
        self.config.write_text(
            f"[model]\nhf = {str(self.hf)!r}\nattention = '{'lastkv' if lastkv else 'full'}'\n"
            "[rollout]\ngroup_size = 4\nmax_new_tokens = 5\n[optimizer]\nlr = 1e-2\n"
            "[prefix]\nchunk_size = 13\n[replay]\nconcurrent = 2\ncheck_poison = true\n"
            "[train]\nupdates = 2\nsave_every = 1\n"
            f"[data]\nprompts = {str(self.prompts)!r}\nreward = 'cli.toy_rewards:low_ids'\n"
        )
        self.settings = settings

    def run(self, verb: str, world: World, device: str, *more: str) -> Path:
        """The file that a verb wrote."""
        out = self.root / f"{verb}-{world.name}-{device}{len(list(self.root.iterdir()))}"
        given = ("--prompts", self.prompts) if verb == "generate" else ("--trajectories", self.window)
        words = [verb, self.config, *given, "--out", out, *world.overrides, *self.settings, *more]
        run_verb(world, words, device=device).require_success()
        return out


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def largest_difference(ours: Path, theirs: Path) -> float:
    pairs = zip(lines(ours), lines(theirs), strict=True)
    return max(
        abs(a - b)
        for mine, other in pairs
        for x, y in zip(mine["logprobs"], other["logprobs"], strict=True)
        for a, b in zip(x, y, strict=True)
    )


def require_worlds(world: World) -> None:
    if torch.cuda.device_count() < world.size:
        pytest.skip(f"{world.name} needs {world.size} CUDA devices, here {torch.cuda.device_count()}")


@pytest.mark.parametrize("world", [ONE, *PAIRS], ids=lambda world: world.name)
@pytest.mark.parametrize("model", MODELS)
def test_float32_agrees_with_the_cpu(model: str, world: World, tmp_path: Path, report: Any) -> None:
    require_worlds(world)
    inputs = Inputs(tmp_path, model)
    scores = [inputs.run("score", *place) for place in ((world, "cuda"), (ONE, "cpu"))]
    difference = largest_difference(*scores)
    report("log-probabilities, CUDA against CPU", difference)
    assert difference <= 2e-5
    for contract in CONTRACTS:
        found, expected = (
            load_file(inputs.run("grad", *place, f"prefix.contract={contract}"))
            for place in ((world, "cuda"), (ONE, "cpu"))
        )
        compare_tensors(found, expected).require(1e-5, 1e-4)
    sampled = [lines(inputs.run("generate", *place)) for place in ((world, "cuda"), (ONE, "cpu"))]
    ids = [[[r["ids"] for r in group["responses"]] for group in groups] for groups in sampled]
    assert ids[0] == ids[1]


@pytest.mark.parametrize("model", MODELS)
def test_bfloat16_stays_within_its_rounding(model: str, tmp_path: Path, report: Any) -> None:
    """Against the CPU in bfloat16 too: both round, each in its own order (and a near-tie may route otherwise)."""
    inputs = Inputs(tmp_path, model, "model.dtype=bfloat16")
    found, expected = (load_file(inputs.run("grad", ONE, device)) for device in ("cuda", "cpu"))
    ours, theirs = (torch.cat([x.flatten() for _, x in sorted(t.items())]) for t in (found, expected))
    assert torch.isfinite(ours).all()
    cosine = float(torch.nn.functional.cosine_similarity(ours, theirs, dim=0))
    report("gradient's cosine, CUDA against CPU", cosine)
    assert cosine > 0.95


@pytest.mark.parametrize("world", [ONE, *PAIRS], ids=lambda world: world.name)
def test_same_bits_hold_where_the_probe_says_so(world: World, tmp_path: Path, report: Any) -> None:
    """`check` fails where it says "on" and a number differs."""
    require_worlds(world)
    inputs = Inputs(tmp_path, "qwen3-tied-yarn", "model.dtype=bfloat16", "model.same_bits=auto")
    words = ["check", inputs.config, *world.overrides, *inputs.settings]
    said = run_verb(world, words, device="cuda").require_success().out[0]
    verdict = next(line for line in said.splitlines() if line.startswith("same bits: "))
    report("verdict", verdict)
    assert verdict.startswith(("same bits: on", "same bits: off: on this machine"))


@pytest.mark.parametrize("world", [ONE, *PAIRS], ids=lambda world: world.name)
def test_training_saves_and_resumes(world: World, tmp_path: Path) -> None:
    require_worlds(world)
    inputs = Inputs(tmp_path, "qwen3_5_moe-vl", "model.dtype=bfloat16")
    run = ["train", inputs.config, f"train.output={tmp_path / 'run'}", *world.overrides, *inputs.settings]
    run_verb(world, run, device="cuda").require_success()
    again = run_verb(world, [*run, "train.updates=3"], device="cuda").require_success()
    assert "resumed" in again.out[0] + again.err[0]
    checkpoint = tmp_path / "run" / "checkpoints" / "update-000003"
    run_verb(ONE, ["export", checkpoint, tmp_path / "hf-out"], device="cpu").require_success()
