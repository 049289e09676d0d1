"""Ridge on every combination of choices up to an order, by kernels, with held-out errors for free.

A row is a table (slots, labels): what was chosen in each slot, as a one or as probabilities.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import comb
from typing import NamedTuple

import numpy as np

from counterpoint import groups
from counterpoint.groups import Floats, Ints

LADDER = (1e-9, 1e-6, 1e-4, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0, 10.0, 100.0)
"""λ that are tried, in units of the prior variance of one fully known run."""

MOST_ORDER = 8
"""The highest order of interaction that is tried."""

WORTH = 2.0
"""What an order more has to take off the held-out error, in mean errors of a run, as by Akaike's
criterion (1974) for a parameter more."""

_EQUAL = 1e-12


class Fit(NamedTuple):
    """m(x) = b + Σ α_j k(x, x_j), with k of an order; `X` (distinct, slots, labels)."""

    X: Floats
    alpha: Floats
    b: float
    order: int

    def __call__(self, x: Floats) -> Floats:
        """(rows,) the outcome to be expected of rows (rows, slots, labels)."""
        if not self.order or not len(x):
            return np.full(len(x), self.b)
        said: Floats = kernels(x, self.X, self.order)[-1] @ self.alpha + self.b
        return said


def kernels(x: Floats, y: Floats, most: int) -> list[Floats]:
    """(rows of x, rows of y) for each order from 1 to `most`: how many combinations of choices two
    runs share, up to that order, as a share of all that there are.

    A ridge on one indicator for each combination is a ridge with this kernel. Choices that are only
    known by their probabilities count as independent of each other.
    """
    slots = x.shape[1]
    e = [np.ones((len(x), len(y)))] + [np.zeros((len(x), len(y))) for _ in range(most)]
    for s in range(slots):
        same = x[:, s] @ y[:, s].T
        for o in range(min(s + 1, most), 0, -1):
            e[o] = e[o] + e[o - 1] * same
    total = np.cumsum([comb(slots, o) for o in range(1, most + 1)])
    return [part / size for part, size in zip(np.cumsum(e[1:], axis=0), total, strict=True)]


class _Distinct(NamedTuple):
    X: Floats
    of: Ints
    n: Floats
    y: Floats


def _distinct(X: Floats, y: Floats) -> _Distinct:
    flat, of = np.unique(X.reshape(len(X), -1), axis=0, return_inverse=True)
    of = of.reshape(-1)
    n = groups.count(of, len(flat))
    return _Distinct(flat.reshape(-1, *X.shape[1:]), of, n, groups.mean(of, y, len(flat)))


def _solved(
    K: Floats, held: _Distinct, penalties: Sequence[float]
) -> list[tuple[Floats, float, Floats]]:
    """For each λ: α, b and 1 − leverage of one run of each distinct row.

    (K + λ N⁻¹) α + 1 b = ȳ, 1ᵀα = 0: the constant is not penalised.
    """
    root = np.sqrt(held.n)
    values, U = np.linalg.eigh(K * root[:, None] * root[None, :])
    values, uy, u1 = np.maximum(values, 0.0), U.T @ (root * held.y), U.T @ root
    out = []
    for penalty in penalties:
        g = 1.0 / (values + penalty)
        own, one = U @ (g * uy), U @ (g * u1)
        size = float(root @ one)
        b = float(root @ own) / size
        free = penalty * ((U * U) @ g - one * one / size)
        out.append((root * (own - b * one), b, (held.n - 1 + free) / held.n))
    return out


def fit(X: Floats, y: Floats, order: int, penalty: float) -> Fit:
    """Fit one group: `X` (runs, slots, labels), `y` (runs,)."""
    held = _distinct(X, y)
    if not order:
        return Fit(held.X, np.zeros(len(held.y)), float(y.mean()), 0)
    K = kernels(held.X, held.X, order)[-1]
    ((alpha, b, _),) = _solved(K, held, [penalty])
    return Fit(held.X, alpha, b, order)


def held_out(X: Floats, y: Floats, most: int) -> Floats:
    """(most + 1, λ) Σ (y − prediction without that run)² of each order and λ of the ladder."""
    held, n = _distinct(X, y), len(y)
    spread = groups.total(held.of, (y - held.y[held.of]) ** 2, len(held.y))
    out = np.full((most + 1, len(LADDER)), float(np.sum((y - y.mean()) ** 2)) * (n / (n - 1)) ** 2)
    for order, K in enumerate(kernels(held.X, held.X, most), 1):
        for at, (alpha, _, free) in enumerate(_solved(K, held, LADDER)):
            missed = LADDER[at] * alpha / held.n  # ȳ − m
            out[order, at] = np.sum((spread + held.n * missed**2) / np.maximum(free, 1e-12) ** 2)
    return out


class Sought(NamedTuple):
    """The order and λ that were asked for; None where they are to be found."""

    order: int | None = None
    penalty: float | None = None


class Choice(NamedTuple):
    """An order and a λ, and the share of the spread of outcomes that they predict on runs that were
    left out of the fit.
    """

    order: int
    penalty: float
    r2: float


def chosen(errors: Floats, runs: int, sought: Sought) -> Choice:
    """The lowest order whose held-out error (`held_out`, summed over groups) is the least, or above
    it by no more than `WORTH` of the `runs` err on average; its best λ; or what was asked for.

    Of equal errors the largest λ; a given λ is judged by its neighbour on the ladder.
    """
    nothing, orders, steps = errors[0, 0], np.arange(len(errors)), np.arange(len(LADDER))
    if sought.order is not None:
        orders = orders[[min(sought.order, len(errors) - 1)]]
    if sought.penalty is not None:
        steps = steps[[np.argmin(np.abs(np.log(np.array(LADDER) / sought.penalty)))]]
    part, rounding = errors[np.ix_(orders, steps)], _EQUAL * nothing
    enough = part.min() * (1 + WORTH / max(runs, 1)) + rounding
    row = int(np.argmax(part.min(axis=1) <= enough))
    column = np.flatnonzero(part[row] <= part[row].min() + rounding)[-1]
    r2 = 1.0 - float(part[row].min()) / nothing if nothing > 0 else 0.0
    return Choice(int(orders[row]), sought.penalty or LADDER[steps[column]], float(r2))
