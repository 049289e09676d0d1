"""Credit of several levels added up: the plain weighted sum, or parts that say each thing once."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations, pairwise
from typing import Any, Literal

import numpy as np

from counterpoint import groups
from counterpoint.credit.grouped import only_trainable
from counterpoint.groups import Bools, Floats, Ints
from counterpoint.ledger import Credit
from counterpoint.spelling import Refused
from counterpoint.steps import Steps

LEVELS: tuple[str, ...] = ("team", "role", "agent", "turn")
"""From coarse to fine: the cells of each lie in cells of the one before."""


def stack(
    steps: Steps,
    levels: Mapping[str, Credit],
    weights: Mapping[str, float] | None = None,
    *,
    partition: bool = False,
    by: Literal["event", "agent"] = "event",
    minimum: int = 0,
) -> Credit:
    """Add up the credit of several levels: team, role, agent, turn.

    Plainly, A = A_team + Σ_l w_l x^(l), which is GiGPO for its two parts. What the levels have in
    common is then counted once for each of them. With `partition` every level adds only what it
    says within the cells of the level above it:

        B^(l) = P_l x^(l) − P_{l−1} x^(l),    A = A_team + Σ_l w_l B^(l)

    P_l y is the m-weighted mean of y over the rows of a rollout that share their role, their role
    and agent, or stand alone (turn); P_0 is the mean over the rollout. The weights m of a rollout
    sum to 1. So for any x, w, m: P_{l−1} B^(l) = 0, the m-weighted mean of A over a rollout is
    A_team, and the B of two levels are orthogonal under m.

    Source: this project's own decomposition; it is the analysis of variance of nested cells
    (Scheffé 1959, The Analysis of Variance, ch. 5). The plain sum: GiGPO (arXiv:2505.10978, eq. 8).

    Args:
        steps: the rows that were credited.
        levels: credit per turn by level, `team` and any of role, agent, turn.
        weights: w by level, 1 where none is given; the team's is 1.
        partition: whether each level adds its contrasts alone.
        by: m is 1 ÷ credited rows of the rollout ("event"), or spread evenly over its agents, then
            over the rows of each ("agent").
        minimum: a level is left out where its median row is compared with fewer rollouts than this
            (its own included).

    Returns:
        Credit per turn with a part for every level, as it was added, and `shared`: Σ w P_0 x, what
        the plain sum counts twice and the partition leaves out. Masked rows and rows without team
        credit are NaN; in the plain sum a level that did not credit a row adds nothing there.
        Diagnostics by level: `samples`, how many rollouts the median row is compared with (rows of
        its group at the same role, agent, or anchor); `comparable`, the share of rows that are
        compared with another rollout at all; `double_counted`, the share of Σ m x² that is P_0 x;
        `discarded`, the share of it that did not go in; `missing`, rows that it did not credit.
        `aliases` are pairs of levels with the same cells, `dropped` levels under `minimum`.

    Raises:
        Refused: no team level, an unknown one, another number of rows, a weight that is no number;
            with `partition`, team credit that differs within a rollout, or a level that did not
            credit a row that the team credits.

    A sum that conserves the team's credit is not for that an unbiased gradient. With n agents that
    act once each, equal m and x = seqau, its expectation is 1 + w(1 − 1/n) times the policy
    gradient; with removal scores it is biased.
    """
    _check(steps, levels, weights or {}, by)
    team = only_trainable(steps, levels["team"].values.copy())
    on = ~np.isnan(team)
    about = {name: _samples(steps, on, name) for name in LEVELS if name in levels}
    kept = [name for name in about if name == "team" or about[name]["samples"] >= minimum]
    cells = _cells(steps, kept)
    if partition:
        _check_partition(steps, team, levels, kept)
    m = _shares(steps, on, by)
    values, shared = team.copy(), np.where(on, 0.0, np.nan)
    parts: dict[str, Floats] = {"team": team}
    for above, name in pairwise(kept):
        w = float((weights or {}).get(name, 1.0))
        x = np.where(on, np.nan_to_num(levels[name].values), 0.0)
        whole = mean_in(steps.rollout, x, m)
        part = mean_in(cells[name], x, m) - mean_in(cells[above], x, m) if partition else x
        values += w * part
        shared += w * whole
        parts[name] = np.where(on, w * part, np.nan)
        missing = np.isnan(levels[name].values) & on
        about[name] |= {**_kept(x, whole, part, m), "missing": int(np.count_nonzero(missing))}
    return Credit(
        values,
        estimand="+".join(dict.fromkeys(levels[name].estimand for name in kept)),
        parts={**parts, "shared": shared, "m": m},
        diagnostics={
            "effective_sample_size": levels["team"].diagnostics.get("effective_sample_size", 0),
            "levels": about,
            "aliases": _aliases(cells, on),
            "dropped": [name for name in about if name not in kept],
        },
    )


def _check(
    steps: Steps, levels: Mapping[str, Credit], weights: Mapping[str, float], by: str
) -> None:
    for name in (*levels, *weights):
        if name not in LEVELS:
            raise Refused(f"there is no level {name!r}; the levels are {', '.join(LEVELS)}")
    if "team" not in levels or "team" in weights:
        raise Refused("levels are added to the team's, which is among them and has weight 1")
    for name, credit in levels.items():
        if len(credit) != len(steps):
            raise Refused(
                f"level {name} has {len(credit)} values where there are {len(steps)} rows"
            )
    for name, weight in weights.items():
        if not np.isfinite(weight) or name not in levels:
            raise Refused(f"the weight of {name} is {weight!r}; it is a number, of a level given")
    if by not in ("event", "agent"):
        raise Refused(f"by is {by!r}; it is 'event' or 'agent'")


def _check_partition(
    steps: Steps, team: Floats, levels: Mapping[str, Credit], kept: list[str]
) -> None:
    on = np.flatnonzero(~np.isnan(team))
    one = np.zeros(steps.n_rollouts)
    one[steps.rollout[on[::-1]]] = team[on[::-1]]
    differs = one[steps.rollout[on]] != team[on]
    if differs.any():
        row = int(on[np.argmax(differs)])
        raise Refused(
            f"row {row}: the team's credit differs from another row of its rollout; a partition "
            "shares out one number per rollout"
        )
    for name in kept:
        missing = np.isnan(levels[name].values[on])
        if missing.any():
            row = int(on[np.argmax(missing)])
            raise Refused(
                f"row {row} has team credit and none of level {name}; a partition needs both, so "
                "mask the row or leave the level out"
            )


def _cells(steps: Steps, kept: list[str]) -> dict[str, Ints]:
    """(rows,) codes of the cells of each level; labels that cross become cells of their pairs."""
    cells = {"team": steps.rollout}
    for above, name in pairwise(kept):
        own = np.arange(len(steps)) if name == "turn" else getattr(steps, name)
        cells[name] = own if name == "turn" else groups.pair(cells[above], own)
    return cells


def _shares(steps: Steps, on: Bools, by: str) -> Floats:
    """The weights m: those of a rollout sum to 1; 0 where there is no team credit."""
    cell = steps.rollout if by == "event" else groups.pair(steps.rollout, steps.agent)
    n = int(cell.max(initial=-1)) + 1
    size = groups.count(cell[on], n)
    home = np.zeros(n, dtype=np.int64)
    home[cell] = steps.rollout
    cells = groups.count(home[size > 0], steps.n_rollouts)
    return np.divide(1.0, (size * cells[home]).take(cell), out=np.zeros(len(on)), where=on)


def mean_in(cell: Ints, x: Floats, m: Floats) -> Floats:
    """P y: the m-weighted mean of each row's cell, shape (rows,); 0 in a cell without weight."""
    n = int(cell.max(initial=-1)) + 1
    weight = groups.total(cell, m, n)
    summed = groups.total(cell, m * x, n)
    return np.divide(summed, weight, out=np.zeros(n), where=weight > 0).take(cell)


