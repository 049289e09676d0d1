"""Fusion: one model of the outcome, fitted on the recorded runs and on every branch paid for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace as changed
from typing import Any, Literal, NamedTuple

import numpy as np

from counterpoint import groups
from counterpoint.branches import Branches, Spent
from counterpoint.credit.interactions import MOST_ORDER, Choice, Sought
from counterpoint.credit.outcome_model import (
    Runs,
    by_group,
    choice_of,
    contrasts,
    fitted,
    joined,
)
from counterpoint.credit.protocols import Harness, Replay, needed
from counterpoint.credit.purchase import Order, Record, bought, informative, plain, record
from counterpoint.credit.replayed import due, measured
from counterpoint.credit.robust import errors, remaining, robust
from counterpoint.groups import Bools, Floats, Ints
from counterpoint.ledger import Credit
from counterpoint.spelling import Refused
from counterpoint.steps import Steps

Correction = Literal["auto", "always", "never"]

SWEEPS = 4
"""What is spent where nobody says: as much as four siblings at every turn, the default of C3."""


def fusion(
    steps: Steps,
    *,
    replay: Replay | Harness | None = None,
    budget: int | None = None,
    correction: Correction = "auto",
    order: int | None = None,
    ridge: float | None = None,
    rounds: int = 4,
    folds: int = 4,
    seed: int = 0,
) -> Credit:
    """A model of the outcome from recorded runs and branches together, and what it says of acts.

    Estimates `seqau`: Q(h, a) − V(h).

        R ≈ m(choices)        ridge on all combinations of choices up to an order, group by group
        A = Q̂(h, a) − Σ_a' π(a' | h) Q̂(h, a')      Q̂: m with all later acts drawn from the policies
        A' = W − mean over branches of W_b           where its variance is below the bias² of A
        W = R − Σ_{j>k} D_j,  W_b = R_b − Σ_{j≥k} D_j,  D = m(h, a) − Σ_a' π(a' | h) m(h, a')

    A choice is (agent, how-manieth of its turns, label). Order and λ are those of the least error
    on runs that were left out, over all groups together; groups share nothing else. A' is a doubly
    robust contrast: with m fitted on other rollouts it is unbiased whatever m is, since the mean of
    D given its history is 0, and m only takes variance off. Under m = constant it is C3.

    The first part of the budget draws acts anew at every turn; each later part goes, branch by
    branch, where it takes most off the model's error in all credits per call of the environment
    (acts are put in then), or again to plain branches while no model beats the mean.

    Source: this project's own. A' is the sequential form (Burch et al. 2018, arXiv:1612.06915) of
    augmented inverse propensity weighting (Robins et al. 1994), with propensities that are known;
    with `correction="always"` and `order=1` it stands for the estimator of arXiv:2606.05263, whose
    exact form was not at hand.

    Args:
        steps: rows with `group`, `rollout`, `step`, `agent`, `outcome`, `mask`.
        replay: what runs them again; its menus say what could be chosen. One that also tells the
            turns of its branches (`credit.protocols.Retelling`) teaches the model more.
        budget: calls of the environment, one for each turn that is left; by default what C3 takes
            for four siblings a turn. Branches that turn out dearer than the record can exceed it by
            that much. 0 is none: the model of the recorded runs alone.
        correction: "auto" as above; "always" gives A' everywhere, from plain branches alone, which
            is unbiased; "never" leaves the model as it is.
        order: how many choices may interact, 0 for none at all; by default it is found.
        ridge: λ, above 0, in units of the prior variance of a run; by default it is found.
        rounds: parts of the budget, between which model and plan are made anew.
        folds: of the rollouts of a group, for A'.
        seed: of all draws and folds.

    Returns:
        Credit per turn with parts model (A), value (V̂), corrected (A' − A where it was added, else
        0), n (plain branches of the turn). Masked rows and unscored rollouts are never credited
        (NaN). An act without a label or a menu has A = 0, so only branches can credit it. Where the
        noise of outcomes cannot be told from the model's bias, since no act was seen twice in one
        history, A' is taken. Empty steps give empty credit. Diagnostics say order, ridge, r2 (share
        of the spread that the model predicts on runs it did not see), plain and put_in (branches of
        either kind), corrected_share, and what was spent.

    Raises:
        Refused: no replay; a group with fewer than two scored rollouts; agents of one rollout with
            outcomes of their own; an option out of range; "always" with a budget that does not pay
            for one branch of every turn.
    """
    runner, rows = needed(replay, "fusion"), due(steps, rounds=rounds, folds=folds - 1)
    _check(steps, budget, correction, order, ridge)
    held, sought = record(steps, runner, seed), Sought(order, ridge)
    sweep = float(held.price[rows].sum())
    money = sweep * SWEEPS if budget is None else float(budget)
    if correction == "always":
        money, rounds = _whole_sweeps(money, sweep), 1
    pool = _gathered(held, runner, money, sought, rounds, seed)
    estimate = _estimated(held, pool.runs, correction, sought, folds)
    return _credit(steps, rows, held, pool, estimate, correction)


def _check(
    steps: Steps, budget: int | None, correction: str, order: int | None, ridge: float | None
) -> None:
    if correction not in ("auto", "always", "never"):
        raise Refused(f"correction is {correction!r}; it is 'auto', 'always' or 'never'")
    if budget is not None and budget < 0:
        raise Refused(f"budget is {budget}; it is a number of environment calls, from 0")
    if order is not None and not 0 <= order <= MOST_ORDER:
        raise Refused(f"order is {order}; it is a whole number from 0 to {MOST_ORDER}")
    if ridge is not None and not 0 < ridge < np.inf:
        raise Refused(f"ridge is {ridge!r}; it is a number above 0")
    if steps.cell is not steps.rollout:
        raise Refused(
            "the agents of a rollout have outcomes of their own; fusion explains one outcome of "
            "the team"
        )
    _, _, scored = steps.moments(steps.outcome)
    if (scored == 1).any():
        name = steps.names["group"][int(np.argmax(scored == 1))]
        raise Refused(
            f"group {name!r} has one scored rollout, and a model of the outcome needs two; give it "
            "more, or take c3, which compares with branches alone"
        )


def _whole_sweeps(money: float, sweep: float) -> float:
    """What whole rounds of one branch at every turn cost, as far as the budget pays for them."""
    if sweep and money < sweep:
        raise Refused(
            f"a correction everywhere takes one branch of every turn, {sweep:.0f} calls of the "
            f"environment, and the budget is {money:.0f}; raise it, or take correction='auto'"
        )
    return money // sweep * sweep if sweep else 0.0


# ---------------------------------------------------------------------------------------------
# Buying


class Pool(NamedTuple):
    """All runs, recorded and branched, and the branches as they came."""

    runs: Runs
    found: list[Branches]


def _gathered(
    held: Record, replay: Replay, money: float, sought: Sought, rounds: int, seed: int
) -> Pool:
    """Spend the budget, a part of it at a time, the first on plain branches."""
    runs, found = held.runs, [Branches.of(np.zeros((0, 1)), Spent(), exact=True)]
    taken = np.zeros(len(held.steps), dtype=np.int64)
    for left in range(rounds, 0, -1):
        part = money / left
        wanted = (
            plain(held, taken, part) if left == rounds else _wanted(held, runs, taken, part, sought)
        )
        if not len(wanted.row):
            continue
        more, came = bought(held, replay, wanted, taken, seed)
        runs, found = joined(runs, more), found + came
        spent = sum((each.spent for each in came), Spent()).env_calls
        ran = any(each.leaves.any() for each in came)  # else it was only priced
        money -= spent if ran else float(held.price[wanted.row].sum())
    return Pool(runs, found)


def _wanted(held: Record, runs: Runs, taken: Ints, money: float, sought: Sought) -> Order:
    """Which branches the next part goes to: each group gets as much as its turns cost, and what the
    model has no use for goes to plain ones.
    """
    parts = by_group(runs)
    choice = choice_of(parts, sought)
    if not (choice.order and held.due.any()):
        return plain(held, taken, money)
    price = groups.total(held.steps.group[held.due], held.price[held.due], held.steps.n_groups)
    orders = [
        informative(held, each, choice, money * price[each.group] / price.sum()) for each in parts
    ]
    orders.append(plain(held, taken, money - sum(held.price[each.row].sum() for each in orders)))
    return Order(*(np.concatenate(column) for column in zip(*orders, strict=True)))


# ---------------------------------------------------------------------------------------------
# Estimating


class Estimate(NamedTuple):
    """Of each row of the steps: A, V̂, A', plain branches, the variance of A' and the bias² of A."""

    model: Floats
    value: Floats
    robust: Floats
    n: Floats
    variance: Floats
    bias2: Floats
    choice: Choice


def _estimated(
    held: Record, runs: Runs, correction: Correction, sought: Sought, folds: int
) -> Estimate:
    parts = by_group(runs)
    choice = choice_of(parts, sought)
    gain, value = np.full((2, len(held.row), runs.agent.shape[1]), np.nan)
    for each in parts:
        found = contrasts(fitted(each, choice), each)
        recorded = each.runs.turn < 0
        for table, part in zip((gain, value), found, strict=True):
            table[each.runs.origin[recorded]] = part[recorded]
    gain = np.nan_to_num(gain)
    other, n, variance, bias2 = np.full((4, *gain.shape), np.nan)
    if correction != "never":
        left = remaining(parts, runs, sought, folds)
        other, n = robust(runs, left, gain.shape)
        variance, bias2 = errors(parts, runs, left, other - gain, n)
    gain, value, other, n, variance, bias2 = (
        _to_rows(held, part) for part in (gain, value, other, n, variance, bias2)
    )
    return Estimate(gain, value, other, n, variance, bias2, choice)


def _to_rows(held: Record, table: Floats) -> Floats:
    """(rows,) what stands at each row's run and turn."""
    out = np.full(len(held.steps), np.nan)
    there = held.row >= 0
    out[held.row[there]] = table[:, : held.row.shape[1]][there]
    return out


