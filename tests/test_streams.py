"""Random draws: named, uniform, and independent of everything but their name."""

import math
from hashlib import blake2b

import pytest
from hypothesis import given
from hypothesis import strategies as st

from counterpoint.spelling import Refused
from counterpoint.streams import Draws, branch_key, key_at, keys_of

NAMES = st.tuples(
    st.text(max_size=3),
    st.sampled_from(["policy", "tool", "env", "schedule"]),
    st.text(alphabet="ab1:", max_size=3),
    st.integers(0, 30),
)


def test_a_number_is_the_digest_of_its_name():
    """It is BLAKE2b(key ‖ domain ‖ owner ‖ k ‖ j), its first 53 bits over 2⁵³."""
    draws = Draws("7", "tool", "a", 3)
    for j in range(3):
        digest = blake2b(b"1:7tool1:a3:%d" % j, digest_size=8).digest()
        assert draws.random() == (int.from_bytes(digest, "big") >> 11) / 2**53


@given(NAMES, NAMES)
def test_two_names_never_share_a_stream(one, other):
    """Also where their letters run together (owner "a1", k 2 and owner "a", k 12)."""
    assert (one == other) == (Draws(*one).random() == Draws(*other).random())


def test_draws_are_uniform():
    """2,000 draws of as many owners: mean within 4 standard errors of 1/2, variance of 1/12; an
    integer of 7 has each value about equally often, by chi-square at 6 degrees (p ≈ 10⁻⁵).
    """
    us = [Draws("k", "policy", str(n), 0).random() for n in range(2000)]
    assert abs(sum(us) / 2000 - 0.5) < 4 * math.sqrt(1 / 12 / 2000)
    assert abs(sum((u - 0.5) ** 2 for u in us) / 2000 - 1 / 12) < 4 * math.sqrt(1 / 180 / 2000)
    counts = [0] * 7
    draws = Draws("k", "policy", "a", 0)
    for _ in range(7000):
        counts[draws.integer(7)] += 1
    assert sum((c - 1000) ** 2 / 1000 for c in counts) < 33


@given(st.lists(st.integers(0, 4), min_size=1, max_size=6).filter(any), st.integers(0, 500))
def test_what_has_no_chance_is_never_drawn(weights, k):
    """Whatever rounding does at the ends."""
    total = sum(weights)
    p = [w / total for w in weights]
    assert weights[Draws("k", "env", "a", k).choice(p)] > 0


@given(st.floats(-1e-9, 1e-9), st.integers(0, 3))
def test_the_last_with_a_chance_is_drawn_at_the_top(off, behind):
    """The largest number there is, on a sum as far from 1 as may be: not an entry of probability 0
    behind it.
    """

    class Topmost(Draws):
        def random(self):
            return 1 - 2**-53

    p = [0.5, 0.5 + 0.999 * off, *[0.0] * behind]
    assert Topmost("k", "env", "a", 0).choice(p) == 1


def test_choice_follows_its_probabilities():
    """20,000 draws of (.2, 0, .5, .3): each count within 4 standard errors."""
    draws, p = Draws("k", "env", "a", 0), [0.2, 0.0, 0.5, 0.3]
    counts = [0] * 4
    for _ in range(20_000):
        counts[draws.choice(p)] += 1
    for c, q in zip(counts, p, strict=True):
        assert abs(c - 20_000 * q) <= 4 * math.sqrt(20_000 * q * (1 - q))


@pytest.mark.parametrize("p", [[], [0.5], [1.5, -0.5], [math.nan, 1.0], [math.inf], [1e-8, 1.0]])
def test_what_is_no_distribution_is_refused(p):
    """Empty, short, negative, NaN, infinite, a sum off by more than 10⁻⁹."""
    with pytest.raises(Refused, match="sum to 1"):
        Draws("k", "env", "a", 0).choice(p)


@pytest.mark.parametrize("n", [0, -3])
def test_an_integer_needs_a_range(n):
    """There is none below 1."""
    with pytest.raises(Refused, match="n ≥ 1"):
        Draws("k", "env", "a", 0).integer(n)


def test_keys_are_in_force_from_their_event_on():
    """A run has its seed's key throughout; a branch has the parent's until it leaves."""
    keys = keys_of(5)
    branch = branch_key(keys, 10, seed=0, branch=1)
    assert [key_at(keys, seq) for seq in (0, 9, 10)] == ["5", "5", "5"]
    assert [key_at(branch, seq) for seq in (0, 9)] == ["5", "5"]
    assert key_at(branch, 10) == key_at(branch, 99) != "5"


def test_branches_differ_by_seed_number_and_place_and_grow_from_their_own():
    """A branch of a branch keeps what its parent had until it left."""
    keys = keys_of(5)
    one = branch_key(keys, 10, 0, 1)
    others = [branch_key(keys, 10, 0, 2), branch_key(keys, 10, 1, 1), branch_key(keys, 11, 0, 1)]
    assert len({key_at(k, 99) for k in (one, *others)}) == 4
    assert one == branch_key(keys, 10, 0, 1)
    grown = branch_key(one, 20, 0, 0)
    assert [key_at(grown, s) for s in (9, 10, 19)] == [key_at(one, s) for s in (9, 10, 19)]
    assert key_at(grown, 20) != key_at(one, 20)
    earlier = branch_key(one, 10, 0, 7)
    assert key_at(earlier, 9) == "5"
    assert len(earlier) == 2
