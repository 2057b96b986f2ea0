"""Claim: a window's phases are enforced, a prefix dies with the step that made it stale, and a replay that
fails half-way leaves no trace in the gradient.

Why the tests show it: every illegal transition is tried; a failure is injected in the second micro-batch,
when the first has already been added to the buffers, and after the restart the gradient is bit-equal to
that of a window in which nothing failed; stale reads are tried after a step, after a close and with another
prompt.

Not shown: gradients themselves (tests/worlds), several ranks (tests/worlds).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lifetimes.tiny import branches, gradient, ids, mean_loss, tiny_run
from megatron_lrl.lifetimes.contributions import ContributionError
from megatron_lrl.lifetimes.identity import IdentityMismatch
from megatron_lrl.lifetimes.node import NodePhase
from megatron_lrl.lifetimes.replay import NonFiniteLoss, Replay
from megatron_lrl.lifetimes.run import Run
from megatron_lrl.lifetimes.window import UpdateWindow, WindowPhase
from megatron_lrl.lifetimes.work import batches_of, work_of

PROMPT = ids(19, 1)
BRANCHES = branches([3, 5, 2])
BATCHES = batches_of(BRANCHES, 1)
KEYS = [branch.key for branch in BRANCHES]
LOSS = mean_loss(0.1)


@pytest.fixture(scope="module")
def run(session_dir: Path) -> Iterator[Run]:
    with tiny_run(session_dir, "prefix.chunk_size=7", "model.dtype=float32", optimizer=True) as run:
        yield run


def failing(error: Exception) -> Any:
    def loss(*_: Any) -> Any:
        raise error

    return loss


def replay_all(window: UpdateWindow) -> None:
    with window.prompt_group("g", PROMPT) as group:
        window.replay(group, work_of(BATCHES, [LOSS] * len(BATCHES)))


def test_the_whole_life_of_a_window(run: Run) -> None:
    version = run.version
    before = [p.detach().clone() for p in run.core(run.model).parameters()]
    with UpdateWindow(run) as window:
        assert window.phase is WindowPhase.OPEN
        assert not gradient(run).any()
        window.fix(KEYS)
        assert window.phase is WindowPhase.FIXED
        replay_all(window)
        window.reduce()
        assert window.phase is WindowPhase.REPLAYED
        assert gradient(run).any()
        result = window.step()
        assert window.phase is WindowPhase.CLOSED
    assert run.version == version + 1
    assert result.grad_norm > 0
    after = list(run.core(run.model).parameters())
    assert any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_illegal_transitions_raise(run: Run) -> None:
    with UpdateWindow(run) as window:
        with window.prompt_group("g", PROMPT) as group:
            for action in (
                lambda: window.replay(group, work_of(BATCHES, [LOSS] * 3)),
                window.reduce,
                window.step,
            ):
                with pytest.raises(RuntimeError, match="the update window is open"):
                    action()
            window.fix(KEYS)
            with pytest.raises(RuntimeError, match="the update window is fixed, this needs it open"):
                window.fix(KEYS)
            with pytest.raises(RuntimeError, match="this needs it replayed"):
                window.step()
            with pytest.raises(ContributionError, match="3 branches"):
                window.reduce()
            window.replay(group, work_of(BATCHES, [LOSS] * 3))
            with pytest.raises(ContributionError, match="already counted"):
                window.replay(group, work_of(BATCHES, [LOSS] * 3))
            with pytest.raises(RuntimeError, match="cannot be swept: it is swept"):
                group.sweep()
        window.reduce()
    with pytest.raises(RuntimeError, match="the update window is closed"):
        window.prompt_group("h", PROMPT)


def test_an_unknown_branch_is_refused_before_anything_is_added(run: Run) -> None:
    with UpdateWindow(run) as window:
        window.fix(KEYS[:2])
        with window.prompt_group("g", PROMPT) as group:
            with pytest.raises(ContributionError, match=r"g\[2\] does not belong"):
                window.replay(group, work_of(BATCHES, [LOSS] * 3))
        assert not gradient(run).any()


@pytest.mark.parametrize("contract", ["conventional", "response_only", "exact"])
def test_a_failed_replay_leaves_no_trace(run: Run, contract: str) -> None:
    with UpdateWindow(run) as window:
        window.fix(KEYS)
        with window.prompt_group("g", PROMPT, contract) as group:
            window.replay(group, work_of(BATCHES, [LOSS] * 3))
        undisturbed = gradient(run)
    with UpdateWindow(run) as window:
        window.fix(KEYS)
        with pytest.raises(ArithmeticError, match="injected"):
            with window.prompt_group("g", PROMPT, contract) as group:
                window.replay(group, work_of(BATCHES, [LOSS, failing(ArithmeticError("injected")), LOSS]))
        assert gradient(run).any(), "the first micro-batch was already added"
        assert window.contributions is not None
        assert window.contributions.missing == KEYS
        window.restart()
        assert not gradient(run).any()
        with window.prompt_group("g", PROMPT, contract) as group:
            window.replay(group, work_of(BATCHES, [LOSS] * 3))
        assert torch.equal(gradient(run), undisturbed)


def test_an_exception_that_leaves_the_window_clears_the_gradient(run: Run) -> None:
    with pytest.raises(ArithmeticError, match="injected"):
        with UpdateWindow(run) as window:
            window.fix(KEYS)
            with window.prompt_group("g", PROMPT) as group:
                window.replay(group, work_of(BATCHES, [LOSS, LOSS, failing(ArithmeticError("injected"))]))
    assert window.phase is WindowPhase.CLOSED
    assert group.phase is NodePhase.CLOSED
    assert not gradient(run).any()
    assert run.ledger.live == {"window": 0, "group": 0, "replay": 0}


def test_a_loss_that_is_not_finite_names_its_branches_and_stops_the_window(run: Run) -> None:
    def nan(logprob_S: torch.Tensor, *_: Any) -> Any:
        return logprob_S.sum() * float("nan"), {}

    with UpdateWindow(run) as window:
        window.fix(KEYS)
        with window.prompt_group("g", PROMPT) as group:
            window.replay(group, work_of(batches_of(BRANCHES, 2), [nan, LOSS]))
        assert bool(torch.isfinite(gradient(run)).all()), "it counts as 0"
        with pytest.raises(NonFiniteLoss, match=r"not finite: the loss of g\[0\], g\[1\] is nan"):
            window.reduce()
        window.restart()
        replay_all(window)
        window.reduce()


def test_a_gradient_that_is_not_finite_changes_no_parameter(run: Run) -> None:
    before = [p.detach().clone() for p in run.core(run.model).parameters()]
    with UpdateWindow(run) as window:
        window.fix(KEYS)
        replay_all(window)
        window.reduce()
        run.model.buffers[0].grad_data[0] = float("inf")
        with pytest.raises(FloatingPointError, match="no parameter was changed"):
            window.step()
    after = list(run.core(run.model).parameters())
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_every_kind_of_bad_element_is_found_in_one_reading(run: Run, value: float) -> None:
    with UpdateWindow(run) as window:
        window.fix(KEYS)
        replay_all(window)
        window.reduce()
        assert run.gradients_finite()
        buffer = run.model.buffers[-1].grad_data
        before = buffer[-1].item()
        buffer[-1] = value
        assert not run.gradients_finite()
        assert not window.gradient_finite()
        buffer[-1] = before
        assert not window.gradient_finite()  # remembered: `step` does not read the buffers again
        window.restart()
        replay_all(window)
        window.reduce()
        assert window.gradient_finite()


def test_the_fused_step_is_adamw(run: Run) -> None:
    """Megatron-Core's optimizer, its gradient clipped, against torch's AdamW over single tensors: a few ulp."""
    groups = [dict(group) for group in run.optimizer.param_groups]
    assert all(group["fused"] for group in groups)
    mains = [p for group in groups for p in group["params"]]
    copies = {p: torch.nn.Parameter(p.detach().clone()) for p in mains}
    plain = torch.optim.AdamW(
        [{**g, "params": [copies[p] for p in g["params"]], "fused": False} for g in groups]
    )
    for main, copy in copies.items():
        plain.state[copy] = {k: v.clone() for k, v in run.optimizer.optimizer.state[main].items()}
    with UpdateWindow(run) as window:
        window.fix(KEYS)
        replay_all(window)
        window.reduce()
        clip = run.config.optimizer.clip_grad
        norm = gradient(run).norm().item()
        for main, copy in copies.items():
            copy.grad = main.main_grad * min(1.0, clip / (norm + 1e-6))
        window.step()
    plain.step()
    for main, copy in copies.items():
        torch.testing.assert_close(main, copy, rtol=1e-6, atol=1e-9)


def test_a_prefix_dies_with_the_step(run: Run) -> None:
    with UpdateWindow(run) as window:
        window.fix(KEYS)
        group = window.prompt_group("g", PROMPT).__enter__()
        kept = group.fork(2)
        window.replay(group, work_of(BATCHES, [LOSS] * 3))
        window.reduce()
        window.step()
        for read in (lambda: group.fork(1), lambda: Replay(group).score(work_of(BATCHES))):
            with pytest.raises(RuntimeError, match="group g is closed"):
                read()
        with pytest.raises(RuntimeError, match="stale state"):
            kept.layer(1)


def test_a_prefix_of_another_version_or_prompt_is_refused(run: Run) -> None:
    with UpdateWindow(run) as window, window.prompt_group("g", PROMPT) as group:
        group.version -= 1  # as if the model had moved on without closing the window
        with pytest.raises(
            IdentityMismatch, match=f"model_version: resident {run.version - 1}, needed {run.version}"
        ):
            group.fork(1)
        group.version += 1
        assert group.fork(1).counts == [len(PROMPT) - 1]
        wanted = run.identity(PROMPT[:-2])
        with pytest.raises(IdentityMismatch, match=r"tokens: .*count: resident 18, needed 17"):
            group.identity.require(wanted)


def test_an_empty_prompt_is_refused(run: Run) -> None:
    with UpdateWindow(run) as window, pytest.raises(ValueError, match="the prompt is empty"):
        window.prompt_group("g", ())