# ---------------------------------------------------------------------------------------------
# What comes back


def _credit(
    steps: Steps, rows: Ints, held: Record, pool: Pool, found: Estimate, correction: Correction
) -> Credit:
    model, other = found.model[rows], found.robust[rows]
    used: Bools = ~np.isnan(other)
    if correction == "auto":
        used &= found.variance[rows] < found.bias2[rows]
    added = np.where(used, other - model, 0.0)
    values = model + (other - model if correction == "always" else added)
    branched = pool.runs.turn >= 0
    said: dict[str, Any] = {
        "order": found.choice.order,
        "ridge": found.choice.penalty,
        "r2": found.choice.r2,
        "plain": int(np.count_nonzero(branched & pool.runs.plain)),
        "put_in": int(np.count_nonzero(branched & ~pool.runs.plain)),
        "corrected_share": float(used.mean()) if len(rows) else 0.0,
    }
    parts = {"model": model, "value": found.value[rows], "corrected": added, "n": found.n[rows]}
    credit = measured(steps, rows, values, "seqau", parts, pool.found, **said)
    advice = (*credit.diagnostics.get("advice", ()), *_advice(found, pool, rows, held))
    about = {**credit.diagnostics, **({"advice": advice} if advice else {})}
    identified = credit.identified if used.all() and len(rows) else "assumption:outcome_model"
    return changed(credit, identified=identified, diagnostics=about)


def _advice(found: Estimate, pool: Pool, rows: Ints, held: Record) -> Iterator[str]:
    """What a person should look at, in sentences."""
    if not len(rows):
        return
    if not (pool.runs.turn >= 0).any():
        yield "nothing was branched: this is what a model of the recorded runs alone says"
    if not found.choice.order:
        yield (
            "no model of the choices predicts outcomes better than their mean, so the model says 0 "
            "everywhere and only branches speak"
        )
    blind = np.count_nonzero(np.isnan(held.runs.probs).all(axis=2) & (held.row >= 0))
    if blind:
        yield f"{blind} turns have no menu with probabilities: only branches can credit them"
