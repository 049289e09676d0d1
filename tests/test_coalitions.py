"""Shapley values against textbook games, and against means over all orders in fractions."""

from __future__ import annotations

from fractions import Fraction
from itertools import permutations as all_orders
from math import factorial

import numpy as np
import pytest

from counterpoint.coalitions import (
    every_coalition,
    kernel_shap,
    linear_extensions,
    marginals,
    ordered_shapley,
    paired_coalitions,
    permutations,
    shapley_values,
)
from counterpoint.spelling import Refused


def players(coalition: int) -> list[int]:
    return [i for i in range(coalition.bit_length()) if coalition >> i & 1]


def table(n, worth) -> np.ndarray:
    """Values of all coalitions from a function of their players."""
    return np.array([worth(players(s)) for s in range(2**n)], dtype=float)


def mean_of_orders(v, n, allowed=lambda order: True) -> list[Fraction]:
    """The definition: the mean of what each adds, over all orders, in fractions."""
    orders = [order for order in all_orders(range(n)) if allowed(order)]
    earned = [Fraction(0)] * n
    for order in orders:
        there = 0
        for i in order:
            earned[i] += Fraction(v[there | 1 << i]) - Fraction(v[there])
            there |= 1 << i
    return [x / len(orders) for x in earned]


def random_game(n, seed=0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=2**n)


def pairwise_game(n, seed=0) -> np.ndarray:
    """Own worth and interactions of two, nothing of higher order, v(∅) = 0."""
    rng = np.random.default_rng(seed)
    own, both = rng.normal(size=n), np.triu(rng.normal(size=(n, n)), 1)
    return table(n, lambda s: own[s].sum() + both[np.ix_(s, s)].sum())


# ---------------------------------------------------------------------------------------------
# Textbook games

COSTS = (1, 3, 6, 10)
TEXTBOOK = {
    # One left glove, two right ones; a pair is worth 1.
    "glove": (3, lambda s: 0 in s and len(s) > 1, ["2/3", "1/6", "1/6"]),
    # A runway for the largest aircraft serves all: 1/4, + 2/3, + 3/2, + 4.
    "airport": (
        4,
        lambda s: max((COSTS[i] for i in s), default=0),
        ["1/4", "11/12", "29/12", "77/12"],
    ),
    # [3; 2, 1, 1]: the first is pivotal unless it comes first, in 4 of 6 orders.
    "weighted majority": (3, lambda s: sum((2, 1, 1)[i] for i in s) >= 3, ["2/3", "1/6", "1/6"]),
    "AND": (4, lambda s: len(s) == 4, ["1/4"] * 4),
    "OR": (4, lambda s: len(s) > 0, ["1/4"] * 4),
    "dummy": (3, lambda s: 5 * (0 in s and 2 in s), ["5/2", "0", "5/2"]),
    "one player": (1, lambda s: 7 * len(s), ["7"]),
    # What everybody has without joining is nobody's.
    "a constant": (2, lambda s: 4, ["0", "0"]),
}


@pytest.mark.parametrize("case", TEXTBOOK)
def test_textbook_values(case):
    """Exactly, over all linear extensions of no order, and by regression over all coalitions."""
    n, worth, want = TEXTBOOK[case]
    v, want = table(n, worth), [float(Fraction(x)) for x in want]
    np.testing.assert_allclose(shapley_values(v, n), want, atol=1e-14)
    np.testing.assert_allclose(ordered_shapley(v, np.zeros((n, n), bool)), want, atol=1e-14)
    np.testing.assert_allclose(kernel_shap(v, n, every_coalition(n)), want, atol=1e-12)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 6])
def test_the_mean_of_what_each_adds_over_all_orders(n):
    """Both exact ways, and regression over all coalitions, give the definition."""
    v = random_game(n, seed=n)
    want = [float(x) for x in mean_of_orders(v, n)]
    np.testing.assert_allclose(shapley_values(v, n), want, atol=1e-14)
    np.testing.assert_allclose(ordered_shapley(v, np.zeros((n, n), bool)), want, atol=1e-14)
    np.testing.assert_allclose(kernel_shap(v, n, every_coalition(n)), want, atol=1e-12)


