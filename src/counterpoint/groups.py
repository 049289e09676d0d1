"""Grouped arithmetic over integer codes: the one place where rows are summed by label.

Every function takes `codes`, an integer array of shape (rows,) with values in 0 … n−1, and works in
float64 with `bincount`, so its cost is linear in rows and independent of how many groups there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Floats: TypeAlias = npt.NDArray[np.float64]
Ints: TypeAlias = npt.NDArray[np.int64]
Bools: TypeAlias = npt.NDArray[np.bool_]


def encode_labels(labels: Sequence[Any] | npt.NDArray[Any]) -> tuple[Ints, tuple[Any, ...]]:
    """Number labels in order of first appearance: (codes of shape (rows,), the distinct labels).

    An integer array is coded without going through Python; any other labels cost one dictionary
    look-up each. None is a label like any other.
    """
    if isinstance(labels, np.ndarray) and labels.dtype.kind in "iub":
        distinct, first, codes = np.unique(labels, return_index=True, return_inverse=True)
        order = np.argsort(first)
        rank = np.empty_like(order)
        rank[order] = np.arange(len(order))
        return rank[codes].astype(np.int64), tuple(distinct[order].tolist())
    seen: dict[Any, int] = {}
    number = seen.setdefault
    values = labels.tolist() if isinstance(labels, np.ndarray) else labels
    codes = np.fromiter((number(v, len(seen)) for v in values), np.int64, len(values))
    return codes, tuple(seen)


def pair(first: Ints, second: Ints) -> Ints:
    """Number the distinct pairs (first, second), in ascending order of the pair."""
    if not len(first):
        return first.astype(np.int64)
    key = first * (int(second.max(initial=-1)) + 1) + second
    return np.unique(key, return_inverse=True)[1].astype(np.int64)


def total(codes: Ints, values: Floats, n: int) -> Floats:
    """Sum of `values` in each of `n` groups; an empty group gives 0."""
    return np.bincount(codes, weights=values, minlength=n)


def count(codes: Ints, n: int) -> Floats:
    """Rows in each of `n` groups, as floats."""
    return np.bincount(codes, minlength=n).astype(np.float64)


def mean(codes: Ints, values: Floats, n: int) -> Floats:
    """Mean of each group; an empty group gives NaN."""
    size = count(codes, n)
    return np.divide(total(codes, values, n), size, out=np.full(n, np.nan), where=size > 0)


def std(codes: Ints, values: Floats, n: int, ddof: int = 1) -> Floats:
    """Standard deviation of each group around its own mean, with `size − ddof` in the denominator.

    Groups of `ddof` rows or fewer give 0. Two passes: the deviations are taken before squaring, so
    rewards that differ in the seventh digit keep their spread.
    """
    size = count(codes, n)
    centred = values - mean(codes, values, n)[codes]
    square = total(codes, centred * centred, n)
    degrees = size - ddof
    return np.sqrt(np.divide(square, degrees, out=np.zeros(n), where=degrees > 0))
