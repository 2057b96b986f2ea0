"""The tree of a group's responses: tokens that several share beyond the prompt, found by ids, declared by nobody.

    responses   a b c d e f       nodes    [a b c] ─┬─ [d e f]
                a b c d e g                         ├─ [d e g]      ("d e" alone is too short to share)
                a b c x                             └─ [x]
                a b c                               (ends in the first node)

A node's tokens are fed once for all responses through it; each has its own terms there. Sharing costs one more
forward of them (they are captured, then swept), and their last one is fed again with every child, so a short run is
left to the responses. Where nothing branches sharing is free: a twin, or a beginning, of a response ends in its node.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field


@dataclass
class TreeNode:
    """Consecutive tokens of one response or several.

    start: place of the first token in the responses. ids: the tokens, at least one. covers: for each response through
    the node, by its number in the group, how many of the tokens are its own (all, unless it ends in the node).
    children: what follows, in the order of their first responses.
    """

    start: int
    ids: tuple[int, ...]
    covers: dict[int, int]
    children: list[TreeNode] = field(default_factory=list)

    def walk(self) -> Iterator[TreeNode]:
        """This node and all below it, each before its children."""
        waiting = [self]
        while waiting:
            node = waiting.pop()
            yield node
            waiting += reversed(node.children)


def response_tree(
    responses: Sequence[Sequence[int]],
    least: int,
    mark: Callable[[int, int], Hashable] | None = None,
) -> list[TreeNode]:
    """What follows the prompt: the nodes that share no token with each other.

    Args:
        responses: token ids, at least one each.
        least: a node with children holds so many tokens or more; 0: nothing is shared.
        mark: of a response and a place; tokens are shared only where their marks are equal too (recorded routing).
    """
    if least <= 0:
        return [TreeNode(0, tuple(ids), {i: len(ids)}) for i, ids in enumerate(responses)]
    codes: dict[Hashable, int] = {}
    coded = [
        [codes.setdefault((token, mark and mark(i, place)), len(codes)) for place, token in enumerate(ids)]
        for i, ids in enumerate(responses)
    ]
    return _collapsed(_trie(responses, coded), least)


def _trie(responses: Sequence[Sequence[int]], coded: list[list[int]]) -> TreeNode:
    """All sharing there is, below an empty root: responses in sorted order, each where it leaves the one before."""
    root = TreeNode(0, (), {})
    path = [root]  # from the root to the end of the response before
    before: list[int] = []
    for i in sorted(range(len(coded)), key=lambda i: coded[i]):
        shared = _common(before, coded[i])
        while path[-1].start >= shared and len(path) > 1:
            path.pop()
        node = path[-1]
        if shared - node.start < len(node.ids):  # it leaves in the middle: cut the node there
            at = shared - node.start
            lower = TreeNode(shared, node.ids[at:], {}, node.children)
            lower.covers = {j: n - at for j, n in node.covers.items() if n > at}
            node.ids, node.children = node.ids[:at], [lower]
            node.covers = {j: min(n, at) for j, n in node.covers.items()}
        for above in path[1:]:
            above.covers[i] = len(above.ids)
        if shared < len(coded[i]):
            rest = TreeNode(shared, tuple(responses[i][shared:]), {i: len(coded[i]) - shared})
            node.children.append(rest)
            path.append(rest)
        before = coded[i]
    return root


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the common beginning."""
    return next(
        (place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )


def _collapsed(root: TreeNode, least: int) -> list[TreeNode]:
    """The nodes below the root; one that branches too early goes to each of its children, a single child joins."""
    found: list[TreeNode] = []
    waiting = [(child, found) for child in reversed(root.children)]  # a node, and where it hangs
    while waiting:
        node, siblings = waiting.pop()
        if len(node.children) == 1 or (node.children and len(node.ids) < least):
            ended = node.covers.keys() - {i for child in node.children for i in child.covers}
            for child in node.children:
                covers = {i: len(node.ids) + n for i, n in child.covers.items()}
                covers |= {i: node.covers[i] for i in ended}  # along with the first child
                ended = set()
                joined = TreeNode(node.start, node.ids + child.ids, covers, child.children)
                waiting.append((joined, siblings))
            continue
        siblings.append(node)
        below, node.children = node.children, []
        waiting += [(child, node.children) for child in below]
    _in_order(found)
    return found


def _in_order(nodes: list[TreeNode]) -> None:
    """Sort nodes, and those below them, by their first response."""
    waiting = [nodes]
    while waiting:
        siblings = waiting.pop()
        siblings.sort(key=lambda node: min(node.covers))
        for node in siblings:
            node.covers = dict(sorted(node.covers.items()))
            waiting.append(node.children)


def distinct_tokens(nodes: Iterable[TreeNode]) -> int:
    """Tokens of all nodes: what is fed of the responses, each shared token once."""
    return sum(len(node.ids) for top in nodes for node in top.walk())