@pytest.mark.parametrize("n", [8, 9, 12])
def test_larger_games_by_the_weights_of_the_coalitions(n):
    """φ_i = Σ_{S∌i} |S|!(n−|S|−1)!/n!·(v(S ∪ i) − v(S)), summed in a loop; 8 players are the most
    that are taken in one product, 9 the fewest that are folded.
    """
    v = random_game(n)
    want = np.zeros(n)
    for s in range(2**n):
        for i in set(range(n)) - set(players(s)):
            size = s.bit_count()
            weight = factorial(size) * factorial(n - size - 1) / factorial(n)
            want[i] += weight * (v[s | 1 << i] - v[s])
    np.testing.assert_allclose(shapley_values(v, n), want, atol=1e-13)


# ---------------------------------------------------------------------------------------------
# Axioms


@pytest.mark.parametrize("n", [3, 8, 9, 14])
def test_axioms(n):
    """Efficiency, linearity, symmetry and the null player; the table that came in is unchanged."""
    v, w = random_game(n, 1), random_game(n, 2)
    kept = v.copy()
    phi, psi = shapley_values(v, n), shapley_values(w, n)
    assert phi.sum() == pytest.approx(v[-1] - v[0], abs=1e-12)
    np.testing.assert_allclose(shapley_values(2 * v - 3 * w, n), 2 * phi - 3 * psi, atol=1e-12)
    # Players 0 and 1 change places: bits 0 and 1 of every coalition do.
    s = np.arange(2**n)
    swapped = s & ~3 | (s & 1) << 1 | (s & 2) >> 1
    want = phi[[1, 0, *range(2, n)]]
    np.testing.assert_allclose(shapley_values(v[swapped], n), want, atol=1e-12)
    # Whoever changes nothing gets nothing.
    assert shapley_values(v[s | 1 << n - 1], n)[n - 1] == pytest.approx(0, abs=1e-12)
    np.testing.assert_array_equal(v, kept)


@pytest.mark.parametrize("n", [3, 9])
def test_games_along_leading_axes(n):
    """Many games at once are the same numbers as one by one; none give none."""
    v = np.random.default_rng(0).normal(size=(2, 3, 2**n))
    got = shapley_values(v, n)
    one_by_one = [[shapley_values(game, n) for game in row] for row in v]
    np.testing.assert_allclose(got, one_by_one, atol=1e-13)
    assert shapley_values(np.empty((0, 2**n)), n).shape == (0, n)


def test_a_value_that_is_missing_is_missing_for_everybody():
    """NaN anywhere makes every value of that game NaN and leaves the next game alone."""
    v = np.zeros((2, 8))
    v[0, 5] = np.nan
    assert np.isnan(shapley_values(v, 3)).tolist() == [[True] * 3, [False] * 3]


def test_twenty_players():
    """v(S) = |S|² is worth n to each of n by symmetry, here 20 over a million coalitions."""
    size = np.array([s.bit_count() for s in range(2**20)], dtype=float)
    np.testing.assert_allclose(shapley_values(size**2, 20), np.full(20, 20.0), rtol=1e-10)


# ---------------------------------------------------------------------------------------------
# Orders


def test_every_order_sums_to_the_whole_and_all_of_them_are_the_definition():
    """Each row of the marginals has Σ = v(N) − v(∅); the mean over all 24 orders is exact."""
    v = random_game(4)
    got = marginals(v, np.array(list(all_orders(range(4)))))
    np.testing.assert_allclose(got.sum(axis=1), v[-1] - v[0], atol=1e-12)
    np.testing.assert_allclose(got.mean(axis=0), shapley_values(v, 4), atol=1e-14)


def test_marginals_belong_to_the_player_and_not_to_the_place():
    """Order (2, 0, 1) of v(S) = Σ of 10^i: player 2 joins first and adds 100."""
    v = table(3, lambda s: sum(10**i for i in s))
    np.testing.assert_allclose(marginals(v, np.array([[2, 0, 1]])), [[1, 10, 100]])


