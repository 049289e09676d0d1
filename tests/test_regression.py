"""Regression within groups, against slow and independent ways to the same numbers."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest

from counterpoint.credit.regression import (
    LADDER,
    UNVALIDATED,
    Sums,
    cross_fitted,
    fold_of,
    inference,
    ridge,
    sums,
    validated,
    varies,
    within,
)
from counterpoint.credit.tails import beta_share, f_tail, t_critical


def problem(groups=12, size=6, players=3, seed=0, heavy=False):
    """Rows in mixed order: raw regressors, raw outcome, group codes."""
    rng = np.random.default_rng(seed)
    group = rng.permutation(np.repeat(np.arange(groups), size))
    x = rng.normal(size=(len(group), players)) + group[:, None]
    noise = rng.normal(size=len(group)) * (1 + 2 * np.abs(x[:, 0] - group) if heavy else 1)
    y = x @ np.arange(1, players + 1) + 5.0 * group + noise
    return x, y, group


def dummies(x, group):
    """The regressors beside one dummy per group: what the within transform stands for."""
    return np.column_stack([x, group[:, None] == np.arange(group.max() + 1)])


def one(X, y) -> Sums:
    return sums(X, y, X, np.zeros(len(y), dtype=np.int64), 1).over(np.ones(1))


# ---------------------------------------------------------------------------------------------
# Coefficients


def test_within_equals_a_dummy_for_every_group():
    """Frisch and Waugh: λ = 0 on x̃ gives the coefficients of least squares with group dummies."""
    x, y, group = problem()
    slow = np.linalg.lstsq(dummies(x, group), y, rcond=None)[0][:3]
    got = ridge(one(within(group, x, 12), within(group, y, 12)), 0.0)
    np.testing.assert_allclose(got, slow, atol=1e-10)


@pytest.mark.parametrize("largest", [1, 9, 6000])
def test_groups_that_lie_one_after_the_other_are_centred_like_others(largest):
    """Sorted rows are centred block by block: the same as the mean of each group taken off it,
    for groups of one, small ones, and some larger than a block.
    """
    rng = np.random.default_rng(largest)
    group = np.repeat(np.arange(40), rng.integers(1, largest + 1, size=40))
    x = rng.normal(size=(len(group), 3)) + group[:, None]
    want = np.concatenate([x[group == g] - x[group == g].mean(axis=0) for g in range(40)])
    np.testing.assert_allclose(within(group, x, 40), want, atol=1e-12)


def test_ridge_by_hand():
    """x̃ = ±1, ỹ = ±3 in one group: Σx̃² = 2, Σx̃ỹ = 6, D = 1, so β = 6/(2 + 2λ), 2 for λ = ½."""
    X, y = np.array([[1.0], [-1.0]]), np.array([3.0, -3.0])
    assert ridge(one(X, y), 0.0).tolist() == [3.0]
    assert ridge(one(X, y), 0.5).tolist() == pytest.approx([2.0])


@pytest.mark.parametrize("penalty", [0.0, 1e-3, 0.7])
def test_the_penalty_knows_no_units(penalty):
    """Q in thousandths makes β a thousand times as large and no share any different."""
    x, y, group = problem()
    X, ty = within(group, x, 12), within(group, y, 12)
    unit = np.array([1e-3, 1.0, 1e4])
    plain, other = ridge(one(X, ty), penalty), ridge(one(X * unit, ty), penalty)
    np.testing.assert_allclose(other * unit, plain, rtol=1e-9)


def test_ridge_is_the_stated_formula():
    """(Σ q̃q̃ᵀ + λN·D)⁻¹ Σ q̃R̃ with D = diag(mean q̃²), written out with a solver."""
    x, y, group = problem()
    X, ty = within(group, x, 12), within(group, y, 12)
    N, D = len(ty), np.diag(np.mean(X**2, axis=0))
    want = np.linalg.solve(X.T @ X + 0.3 * N * D, X.T @ ty)
    np.testing.assert_allclose(ridge(one(X, ty), 0.3), want, atol=1e-12)


def test_what_does_not_vary_gets_nothing_and_is_named():
    """A q that is .1 everywhere, and one that only differs between groups, have β exactly 0."""
    x, y, group = problem()
    raw = np.column_stack([x, np.full(len(y), 0.1), 7.3 * group])
    X = within(group, raw, 12)
    held = sums(X, within(group, y, 12), raw, np.zeros(len(y), dtype=np.int64), 1).over(np.ones(1))
    assert varies(held).tolist() == [True, True, True, False, False]
    assert ridge(held, 0.0)[3:].tolist() == [0.0, 0.0]


def test_twins_share_what_one_of_them_would_have():
    """A proxy given twice gets half of its coefficient on either copy, with λ 0 and with λ → 0."""
    x, y, group = problem(players=1)
    X, ty = within(group, x, 12), within(group, y, 12)
    alone = ridge(one(X, ty), 0.0)[0]
    for penalty in (0.0, 1e-9):
        got = ridge(one(np.column_stack([X, X]), ty), penalty)
        np.testing.assert_allclose(got, [alone / 2, alone / 2], rtol=1e-6)


# ---------------------------------------------------------------------------------------------
# Folds


def test_a_fold_is_fitted_on_the_others_only():
    """β of a fold is that of a plain fit on the rows of the other folds."""
    x, y, group = problem()
    X, ty, bins = within(group, x, 12), within(group, y, 12), group % 4
    for own, fold in enumerate(cross_fitted(sums(X, ty, x, bins, 4), 2, 0.1)):
        rows = bins % 2 != own
        np.testing.assert_allclose(fold.beta, ridge(one(X[rows], ty[rows]), 0.1), atol=1e-10)


def test_an_outcome_moves_no_beta_of_its_own_fold():
    """Changing the outcomes of fold 0 changes β and λ of fold 1 and neither of fold 0."""
    x, y, group = problem()
    X, ty, bins = within(group, x, 12), within(group, y, 12), group % 12
    before = cross_fitted(sums(X, ty, x, bins, 12), 2, None)
    moved = np.where(bins % 2 == 0, -10 * ty, ty)
    after = cross_fitted(sums(X, moved, x, bins, 12), 2, None)
    np.testing.assert_array_equal(before[0].beta, after[0].beta)
    assert before[0].penalty == after[0].penalty
    assert np.abs(before[1].beta - after[1].beta).max() > 0.5


def test_lambda_has_the_least_error_on_what_is_left_out():
    """Over five bins, each left out in turn, by fitting on rows; noise wants a larger λ."""
    rng = np.random.default_rng(1)
    for seed, noise in [(2, 0.1), (3, 30.0)]:
        x, y, group = problem(groups=10, seed=seed)
        X = within(group, x, 10)
        ty = within(group, y + noise * rng.normal(size=len(y)), 10)
        bins = group % 5
        error = []
        for penalty in LADDER:
            parts = [(X[bins == k], ty[bins == k], X[bins != k], ty[bins != k]) for k in range(5)]
            error.append(
                sum(
                    np.sum((yk - xk @ ridge(one(xo, yo), penalty)) ** 2) for xk, yk, xo, yo in parts
                )
            )
        got = validated(sums(X, ty, x, bins, 5), np.ones(5, dtype=bool))
        assert got == LADDER[int(np.argmin(error))]


def test_with_one_bin_there_is_nothing_to_validate_on():
    x, y, group = problem()
    held = sums(within(group, x, 12), within(group, y, 12), x, np.zeros(len(y), dtype=np.int64), 1)
    assert validated(held, np.ones(1, dtype=bool)) == UNVALIDATED


def test_folds_know_tasks_and_no_rows():
    """Rows in another order keep their folds; n tasks fill every fold as evenly as can be."""
    tasks = np.array([3, 0, 0, 1, 4, 2, 2, 5])
    names = ("a", "b", "c", "d", "e", "f")
    folds = fold_of(tasks, names, 7, 3)
    order = np.array([5, 2, 7, 1, 0, 4, 6, 3])
    np.testing.assert_array_equal(fold_of(tasks[order], names, 7, 3), folds[order])
    assert np.bincount(folds[np.unique(tasks, return_index=True)[1]]).tolist() == [2, 2, 2]
    assert any(fold_of(tasks, names, seed, 3).tolist() != folds.tolist() for seed in range(8))


# ---------------------------------------------------------------------------------------------
# Inference


def sandwich(x, y, group, kind):
    """Standard errors from the regression with dummies written out, residual by residual."""
    W = dummies(x, group)
    N, k = W.shape
    bread = np.linalg.inv(W.T @ W)
    e = y - W @ bread @ W.T @ y
    hat = np.diag(W @ bread @ W.T)
    meat = np.zeros((k, k))
    if kind == "cr1":
        for g in range(group.max() + 1):
            u = sum(e[r] * W[r] for r in np.flatnonzero(group == g))
            meat += np.outer(u, u)
        n = group.max() + 1
        meat *= n / (n - 1) * (N - 1) / (N - k)
    else:
        for r in range(N):
            scale = {"hc1": N / (N - k), "hc3": 1 / (1 - hat[r]) ** 2}[kind]
            meat += scale * e[r] ** 2 * np.outer(W[r], W[r])
    return np.sqrt(np.diag(bread @ meat @ bread))[: x.shape[1]]


@pytest.mark.parametrize("kind", ["hc1", "hc3", "cr1"])
def test_errors_are_those_of_the_regression_with_dummies(kind):
    """The leverage of a row is that of x̃ plus 1/n_g for its group's dummy."""
    x, y, group = problem(heavy=True)
    got = inference(within(group, x, 12), within(group, y, 12), group, 12, errors=kind)
    np.testing.assert_allclose(got.stderr, sandwich(x, y, group, kind), rtol=1e-9)


