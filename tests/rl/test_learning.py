"""Claim: GRPO learns from a long prompt, under full attention and under LastKV with its chunk boundaries in prompt and
responses.

Why this shows it: four prompts differ in one token alone, the first, which LastKV's open chunk sees only through the
history (last-layer keys and values) and the blended chunk in between. It names a quarter of the vocabulary, and the
reward is the share of the response's tokens that lie there: whoever does not read the prompt gets a quarter, whatever
it says. The program's own trainer and sampler run, from random weights. The same run with negated advantages falls
towards zero, so the rise comes from the gradient and not from the sampler or the measure. (Advantages dealt out at
random are no such control: a few updates of noise collapse so small a model onto some answer, at times a right one.)
It does not show: that a gradient is right to rounding (`worlds/`, `lastkv/`), or learning on real text
(`ci/quickstart.sh`, `examples/lastkv`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from layers.lastkv.tiny import write_lastkv
from lifetimes.tiny import ids, tiny_run

from megatron_lrl.rl import accumulate
from megatron_lrl.rl.rewards import load_reward
from megatron_lrl.rl.source import Sampling
from megatron_lrl.rl.trainer import Trainer
from megatron_lrl.rollout.text import Text
from megatron_lrl.rollout.types import Prompt

VOCAB, QUARTERS, C = 131, 4, 8
PROMPT, RESPONSE = 2 * C + C // 2, C  # fed positions 19 to 26: a boundary at 24
UPDATES, EDGE = 14, 2

FULL = ["model.attention=full"]
LASTKV = ["model.attention=lastkv"]
CASES = {
    "full, exact": [*FULL, "prefix.contract=exact"],
    "full, response_only": [*FULL, "prefix.contract=response_only"],
    "lastkv, exact": [*LASTKV, "prefix.contract=exact"],
}


def in_quarter(text: str, record: Mapping[str, Any]) -> float:
    """The share of a response's tokens in the quarter of the vocabulary that the prompt names."""
    tokens = [int(word) for word in text.split()]
    return fmean(token * QUARTERS // VOCAB == record["quarter"] for token in tokens) if tokens else 0.0


def prompts() -> list[Prompt]:
    """One for each quarter; the first token is in that quarter, the others are the same in all."""
    rest = ids(PROMPT - 1, 3)
    firsts = [quarter * VOCAB // QUARTERS + 9 for quarter in range(QUARTERS)]
    return [Prompt(f"q{q}", (first, *rest), {"quarter": q}) for q, first in enumerate(firsts)]


def train(folder: Path, *overrides: str) -> list[dict[str, float]]:
    """The metrics of every update."""
    settings = [
        "model.dtype=float32", "prefix.chunk_size=7", "replay.concurrent=8", "optimizer.lr=1e-2",
        "rollout.group_size=8", f"rollout.max_new_tokens={RESPONSE}",
        f"train.groups_per_update={QUARTERS}", f"train.updates={UPDATES}",
    ]  # fmt: skip
    if (
        overrides[0] == LASTKV[0]
    ):  # a model that has its history already: to learn from an empty one takes longer
        settings.append(f"model.hf={write_lastkv(folder, 'qwen3', C)}")
    with tiny_run(folder, *settings, *overrides, optimizer=True) as run:
        text = Text(Path(run.config.model.hf or ""))
        source = Sampling(run, prompts(), load_reward("rl.test_learning:in_quarter"), text)
        trainer = Trainer(run, source, text)
        return [trainer.update(number)[0] for number in range(UPDATES)]


def ends(updates: Sequence[Mapping[str, float]]) -> tuple[float, float]:
    """Mean reward of the first and of the last EDGE updates."""
    rewards = [update["reward/mean"] for update in updates]
    return fmean(rewards[:EDGE]), fmean(rewards[-EDGE:])


@pytest.mark.parametrize("case", CASES)
def test_reward_rises(case: str, tmp_path: Path, report: Callable[[str, object], None]) -> None:
    updates = train(tmp_path, *CASES[case])
    first, last = ends(updates)
    report(
        f"{case}: mean reward of the first and last {EDGE} of {UPDATES} updates", f"{first:.2f}, {last:.2f}"
    )
    report(
        f"{case}: largest ratio deviation before a step",
        max(u.get("ratio/max_deviation_before_step", 0.0) for u in updates),
    )
    assert first < 0.4 and last > 0.5


@pytest.mark.parametrize("case", [pytest.param("full, exact", marks=pytest.mark.slow), "lastkv, exact"])
def test_against_its_advantages_it_falls(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, report: Callable[[str, object], None]
) -> None:
    proper = accumulate.group_advantages
    monkeypatch.setattr(
        accumulate, "group_advantages", lambda group, kind: [-advantage for advantage in proper(group, kind)]
    )
    first, last = ends(train(tmp_path, *CASES[case]))
    report(
        f"{case}, negated advantages: first and last {EDGE} of {UPDATES} updates", f"{first:.2f}, {last:.2f}"
    )
    assert last < 0.18