@pytest.mark.parametrize("antithetic", [False, True])
def test_sampled_orders_are_unbiased(antithetic):
    """The mean of 4,000 orders is within 4 standard errors, taken over pairs, for 20 games."""
    n, rng = 5, np.random.default_rng(1)
    for seed in range(20):
        v = random_game(n, seed)
        added = marginals(v, permutations(n, 4000, rng, antithetic))
        pairs = added.reshape(2000, 2, n).mean(axis=1)
        error = pairs.std(axis=0, ddof=1) / np.sqrt(2000)
        assert np.all(np.abs(pairs.mean(axis=0) - shapley_values(v, n)) < 4 * error)


def test_one_antithetic_pair_is_exact_for_pairwise_games():
    """Player j stands before i in the order or in its reverse, so each pays half of it."""
    for n in (2, 5, 8):
        v = pairwise_game(n, seed=n)
        orders = permutations(n, 2, np.random.default_rng(n), antithetic=True)
        np.testing.assert_array_equal(orders[0], orders[1][::-1])
        got = marginals(v, orders)
        np.testing.assert_allclose(got.mean(axis=0), shapley_values(v, n), atol=1e-12)
        assert np.abs(got[0] - got.mean(axis=0)).max() > 0.1  # one order alone is not


def test_orders_are_uniform():
    """Of 12,000 draws each of 6 orders has 2,000 ± 4 standard deviations."""
    for antithetic in (False, True):
        drawn = permutations(3, 12_000, np.random.default_rng(0), antithetic)
        count = np.unique(drawn, axis=0, return_counts=True)[1]
        assert len(count) == 6
        assert np.abs(count - 2000).max() < 4 * np.sqrt(2 * 12_000 * 5 / 36)


# ---------------------------------------------------------------------------------------------
# Orders under precedence

PRECEDENCE = {
    "chain": (4, [(0, 1), (1, 2), (2, 3)]),
    "star": (4, [(0, 1), (0, 2), (0, 3)]),
    "two lines": (5, [(0, 1), (2, 3), (3, 4)]),
    "against the numbers": (4, [(3, 0), (2, 1)]),
    "given twice": (4, [(0, 1), (1, 2), (0, 2)]),
    "none": (4, []),
}


def matrix(n, pairs) -> np.ndarray:
    before = np.zeros((n, n), dtype=bool)
    for i, j in pairs:
        before[i, j] = True
    return before


@pytest.mark.parametrize("case", PRECEDENCE)
def test_precedence_is_the_mean_over_the_orders_that_respect_it(case):
    """The weighted sum over coalitions equals the mean over all linear extensions, in fractions."""
    n, pairs = PRECEDENCE[case]
    v = random_game(n, seed=3)
    want = mean_of_orders(
        v, n, lambda order: all(order.index(i) < order.index(j) for i, j in pairs)
    )
    got = ordered_shapley(v, matrix(n, pairs))
    np.testing.assert_allclose(got, [float(x) for x in want], atol=1e-13)


def test_linear_extensions_are_uniform():
    """Two lines 0→1 and 2→3→4 mix in 10 ways; 20,000 draws give each 2,000 ± 4 deviations."""
    n, pairs = PRECEDENCE["two lines"]
    drawn = linear_extensions(matrix(n, pairs), 20_000, np.random.default_rng(0))
    orders, count = np.unique(drawn, axis=0, return_counts=True)
    assert len(orders) == 10
    assert np.abs(count - 2000).max() < 4 * np.sqrt(20_000 * 0.1 * 0.9)
    for order in orders.tolist():
        assert all(order.index(i) < order.index(j) for i, j in pairs)


def test_precedence_asks_only_for_what_can_occur():
    """Along a chain of 10 a function is asked once, for the 11 coalitions of its one order."""
    asked = []

    def worth(coalitions):
        asked.append(coalitions)
        return coalitions.astype(float)

    chain = matrix(10, [(i, i + 1) for i in range(9)])
    np.testing.assert_allclose(ordered_shapley(worth, chain), 2.0 ** np.arange(10))
    assert [s.tolist() for s in asked] == [[2**i - 1 for i in range(11)]]


# ---------------------------------------------------------------------------------------------
# Functions in place of tables