def test_an_error_of_nothing_is_nothing():
    """A regressor that one run alone carries fits it perfectly: its error is 0, whatever rounding
    says of the variance.
    """
    group = np.repeat(np.arange(4), 8)
    x, y = np.ones((32, 2)), np.ones(32)
    x[8, 1] = x[26] = 0.0  # in one run of two groups; the two others have no spread
    y[[2, 8, 22, 23, 26, 28, 31]] = 0.0
    X = within(group, x, 4)
    found = inference(X, within(group, y, 4), group, 4)
    assert found.stderr[1] == pytest.approx(0, abs=1e-12)
    assert found.stderr[0] > 0.1


@pytest.mark.parametrize(
    ("kind", "want"),
    [
        ("hc1", [0.40766822264942043, 0.27194801243510197, 0.27315608344037934]),
        ("hc3", [0.46568243605962273, 0.31372942677008453, 0.3114284757428434]),
        ("cr1", [0.3105832431679249, 0.20602435007567657, 0.23282288285070674]),
    ],
)
def test_errors_are_those_of_statsmodels(kind, want):
    """Statsmodels 0.15.0: OLS with group dummies on `problem(heavy=True)`, cov_type HC1, HC3 and
    cluster.
    """
    x, y, group = problem(heavy=True)
    got = inference(within(group, x, 12), within(group, y, 12), group, 12, errors=kind)
    np.testing.assert_allclose(got.stderr, want, rtol=1e-6)


