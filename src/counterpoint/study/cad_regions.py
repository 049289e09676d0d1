"""Where CAD-GRPO, COSAC, C3 and fusion each win: regions, what was expected, and what was found.

`REGIONS` was written down before the study ran for the first time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from counterpoint.study.cad import Cell, Found

RIVALS = ("cad", "cosac", "c3", "fusion")
"""What stands for its kind at equal calls: CAD is the better of its two forms there."""


class Region(NamedTuple):
    """Cells that are alike, and which method was expected to win there, with the reason."""

    holds: Callable[[Cell], bool]
    expected: str
    why: str


REGIONS: dict[str, Region] = {
    "hacked proxy": Region(
        lambda c: c.proxy in ("self_report", "call_count", "padding"),
        "cosac",
        "the proxy says nothing, and COSAC asks none",
    ),
    "mediated proxy": Region(
        lambda c: c.proxy == "mediated",
        "fusion",
        "a q that holds what others did shares the outcome out wrongly",
    ),
    "noisy proxy": Region(
        lambda c: c.error > 0, "cosac", "an error on q shrinks β, and COSAC asks for no q"
    ),
    "all or nothing": Region(
        lambda c: c.game in ("T3", "T4", "T5"),
        "fusion",
        "what an act is worth hangs on the others, which no sum of shares says",
    ),
    "pairs of agents": Region(
        lambda c: c.game == "T17", "fusion", "an interaction of two is one step above a sum"
    ),
    "confounded or gated": Region(
        lambda c: c.game in ("T6", "T10"), "c3", "branches are drawn by the experimenter"
    ),
    "few runs": Region(
        lambda c: c.groups <= 4 or c.G <= 4, "fusion", "a model of few runs needs its branches"
    ),
    "sums, nobody reacts": Region(
        lambda c: c.dep == 0.0, "cad", "the proxy is the act's own part, and β is 1"
    ),
    "sums, later agents react": Region(
        lambda c: True, "cosac", "it adds what the act makes later agents choose"
    ),
}
"""Name → region; a cell belongs to the first that holds."""


def region_of(cell: Cell) -> str:
    """The name of the first region that holds."""
    return next(name for name, region in REGIONS.items() if region.holds(cell))


def cell_of(found: Found) -> Cell:
    """The cell that was run."""
    return Cell(*(found.rows[0][name] for name in Cell._fields))


def errors(found: Found) -> dict[str, float]:
    """Mean squared error to seqau of each rival at equal calls."""
    mse = {row["method"]: row["mse"] for row in found.rows if row["calls"] is not None}
    kinds = {
        "cad": ("cad_upstream", "cad_equal"),
        "cosac": ("cosac",),
        "c3": ("c3_4",),
        "fusion": ("fusion",),
    }
    there = {kind: [mse[name] for name in names if name in mse] for kind, names in kinds.items()}
    return {kind: min(values) for kind, values in there.items() if values}


def use_this_when(cells: Sequence[Found]) -> list[dict[str, Any]]:
    """One row per region: how often each rival won, and whether that was expected."""
    rows = []
    for name, region in REGIONS.items():
        held = [errors(found) for found in cells if region_of(cell_of(found)) == name]
        held = [each for each in held if len(each) > 1]
        if not held:
            continue
        won = [min(each, key=each.__getitem__) for each in held]
        shares = {rival: won.count(rival) / len(won) for rival in RIVALS}
        best = max(shares, key=shares.__getitem__)
        rows.append(
            {
                "region": name,
                "cells": len(held),
                **shares,
                "wins most": best,
                "expected": region.expected,
                "because": region.why,
            }
        )
    return rows


def aim(cells: Sequence[Found]) -> dict[str, Any]:
    """Fusion against the best of the other three at equal calls.

    Returns:
        cells; half: share in which its error is at most half of the best one's; kept: share of the
        others in which it is at most 1.1 of it; losses: names of the cells in which it is more.
    """
    held = [(cell_of(found), errors(found)) for found in cells]
    held = [(cell, each) for cell, each in held if "fusion" in each and len(each) > 1]
    ratio = np.array(
        [
            each["fusion"] / _floor(min(v for k, v in each.items() if k != "fusion"))
            for _, each in held
        ]
    )
    half, kept = ratio <= 0.5, ratio <= 1.1
    rest = ~half
    return {
        "cells": len(held),
        "half": float(half.mean()) if len(held) else None,
        "kept": float(kept[rest].mean()) if rest.any() else None,
        "losses": [cell.name for (cell, _), bad in zip(held, ~kept, strict=True) if bad],
    }


def _floor(mse: float) -> float:
    """Below this an error is rounding, and no ratio of two of them means anything."""
    return max(mse, 1e-12)
