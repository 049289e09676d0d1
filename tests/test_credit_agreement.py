"""Agreement of two credits: the figures by hand and a second way, and what is undefined."""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from counterpoint.credit import score
from counterpoint.credit.correlation import intervals, kendall
from counterpoint.ledger import Credit
from counterpoint.spelling import Refused

NAN = math.nan


def credit(*values, estimand="outcome", **fields) -> Credit:
    return Credit(np.array(values, dtype=float), estimand=estimand, **fields)


def test_figures_by_hand():
    """Truth 1, −1, 2, 0, 0; estimate 2, 1, 0, 0, 3.

    Non-zero truths: 3, of which 2 are decided (2 and 1), 1 with the right sign. Zero truths: 2, one
    false alarm. Pearson: means .4 and 1.2, deviations (.6, −1.4, 1.6, −.4, −.4) and
    (.8, −.2, −1.2, −1.2, 1.8): Σxy = .48 + .28 − 1.92 + .48 − .72 = −1.4, Σx² = 5.2, Σy² = 6.8.
    Spearman: ranks (4, 1, 5, 2.5, 2.5) and (4, 3, 1.5, 1.5, 5): Σ of products of deviations from 3
    = 1 + 0 − 3 + .75 − 1 = −2.25; squares 1 + 4 + 4 + .25 + .25 = 9.5 and
    1 + 0 + 2.25 + 2.25 + 4 = 9.5.
    """
    found = score(credit(2, 1, 0, 0, 3), credit(1, -1, 2, 0, 0, estimand="seqau"))
    assert found.n == 5
    assert (found.nonzero, found.zero, found.decided) == (3, 2, 2)
    assert found.sign_accuracy == 1 / 2
    assert found.coverage == pytest.approx(2 / 3)
    assert found.false_alarms == 1 / 2
    assert found.pearson == pytest.approx(-1.4 / math.sqrt(5.2 * 6.8))
    assert found.spearman == pytest.approx(-2.25 / 9.5)
    assert (found.estimand, found.truth) == ("outcome", "seqau")
    assert math.isnan(found.gradient_cosine)
    assert found.undefined == 0


def test_what_either_side_never_credited_is_left_out():
    """NaN is not 0: the pair leaves every figure."""
    found = score(credit(1, NAN, 3, 2), credit(1, 5, NAN, 2))
    assert found.n == 2
    assert found.pearson == pytest.approx(1)


@pytest.mark.parametrize("flat", [(1, 1, 1), (0.1 + 0.2, 0.3, 0.3), (0, 0, 0)])
def test_a_constant_side_has_no_correlation(flat):
    """NaN and counted, never 0, also where equal values differ by rounding."""
    for found in (score(credit(*flat), credit(1, 2, 3)), score(credit(1, 2, 3), credit(*flat))):
        assert math.isnan(found.pearson)
        assert found.undefined >= 1


def test_empty_denominators_are_undefined():
    """No zero truths: no false-alarm rate; nothing decided: no accuracy; no units: nothing."""
    found = score(credit(0, 0), credit(1, 2))
    assert found.coverage == 0
    assert math.isnan(found.sign_accuracy)
    assert math.isnan(found.false_alarms)
    assert (found.decided, found.zero) == (0, 0)
    nothing = score(credit(NAN), credit(1))
    assert nothing.n == 0
    assert all(math.isnan(x) for x in (nothing.pearson, nothing.spearman, nothing.coverage))
    assert nothing.undefined == 3


def test_gradient_cosine_uses_the_gradient_given():
    """Rows (1, 0), (1, 1): estimate 1, 0 gives (1, 0), truth 0, 1 gives (1, 1): cosine 1/√2."""
    scores = np.array([[1.0, 0.0], [1.0, 1.0]])
    found = score(credit(1, 0), credit(0, 1), gradient=lambda A: A @ scores)
    assert found.gradient_cosine == pytest.approx(1 / math.sqrt(2))
    none = score(credit(0, 0), credit(0, 1), gradient=lambda A: A @ scores)
    assert math.isnan(none.gradient_cosine)


