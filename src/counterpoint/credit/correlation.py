"""Three correlations of two lists, and how far they would move with other groups of runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from counterpoint.groups import Floats, Ints

_CONSTANT = 1e-12


def pearson(x: Floats, y: Floats) -> float:
    """Pearson's r; NaN where a side is constant up to rounding, or of fewer than two."""
    if _constant(x) or _constant(y):
        return float("nan")
    return cosine(x - x.mean(), y - y.mean())


def spearman(x: Floats, y: Floats) -> float:
    """Pearson's r of the ranks, where equal values share the mean of theirs; NaN as there."""
    return pearson(_ranks(x), _ranks(y))


def kendall(x: Floats, y: Floats) -> float:
    """Kendall's τ-b, in O(n log n); NaN where a side is constant up to rounding, or below two.

        τ_b = (C − D) / √((n₀ − n₁)(n₀ − n₂))

    C and D are the pairs that both sides put in the same and in opposite order, n₀ all pairs, n₁
    and n₂ those that one side ties. Sources: Kendall (Biometrika 33, 1945); Knight (Journal of the
    American Statistical Association 61, 1966) for counting D by sorting.

    Args:
        x: (n,).
        y: (n,).
    """
    if _constant(x) or _constant(y):
        return float("nan")
    one, other = (np.unique(side, return_inverse=True)[1].reshape(-1) for side in (x, y))
    tied, tied_too = _tied(one), _tied(other)
    pairs = len(x) * (len(x) - 1) // 2
    either = tied + tied_too - _tied(one * (int(other.max()) + 1) + other)
    swapped = _inversions(other[np.lexsort((other, one))])
    lengths = np.sqrt(float(pairs - tied)) * np.sqrt(float(pairs - tied_too))
    return float(np.clip((pairs - either - 2 * swapped) / lengths, -1, 1))


CORRELATIONS: dict[str, Callable[[Floats, Floats], float]] = {
    "pearson": pearson,
    "spearman": spearman,
    "kendall": kendall,
}
"""Name → correlation of two lists."""


def intervals(
    x: Floats, y: Floats, group: Ints, draws: int, seed: int
) -> dict[str, tuple[float, float]]:
    """95 % intervals of the three correlations, by drawing whole groups again (bootstrap).

    Rows of one group vary together, as they share a baseline, so a group is drawn or left out as a
    whole. Source: Davison and Hinkley (1997), §3.8 and §5.3 (percentiles).

    Args:
        x: (n,).
        y: (n,).
        group: (n,) code of the group of each.
        draws: how many sets of groups are drawn.
        seed: of the draws.

    Returns:
        Name → (low, high). Draws in which a correlation is not defined are left out; NaN for fewer
        than two groups, or where none is left.
    """
    found = [
        [f(x[rows], y[rows]) for f in CORRELATIONS.values()] for rows in _again(group, draws, seed)
    ]
    return {
        name: percentiles(np.array([each[place] for each in found]))
        for place, name in enumerate(CORRELATIONS)
    }


def percentiles(draws: Floats) -> tuple[float, float]:
    """The middle 95 % of what was drawn, without what is NaN; NaN if nothing is left."""
    known = draws[~np.isnan(draws)]
    if not len(known):
        return float("nan"), float("nan")
    low, high = np.quantile(known, [0.025, 0.975]).tolist()
    return low, high


def cosine(x: npt.ArrayLike, y: npt.ArrayLike) -> float:
    """Cosine of two arrays of one size; NaN where one is all zero."""
    a, b = np.ravel(x).astype(np.float64), np.ravel(y).astype(np.float64)
    lengths = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(np.clip(a @ b / lengths, -1, 1)) if lengths else float("nan")


def _again(group: Ints, draws: int, seed: int) -> Iterator[Ints]:
    """The rows of as many groups as there are, drawn with replacement; nothing for one group."""
    held = np.unique(group, return_inverse=True)[1].reshape(-1)
    rows = np.split(np.argsort(held, kind="stable"), np.cumsum(np.bincount(held))[:-1])
    rng = np.random.default_rng(seed)
    for _ in range(draws if len(rows) > 1 else 0):
        yield np.concatenate([rows[place] for place in rng.integers(len(rows), size=len(rows))])


def _constant(side: Floats) -> bool:
    return len(side) < 2 or bool(np.ptp(side) <= _CONSTANT * np.abs(side).max())


def _ranks(x: Floats) -> Floats:
    """Ranks from 1 up; equal values share the mean of theirs."""
    _, place, size = np.unique(x, return_inverse=True, return_counts=True)
    return (np.cumsum(size) - (size - 1) / 2)[place]


def _tied(codes: Ints) -> int:
    """How many pairs have one code."""
    size = np.unique(codes, return_counts=True)[1]
    return int(size @ (size - 1)) // 2


def _inversions(codes: Ints) -> int:
    """How many pairs i < j have codes[i] > codes[j].

    Bit by bit from the highest: two codes that differ there for the first time are an inversion if
    the one with the bit comes first. Codes that agree so far stand together, in their order.
    """
    found, place = 0, np.arange(len(codes))
    for bit in reversed(range(int(codes.max(initial=0)).bit_length())):
        above = codes >> (bit + 1)
        begins = np.append(True, above[1:] != above[:-1])
        on = codes >> bit & 1
        before = np.cumsum(on) - on
        before -= before[np.maximum.accumulate(np.where(begins, place, 0))]
        found += int(before[on == 0].sum())
        codes = codes[np.argsort(codes >> bit, kind="stable")]
    return found
