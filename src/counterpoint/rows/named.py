"""Steps as the named columns of a trainer, and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from counterpoint.rows.halves import Halves, joined
from counterpoint.spelling import Refused
from counterpoint.steps import Steps

Column: TypeAlias = npt.NDArray[Any]
Columns: TypeAlias = Mapping[str, Column]

OURS = "counterpoint_"
"""Before the name of a column of Steps for which a trainer has no word; trainers pass it on."""

_LEFT_OUT = ("descends", "event", "quality", "menu", "action")
"""Columns of Steps that are no number, flag or label of a row, or name traces and menus."""


def named(steps: Steps, columns: Mapping[str, str]) -> dict[str, Column]:
    """The columns of Steps under a trainer's names; a missing label is an empty text.

    Args:
        steps: any steps.
        columns: the trainer's name → that of Steps.
    """
    theirs = {ours: its for its, ours in columns.items()}
    out: dict[str, Column] = {}
    for field in fields(steps):
        values = getattr(steps, field.name)
        if isinstance(values, np.ndarray) and field.name not in _LEFT_OUT:
            out[theirs.get(field.name, OURS + field.name)] = _texts(steps, field.name, values)
    return out


def left_out(steps: Steps) -> list[str]:
    """Columns that these steps have and `named` has no place for."""
    return [name for name in _LEFT_OUT if getattr(steps, name) is not None]


def unnamed(
    given: Columns, columns: Mapping[str, str], cut: Halves | None, mask: Column | None
) -> Steps:
    """Steps of a trainer's batch, in its row order.

    Args:
        given: the batch.
        columns: the trainer's name → that of Steps; ours bear our prefix.
        cut: its tokens, if it holds them.
        mask: (rows, tokens) what is trained, which counts a turn's tokens unless a column does.

    Raises:
        Refused: what `Steps.from_columns` refuses.
    """
    own = any(name.startswith(OURS) for name in given)
    found: dict[str, Any] = {}
    for name, values in given.items():
        ours = name.removeprefix(OURS) if name.startswith(OURS) else columns.get(name)
        if ours is not None:
            missing = own and values.dtype.kind == "U" and (values == "").any()
            found[ours] = [text or None for text in values.tolist()] if missing else values
    if mask is not None:
        found.setdefault("n_tokens", np.asarray(mask).astype(bool).sum(-1))
    steps = Steps.from_columns(**found)
    return steps if cut is None else replace(steps, tokens=joined(cut))


def need(given: Columns, names: tuple[str, ...]) -> None:
    """Refuse a batch that lacks one of the columns."""
    for name in names:
        if name not in given:
            raise Refused(f"the batch has no column {name}; it has {', '.join(given) or 'none'}")


def _texts(steps: Steps, name: str, values: Column) -> Column:
    """The labels behind codes, texts unless all are numbers; what is no label stays as it is."""
    if name not in steps.names:
        return values
    labels = steps.names[name]
    if all(isinstance(label, int) for label in labels) and (values >= 0).all():
        return np.array(labels, dtype=np.int64)[values]
    return np.array([*map(str, labels), ""])[values]