def test_the_bootstrap_draws_groups():
    """Under ridge its error is that of β over new samples of groups, within a fifth."""
    found, fresh = [], []
    for seed in range(30):
        x, y, group = problem(groups=40, seed=seed)
        X, ty = within(group, x, 40), within(group, y, 40)
        fresh.append(ridge(one(X, ty), 0.1))
        got = inference(X, ty, group, 40, errors="bootstrap", penalty=0.1, draws=200)
        np.testing.assert_allclose(got.beta, fresh[-1])
        assert np.all((got.low < got.beta) & (got.beta < got.high))
        found.append(got.stderr)
    np.testing.assert_allclose(np.mean(found, axis=0), np.std(fresh, axis=0, ddof=1), rtol=0.35)


def test_nothing_is_said_where_nothing_can_be():
    """No degree of freedom, one cluster, a column that does not vary, collinear ones: NaN."""
    x, y, group = problem(groups=2, size=2)
    few = inference(within(group, x, 2), within(group, y, 2), group, 2)
    assert np.isnan(few.stderr).all()
    x, y, group = problem(groups=1, size=20)
    for kind in ("cr1", "bootstrap"):
        alone = inference(within(group, x, 1), within(group, y, 1), group, 1, errors=kind)
        assert np.isnan(alone.low).all()
    x, y, group = problem()
    X = within(group, x, 12)
    X[:, 1] = 0.0
    still = inference(X, within(group, y, 12), group, 12)
    assert np.isnan(still.beta).tolist() == [False, True, False]
    X[:, 1] = X[:, 0]
    assert np.isnan(inference(X, within(group, y, 12), group, 12).beta).all()


