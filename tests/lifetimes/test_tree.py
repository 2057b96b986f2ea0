"""Claim: the tree of a group's responses holds every response once, and shares what pays, whatever the ids.

Why the tests show it: on random responses over few ids (so that they share at every depth) the paths of the tree spell
exactly the responses, every node that branches is long enough, siblings never begin alike where sharing them would pay,
and with least = 1 the number of tokens is that of a plain dictionary of prefixes. A staircase of 400 responses (deeper
than a recursion would go) is a tree too.
Not shown: that a gradient over the tree is that of its paths (tests/worlds/test_trees.py).
"""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lrl.lifetimes.tree import TreeNode, distinct_tokens, response_tree

responses = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12).map(tuple), min_size=1, max_size=9)


def spelled(nodes: list[TreeNode], count: int) -> list[tuple[int, ...]]:
    """Each response, read off the nodes from the top down."""
    found: list[tuple[int, ...]] = [()] * count
    for top in nodes:
        for node in top.walk():
            for i, tokens in node.covers.items():
                assert node.start == len(found[i])  # nothing twice, nothing left out
                found[i] += node.ids[:tokens]
    return found


@settings(deadline=None)
@given(given=responses, least=st.integers(0, 5))
def test_paths_spell_the_responses(given: list[tuple[int, ...]], least: int) -> None:
    tree = response_tree(given, least)
    assert spelled(tree, len(given)) == given
    for top in tree:
        for node in top.walk():
            assert node.ids and len(node.children) != 1
            assert not node.children or len(node.ids) >= least > 0
            # Who goes on into a child owns the whole node.
            assert all(node.covers[i] == len(node.ids) for child in node.children for i in child.covers)
            assert max(node.covers.values()) == len(node.ids)


@settings(deadline=None)
@given(given=responses)
def test_every_shared_token_once(given: list[tuple[int, ...]]) -> None:
    prefixes = {ids[: n + 1] for ids in given for n in range(len(ids))}
    assert distinct_tokens(response_tree(given, 1)) == len(prefixes)
    assert distinct_tokens(response_tree(given, 0)) == sum(map(len, given))


@settings(deadline=None)
@given(given=responses, least=st.integers(1, 5))
def test_what_pays_is_shared(given: list[tuple[int, ...]], least: int) -> None:
    waiting = [response_tree(given, least)]
    while waiting:
        siblings = waiting.pop()
        for i, one in enumerate(siblings):
            waiting.append(one.children)
            for other in siblings[i + 1 :]:
                alike = zip(one.ids, other.ids, strict=False)
                common = next(
                    (n for n, (a, b) in enumerate(alike) if a != b), min(len(one.ids), len(other.ids))
                )
                assert common < least


def test_the_picture() -> None:
    a, b, c, d, e, f, g, x = range(8)
    given = [(a, b, c, d, e, f), (a, b, c, d, e, g), (a, b, c, x), (a, b, c)]
    (top,) = response_tree(given, 3)
    assert top == TreeNode(0, (a, b, c), {0: 3, 1: 3, 2: 3, 3: 3}, top.children)
    assert [(node.ids, node.covers) for node in top.children] == [
        ((d, e, f), {0: 3}),
        ((d, e, g), {1: 3}),
        ((x,), {2: 1}),
    ]


def test_twins_and_beginnings_share_for_nothing() -> None:
    (leaf,) = response_tree([(1, 2, 3), (1, 2, 3), (1,)], 100)
    assert leaf == TreeNode(0, (1, 2, 3), {0: 3, 1: 3, 2: 1})


def test_tokens_with_other_marks_are_not_shared() -> None:
    same = [(1, 2, 3, 4), (1, 2, 3, 5)]
    (top,) = response_tree(same, 1, mark=lambda response, place: 0)
    assert top.ids == (1, 2, 3)
    (top,) = response_tree(same, 1, mark=lambda response, place: response if place == 2 else None)
    assert top.ids == (1, 2)


def test_a_staircase() -> None:
    given = [(0,) * n + (1,) for n in range(1, 400)]
    for least in (1, 10, 10_000):
        assert spelled(response_tree(given, least), len(given)) == given