def test_one_readable_line_names_both_estimands_and_samples():
    """The print has figures, their denominators, estimands, sample sizes, and no line break."""
    estimate = credit(1, -1, 0.5, diagnostics={"effective_sample_size": 3})
    line = str(score(estimate, credit(1, -1, 0, estimand="seqau")))
    assert line == (
        "outcome against seqau · 3 units · pearson 0.961 · spearman 1.000 · "
        "sign accuracy 1.000 (2 of 2 decided) · coverage 1.000 · false alarms 1.000 (of 1) · "
        "effective sample 3 against unsaid"
    )


def test_unlike_sides_are_refused():
    """Other rows or other units cannot be compared."""
    with pytest.raises(Refused, match="2 rows, the truth 1"):
        score(credit(1, 2), credit(1))
    with pytest.raises(Refused, match="per turn, the truth per agent"):
        score(credit(1), credit(1, unit="agent"))


# ---------------------------------------------------------------------------------------------
# Kendall


def by_pairs(x, y) -> float:
    """τ-b by its definition: every pair is looked at."""
    pairs = list(combinations(zip(x, y, strict=True), 2))
    same = sum(np.sign(a - c) * np.sign(b - d) for (a, b), (c, d) in pairs)
    apart = [sum(a[side] != b[side] for a, b in pairs) for side in (0, 1)]
    return same / math.sqrt(math.prod(apart)) if math.prod(apart) else NAN


few = st.integers(-3, 3).map(float)


@given(st.lists(st.tuples(few, few), max_size=25))
def test_kendall_is_what_looking_at_every_pair_gives(pairs):
    """With ties on either side, on both, and on all of one."""
    x, y = np.array(pairs).reshape(-1, 2).T
    assert kendall(x, y) == pytest.approx(by_pairs(x, y), nan_ok=True)


def test_kendall_does_not_look_at_every_pair():
    """200,000 values turned by k: the k that come last stand before n − k others, so that
    τ = 1 − 2·k(n − k)/(n(n − 1)/2). All pairs would be 20 billion.
    """
    n, k = 200_000, 30_000
    x = np.arange(n, dtype=float)
    assert kendall(x, np.roll(x, k)) == pytest.approx(1 - 4 * k * (n - k) / (n * (n - 1)))


# ---------------------------------------------------------------------------------------------
# Sizes, culprits, sums, gradients


def test_sizes_by_hand():
    """Estimate (2, 1, 0), truth (1, −1, 2): errors (1, 2, −2), MSE 9/3. Σxy = 1, Σx² = 5, c = 1/5;
    (.4, .2, 0) less the truth is (−.6, 1.2, −2), squares .36 + 1.44 + 4 = 5.8. E[A²] = 5/3.
    """
    found = score(credit(2, 1, 0), credit(1, -1, 2))
    assert found.mse == pytest.approx(3)
    assert found.best_scale == pytest.approx(1 / 5)
    assert found.mse_scaled == pytest.approx(5.8 / 3)
    assert found.second_moment == pytest.approx(5 / 3)


@given(st.lists(st.tuples(few, few), min_size=1, max_size=9), st.floats(-3, 3))
def test_no_factor_leaves_less_than_the_best_scale(pairs, factor):
    """Any other one leaves as much or more."""
    x, y = np.array(pairs).T
    found = score(credit(*x), credit(*y))
    assert found.mse_scaled <= np.mean((factor * x - y) ** 2) + 1e-12


def test_the_culprit_by_hand():
    """Rollout 0: truth (−1, 2, −3), the third is it, and the estimate (0, 1, −1) says so. 1: truth
    (−1, −1), both are; the estimate (0, 0) ties and cannot miss. 2: truth (−2, 0), the estimate
    ties: half. 3: nobody did harm, so it does not count. 4: missed. Hence (1 + 1 + ½ + 0)/4.
    Sums of the estimate less the truth: 0 − −2, 0 − −2, 2 − −2, 0 − 1, −1 − −1.
    """
    found = score(
        credit(0, 1, -1, 0, 0, 1, 1, -5, 5, -1, 0),
        credit(-1, 2, -3, -1, -1, -2, 0, 0, 1, 0, -1),
        rollout=np.array([0, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4]),
    )
    assert found.culprits == 4
    assert found.culprit == pytest.approx(2.5 / 4)
    assert found.conservation_error == pytest.approx(4)