def coverage(runs: int) -> dict[str, float]:
    """Share of 95 % intervals that hold the true β, with errors that grow with |q̃|."""
    hits = {"hc1": 0, "hc3": 0, "cr1": 0, "classic": 0}
    for seed in range(runs):
        x, y, group = problem(groups=50, size=8, players=2, seed=seed, heavy=True)
        X, ty = within(group, x, 50), within(group, y, 50)
        for kind in ("hc1", "hc3", "cr1"):
            got = inference(X, ty, group, 50, errors=kind)
            hits[kind] += got.low[0] < 1 < got.high[0]
        e = ty - X @ got.beta
        df = len(ty) - 52
        plain = math.sqrt(e @ e / df * np.linalg.inv(X.T @ X)[0, 0])
        hits["classic"] += abs(got.beta[0] - 1) < t_critical(0.95, df) * plain
    return {kind: count / runs for kind, count in hits.items()}


@pytest.mark.slow
def test_intervals_cover_and_the_classic_one_does_not():
    """200 simulations: within three standard errors (.015 each) of .95; least squares far below."""
    found = coverage(200)
    assert all(0.904 <= found[kind] <= 0.996 for kind in ("hc1", "hc3", "cr1"))
    assert found["classic"] < 0.85


@pytest.mark.soak
def test_intervals_cover_between_93_and_97_percent():
    """1,000 simulations."""
    found = coverage(1000)
    assert all(0.93 <= found[kind] <= 0.97 for kind in ("hc3", "cr1"))
    assert found["classic"] < 0.85


# ---------------------------------------------------------------------------------------------
# Tails


def test_tails_of_whole_numbers_are_sums():
    """I_x(a, b) = Σ_{j ≥ a} C(a+b−1, j) x^j (1−x)^{a+b−1−j}, in fractions (DLMF 8.17.5)."""
    for a, b, x in [(1, 1, Fraction(1, 3)), (2, 5, Fraction(9, 10)), (7, 3, Fraction(1, 8))]:
        n = a + b - 1
        want = sum(math.comb(n, j) * x**j * (1 - x) ** (n - j) for j in range(a, n + 1))
        assert beta_share(float(x), a, b) == pytest.approx(float(want), rel=1e-12)


def test_critical_values_of_the_tables():
    """Two-sided 95 %: 12.706, 2.571, 2.042 for 1, 5 and 30 degrees of freedom; F(2, 10) at 4.10 is
    the upper 5 %, F(4, 20) at 4.43 the upper 1 %.
    """
    assert [round(t_critical(0.95, df), 3) for df in (1, 5, 30)] == [12.706, 2.571, 2.042]
    assert t_critical(0.95, 1e7) == pytest.approx(1.95996, abs=1e-4)
    assert f_tail(4.1028, 2, 10) == pytest.approx(0.05, abs=1e-5)
    assert f_tail(4.4307, 4, 20) == pytest.approx(0.01, abs=1e-5)
    assert math.isnan(t_critical(0.95, 0))
    assert math.isnan(f_tail(1.0, 1, 0))
