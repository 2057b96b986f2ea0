"""Claim: an identity that does not match names every field that differs; a branch is counted exactly once.

Why the tests show it: each field of an identity is changed alone, in turn, and the error must name that
field and both values; contributions are driven through random orders with a duplicate, a stranger or a gap
inserted.

Not shown: that a run fills the fields in (test_window).
"""

from __future__ import annotations

import hashlib
import itertools
import struct
from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_lrl.lifetimes.contributions import BranchKey, ContributionError, Contributions
from megatron_lrl.lifetimes.identity import Identity, IdentityMismatch, hash_tokens

IDENTITY = Identity(3, 0, "model", hash_tokens([1, 2]), 0, 2, "full", "rope", "float32", "dense", "tp1")


def test_the_same_identity_passes() -> None:
    IDENTITY.require(replace(IDENTITY))


@pytest.mark.parametrize("name", [field.name for field in fields(Identity)])
def test_a_difference_is_named(name: str) -> None:
    value = getattr(IDENTITY, name)
    other = replace(IDENTITY, **{name: value + 1 if isinstance(value, int) else "another"})
    with pytest.raises(IdentityMismatch) as caught:
        IDENTITY.require(other)
    message = str(caught.value)
    assert f"{name}: resident {value!r}, needed {getattr(other, name)!r}" in message
    unnamed = {field.name for field in fields(Identity)} - {name}
    assert not [field for field in unnamed if f"{field}: resident" in message]


def test_all_differences_are_named() -> None:
    with pytest.raises(IdentityMismatch, match=r"model_version: .*; rope: "):
        IDENTITY.require(replace(IDENTITY, model_version=4, rope="another"))


def test_tokens_are_hashed_as_ids() -> None:
    assert hash_tokens([1, -1]) == hashlib.sha256(struct.pack("<2q", 1, -1)).hexdigest()
    assert len({hash_tokens(ids) for ids in ([], [1], [1, 2], [2, 1], [12])}) == 5


KEYS = [BranchKey(group, i) for group in "ab" for i in range(3)]


@given(st.permutations(KEYS), st.lists(st.integers(0, 6), max_size=3))
def test_every_branch_counts_once_in_any_order_and_grouping(order: list[BranchKey], cuts: list[int]) -> None:
    window = Contributions(KEYS)
    edges = [0, *sorted(cuts), len(order)]
    for low, high in itertools.pairwise(edges):
        assert window.missing == [key for key in KEYS if key in order[low:]]
        window.count(order[low:high])
    window.require_complete()
    assert window.missing == []
    with pytest.raises(ContributionError, match=r"already counted"):
        window.count(order[:1])


def test_a_stranger_a_duplicate_and_a_gap_are_errors_that_count_nothing() -> None:
    with pytest.raises(ContributionError, match=r"a\[0\] is listed twice"):
        Contributions([KEYS[0], KEYS[0]])
    window = Contributions(KEYS)
    with pytest.raises(ContributionError, match=r"c\[7\] does not belong"):
        window.count([KEYS[0], BranchKey("c", 7)])
    with pytest.raises(ContributionError, match=r"a\[1\] was already counted"):
        window.count([KEYS[1], KEYS[1]])
    assert window.missing == KEYS
    window.count(KEYS[:4])
    with pytest.raises(ContributionError, match=r"2 branches .* were not replayed: b\[1\], b\[2\]"):
        window.require_complete()
    window.restart()
    assert window.missing == KEYS


def test_a_long_list_of_missing_branches_is_cut() -> None:
    window = Contributions(BranchKey("g", i) for i in range(20))
    with pytest.raises(ContributionError, match=r"20 branches .*g\[7\], \.\.\.$"):
        window.require_complete()