def test_one_number_for_all_guesses_the_culprit():
    """The outcome as everybody's credit names one of K acts blindly: 1/K, here 1/3."""
    rng = np.random.default_rng(0)
    rollout = np.repeat(np.arange(50), 3)
    found = score(credit(*rng.normal(size=50)[rollout]), credit(*-rng.random(150)), rollout=rollout)
    assert found.culprit == pytest.approx(1 / 3)
    assert math.isnan(score(credit(1, 2), credit(1, 2)).culprit)


def test_what_was_not_credited_is_no_culprit():
    """A row that the estimate leaves out is not looked at; an empty rollout does not count."""
    found = score(credit(NAN, 1, NAN, 0), credit(-1, 1, -1, -1), rollout=np.array([0, 0, 1, 2]))
    assert (found.culprits, found.culprit, found.conservation_error) == (1, 1.0, 1.0)


def test_gradients_by_hand():
    """With g = (1, 1) and g* = (2, 0): |g − g*| = √2, over 2; g·g* = 2, over 4."""
    push = np.array([[1.0, 1.0], [2.0, 0.0]])
    found = score(credit(1, 0), credit(0, 1), gradient=lambda A: A @ push)
    assert found.gradient_error == pytest.approx(math.sqrt(2) / 2)
    assert found.gradient_scale == pytest.approx(1 / 2)
    assert found.gradient_cosine == pytest.approx(math.sqrt(1 / 2))
    none = score(credit(1, 0), credit(0, 0), gradient=lambda A: A @ push)
    assert math.isnan(none.gradient_error)
    assert math.isnan(none.gradient_scale)


# ---------------------------------------------------------------------------------------------
# Intervals


def test_two_groups_can_only_be_drawn_in_three_ways():
    """A and B, A twice, B twice: the ends of every interval are among these three."""
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(2, 12))
    group = np.arange(12) % 2
    rows = [
        np.concatenate([np.flatnonzero(group == g) for g in two])
        for two in ((0, 1), (0, 0), (1, 1))
    ]
    whole = [score(credit(*x[r]), credit(*y[r])) for r in rows]
    found = score(credit(*x), credit(*y), group=group, bootstrap=400, seed=3).intervals
    for name, ends in found.items():
        held = [getattr(each, name) for each in whole]
        assert ends == pytest.approx((min(held), max(held)))


def test_copies_within_a_group_say_nothing_new():
    """Every row ten times over in its own group: the same intervals, as groups are drawn whole."""
    rng = np.random.default_rng(2)
    x, y = rng.normal(size=(2, 40))
    group = np.arange(40) // 4
    once = intervals(x, y, group, 100, 5)
    often = intervals(np.tile(x, 10), np.tile(y, 10), np.tile(group, 10), 100, 5)
    for name in ("pearson", "spearman"):
        assert often[name] == pytest.approx(once[name])
    assert intervals(x, y, group, 100, 5) == once
    assert intervals(x, y, group, 100, 6) != once


def test_intervals_need_two_groups_and_say_so():
    """One group: NaN; none asked for: empty; no groups to draw: refused."""
    one = intervals(np.arange(4.0), np.arange(4.0) ** 2, np.zeros(4, dtype=int), 10, 0)
    assert np.isnan(list(one.values())).all()
    assert score(credit(1, 2), credit(1, 2)).intervals == {}
    with pytest.raises(Refused, match="bootstrap=5 draws groups again"):
        score(credit(1, 2), credit(1, 2), bootstrap=5)
    with pytest.raises(Refused, match="bootstrap=-1"):
        score(credit(1, 2), credit(1, 2), rollout=np.array([0, 1]), bootstrap=-1)


@pytest.mark.slow
def test_the_interval_covers_what_it_should():
    """Groups of four that share a term, correlation .5 by construction: of 60 intervals 95 %, less
    four Monte-Carlo errors (.12), cover it; intervals over rows, as if they were apart, do not.
    """
    rng = np.random.default_rng(4)
    group, hits = np.repeat(np.arange(40), 4), {"group": 0, "row": 0}
    for number in range(60):
        shared = rng.normal(size=(2, 40))[:, group] * 3
        own = rng.normal(size=(2, 160))
        x, noise = shared + own
        y = 0.5 * x + math.sqrt(0.75) * noise
        for name, codes in (("group", group), ("row", np.arange(160))):
            low, high = intervals(x, y, codes, 40, number)["pearson"]
            hits[name] += low <= 0.5 <= high
    assert hits["group"] / 60 > 0.95 - 0.12 > hits["row"] / 60
