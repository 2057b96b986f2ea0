"""The gradient of one window: recorded groups in, gradient buffers and metrics out.

`train`, `grad` and `check` all go through `WindowPlan` and `accumulate`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from megatron_lrl.errors import UserError
from megatron_lrl.lifetimes.contributions import BranchKey
from megatron_lrl.lifetimes.ledger import storage_bytes
from megatron_lrl.lifetimes.node import NodePhase
from megatron_lrl.lifetimes.prompt import PromptGroup
from megatron_lrl.lifetimes.replay import Replay
from megatron_lrl.lifetimes.tree import distinct_tokens
from megatron_lrl.lifetimes.window import UpdateWindow, WindowPhase
from megatron_lrl.lifetimes.work import Branch, TokenLoss, Work, tree_of, tree_work, work_of
from megatron_lrl.passes.schedule import from_last_stage, in_lockstep
from megatron_lrl.rl.advantage import group_advantages
from megatron_lrl.rl.loss import merge_metrics, policy_loss, token_weights, window_totals
from megatron_lrl.rl.stopwatch import Stopwatch
from megatron_lrl.rl.terms import BranchTerms, measured, token_loss
from megatron_lrl.rollout.types import Group
from megatron_lrl.runtime import Runtime
from megatron_lrl.settings import Config, LossTable


class WindowPlan:
    """A window's groups with their final weights and advantages, and this rank's share of them.

    A response whose terms are all zero (equal rewards, advantages of zero) adds nothing to the gradient: it is not
    replayed, and a group of such responses is neither captured nor swept for it. With a KL term, an auxiliary loss or a
    router bias every response counts.
    """

    def __init__(self, groups: Sequence[Group], config: Config, dp: int = 1, dp_rank: int = 0) -> None:
        """``groups``: all of the window, in the same order on every rank.

        Raises `UserError` for a group whose advantage cannot be computed, or whose routing is missing.
        """
        self.groups = list(groups)
        require_routing(groups, config)
        self.totals = window_totals(groups)
        weights = token_weights(groups, config.loss.aggregate, self.totals)
        self.advantages = [group_advantages(group, config.loss.advantage) for group in groups]
        self.terms: dict[BranchKey, BranchTerms] = {}
        for group, group_weights, advantages in zip(groups, weights, self.advantages, strict=True):
            for index, response in enumerate(group.responses):
                sampler = response.logprobs
                self.terms[BranchKey(group.id, index)] = BranchTerms(
                    group_weights[index],
                    advantages[index],
                    None if sampler is None else torch.tensor(sampler, dtype=torch.float64),
                )
        every = config.loss.kl_coef or config.moe.aux_loss_coef or config.moe.router_bias_update_rate
        self.live = {
            key for key, terms in self.terms.items() if every or bool((terms.advantage_R != 0).any())
        }
        self.local = [group for group in self.groups[dp_rank::dp] if self.branches(group)]
        self._least = 0 if config.prefix.contract == "conventional" else config.replay.share_tokens

    def branches(self, group: Group) -> list[Branch]:
        """The responses of a group that are replayed."""
        return [branch for branch in branches_of(group) if branch.key in self.live]

    @property
    def skipped(self) -> float:
        """Share of the window's responses that are not replayed, because their terms are zero."""
        return 1.0 - len(self.live) / len(self.terms)

    @property
    def shared(self) -> int:
        """Tokens that replay is spared, because responses share them."""
        every = [self.branches(group) for group in self.groups]
        alone = sum(len(branch.ids) for branches in every for branch in branches)
        return alone - sum(distinct_tokens(tree_of(branches, self._least)) for branches in every)

    @property
    def records_routing(self) -> bool:
        """Whether any response of the window has a record."""
        return any(response.routing is not None for group in self.groups for response in group.responses)

    @property
    def nbytes(self) -> int:
        """Bytes of the recorded per-token values."""
        tensors = [t for terms in self.terms.values() for t in vars(terms).values() if t is not None]
        return storage_bytes(tensors)

    @property
    def local_keys(self) -> list[BranchKey]:
        return [branch.key for group in self.local for branch in self.branches(group)]


