"""Claim: advantages are the published GRPO, Dr. GRPO and RLOO ones, and recorded advantages are used as
they are.

Why this shows it: values worked out by hand, Python's own statistics module and leave-one-out sums as a
second implementation on generated rewards.
It does not show: that an advantage improves a policy.
"""

from __future__ import annotations

import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_lrl.errors import UserError
from megatron_lrl.rl.advantage import advantages, group_advantages
from megatron_lrl.rollout.types import Group, Response

KINDS = ("grpo", "dr_grpo", "rloo")


def tensor(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def group(rewards: list[float | None], recorded: list[float | None] | None = None) -> Group:
    recorded = recorded or [None] * len(rewards)
    responses = tuple(Response((1,), reward=r, advantage=a) for r, a in zip(rewards, recorded, strict=True))
    return Group("g7", (1, 2), responses)


@pytest.mark.parametrize("size", [1e101, 1e160, 1.7e308])
def test_huge_rewards_do_not_overflow(size: float) -> None:
    rewards, small = tensor([size, -size, 0.5 * size]), tensor([1, -1, 0.5])
    spread = (small - small.mean()) / small.std(correction=0)
    torch.testing.assert_close(advantages(rewards, "grpo"), spread, rtol=1e-12, atol=0)
    for kind in ("dr_grpo", "rloo"):
        with pytest.raises(UserError, match=r"group 'g7': .*valid: up to 1e\+30"):
            group_advantages(group(rewards.tolist()), kind)


def test_by_hand() -> None:
    rewards = tensor([1, 0, 0, 1])  # mean 1/2, population std 1/2
    scaled = 0.5 / (0.5 + 1e-6)
    torch.testing.assert_close(advantages(rewards, "grpo"), tensor([scaled, -scaled, -scaled, scaled]))
    torch.testing.assert_close(advantages(rewards, "dr_grpo"), tensor([0.5, -0.5, -0.5, 0.5]))
    torch.testing.assert_close(advantages(rewards, "rloo"), tensor([2 / 3, -2 / 3, -2 / 3, 2 / 3]))


@given(rewards=st.lists(st.floats(-10, 10), min_size=2, max_size=9))
def test_against_a_second_implementation(rewards: list[float]) -> None:
    mean, std = statistics.fmean(rewards), statistics.pstdev(rewards)
    others = [reward - statistics.fmean(rewards[:i] + rewards[i + 1 :]) for i, reward in enumerate(rewards)]
    expected = {
        "grpo": [(r - mean) / (std + 1e-6) for r in rewards],
        "dr_grpo": [r - mean for r in rewards],
        "rloo": others,
    }
    for kind in KINDS:
        actual = advantages(torch.tensor(rewards, dtype=torch.float64), kind)
        assert actual.dtype == torch.float64
        torch.testing.assert_close(actual, tensor(expected[kind]), rtol=1e-9, atol=1e-8)
        assert abs(float(actual.sum())) < 1e-7


@pytest.mark.parametrize("kind", KINDS)
def test_equal_rewards_give_exact_zeros(kind: str) -> None:
    # 0.1 is not representable: mean([0.1] * 3) != 0.1, and grpo would divide the difference by 1e-6.
    assert advantages(tensor([0.1] * 3), kind).tolist() == [0.0] * 3


def test_recorded_advantages_win_over_rewards() -> None:
    assert [a.tolist() for a in group_advantages(group([1.0, 0.0], [0.25, 3.0]), "grpo")] == [[0.25], [3.0]]
    assert [a.tolist() for a in group_advantages(group([1.0, 0.0]), "dr_grpo")] == [[0.5], [-0.5]]


def test_one_advantage_a_token_and_none_where_the_mask_is_0() -> None:
    listed = Response((7, 8, 9), advantage=(0.5, 4.0, -1.0), mask=(1, 0, 1))
    one = Response((7, 8), advantage=2.0, mask=(0, 1))
    found = group_advantages(Group("g", (1,), (listed, one)), "grpo")
    assert [a.tolist() for a in found] == [[0.5, 0.0, -1.0], [0.0, 2.0]]


@pytest.mark.parametrize(
    ("bad", "kind", "expected"),
    [
        (group([1.0, 0.0], [0.5, None]), "grpo", "1 of 2 responses have an advantage"),
        (group([1.0, None]), "grpo", "1 of 2 responses have a reward"),
        (group([1.0]), "rloo", "at least 2 responses"),
    ],
)
def test_incomplete_groups_are_named(bad: Group, kind: str, expected: str) -> None:
    with pytest.raises(UserError) as caught:
        group_advantages(bad, kind)
    assert "group 'g7'" in str(caught.value) and expected in str(caught.value)


def test_unknown_kind() -> None:
    with pytest.raises(ValueError, match="unknown advantage 'ppo'"):
        advantages(tensor([1.0]), "ppo")
