"""Claim: `policy_loss` is the clipped, importance-weighted surrogate plus k3 KL, with the right gradient,
and a plain sum: any split of a window gives the same loss, gradient and metrics.

Why this shows it: an implementation that shares no code with it (Python floats, token by token, gradient by
its closed form, which differs from autograd's path) agrees on generated inputs in fp64; autograd's own finite
differences agree; splits, padding and order are compared with the whole.
It does not show: that log-probabilities fed to it are right.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_lrl.errors import UserError
from megatron_lrl.rl.loss import (
    WindowTotals,
    k3,
    merge_metrics,
    policy_loss,
    summarise,
    token_weights,
    window_totals,
)
from megatron_lrl.rollout.types import Group, Response
from megatron_lrl.settings import LossTable

FULL = LossTable(clip_low=0.2, clip_high=0.3, kl_coef=0.1, importance_cap=1.5)


def naive(
    logprob: list[float],
    old: list[float],
    advantage: list[float],
    weight: list[float],
    ref: list[float],
    sampler: list[float],
    s: LossTable,
) -> tuple[float, list[float], int]:
    """Loss, d loss / d logprob and the number of clipped tokens, token by token from the definition."""
    loss, gradient, clipped = 0.0, [], 0
    for lp, o, a, w, r, q in zip(logprob, old, advantage, weight, ref, sampler, strict=True):
        ratio = math.exp(lp - o)
        cut = min(max(ratio, 1 - s.clip_low), 1 + s.clip_high)
        factor = min(math.exp(o - q), s.importance_cap) if s.importance_cap > 0 else 1.0
        slope = 0.0
        if ratio * a <= cut * a:
            slope = ratio * a
        else:
            clipped += 1
        loss += w * (-factor * min(ratio * a, cut * a) + s.kl_coef * (math.exp(r - lp) - (r - lp) - 1))
        gradient.append(w * (-factor * slope + s.kl_coef * (1 - math.exp(r - lp))))
    return loss, gradient, clipped


def near_edge(logprob: list[float], old: list[float], s: LossTable) -> bool:
    ratios = [math.exp(a - b) for a, b in zip(logprob, old, strict=True)]
    return any(min(abs(r - 1 + s.clip_low), abs(r - 1 - s.clip_high)) < 1e-9 for r in ratios)


def t(values: list[float], dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor(values, dtype=dtype)


def random_window(n: int, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def normal(scale: float, mean: float = 0.0) -> Tensor:
        return torch.randn(n, generator=generator, dtype=torch.float64) * scale + mean

    old = -normal(1.0).abs()
    return {
        "logprob_N": old + normal(0.3),
        "old_logprob_N": old,
        "advantage_N": normal(1.0),
        "weight_N": torch.rand(n, generator=generator, dtype=torch.float64) + 0.1,
        "ref_logprob_N": old + normal(0.5),
        "sampler_logprob_N": old + normal(0.5),
    }


def evaluate(window: dict[str, Tensor], s: LossTable) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    leaf = window["logprob_N"].clone().requires_grad_()
    loss, metrics = policy_loss(**{**window, "logprob_N": leaf}, settings=s)
    (gradient,) = torch.autograd.grad(loss, leaf)
    return loss.detach(), gradient, metrics


# Not denormal: the naive implementation multiplies before it compares, and tiny products round to a tie.
advantage = st.just(0.0) | st.floats(1e-3, 3) | st.floats(-3, -1e-3)
tokens = st.tuples(*[st.floats(-3, 0)] * 4, advantage, st.floats(0.01, 1))


@settings(max_examples=100, deadline=None)
@given(
    rows=st.lists(tokens, min_size=1, max_size=6),
    clip_low=st.floats(0, 1),
    clip_high=st.floats(0, 1),
    kl_coef=st.sampled_from([0.0, 0.3]),
    cap=st.sampled_from([0.0, 0.5, 2.0]),
)
def test_value_and_gradient_against_the_definition(rows, clip_low, clip_high, kl_coef, cap) -> None:
    s = LossTable(clip_low=clip_low, clip_high=clip_high, kl_coef=kl_coef, importance_cap=cap)
    logprob, old, ref, sampler, advantage, weight = (list(column) for column in zip(*rows, strict=True))
    assume(not near_edge(logprob, old, s))  # there the derivative does not exist
    expected, slope, clipped = naive(logprob, old, advantage, weight, ref, sampler, s)
    leaf = t(logprob).requires_grad_()
    loss, metrics = policy_loss(leaf, t(old), t(advantage), t(weight), t(ref), s, t(sampler))
    (gradient,) = torch.autograd.grad(loss, leaf)
    assert loss.dtype == gradient.dtype == torch.float64 and loss.shape == ()
    torch.testing.assert_close(loss.detach(), t([expected])[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient, t(slope), rtol=1e-12, atol=1e-12)
    assert metrics["clip_low_count"] + metrics["clip_high_count"] == clipped
    assert metrics["tokens"] == len(rows)


def test_by_hand() -> None:
    """Ratios 2 and 1/2 with both signs: clipped are A > 0 above 1.3 and A < 0 below 0.8, nothing else."""
    two = math.log(2)
    leaf = t([two, two, -two, -two]).requires_grad_()
    s = LossTable(clip_low=0.2, clip_high=0.3)
    loss, metrics = policy_loss(leaf, t([0.0] * 4), t([1, -1, 1, -1]), t([0.25] * 4), None, s)
    (gradient,) = torch.autograd.grad(loss, leaf)
    assert loss.item() == pytest.approx(-0.25 * (1.3 - 2 + 0.5 - 0.8))
    assert gradient.tolist() == pytest.approx([0, 0.5, -0.125, 0])
    assert (float(metrics["clip_high_count"]), float(metrics["clip_low_count"])) == (1, 1)
    assert float(metrics["ratio_sum"]) == pytest.approx(5)
    assert float(metrics["ratio_deviation_max"]) == pytest.approx(1)


def test_finite_differences() -> None:
    window = random_window(7)
    rest = {name: value for name, value in window.items() if name != "logprob_N"}
    leaf = window["logprob_N"].requires_grad_()
    assert torch.autograd.gradcheck(lambda x: policy_loss(x, **rest, settings=FULL)[0], (leaf,))


def test_only_the_policy_gets_a_gradient() -> None:
    window = {name: value.requires_grad_() for name, value in random_window(5).items()}
    loss, metrics = policy_loss(**window, settings=FULL)
    loss.backward()
    assert window["logprob_N"].grad is not None
    assert all(value.grad is None for name, value in window.items() if name != "logprob_N")
    assert not any(value.requires_grad for value in metrics.values())


@pytest.mark.parametrize("order", [list(range(12)), list(range(11, -1, -1))])
@pytest.mark.parametrize("size", [1, 5, 12])
def test_any_split_and_order_give_the_window(order, size: int) -> None:
    window = random_window(12)
    whole, whole_gradient, whole_metrics = evaluate(window, FULL)
    total, gradient, merged = torch.zeros_like(whole), torch.zeros_like(whole_gradient), None
    for start in range(0, 12, size):
        part = torch.tensor(order[start : start + size])
        loss, part_gradient, metrics = evaluate({k: v[part] for k, v in window.items()}, FULL)
        total, gradient[part] = total + loss, part_gradient
        merged = metrics if merged is None else merge_metrics(merged, metrics)
    assert merged is not None
    torch.testing.assert_close(total, whole, rtol=1e-13, atol=1e-13)
    assert torch.equal(gradient, whole_gradient)
    assert summarise(merged) == pytest.approx(summarise(whole_metrics), rel=1e-12)


def test_padding_is_never_read() -> None:
    window = random_window(6)
    padded = {name: torch.cat([value, t([math.nan] * 3)]) for name, value in window.items()}
    padded["weight_N"][6:] = 0
    loss, gradient, metrics = evaluate(padded, FULL)
    expected, expected_gradient, expected_metrics = evaluate(window, FULL)
    torch.testing.assert_close(loss, expected)  # not equal: the length decides the order of summation
    assert torch.equal(gradient, torch.cat([expected_gradient, t([0.0] * 3)]))
    torch.testing.assert_close(metrics, expected_metrics)


def test_a_nan_of_a_real_token_is_not_hidden() -> None:
    for name in ("logprob_N", "old_logprob_N", "advantage_N", "ref_logprob_N", "sampler_logprob_N"):
        window = random_window(4)
        window[name][2] = math.nan
        assert evaluate(window, FULL)[0].isnan(), name


def test_a_share_without_tokens() -> None:
    loss, gradient, metrics = evaluate({k: v[:0] for k, v in random_window(3).items()}, FULL)
    assert float(loss) == 0 and gradient.shape == (0,)
    assert set(metrics) == set(evaluate(random_window(3), FULL)[2])
    assert all(float(value) == 0 for value in metrics.values())
    assert all(value == 0 for value in summarise(metrics).values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dtype_is_kept(dtype: torch.dtype) -> None:
    window = random_window(4)
    window["logprob_N"] = window["logprob_N"].to(dtype)
    loss, gradient, metrics = evaluate(window, FULL)
    assert {loss.dtype, gradient.dtype, *(value.dtype for value in metrics.values())} == {dtype}


def test_without_old_logprobs_the_ratio_is_one_and_the_gradient_is_kept() -> None:
    window = random_window(5)
    window["old_logprob_N"] = window["sampler_logprob_N"] = window["ref_logprob_N"] = None
    _, gradient, metrics = evaluate(window, LossTable())
    torch.testing.assert_close(gradient, -window["weight_N"] * window["advantage_N"])
    report = summarise(metrics)
    assert report["ratio_mean"] == 1 and report["ratio_deviation_max"] == 0
    assert report["sampler_kl"] == 0 and report["effective_sample_size"] == pytest.approx(1)


def test_a_broken_ratio_gives_finite_gradients() -> None:
    loss, gradient, _ = evaluate(
        {
            "logprob_N": t([0.0, 0.0], torch.float32),
            "old_logprob_N": t([-500.0, -500.0]),
            "advantage_N": t([1.0, -1.0]),
            "weight_N": t([0.5, 0.5]),
            "ref_logprob_N": t([0.0, -500.0]),
            "sampler_logprob_N": t([-500.0, 0.0]),
        },
        FULL,
    )
    assert loss.isfinite() and gradient.isfinite().all()
    assert gradient[0] == 0  # clipped


def test_sampler_mismatch_is_measured() -> None:
    """Weights 1 and 2: effective share 9 / (2 * 5); k3 is 0 and 2 - log 2 - 1."""
    two = math.log(2)
    _, metrics = policy_loss(
        t([-1.0, -1.0]), None, t([1.0, 1.0]), t([0.5, 0.5]), None, LossTable(), t([-1.0, -1.0 - two])
    )
    report = summarise(metrics)
    assert report["effective_sample_size"] == pytest.approx(0.9)
    assert report["sampler_kl"] == pytest.approx((1 - two) / 2)
    assert report["entropy_estimate"] == pytest.approx(1)


def test_importance_weights_are_truncated_and_counted() -> None:
    s = LossTable(importance_cap=1.5)
    old, sampler = t([-1.0, -1.0]), t([-1.0 - math.log(2), -1.0 + math.log(2)])
    loss, metrics = policy_loss(old.clone(), old, t([1.0, 1.0]), t([0.5, 0.5]), None, s, sampler)
    assert float(loss) == pytest.approx(-0.5 * (1.5 + 0.5))
    report = summarise(metrics)
    assert report["importance_mean"] == pytest.approx(1.0) and report["importance_capped"] == 0.5


@given(x=st.floats(-20, 20))
def test_k3_is_never_negative(x: float) -> None:
    assert float(k3(t([x]))) >= 0
    assert float(k3(t([x]))) == pytest.approx(math.exp(x) - x - 1, abs=1e-9)


def test_missing_and_misshapen_inputs() -> None:
    window = random_window(3)
    with pytest.raises(UserError, match=r"loss\.importance_cap = 1\.5 needs the sampler's"):
        policy_loss(**{**window, "sampler_logprob_N": None}, settings=FULL)
    with pytest.raises(ValueError, match="needs ref_logprob_N"):
        policy_loss(**{**window, "ref_logprob_N": None}, settings=FULL)
    with pytest.raises(ValueError, match=r"shape \(1,\) where logprob_N has \(3,\)"):
        policy_loss(**{**window, "advantage_N": t([1.0])}, settings=FULL)
    with pytest.raises(ValueError, match="metrics differ"):
        merge_metrics({"tokens": t([1.0])}, {})


def groups_of(*lengths: list[int]) -> list[Group]:
    return [
        Group(f"g{i}", (1,), tuple(Response(tuple(range(n))) for n in group))
        for i, group in enumerate(lengths)
    ]


def test_weights_by_hand() -> None:
    groups = groups_of([1, 3], [4])
    token = token_weights(groups, "token")
    assert [[w.tolist() for w in group] for group in token] == [[[1 / 8], [1 / 8] * 3], [[1 / 8] * 4]]
    sequence = token_weights(groups, "sequence", dtype=torch.float32)
    assert [[w.tolist() for w in group] for group in sequence] == [
        [[pytest.approx(1 / 3)], pytest.approx([1 / 9] * 3)],
        [pytest.approx([1 / 12] * 4)],
    ]
    assert sequence[0][0].dtype == torch.float32 and token[0][0].dtype == torch.float64
    with pytest.raises(ValueError, match="unknown aggregate"):
        token_weights(groups, "mean")


def test_masked_tokens_weigh_nothing_and_are_not_counted() -> None:
    masked = Response((1, 2, 3, 4), mask=(0, 1, 0, 1))
    groups = [Group("g", (1,), (masked, Response((5, 6, 7))))]
    assert window_totals(groups) == WindowTotals(responses=2, tokens=5)
    token, sequence = (token_weights(groups, kind)[0] for kind in ("token", "sequence"))
    assert token[0].tolist() == [0, 1 / 5, 0, 1 / 5] and token[1].tolist() == [1 / 5] * 3
    assert sequence[0].tolist() == [0, 1 / 4, 0, 1 / 4] and sequence[1].tolist() == pytest.approx([1 / 6] * 3)


@given(
    lengths=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4), min_size=2, max_size=4),
    aggregate=st.sampled_from(["token", "sequence"]),
)
def test_weights_sum_to_one_and_do_not_depend_on_placement(lengths, aggregate: str) -> None:
    groups = groups_of(*lengths)
    whole = token_weights(groups, aggregate)
    assert sum(float(w.sum()) for group in whole for w in group) == pytest.approx(1)
    ranks = [groups[0::2], groups[1::2]]
    totals = window_totals(ranks[0]) + window_totals(ranks[1])
    assert totals == WindowTotals(sum(map(len, lengths)), sum(map(sum, lengths)))
    for offset, rank in enumerate(ranks):
        local = token_weights(rank, aggregate, totals)
        for mine, theirs in zip(local, whole[offset::2], strict=True):
            assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
