"""Doubly robust contrasts: a run against its branches, less what a model puts down to luck.

With known propensities this is augmented inverse propensity weighting, turn after turn; the model
may be anything, as long as it did not see the rollout.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from counterpoint import groups
from counterpoint.credit.interactions import Sought
from counterpoint.credit.outcome_model import (
    Group,
    Runs,
    choice_of,
    fitted,
    later,
    luck,
)
from counterpoint.groups import Floats, Ints

SURE = 2.0
"""Standard errors that are taken off an estimated bias² before anything is corrected for it."""


def remaining(parts: list[Group], runs: Runs, sought: Sought, folds: int) -> Floats:
    """(runs, T + 1) W: the outcome without what the acts from turn t on owe to luck, as a model
    says that was fitted on other rollouts of the group and their branches.
    """
    lucky = np.zeros(runs.agent.shape)
    fold: list[Ints] = [groups.encode_labels(each.runs.origin)[0] % folds for each in parts]
    for own in range(folds):
        others = [each != own for each in fold]
        choice = choice_of(parts, sought, others)
        for each, use in zip(parts, others, strict=True):
            if use.any() and not use.all():
                mine = np.flatnonzero(~use)
                model, rest = fitted(each, choice, use), later(each, use)
                lucky[each.which[mine]] = luck(
                    model, each.laid.take(mine), each.runs.take(mine), rest
                )
    since = np.flip(np.cumsum(np.flip(lucky, axis=1), axis=1), axis=1)
    return np.asarray(runs.outcome[:, None] - np.pad(since, [(0, 0), (0, 1)]))


def robust(runs: Runs, left: Floats, shape: tuple[int, int]) -> tuple[Floats, Floats]:
    """(recorded runs, T) A' of every turn, NaN without a plain branch, and how many there are."""
    mine = np.flatnonzero(runs.plain & (runs.turn >= 0))
    cell = runs.origin[mine] * shape[1] + runs.turn[mine]
    n = groups.count(cell, shape[0] * shape[1]).reshape(shape)
    mean = groups.mean(cell, left[mine, runs.turn[mine]], n.size).reshape(shape)
    recorded = np.flatnonzero(runs.turn < 0)
    own = np.zeros(shape)
    own[runs.origin[recorded]] = left[recorded, 1:]
    return own - mean, n


def errors(
    parts: list[Group], runs: Runs, left: Floats, off: Floats, n: Floats
) -> tuple[Floats, Floats]:
    """(recorded runs, T) the variance of A', and the bias² of the model, both of a whole turn.

        variance = s² of W within one act in one history + s² of W_b within one history ÷ branches

    `off` is A' − A, whose mean square is bias² and variance together; of the bias² that is
    left, two standard errors are taken off. Where no act was met twice in one history the noise of
    W is unknown, and counts 0.
    """
    variance, bias2 = np.full((2, *off.shape), np.nan)
    for turn in range(off.shape[1]):
        acts, histories = _Spread(0.0, 0), _Spread(0.0, 0)
        for each in parts:
            on = (each.laid.node[:, turn] >= 0) & each.runs.plain & (each.runs.turn <= turn)
            node, label = each.laid.node[on, turn], each.runs.label[on, turn]
            own = np.where(label < 0, label.max(initial=0) + 1 + np.arange(len(label)), label)
            acts = acts.plus(_within(groups.pair(node, own), left[each.which[on], turn + 1]))
            histories = histories.plus(_within(node, left[each.which[on], turn]))
        there = n[:, turn] > 0
        variance[there, turn] = acts.variance + histories.variance / n[there, turn]
        if there.any():
            each_ = off[there, turn] ** 2 - variance[there, turn]
            unsure = each_.std() / np.sqrt(len(each_))
            bias2[there, turn] = each_.mean() - SURE * unsure
    return variance, bias2


class _Spread(NamedTuple):
    """Sum of squares within cells, and its degrees of freedom."""

    squares: float
    free: int

    def plus(self, other: _Spread) -> _Spread:
        """Both together."""
        return _Spread(self.squares + other.squares, self.free + other.free)

    @property
    def variance(self) -> float:
        """Mean square per degree of freedom; 0 where there is none."""
        return self.squares / self.free if self.free else 0.0


def _within(cell: Ints, x: Floats) -> _Spread:
    codes = groups.pair(np.zeros_like(cell), cell)
    cells = int(codes.max(initial=-1)) + 1
    return _Spread(float(np.sum((x - groups.mean(codes, x, cells)[codes]) ** 2)), len(x) - cells)
