"""Signed blame that adds up: what every act took from the run's prospects, repairs included."""

from __future__ import annotations

from dataclasses import replace as changed

import numpy as np

from counterpoint import groups
from counterpoint.branches import KEEP, RESAMPLE, Branches
from counterpoint.credit.protocols import Harness, Replay, mean_of, needed, places
from counterpoint.credit.replayed import before, due, measured
from counterpoint.groups import Bools, Floats, Ints
from counterpoint.ledger import Credit
from counterpoint.spelling import Refused
from counterpoint.steps import Steps


def blame(
    steps: Steps,
    *,
    replay: Replay | Harness | None = None,
    n: int = 8,
    split: bool = False,
    drop: float = 0.1,
    seed: int = 0,
) -> Credit:
    """Repair-aware credit: how an act moved the value of the run, in failures and in successes.

    Estimates `seqau`: with V(h_T) := R, the outcome,

        b_t = V(h_t) − V(h_{t+1}),  credit −b_t,  Σ_t b_t = V(h₀) − R

    exactly, for any estimate of V. An act that saves what an earlier one spoilt has negative blame.
    V is the expected outcome of the whole run, so rewards on the way are in it.

    Source: potential differences along a trajectory (Ng, Harada and Russell, 1999), read as blame.

    Args:
        steps: rows with `rollout`, `step`, `outcome`, `mask`, and without a replay `value`, the
            expected return from the row on.
        replay: what runs them again; V(h_t) is then the mean of n runs from there.
        n: branches of each row.
        split: also play n runs on from each act, which parts its blame into the agent's own,
            V(h_t) − Q(h_t, a_t), and that of chance, Q(h_t, a_t) − V(h_{t+1}).
        drop: blame above this is a drop; the first of a rollout is labelled.
        seed: of all draws.

    Returns:
        Credit per turn, positive where an act helped, with parts blame, value (V(h_t)), next
        (V(h_{t+1}), R on the last turn), first_drop (1 on the first turn of its rollout whose blame
        exceeds `drop`, else 0) and with `split` agent and chance. first_drop is not the first
        error: a drop can come of a good act's bad luck, and an error that costs nothing is none.
        Masked rows, unscored rollouts and rows without a value are never credited (NaN); what
        happened there falls to the turn before, so the sum still holds from the first value on.

    Raises:
        Refused: no replay and no `value`, or one that is missing on a row; n below 1; split without
            a replay.
    """
    rows = _in_order(steps, due(steps, n=n))
    if replay is None:
        if split:
            raise Refused("blame cannot split off chance from values alone; it needs replay=")
        worth, found = _given(steps, rows), []
    else:
        runner = needed(replay, "blame")
        drawn = _branched(steps, runner, rows, RESAMPLE, n, seed)
        worth, found = mean_of(drawn.values), [drawn]
    known = ~np.isnan(worth)
    at, v = rows[known], worth[known]
    follows = _next(steps, at, v)
    parts = {"blame": v - follows, "value": v, "next": follows}
    parts["first_drop"] = _first(steps, at, parts["blame"] > drop)
    if split:
        kept = _branched(steps, runner, at, KEEP, n, seed)
        q = mean_of(kept.values)
        parts |= {"agent": v - q, "chance": q - follows}
        found.append(kept)
    credit = measured(steps, at, follows - v, "seqau", parts, found)
    missing = len(rows) - len(at)
    about = {**credit.diagnostics, "without_value": missing} if missing else credit.diagnostics
    kind = credit.identified if found else "assumption:true_value"
    return changed(credit, identified=kind, diagnostics=about)


def _given(steps: Steps, rows: Ints) -> Floats:
    worth = before(steps)[rows]
    if np.isnan(worth).any():
        row = int(rows[np.argmax(np.isnan(worth))])
        raise Refused(f"row {row} is trainable and has no value; give one, or mask the row")
    return worth


def _branched(steps: Steps, runner: Replay, rows: Ints, action: int, n: int, seed: int) -> Branches:
    return runner.branch(places(steps, rows), np.full(len(rows), action), n, seed=seed)


def _in_order(steps: Steps, rows: Ints) -> Ints:
    return rows[np.lexsort((steps.step[rows], steps.rollout[rows]))]


def _next(steps: Steps, rows: Ints, worth: Floats) -> Floats:
    """What the run is worth at the next of the rows of its rollout, at the last its outcome."""
    follows = steps.outcome[rows].copy()
    goes_on = np.flatnonzero(groups.same_as_next(steps.rollout[rows]))
    follows[goes_on] = worth[goes_on + 1]
    return follows


def _first(steps: Steps, rows: Ints, drops: Bools) -> Floats:
    """1 on the first row of every rollout that drops, 0 elsewhere."""
    found = np.zeros(len(rows))
    dropped = np.flatnonzero(drops)
    found[dropped[np.unique(steps.rollout[rows[dropped]], return_index=True)[1]]] = 1.0
    return found