def branches_of(group: Group) -> list[Branch]:
    """The group's responses as branches of a replay, with their recorded routing."""
    return [
        Branch(BranchKey(group.id, i), response.ids, response.routing, response.mask)
        for i, response in enumerate(group.responses)
    ]


def require_routing(groups: Sequence[Group], config: Config) -> None:
    """Raise `UserError` for a response without a record, if replay is to use it."""
    if not config.replay.use_recorded_routing:
        return
    for group in groups:
        for index, response in enumerate(group.responses):
            if response.routing is None:
                raise UserError(
                    f"replay.use_recorded_routing = true, but response {index} of group {group.id!r} has no recorded "
                    "routing; sample with rollout.record_routing = true"
                )


def score_group(group: PromptGroup, branches: Sequence[Branch]) -> dict[BranchKey, Tensor]:
    """Log-probabilities [R] of each branch under the group's model, without a graph, on every rank."""
    found = {branch.key: torch.zeros(len(branch.ids), dtype=torch.float64) for branch in branches}
    for part, (logprob_N, _) in Replay(group).score(_work(group, branches, None)):
        for key, tokens in part.owners:
            found[key][part.start : part.start + tokens] = logprob_N[:tokens]
    return found


def _work(
    group: PromptGroup, branches: Sequence[Branch], loss_of: Callable[[Sequence[Branch]], TokenLoss] | None
) -> Work:
    """The branches of a group, merged where they share tokens; the conventional contract runs each alone."""
    replay = group.run.config.replay
    return tree_work(branches, replay.concurrent, 0 if group.conventional else replay.share_tokens, loss_of)


def accumulate(
    window: UpdateWindow,
    plan: WindowPlan,
    *,
    contract: str | None = None,
    captured: Mapping[str, PromptGroup] | None = None,
    reference: Any = None,
    watch: Stopwatch | None = None,
    quiet: bool = True,
) -> dict[str, Tensor]:
    """Replay this rank's groups and add their gradient to the buffers; fixes the window.

    Args:
        contract: the gradient contract (default: the config's).
        captured: prefixes of this window that are already resident, by group id; each is freed after its replay.
        reference: the reference model, if the loss has a KL term.
        watch: where the seconds of capture, score and replay go.
        quiet: no progress bar on rank 0.

    Returns the window's metric sums, the same on every rank. Call `UpdateWindow.reduce` next.
    """
    run, config = window.run, window.run.config
    if window.phase is WindowPhase.OPEN:  # else it starts over, and knows them
        window.fix(plan.local_keys, plan.nbytes)
    merged: dict[str, Tensor] = _no_tokens(run.precision.accumulation, config.loss, run.runtime.device)
    bar = tqdm(
        total=len(plan.local_keys), desc=f"replay, {contract or config.prefix.contract}", unit="resp",
        leave=False, delay=2, disable=quiet or not run.runtime.is_main,
    )  # fmt: skip
    watch = watch or Stopwatch()
    _share_reference(window, reference)
    window.balance = config.moe.aux_loss_coef / plan.totals.responses
    replayed = {group.id for group in plan.local}
    for name, idle in (captured or {}).items():
        if name not in replayed:
            idle.close()
    with bar, in_lockstep(run):
        for group in plan.local:
            prefix = (captured or {}).get(group.id)
            if prefix is None:
                prefix = window.prompt_group(group.id, group.prompt_ids, contract, quiet=quiet)
            with closing(prefix):
                loss_of = _loss_of(window, plan, group, prefix, reference, watch)
                with watch.timed("replay"):
                    for metrics in window.replay(prefix, _work(prefix, plan.branches(group), loss_of)):
                        merged = merge_metrics(merged, metrics)
            bar.update(len(plan.branches(group)))
    sums = _merge_over_ranks(merged, run.runtime)
    return {**sums, **run.routing.mismatch(run.runtime.device)} if plan.records_routing else sums


