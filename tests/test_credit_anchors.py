"""Similar anchors: the clusters of the plain loop, in either order."""

from __future__ import annotations

from difflib import SequenceMatcher

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

import reference
from counterpoint.credit import gigpo
from counterpoint.credit.anchors import clusters
from counterpoint.spelling import Refused
from counterpoint.steps import Steps

THREE = ["x" * 18 + "yy", "x" * 20, "x" * 16 + "yyyy"]
"""Ratios .9, .9 and, between the last two, .8."""


def sizes(anchors, **options):
    steps = Steps.from_columns(
        rollout=range(len(anchors)), reward=[1] + [0] * (len(anchors) - 1), anchor=anchors
    )
    return gigpo(steps, **options).parts["anchor_size"].tolist()


@settings(deadline=None, max_examples=150)
@given(
    st.lists(st.text("abc ", max_size=12), unique=True, max_size=12),
    st.sampled_from([0.3, 0.6, 0.8, 0.9, 1.0]),
)
def test_bounds_do_not_change_the_clusters(texts, threshold):
    """Asking the cheap bounds first gives the clusters of the loop that asks only the ratio."""
    assert clusters(texts, threshold) == reference.clusters(texts, threshold)


def test_order_of_the_anchors_is_an_option():
    """As given the first of the three collects both others; sorted, it does not stand first."""
    assert sizes(THREE, similarity=0.9, order="as_given") == [3, 3, 3]
    # by code point x < y, so the order is 20 x, 18 x, 16 x: the last is .8 from the first
    assert sizes(THREE, similarity=0.9) == [2, 2, 1]
    assert sizes(THREE) == [1, 1, 1]
    for order in (THREE[::-1], THREE[1:] + THREE[:1]):
        steps = dict(zip(order, sizes(order, similarity=0.9), strict=True))
        assert [steps[text] for text in THREE] == [2, 2, 1]


def test_autojunk_is_on_as_in_the_public_code_and_can_be_turned_off():
    """Long texts of few letters look unlike with difflib's shortcut, and alike without."""
    one = "red door, blue door; " * 12
    other = "A " + one
    ratios = [SequenceMatcher(None, other, one, junk).ratio() for junk in (True, False)]
    assert ratios[0] < 0.2 < 0.99 < ratios[1]
    assert sizes([one, other], similarity=0.8) == [1, 1]
    assert sizes([one, other], similarity=0.8, autojunk=False) == [2, 2]


def test_clusters_stay_within_group_and_agent():
    """Similar anchors of another task or another agent are no partners."""
    steps = Steps.from_columns(
        group=["a", "a", "b", "a"],
        rollout=range(4),
        agent=["p", "p", "p", "q"],
        reward=[1, 0, 0, 0],
        anchor=["the red door", "the red doors", "the red door", "the red door"],
    )
    credit = gigpo(steps, similarity=0.9)
    assert credit.parts["anchor_size"].tolist() == [2, 2, 1, 1]
    assert gigpo(steps, similarity=0.9, key="anchor").parts["anchor_size"].tolist() == [3, 3, 1, 3]


def test_a_missing_anchor_is_like_no_other():
    """Rows without an anchor have no partner, and are counted."""
    steps = Steps.from_columns(rollout=range(3), reward=[1, 0, 0], anchor=[None, None, "s"])
    credit = gigpo(steps, similarity=0.5)
    assert credit.parts["step"].tolist() == [0, 0, 0]
    assert credit.parts["anchor_size"].tolist() == [0, 0, 1]
    assert credit.diagnostics["without_anchor"] == 2


def test_digests_and_numbers_have_no_similarity():
    """Hashes and numbers are refused where texts are compared; equality still works on them."""
    digests = ["0123456789abcdef" * 2, "fedcba9876543210" * 2]
    with pytest.raises(Refused, match="these anchors are digests"):
        sizes(digests, similarity=0.9)
    with pytest.raises(Refused, match="the anchor 7 is none"):
        sizes([7, 8], similarity=0.9)
    assert sizes(digests) == [1, 1]