def test_no_coalition_is_asked_for_twice():
    """A function sees the distinct coalitions of an estimate in one call, and gives its table's
    numbers; orders of 40 players need no table.
    """
    calls = []

    def squared(coalitions):
        calls.append(len(coalitions))
        assert len(np.unique(coalitions)) == len(coalitions)
        return np.array([float(int(s).bit_count() ** 2) for s in coalitions])

    orders = permutations(40, 200, np.random.default_rng(0), antithetic=True)
    # |S|² has interactions of two only, so 40 each is exact already.
    np.testing.assert_allclose(marginals(squared, orders).mean(axis=0), 40, atol=1e-9)
    drawn = paired_coalitions(40, 200, np.random.default_rng(0))
    np.testing.assert_allclose(kernel_shap(squared, 40, drawn), 40, atol=1e-7)
    assert len(calls) == 2


# ---------------------------------------------------------------------------------------------
# Regression


def test_paired_coalitions_converge():
    """On a game of 8 the error of 20,000 pairs is small; each coalition has its complement."""
    v, rng = random_game(8), np.random.default_rng(0)
    drawn = paired_coalitions(8, 20_000, rng)
    np.testing.assert_array_equal(drawn[0][:20_000] ^ drawn[0][20_000:], 255)
    np.testing.assert_allclose(kernel_shap(v, 8, drawn), shapley_values(v, 8), atol=0.03)


def test_complements_make_pairwise_games_exact():
    """Even interactions cancel between S and N∖S, whatever is drawn, if it spans all players."""
    v = pairwise_game(7)
    drawn = paired_coalitions(7, 60, np.random.default_rng(0))
    np.testing.assert_allclose(kernel_shap(v, 7, drawn), shapley_values(v, 7), atol=1e-10)
    alone = (drawn[0][:60], drawn[1][:60])
    assert np.abs(kernel_shap(v, 7, alone) - shapley_values(v, 7)).max() > 0.1


def test_coalitions_are_drawn_by_the_kernel():
    """Sizes s of 5 players come as often as 1/(s(5 − s)): 3/10, 1/5, 1/5, 3/10."""
    drawn, _ = paired_coalitions(5, 20_000, np.random.default_rng(0))
    size = np.bincount([int(s).bit_count() for s in drawn[:20_000]], minlength=6)
    np.testing.assert_allclose(size / 20_000, [0, 0.3, 0.2, 0.2, 0.3, 0], atol=0.014)


# ---------------------------------------------------------------------------------------------
# Refusals

RNG = np.random.default_rng(0)
REFUSED = {
    "no player": (lambda: shapley_values(np.zeros(1), 0), "0 players"),
    "short table": (lambda: shapley_values(np.zeros(7), 3), "8 coalitions; the table has shape"),
    "a number": (lambda: shapley_values(np.float64(3), 1), "shape ()"),
    "table of another size": (lambda: marginals(np.zeros(4), np.array([[0, 1, 2]])), "has (4,)"),
    "no order": (lambda: marginals(np.zeros(8), np.array([[0, 1, 1]])), "each of the 3 players"),
    "odd pairs": (lambda: permutations(3, 5, RNG, antithetic=True), "5 is odd"),
    "no samples": (lambda: permutations(3, 0, RNG), "0 orders of 3 players"),
    "cycle": (lambda: ordered_shapley(np.zeros(4), matrix(2, [(0, 1), (1, 0)])), "cycle"),
    "no square": (lambda: ordered_shapley(np.zeros(4), np.zeros((2, 3), bool)), "shape (2, 3)"),
    "no extensions": (lambda: linear_extensions(matrix(2, []), 0, RNG), "0 orders"),
    "odd function": (
        lambda: marginals(lambda s: np.zeros(1), np.array([[0, 1]])),
        "shape (1,) for 3 coalitions",
    ),
    "too few coalitions": (
        lambda: kernel_shap(np.zeros(32), 5, paired_coalitions(5, 1, RNG)),
        "2 coalitions do not determine the values of 5 players",
    ),
    "no pairs": (lambda: paired_coalitions(1, 3, RNG), "3 pairs of coalitions of 1 players"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_with_a_sentence(case):
    """What does not fit is refused in words that say what and why."""
    action, sentence = REFUSED[case]
    with pytest.raises(Refused) as refusal:
        action()
    assert sentence in str(refusal.value)
