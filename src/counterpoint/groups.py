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

_TABLE = 4
"""Integers are numbered by a table instead of a sort where they span up to this many × rows."""


def encode_labels(labels: Sequence[Any] | npt.NDArray[Any]) -> tuple[Ints, tuple[Any, ...]]:
    """Number labels in order of first appearance: (codes of shape (rows,), the distinct labels).

    An integer array is coded without going through Python; any other labels cost one dictionary
    look-up each. None is a label like any other.

    Raises:
        TypeError: a label cannot be hashed.
    """
    if isinstance(labels, np.ndarray) and labels.dtype.kind in "iub":
        distinct, codes = _ascending(labels)
        first = first_of(codes, np.arange(len(codes)))
        if np.all(first[1:] > first[:-1]):
            return codes, tuple(distinct.tolist())
        order = np.argsort(first)
        rank = np.empty_like(order)
        rank[order] = np.arange(len(order))
        return rank[codes], tuple(distinct[order].tolist())
    values = labels.tolist() if isinstance(labels, np.ndarray) else labels
    texts = tuple(dict.fromkeys(values))
    if len(texts) == len(values):
        return np.arange(len(values)), texts
    number = dict(zip(texts, range(len(texts)), strict=True))
    return np.fromiter(map(number.__getitem__, values), np.int64, len(values)), texts


def first_of(codes: Ints, rows: Ints) -> Ints:
    """The first of `rows` in every group that has one of them, by group."""
    held = np.full(int(codes.max(initial=-1)) + 1, -1, dtype=np.int64)
    held[codes[rows[::-1]]] = rows[::-1]
    return held[held >= 0]


def pair(first: Ints, second: Ints) -> Ints:
    """Number the distinct pairs (first, second), in ascending order of the pair."""
    return _ascending(first * (int(second.max(initial=-1)) + 1) + second)[1]


def _ascending(keys: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], Ints]:
    """The distinct integers in ascending order, and the place of each key among them."""
    low, high = (int(keys.min()), int(keys.max())) if len(keys) else (0, -1)
    span = high - low + 1
    if keys.dtype.kind in "ub" or span > _TABLE * len(keys) + 16:
        distinct, codes = np.unique(keys, return_inverse=True)
        return distinct, codes.astype(np.int64)
    place = keys.astype(np.int64, copy=False) - low
    held = np.zeros(span, dtype=bool)
    held[place] = True
    distinct = np.flatnonzero(held)
    if len(distinct) == span:
        return distinct + low, place
    rank = np.cumsum(held) - 1
    return distinct + low, rank[place]


def total(codes: Ints, values: Floats, n: int) -> Floats:
    """Sum of `values` in each of `n` groups; an empty group gives 0."""
    return np.bincount(codes, weights=values, minlength=n).astype(np.float64, copy=False)


def count(codes: Ints, n: int) -> Floats:
    """Rows in each of `n` groups, as floats."""
    return np.bincount(codes, minlength=n).astype(np.float64)


def mean(codes: Ints, values: Floats, n: int) -> Floats:
    """Mean of each group; an empty group gives NaN."""
    size = count(codes, n)
    out = np.full(n, np.nan)
    np.divide(total(codes, values, n), size, out=out, where=size > 0)
    return out


def moments(codes: Ints, values: Floats, n: int, ddof: int = 1) -> tuple[Floats, Floats, Floats]:
    """Mean, standard deviation and size of each group, each of shape (n,).

    The deviation has `size − ddof` in the denominator; groups of `ddof` rows or fewer give 0, an
    empty group has mean NaN. Two passes: the deviations are taken before squaring, so rewards that
    differ in the seventh digit keep their spread.
    """
    if each := _blocks(codes, n):
        return _block_moments(values.reshape(n, each), ddof)
    size = count(codes, n)
    centre = np.divide(total(codes, values, n), size, out=np.full(n, np.nan), where=size > 0)
    off = values - centre.take(codes)
    off *= off
    degrees = size - ddof
    variance = np.divide(total(codes, off, n), degrees, out=np.zeros(n), where=degrees > 0)
    return centre, np.sqrt(variance), size


def _blocks(codes: Ints, n: int) -> int:
    """Rows per group where the groups stand in order and all have one size, as most do; else 0."""
    each, rest = divmod(len(codes), n) if n else (0, 0)
    if not each or rest or codes[each - 1] or codes[-1] != n - 1:
        return 0
    return each if (codes.reshape(n, each) == np.arange(n)[:, None]).all() else 0


def _block_moments(table: Floats, ddof: int) -> tuple[Floats, Floats, Floats]:
    """`moments` of the rows of a table (groups, members)."""
    n, each = table.shape
    centre = np.einsum("ij->i", table) / each  # a sum over short rows is slow
    off = table - centre[:, None]
    variance = np.einsum("ij,ij->i", off, off) / max(each - ddof, 1)
    return centre, np.sqrt(variance) if each > ddof else np.zeros(n), np.full(n, float(each))


def same_as_next(codes: Ints) -> Bools:
    """Whether each code equals the one after it; False for the last."""
    same = np.zeros(len(codes), dtype=bool)
    np.equal(codes[1:], codes[:-1], out=same[:-1])
    return same


def shared(codes: Ints, members: Ints, n: int) -> Bools:
    """Whether each group holds at least two different `members`, an integer array like `codes`."""
    some = np.zeros(n, dtype=np.int64)
    some[codes] = members
    out = np.zeros(n, dtype=bool)
    out[codes[some.take(codes) != members]] = True
    return out
