"""Regression within groups: outcomes on proxies, fitted on some tasks and used on others.

Pure functions over arrays. A *cell* is one rollout that is compared; X holds one column per
regressor. Whatever is fitted needs only sums over tasks, so folds cost nothing beyond one pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from counterpoint import groups
from counterpoint.credit.tails import t_critical
from counterpoint.groups import Bools, Floats, Ints
from counterpoint.spelling import digest_of

Errors = Literal["hc1", "hc3", "cr1", "bootstrap"]

LADDER = (0.0, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)
"""λ that cross-validation chooses from."""

UNVALIDATED = 1e-3
"""λ where there are too few tasks to choose one."""

_VALIDATIONS = 5

_NO_SPREAD = 1e-20
"""A column whose sum of squares within groups is at or below this share of its raw sum of squares
does not vary: what is left is rounding."""

_SINGULAR = 1e-11
"""Eigenvalues below this share of the largest are taken for 0."""

_ROWS = 4096
"""Rows that are centred at a time."""

_BLOCKS = 256
"""Groups are dealt into at most this many blocks before they are drawn again."""


def within(group: Ints, x: Floats, n: int) -> Floats:
    """x̃ = x − mean of its group, for x of shape (cells,) or (cells, columns).

    The within transform; regression on x̃ gives what one dummy per group would (Frisch and Waugh,
    1933; Lovell, 1963). A group of one gives 0.
    """
    if x.ndim == 1:
        return x - groups.mean(group, x, n).take(group)
    if len(group) and np.all(group[1:] >= group[:-1]):
        return _within_sorted(group, x)
    return np.stack([within(group, column, n) for column in x.T], axis=1) if x.size else x.copy()


def _within_sorted(group: Ints, x: Floats) -> Floats:
    """The same for groups that lie one after the other: blocks of whole groups, which stay in the
    processor's cache.
    """
    edges = np.append(np.flatnonzero(np.append(True, group[1:] != group[:-1])), len(group))
    cuts = np.unique(np.searchsorted(edges, np.append(np.arange(0, len(x), _ROWS), len(x))))
    out = np.empty_like(x)
    for first, last in zip(cuts[:-1].tolist(), cuts[1:].tolist(), strict=True):
        rows, size = slice(edges[first], edges[last]), np.diff(edges[first : last + 1])
        mean = np.add.reduceat(x[rows], edges[first:last] - edges[first], axis=0) / size[:, None]
        np.subtract(x[rows], np.repeat(mean, size, axis=0), out=out[rows])
    return out


# ---------------------------------------------------------------------------------------------
# Sums, and what is fitted on them


class Sums(NamedTuple):
    """What a linear fit needs of a set of cells; sums of sets add up.

    `S` (…, p, p) = Σ x̃x̃ᵀ, `b` (…, p) = Σ x̃ỹ, `y` (…) = Σ ỹ², `raw` (…, p) = Σ x².
    """

    S: Floats
    b: Floats
    y: Floats
    raw: Floats

    def over(self, weights: Floats) -> Sums:
        """Weighted sums over the bins: `weights` (…, bins)."""
        return Sums(*(np.tensordot(weights, part, axes=1) for part in self))


def sums(X: Floats, y: Floats, raw: Floats, bins: Ints, n: int) -> Sums:
    """The sums of each of `n` bins of cells; `X` and `y` are within groups, `raw` is not."""
    p = X.shape[1]
    order = np.argsort(bins, kind="stable")
    edges = np.searchsorted(bins[order], np.arange(n + 1))
    out = Sums(np.zeros((n, p, p)), np.zeros((n, p)), np.zeros(n), np.zeros((n, p)))
    for at in np.flatnonzero(np.diff(edges)).tolist():
        rows = order[edges[at] : edges[at + 1]] if n > 1 else slice(None)
        x = X[rows]
        out.S[at], out.b[at] = x.T @ x, x.T @ y[rows]
        out.y[at], out.raw[at] = y[rows] @ y[rows], np.einsum("ij,ij->j", raw[rows], raw[rows])
    return out


def varies(held: Sums) -> Bools:
    """(…, p) whether a regressor varies within groups at all."""
    spread: Bools = np.diagonal(held.S, axis1=-2, axis2=-1) > _NO_SPREAD * held.raw
    return spread


def ridge(held: Sums, penalty: float | Sequence[float]) -> Floats:
    """β̂ = (Σ x̃x̃ᵀ + λN·D)⁻¹ Σ x̃ỹ with D = diag(mean x̃²), for one set of sums or a stack.

    λN·D is λ times the diagonal of Σ x̃x̃ᵀ, so a proxy in other units gets the same share. A
    regressor that does not vary gets 0. Where regressors are collinear and λ is 0, the solution of
    least norm in units of their standard deviations. Several λ, from one decomposition, stand in
    the first dimension of what is returned.
    """
    alive = varies(held)
    scale = np.sqrt(np.where(alive, np.diagonal(held.S, axis1=-2, axis2=-1), 1.0))
    keep = alive[..., :, None] & alive[..., None, :]
    C = np.where(keep, held.S / scale[..., :, None] / scale[..., None, :], 0.0)
    root, Q = np.linalg.eigh(C)
    b = np.einsum("...ij,...i->...j", Q, np.where(alive, held.b, 0.0) / scale)
    shrunk = root + np.reshape(penalty, np.shape(penalty) + (1,) * root.ndim)
    sound = shrunk > _SINGULAR * np.max(shrunk, axis=-1, keepdims=True, initial=0.0)
    beta = np.einsum("...ij,...j->...i", Q, np.divide(b, shrunk, where=sound, out=0 * shrunk))
    fitted: Floats = np.where(alive, beta / scale, 0.0)
    return fitted


def correlations(held: Sums) -> Floats:
    """(p, p) correlation of the regressors within groups; those that do not vary are left out."""
    alive = varies(held)
    S = held.S[np.ix_(alive, alive)]
    scale = np.sqrt(np.diagonal(S))
    return np.asarray(S / scale[:, None] / scale[None, :])


def loss(held: Sums, beta: Floats) -> Any:
    """Σ (ỹ − x̃ᵀβ)² from sums alone."""
    return (
        held.y
        - 2 * np.einsum("...i,...i->...", beta, held.b)
        + np.einsum("...i,...ij,...j->...", beta, held.S, beta)
    )


def validated(bins: Sums, use: Bools) -> float:
    """λ of `LADDER` with the least held-out error over the bins in `use`, dealt into at most five
    parts that are left out in turn.

    Of equal errors the larger λ. `UNVALIDATED` where fewer than two bins hold anything.
    """
    filled = np.flatnonzero(use & (bins.y > 0))
    count = min(len(filled), _VALIDATIONS)
    if count < 2:
        return UNVALIDATED
    dealt = np.zeros((count, len(use)))
    dealt[np.arange(len(filled)) % count, filled] = 1.0
    held_out, training = bins.over(dealt), bins.over(dealt.sum(axis=0) - dealt)
    errors = loss(held_out, ridge(training, LADDER)).sum(axis=1).tolist()
    equal = min(errors) + 1e-12 * float(held_out.y.sum())
    return max(each for each, e in zip(LADDER, errors, strict=True) if e <= equal)


class Fold(NamedTuple):
    """What one fold uses: fitted on everything else."""

    beta: Floats
    penalty: float
    varies: Bools


def fold_of(tasks: Ints, names: Sequence[Any], seed: int, n: int) -> Ints:
    """(cells,) fold of each cell's task: tasks in the order of a hash of (seed, task) are dealt out
    to `n` folds in turn, so that no row number and no outcome has a say.
    """
    there = np.flatnonzero(np.bincount(tasks, minlength=len(names)))
    keys = [
        digest_of(f"{seed}\x1f{names[task]}".encode(errors="replace")) for task in there.tolist()
    ]
    rank = np.empty(len(names), dtype=np.int64)
    rank[there[sorted(range(len(there)), key=keys.__getitem__)]] = np.arange(len(there))
    return np.asarray(rank[tasks] % n)


def cross_fitted(bins: Sums, folds: int, penalty: float | None) -> list[Fold]:
    """For each fold the β, λ and list of regressors that its own tasks had no part in.

    Args:
        bins: sums of bins; bin k belongs to fold k % folds. With one fold, everything is fitted
            on itself.
        folds: number of folds.
        penalty: λ, or None to validate it on the same training bins.
    """
    fold = np.arange(len(bins.y)) % folds
    out = []
    for own in range(folds):
        use = np.ones(len(fold), dtype=bool) if folds == 1 else fold != own
        chosen = validated(bins, use) if penalty is None else penalty
        held = bins.over(use.astype(np.float64))
        out.append(Fold(ridge(held, chosen), chosen, varies(held)))
    return out


# ---------------------------------------------------------------------------------------------
# Inference


class Inference(NamedTuple):
    """Coefficients with standard errors and intervals; NaN where a regressor is not estimated."""

    beta: Floats
    stderr: Floats
    low: Floats
    high: Floats
    df: float


def inference(
    X: Floats,
    y: Floats,
    group: Ints,
    n: int,
    *,
    errors: Errors = "hc3",
    penalty: float = 0.0,
    level: float = 0.95,
    seed: int = 0,
    draws: int = 500,
) -> Inference:
    """Coefficients of ỹ on x̃, within groups, and how sure they are.

        V = (X̃ᵀX̃)⁻¹ M (X̃ᵀX̃)⁻¹
        hc1: M = N/df · Σ e²x̃x̃ᵀ    hc3: M = Σ (e/(1 − h))² x̃x̃ᵀ, h = leverage + 1/n_g
        cr1: M = n/(n − 1) · (N − 1)/df · Σ_g (Σ x̃e)(Σ x̃e)ᵀ

    with df = N − groups − p; a group's mean is fitted too, hence the 1/n_g. Under ridge errors of
    this form are no errors about β, so a penalty goes with the bootstrap by group: groups are drawn
    with replacement and β is fitted again; the interval is of percentiles.

    Args:
        X: (cells, p) regressors within groups; 0 throughout where one does not vary.
        y: (cells,) outcome within groups.
        group: (cells,) codes below `n`.
        n: number of groups.
        errors: hc1 (MacKinnon and White, 1985), hc3 (the same), cr1 (Liang and Zeger, 1986) or
            bootstrap (Efron, 1979; by group).
        penalty: λ of `ridge`; only the bootstrap knows what it does to an interval.
        level: of the interval.
        seed: of the bootstrap.
        draws: of the bootstrap.

    Returns:
        NaN for a regressor that does not vary or is a combination of others, and where df < 1 or,
        for cr1 and the bootstrap, there is one group.
    """
    size = groups.count(group, n)
    there = int(np.count_nonzero(size))
    if errors == "bootstrap":
        return _bootstrap(X, y, group, n, penalty, level, seed, draws)
    held = Sums(*(part[0] for part in sums(X, y, X, np.zeros(len(y), dtype=np.int64), 1)))
    alive = varies(held)
    if alive.any() and np.linalg.cond(correlations(held)) > 1e10:
        alive[:] = False
    x = X[:, alive]
    df = len(y) - there - x.shape[1]
    beta, stderr = np.full(X.shape[1], np.nan), np.full(X.shape[1], np.nan)
    known = df if errors != "cr1" else there - 1
    if df < 1 or known < 1 or not x.shape[1]:
        return Inference(beta, stderr, beta, beta, float(known))
    bread = np.linalg.inv(x.T @ x)
    beta[alive] = bread @ (x.T @ y)
    e: Floats = y - x @ beta[alive]
    V = np.diagonal(bread @ _meat(x, e, bread, group, size, errors) @ bread)
    stderr[alive] = np.sqrt(np.maximum(V, 0.0))  # rounding of a perfect fit may lie below 0
    wide = t_critical(level, known) * stderr
    return Inference(beta, stderr, beta - wide, beta + wide, float(known))


def _meat(x: Floats, e: Floats, bread: Any, group: Ints, size: Floats, errors: Errors) -> Floats:
    cells, there = len(e), int(np.count_nonzero(size))
    df = cells - there - x.shape[1]
    if errors == "cr1":
        scores = np.stack([groups.total(group, u, len(size)) for u in (x * e[:, None]).T], axis=1)
        return np.asarray(there / (there - 1) * (cells - 1) / df * (scores.T @ scores))
    if errors == "hc3":
        h = np.einsum("ij,jk,ik->i", x, bread, x) + 1.0 / size[group]
        e = e / np.maximum(1.0 - h, 1e-12)
    u = x * e[:, None]
    return np.asarray(u.T @ u * (cells / df if errors == "hc1" else 1.0))


def _bootstrap(
    X: Floats, y: Floats, group: Ints, n: int, penalty: float, level: float, seed: int, draws: int
) -> Inference:
    there = groups.pair(np.zeros_like(group), group)
    found = int(there.max(initial=-1)) + 1
    count = min(found, _BLOCKS)
    blocks = sums(X, y, X, there % max(count, 1), count)
    whole = blocks.over(np.ones(count))
    alive = varies(whole)
    beta = np.where(alive, ridge(whole, penalty), np.nan)
    if count < 2:
        nothing = np.full(X.shape[1], np.nan)
        return Inference(beta, nothing, nothing, nothing, 0.0)
    drawn = np.where(alive, resampled(blocks, penalty, seed, draws), np.nan)
    tail = (1 - level) / 2
    low, high = np.quantile(drawn, [tail, 1 - tail], axis=0)
    return Inference(beta, drawn.std(axis=0, ddof=1), low, high, float(count - 1))


def resampled(blocks: Sums, penalty: float, seed: int, draws: int) -> Floats:
    """(draws, p) β̂ of blocks drawn with replacement."""
    count = len(blocks.y)
    rng = np.random.default_rng([seed, count])
    weights = rng.multinomial(count, np.full(count, 1 / count), size=draws).astype(np.float64)
    return ridge(blocks.over(weights), penalty)