def _kept(x: Floats, whole: Floats, part: Floats, m: Floats) -> dict[str, float]:
    size = float(np.sum(m * x**2))
    double, lost = float(np.sum(m * whole**2)), float(np.sum(m * (x - part) ** 2))
    return {
        "double_counted": double / size if size else 0.0,
        "discarded": lost / size if size else 0.0,
    }


def _samples(steps: Steps, on: Bools, level: str) -> dict[str, Any]:
    """How many rollouts a row of this level is compared with, and how many rows with any other."""
    cell = steps.group
    if level == "turn":
        anchor = np.full(len(on), -1) if steps.anchor is None else steps.anchor
        alone = len(steps.names.get("anchor", ())) + np.arange(len(on))
        actor = groups.pair(groups.pair(cell, steps.agent), steps.role)
        cell = groups.pair(actor, np.where(anchor < 0, alone, anchor))
    elif level != "team":
        cell = groups.pair(cell, getattr(steps, level))
    rollouts = groups.pair(cell[on], steps.rollout[on])
    home = np.zeros(int(rollouts.max(initial=-1)) + 1, dtype=np.int64)
    home[rollouts] = cell[on]
    each = np.bincount(home, minlength=1)[cell[on]] if on.any() else np.zeros(1)
    return {"samples": float(np.median(each)), "comparable": float(np.mean(each > 1))}


def _aliases(cells: Mapping[str, Ints], on: Bools) -> list[str]:
    """Levels whose cells are the same: they are nested, so as many cells are the same cells."""
    size = {name: len(np.unique(cell[on])) for name, cell in cells.items()}
    return [f"{one} = {two}" for one, two in combinations(size, 2) if size[one] == size[two]]
