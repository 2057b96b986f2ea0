"""What a window does below a node: branches, K at a time, and parts that several responses share.

Legend: N tokens of a micro-batch, one branch after another; S those scored on this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_lrl.experts.record import Routing
from megatron_lrl.lifetimes.contributions import BranchKey
from megatron_lrl.lifetimes.tree import TreeNode, response_tree

TokenLoss = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, dict[str, Tensor]]]
"""``loss(logprob_S, entropy_S, index_S)``: final-weight loss sum and metric sums of the tokens scored on this rank.
``index_S`` are their places among the micro-batch's N tokens."""


@dataclass(frozen=True)
class Branch:
    """Tokens that are fed and scored together: a recorded response, or the part of it that lies in one tree node."""

    key: BranchKey  # of the response, or of the first one through the part
    ids: tuple[int, ...]
    routing: Routing | None = None  # of the tokens that are fed, if it was recorded
    mask: tuple[int, ...] | None = None  # 0 where a token is fed but never scored
    start: int = 0  # place of ids[0] in the responses
    through: tuple[
        tuple[BranchKey, int], ...
    ] = ()  # all responses that go through, and how many of the ids are theirs

    @property
    def owners(self) -> tuple[tuple[BranchKey, int], ...]:
        return self.through or ((self.key, len(self.ids)),)


@dataclass(frozen=True)
class Batch:
    """Branches that are replayed at once."""

    branches: tuple[Branch, ...]
    loss: TokenLoss | None = None


@dataclass(frozen=True)
class Shared:
    """A part that several responses go through, and what comes after it."""

    branch: Branch
    loss: TokenLoss | None
    below: Work

    @property
    def own(self) -> Batch:
        return Batch((self.branch,), self.loss)


@dataclass(frozen=True)
class Work:
    """What hangs below a node: leaves, K at a time, and parts that branch again."""

    batches: tuple[Batch, ...] = ()
    shared: tuple[Shared, ...] = ()

    def walk(self) -> Iterator[Branch]:
        """Every branch and part."""
        waiting = [self]
        while waiting:
            work = waiting.pop()
            for batch in work.batches:
                yield from batch.branches
            for part in work.shared:
                yield part.branch
                waiting.append(part.below)

    def keys(self) -> list[BranchKey]:
        """The responses that the work consists of, each once unless it was given twice."""
        return [key for branch in self.walk() for key, tokens in branch.owners if not branch.start]


def work_of(batches: Sequence[Sequence[Branch]], losses: Sequence[TokenLoss] | None = None) -> Work:
    """Micro-batches of branches that share nothing."""
    of_each = losses if losses is not None else [None] * len(batches)
    return Work(tuple(Batch(tuple(batch), loss) for batch, loss in zip(batches, of_each, strict=True)))


def tree_work(
    branches: Sequence[Branch],
    concurrent: int,
    least: int,
    loss_of: Callable[[Sequence[Branch]], TokenLoss] | None = None,
) -> Work:
    """The work of some responses, with what they share taken together.

    Args:
        concurrent: K, leaves of a node that are replayed at once.
        least: from how many tokens on a shared part is worth a node of its own; 0: nothing is shared.
        loss_of: the loss of branches that are replayed at once; None: they are only scored.
    """

    def loss(parts: Sequence[Branch]) -> TokenLoss | None:
        return None if loss_of is None else loss_of(parts)

    def below(nodes: Sequence[TreeNode]) -> Work:
        leaves = [_part(branches, node) for node in nodes if not node.children]
        batches = [Batch(tuple(batch), loss(batch)) for batch in batches_of(leaves, concurrent)]
        inner = [(_part(branches, node), node.children) for node in nodes if node.children]
        shared = [Shared(part, loss([part]), below(children)) for part, children in inner]
        return Work(tuple(batches), tuple(shared))

    return below(tree_of(branches, least))


def tree_of(branches: Sequence[Branch], least: int) -> list[TreeNode]:
    """What some responses share, in ids and recorded routing; see `response_tree`."""

    def mark(response: int, place: int) -> Hashable:
        routing = branches[response].routing
        return None if routing is None else routing.rows(place, 1)

    recorded = any(branch.routing is not None for branch in branches)
    return response_tree([branch.ids for branch in branches], least, mark if recorded else None)


def _part(branches: Sequence[Branch], node: TreeNode) -> Branch:
    """The tokens of a tree node, as the responses through it have them."""
    through = [(branches[i], tokens) for i, tokens in node.covers.items()]
    first = max(through, key=lambda item: item[1])[0]  # it goes to the node's end
    if len(through) == 1 and node.start == 0:
        return first
    rows, routing, mask = slice(node.start, node.start + len(node.ids)), first.routing, None
    if routing is not None:
        routing = routing.rows(node.start, len(node.ids))
    if any(branch.mask is not None for branch, _ in through):
        scored = torch.zeros(len(node.ids), dtype=torch.int64)
        for branch, tokens in through:  # what one of them scores is scored
            own = torch.ones(tokens) if branch.mask is None else torch.tensor(branch.mask[rows][:tokens])
            scored[:tokens] |= own.long()
        mask = tuple(scored.tolist())
    owners = tuple((branch.key, tokens) for branch, tokens in through)
    return Branch(through[0][0].key, node.ids, routing, mask, node.start, owners)


def batches_of(branches: Iterable[Branch], size: int) -> list[list[Branch]]:
    """Cut branches into micro-batches of at most ``size``, in order."""
    branches = list(branches)
    return [branches[i : i + size] for i in range(0, len(branches), size)]