def _loss_of(
    window: UpdateWindow,
    plan: WindowPlan,
    group: Group,
    prefix: PromptGroup,
    reference: Any,
    watch: Stopwatch,
) -> Callable[[Sequence[Branch]], TokenLoss]:
    """The loss of some branches of a group; captures ``prefix`` unless it is resident."""
    config, branches = window.run.config, plan.branches(group)
    reference_logprobs = current = None
    if reference is not None and config.loss.kl_coef > 0:
        with (
            watch.timed("score"),
            window.prompt_group(group.id, group.prompt_ids, "response_only", reference) as frozen,
        ):
            reference_logprobs = score_group(frozen, branches)
    if prefix.phase is NodePhase.NEW:
        with watch.timed("capture"):
            prefix.capture()
    recorded = all(plan.terms[branch.key].sampler_R is not None for branch in branches)
    if config.loss.importance_cap > 0 or (config.loss.objective == "gspo" and recorded):
        with watch.timed("score"):
            current = score_group(prefix, branches)
    device = window.run.runtime.device
    return lambda batch: token_loss(batch, plan.terms, config.loss, device, reference_logprobs, current)


def _share_reference(window: UpdateWindow, reference: Any) -> None:
    """Replicas that share experts serve each other's passes of the reference model too."""
    if window.run.lockstep is not None:
        window.run.lockstep.reference = reference


def nonfinite_branches(window: UpdateWindow, plan: WindowPlan, reference: Any = None) -> str:
    """Replay the window's branches one by one to find whose gradient is NaN or infinite; the same text on all ranks.

    Collective. Restarts the window: what it had accumulated is gone, and the buffers are clear afterwards.
    """
    run, watch, names = window.run, Stopwatch(), []
    window.restart()
    _share_reference(window, reference)

    def alone(name: str, action: Callable[[], Any] | None) -> None:
        """Gradient of one action of one replica; where replicas share experts, some of it lies on the others."""
        run.zero_grad()
        with in_lockstep(run):
            if action is not None:
                action()
        finite = run.gradients_finite()
        if run.lockstep is not None:
            finite = run.lockstep.all_true(finite)
        if not finite and action is not None:
            names.append(name)

    # Replicas that share experts take turns, so that no other branch's gradient is in the buffers.
    for group in plan.local if run.lockstep is None else plan.groups:
        if group not in plan.local:
            with in_lockstep(run):  # its capture
                pass
            for _ in range(len(plan.branches(group)) + 1):
                alone("", None)
            continue
        with closing(window.prompt_group(group.id, group.prompt_ids)) as prefix:
            with in_lockstep(run):
                loss_of = _loss_of(window, plan, group, prefix, reference, watch)
            for branch in plan.branches(group):
                work = work_of([[branch]], [loss_of([branch])])
                alone(str(branch.key), partial(Replay(prefix).gradient, work))
            alone(f"the prefix of {group.id}", prefix.sweep)
    run.zero_grad()
    found = sorted({name for part in run.runtime.gather_objects(names) for name in part})
    return ", ".join(found) if found else "no branch alone, only their sum"


def routing_mismatch(sums: Mapping[str, Tensor]) -> dict[str, float]:
    """Share of (token, expert layer) whose experts differ from the record, and the largest difference of a weight among
    the others; nothing if the window had no record."""
    if "routing_pairs_sum" not in sums:
        return {}
    return {
        "routing/mismatch": float(sums["routing_differing_sum"]) / max(1.0, float(sums["routing_pairs_sum"])),
        "routing/weight_difference_max": float(sums["routing_weight_difference_max"]),
    }


def _no_tokens(dtype: torch.dtype, settings: LossTable, device: torch.device) -> dict[str, Tensor]:
    """Metric sums of nothing: what a rank without a group contributes."""
    empty = torch.zeros(0, dtype=dtype, device=device)
    _, metrics = policy_loss(empty, empty, empty, empty, empty, settings, empty, empty)
    return {**metrics, **measured(empty, empty, empty, empty)}


def _merge_over_ranks(metrics: dict[str, Tensor], runtime: Runtime) -> dict[str, Tensor]:
    names = sorted(metrics)
    values = torch.stack([metrics[name].detach().double() for name in names])
    if runtime.is_last_stage and runtime.groups.dp_cp.size() > 1:
        is_max = torch.tensor([name.endswith("_max") for name in names], device=values.device)
        largest = values.clone()
        dist.all_reduce(values, group=runtime.groups.dp_cp)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=runtime.groups.dp_cp)
        values = torch.where(is_max, largest, values)
    values = from_last_stage(values, runtime)
    return dict(zip(names, values, strict=True))
