"""Does the gate work? Whether its figures tell the cells in which CAD-GRPO beats RLOO.

Half of the kinds of cells set a threshold for each figure, the other half judge it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from counterpoint.groups import Bools, Floats
from counterpoint.study.cad import Found

FORMS = ("upstream", "shared", "equal", "drop")


def beats(found: Found, form: str) -> bool:
    """Whether the form has the higher correlation with seqau, from the same rollouts.

    Not the smaller squared error: RLOO's is large in any case, being that of the whole outcome, and
    what hands out little beats it without knowing anything.
    """
    r = {row["method"]: _number(row["pearson"]) for row in found.rows if row["calls"] is None}
    return r[f"cad_{form}"] > r["rloo"]


def judged_gate(cells: Sequence[Found]) -> dict[str, Any]:
    """What `gate.json` holds.

    Returns:
        auc: form → figure → area under the ROC curve for "CAD beats RLOO on this cell", on the
        cells of the second half; None where all of them beat, or none does. thresholds: form →
        figure → where the first half is told apart best, and the share of the second half that
        it tells right, the mean of both kinds. wins: form → share of all cells in which it beats.
        cells_train, cells_test: how many of each.
    """
    kinds = sorted({_kind(found) for found in cells})
    second = np.array([kinds.index(_kind(found)) % 2 == 1 for found in cells])
    figures = list(cells[0].gate)
    values = np.array([[_number(found.gate[name]) for name in figures] for found in cells])
    auc: dict[str, Any] = {}
    thresholds: dict[str, Any] = {}
    wins = {}
    for form in FORMS:
        won = np.array([beats(found, form) for found in cells])
        wins[form] = float(won.mean())
        auc[form] = {name: area(values[second, at], won[second]) for at, name in enumerate(figures)}
        thresholds[form] = {
            name: _threshold(values[:, at], won, second) for at, name in enumerate(figures)
        }
    return {
        "auc": auc,
        "thresholds": thresholds,
        "wins": wins,
        "cells_train": int((~second).sum()),
        "cells_test": int(second.sum()),
    }


def _kind(found: Found) -> str:
    """The cell but for its seed: draws of one kind stand in one half."""
    row = found.rows[0]
    fields = ("game", "K", "dep", "topology", "turns", "noise", "proxy", "error", "G", "groups")
    return "-".join(str(row[name]) for name in fields)


def _number(value: float | None) -> float:
    """A figure that could not be had counts as the worst."""
    return -np.inf if value is None or not np.isfinite(value) else value


def area(score: Floats, won: Bools) -> float | None:
    """Area under the ROC curve: how often a cell that won has the higher score than one that did
    not; equal scores count half (Hanley and McNeil, 1982). None where either kind is missing.
    """
    yes, no = score[won], score[~won]
    if not len(yes) or not len(no):
        return None
    higher = (yes[:, None] > no[None]).mean() + (yes[:, None] == no[None]).mean() / 2
    return float(higher)


def _threshold(score: Floats, won: Bools, second: Bools) -> dict[str, float | None]:
    """The cut that tells the first half apart best, and how well it does on both halves."""
    first = ~second
    cuts = np.unique(score[first][np.isfinite(score[first])])
    told = [_balanced(score[first] >= cut, won[first]) for cut in cuts]
    if not told or all(each is None for each in told):
        return {"cut": None, "train": None, "test": None}
    best = int(np.argmax([-1.0 if each is None else each for each in told]))
    return {
        "cut": float(cuts[best]),
        "train": told[best],
        "test": _balanced(score[second] >= cuts[best], won[second]),
    }


def _balanced(said: Bools, won: Bools) -> float | None:
    """Mean of the shares told right among those that won and among those that did not."""
    if won.all() or not won.any():
        return None
    return float((said[won].mean() + (~said[~won]).mean()) / 2)
