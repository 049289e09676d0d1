"""What may stand in a column: labels, numbers, flags; the first cell that may not is named."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np

from counterpoint import groups
from counterpoint.groups import Bools, Floats, Ints
from counterpoint.spelling import Refused

LARGEST = 1e150
"""Numbers above this overflow when they are squared."""


def encode(name: str, labels: Any) -> tuple[Ints, tuple[Any, ...]]:
    """Codes and texts of labels. Refused where one cannot be hashed."""
    try:
        return groups.encode_labels(labels)
    except TypeError:
        row = next(i for i, label in enumerate(labels) if not isinstance(label, Hashable))
        kind = type(labels[row]).__name__
        raise Refused(
            f"column {name}, row {row}: a {kind} cannot be a label; give a string or a number"
        ) from None


def without_none(codes: Ints, texts: tuple[Any, ...]) -> tuple[Ints, tuple[Any, ...]]:
    """The same labels with −1 where they are None."""
    if None not in texts:
        return codes, texts
    missing = texts.index(None)
    fewer = np.where(codes == missing, -1, codes - (codes > missing))
    return fewer, texts[:missing] + texts[missing + 1 :]


def events(values: Any) -> Ints:
    """(rows, 2) index of the trace and seq. Refused unless there is a pair on each row."""
    try:
        return np.asarray(values, dtype=np.int64).reshape(-1, 2)
    except (TypeError, ValueError, OverflowError):
        raise Refused("column event needs a pair (index of the trace, seq) on each row") from None


def floats(name: str, values: Any) -> Floats:
    """Numbers, NaN where missing. Refused where one is none, infinite, or no logarithm where
    the column holds logarithms.
    """
    try:
        out = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError, OverflowError):
        row = next((i for i, v in enumerate(values) if not _is_number(v)), 0)
        raise Refused(f"column {name}, row {row}: {values[row]!r:.60} is not a number") from None
    if out.ndim != 1:
        raise Refused(f"column {name} has {out.ndim} dimensions where one is needed")
    large = np.abs(out) > LARGEST
    if large.any():
        row = int(np.argmax(large))
        raise Refused(f"column {name}, row {row}: {out[row]:g} is infinite or too large to square")
    if name.startswith("logprob") and (out > 0).any():
        row = int(np.argmax(out > 0))
        raise Refused(f"column {name}, row {row}: {out[row]:g} is above 0, so it is no logarithm")
    return out


def _is_number(value: Any) -> bool:
    try:
        return value is None or isinstance(float(value), float)
    except (TypeError, ValueError, OverflowError):
        return False


def chosen(values: Any) -> Ints:
    """Indices of what was chosen, −1 where nothing was."""
    out = floats("action", values)
    return np.where(np.isnan(out), -1, out).astype(np.int64)


def whole(name: str, given: dict[str, Any]) -> Ints:
    """Whole numbers from 0 up; anything else is Refused."""
    out = floats(name, given[name])
    wrong = np.isnan(out) | (out != np.floor(out)) | (out < 0)
    if wrong.any():
        row = int(np.argmax(wrong))
        raise Refused(f"column {name}, row {row}: {out[row]:g} is no whole number from 0 up")
    return out.astype(np.int64)


def flags(name: str, given: dict[str, Any], n: int) -> Bools:
    """Truth values, by default all true. Refused where one is neither true nor false."""
    if name not in given:
        return np.ones(n, dtype=bool)
    values = np.asarray(given[name])
    if values.dtype.kind == "b" and values.ndim == 1:
        return values
    if values.ndim != 1:
        raise Refused(f"column {name} has {values.ndim} dimensions where one is needed")
    wrong = ~np.isin(values, (0, 1))
    if wrong.any():
        row = int(np.argmax(wrong))
        raise Refused(f"column {name}, row {row}: {given[name][row]!r} is neither true nor false")
    return values.astype(bool)
