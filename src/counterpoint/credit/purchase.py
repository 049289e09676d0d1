"""Runs for a model of the outcome: those of the record, and which branches to pay for next."""

from __future__ import annotations

from functools import reduce
from typing import NamedTuple

import numpy as np

from counterpoint.branches import RESAMPLE, Branches, Retold
from counterpoint.credit.account import Prices
from counterpoint.credit.interactions import Choice, kernels
from counterpoint.credit.outcome_model import (
    Group,
    Runs,
    asked,
    filled,
    joined,
    later,
    rows_of,
)
from counterpoint.credit.protocols import Replay, places
from counterpoint.groups import Bools, Floats, Ints
from counterpoint.spelling import digest_of
from counterpoint.steps import Steps

_LEARNT = 1e-6
"""A model that is this sure of all credits, in units of its prior variance, asks for nothing."""


class Record(NamedTuple):
    """What was recorded, and what branches of it cost.

    Attributes:
        steps, runs: the table, and its scored rollouts as the model reads them.
        row: (runs, T) the row of each turn, −1 after the end.
        due: (rows,) whether a row is to be credited.
        label: (rows, A) the label of each entry of a row's menu, −1 beyond it.
        price: (rows,) calls of the environment that a branch takes.
        rank: (rows,) an order of the rows in which no row number has a say.
    """

    steps: Steps
    runs: Runs
    row: Ints
    due: Bools
    label: Ints
    price: Floats
    rank: Ints


def record(steps: Steps, replay: Replay, seed: int) -> Record:
    """Read the scored rollouts, with the menus that the replay tells."""
    rows = steps.order[~np.isnan(steps.outcome[steps.order])]
    at = places(steps, np.arange(len(steps)))
    menu = replay.menu(at)
    width = np.arange(max(menu.probs.shape[1], 1))
    label = np.where(width < menu.size[:, None], width, -1)
    label = label if menu.label is None else menu.label
    probs = np.zeros((len(steps), int(label.max(initial=0)) + 1))
    row, entry = np.nonzero(label >= 0)
    np.add.at(probs, (row, label[row, entry]), menu.probs[row, entry])
    probs[menu.size == 0] = np.nan
    said = np.where(menu.taken < 0, -1, label[np.arange(len(steps)), np.maximum(menu.taken, 0)])
    _, run = np.unique(steps.rollout[rows], return_inverse=True)
    turn = np.arange(len(rows)) - np.searchsorted(run, run)
    table = np.full((int(run.max(initial=-1)) + 1, int(turn.max(initial=0)) + 1), -1)
    table[run, turn] = rows
    table = table[np.argsort(_ranked(steps, table[:, 0], seed), kind="stable")]
    there, first = table >= 0, table[:, 0]
    runs = Runs(
        outcome=steps.outcome[first],
        group=steps.group[first],
        origin=np.arange(len(table)),
        turn=np.full(len(table), -1),
        plain=np.ones(len(table), dtype=bool),
        whole=np.ones(len(table), dtype=bool),
        agent=np.where(there, steps.agent[table], -1),
        label=np.where(there, said[table], -1),
        probs=np.where(there[:, :, None], probs[table], np.nan),
    )
    due = steps.mask & ~np.isnan(steps.outcome)
    price = Prices(steps).of_branch(at, np.full(len(steps), RESAMPLE), "anew")[:, 0]
    return Record(
        steps, runs, table, due, label, price, _ranked(steps, np.arange(len(steps)), seed)
    )


def _ranked(steps: Steps, rows: Ints, seed: int) -> Ints:
    """Where each row stands in the order of a hash of (seed, group, rollout, step)."""
    keys = [
        digest_of(
            f"{seed}\x1f{steps.label('group', row)}\x1f{steps.label('rollout', row)}"
            f"\x1f{steps.step[row]}".encode(errors="replace")
        )
        for row in rows.tolist()
    ]
    rank = np.empty(len(keys), dtype=np.int64)
    rank[sorted(range(len(keys)), key=keys.__getitem__)] = np.arange(len(keys))
    return rank


# ---------------------------------------------------------------------------------------------
# Where to branch


class Order(NamedTuple):
    """Branches to be run: (branches,) rows of the steps, and entries of menus or RESAMPLE."""

    row: Ints
    action: Ints


def plain(held: Record, taken: Ints, budget: float) -> Order:
    """Acts drawn anew, first where the fewest branches are, as many as the budget pays for."""
    rows = np.flatnonzero(held.due)
    sweep = held.price[rows].sum()
    times = int(budget // sweep) + 2 if sweep else 0
    row = np.tile(rows, times)
    level = taken[row] + np.repeat(np.arange(times), len(rows))
    row = row[np.lexsort((held.rank[row], level))]
    row = row[np.cumsum(held.price[row]) <= budget]
    return Order(row, np.full(len(row), RESAMPLE))


def informative(held: Record, group: Group, choice: Choice, budget: float) -> Order:
    """For one group, one branch after another where it takes most error off all credits per call.

    The model's error after the runs so far is Gaussian with the kernel as prior; an outcome more
    changes it in a known way whatever that outcome is (A-optimal design; Chaloner and Verdinelli,
    1995). Acts are put in, not drawn. What later turns will be is taken as their mean.
    """
    asks = _candidates(held, group)
    if not len(asks.row):
        return Order(asks.row, asks.entry)
    same = asks.history[:, None] == asks.history
    wanted = np.sqrt(asks.often)[:, None] * (np.eye(len(same)) - same * asks.prob)
    error = _error(asks, rows_of(group.laid, group.runs, later(group)), choice)
    noise, cost = max(choice.penalty, _LEARNT), held.price[asks.row]
    off, picks = wanted @ error, list[int]()
    while np.sum(off * wanted) > _LEARNT * asks.often.sum():
        gain = np.sum(off**2, axis=0) / (noise + np.diagonal(error)) / cost
        gain[cost > budget] = 0.0
        best = int(np.argmax(gain))
        if gain[best] <= 0:
            break
        picks.append(best)
        budget -= cost[best]
        step = error[best] / (noise + error[best, best])
        off, error = off - np.outer(off[:, best], step), error - np.outer(error[best], step)
    return Order(asks.row[picks], asks.entry[picks])


def _error(asks: _Candidates, X: Floats, choice: Choice) -> Floats:
    """(candidates, candidates) covariance of the model's error, after the runs `X`."""

    def shared(x: Floats, y: Floats) -> Floats:
        return kernels(x, y, choice.order)[-1] + 1.0  # 1 for the constant

    flat, n = np.unique(X.reshape(len(X), -1), axis=0, return_counts=True)
    X = flat.reshape(-1, *X.shape[1:])
    noise = np.diag(max(choice.penalty, _LEARNT) / n)
    across = shared(X, asks.X)
    known = across.T @ np.linalg.solve(shared(X, X) + noise, across)
    return shared(asks.X, asks.X) - known + np.diag(asks.hidden)


class _Candidates(NamedTuple):
    """Every label that might be chosen in every history with a row to credit: C of them.

    Attributes:
        row, entry: (C,) a row with that history, and the entry of its menu.
        X: (C, S, L) its row of the model.
        history: (C,) code of the history.
        prob: (C,) what the policy gives it.
        often: (C,) how many rows to credit chose it there.
        hidden: (C,) variance of what later turns will be, where nobody has seen them.
    """

    row: Ints
    entry: Ints
    X: Floats
    history: Ints
    prob: Floats
    often: Floats
    hidden: Floats


def _candidates(held: Record, group: Group) -> _Candidates:
    runs, laid, rest = group.runs, group.laid, later(group)
    slots, labels = laid.took.shape[2:]
    own, parts, unsure = np.flatnonzero(runs.turn < 0), list[_Candidates](), 0.0
    for turn in reversed(range(held.row.shape[1])):
        ask = asked(laid, runs, rest, turn)
        row, at = held.row[runs.origin[own], turn], ask.at[own]
        on = (row >= 0) & (at >= 0) & held.due[row]
        node, first, of = np.unique(at[on], return_index=True, return_inverse=True)
        probs = ask.probs[node]
        which, label = np.nonzero(probs > 0)
        entry = np.argmax(held.label[row[on][first][which]] == group.labels[label][:, None], axis=1)
        met = np.zeros(ask.probs.shape, dtype=bool)
        seen = np.flatnonzero((ask.at >= 0) & (runs.label[:, turn] >= 0))
        met[ask.at[seen], runs.label[seen, turn]] = True
        took = np.zeros((len(node), labels))
        known = runs.label[own, turn][on] >= 0
        np.add.at(took, (of.reshape(-1)[known], runs.label[own, turn][on][known]), 1.0)
        parts.append(
            _Candidates(
                row=row[on][first][which],
                entry=entry,
                X=ask.X[node[which], label],
                history=node[which] * held.row.shape[1] + turn,
                prob=probs[which, label],
                often=took[which, label],
                hidden=np.where(met[node[which], label], 0.0, unsure),
            )
        )
        there = ask.probs[~np.isnan(ask.probs).any(axis=1)]
        unsure += float(there.var(axis=0).sum()) / slots if len(there) else 0.0
    return _Candidates(*(np.concatenate(column) for column in zip(*parts, strict=True)))


# ---------------------------------------------------------------------------------------------
# What was bought


def bought(
    held: Record, replay: Replay, order: Order, taken: Ints, seed: int
) -> tuple[Runs, list[Branches]]:
    """Run the branches; a place's are numbered in the order in which they are bought, and counted
    in `taken` (rows,), in place. Those that cannot be run are left out.
    """
    again = np.zeros(len(order.row), dtype=np.int64)
    by_row = np.argsort(order.row, kind="stable")
    again[by_row] = np.arange(len(by_row)) - np.searchsorted(order.row[by_row], order.row[by_row])
    number = taken[order.row] + again
    np.add.at(taken, order.row, 1)
    parts, found = [], []
    for each in np.unique(number).tolist():
        which = number == each
        row, action = order.row[which], order.action[which]
        at = places(held.steps, row)
        branches = replay.branch(at, action, 1, start=each, seed=seed)
        retell = getattr(replay, "retell", None)
        names = held.steps.names["agent"]
        told = retell and retell(at, action, 1, agents=names, start=each, seed=seed)
        runs = _branched(held, row, branches, told)._replace(plain=action == RESAMPLE)
        parts.append(runs.take(np.flatnonzero(~np.isnan(runs.outcome))))
        found.append(branches)
    none = held.runs.take(np.zeros(0, dtype=np.int64))
    return reduce(joined, parts, none), found


def _branched(held: Record, row: Ints, found: Branches, told: Retold | None) -> Runs:
    """The runs that branches at these rows ended in: what went before, and what was told since."""
    origin, turn = _where(held, row)
    past, since = held.runs.take(origin), _since(held, row, found, told)
    before = np.arange(past.agent.shape[1]) < turn[:, None]
    cut = past._replace(
        outcome=found.values[:, 0],
        turn=turn,
        whole=since.whole,
        agent=np.where(before, past.agent, -1),
        label=np.where(before, past.label, -1),
        probs=np.where(before[:, :, None], past.probs, np.nan),
    )
    turns = int(turn.max(initial=0)) + since.agent.shape[1]
    run = filled(cut, max(turns, cut.agent.shape[1]), since.probs.shape[2])
    each, at = np.arange(len(row))[:, None], turn[:, None] + np.arange(since.agent.shape[1])
    run.agent[each, at], run.label[each, at] = since.agent, since.label
    run.probs[each, at] = filled(since, since.agent.shape[1], run.probs.shape[2]).probs
    return run


def _since(held: Record, row: Ints, found: Branches, told: Retold | None) -> Runs:
    """Branches from their place on: as they were told, or else their first turn alone."""
    origin, turn = _where(held, row)
    drawn = found.drawn[:, 0]
    label = np.where(drawn < 0, -1, held.label[row, np.maximum(drawn, 0)])
    first = held.runs.take(origin)._replace(
        whole=np.zeros(len(row), dtype=bool),
        agent=held.steps.agent[row][:, None],
        label=label[:, None],
        probs=held.runs.probs[origin, turn][:, None],
    )
    if told is None:
        return first
    first = filled(first, told.agent.shape[2], told.probs.shape[3])
    whole = told.agent[:, 0, 0] >= 0
    probs = np.full(first.probs.shape, np.nan)
    probs[:, :, : told.probs.shape[3]] = told.probs[:, 0]
    return first._replace(
        whole=whole,
        agent=np.where(whole[:, None], told.agent[:, 0], first.agent),
        label=np.where(whole[:, None], told.label[:, 0], first.label),
        probs=np.where(whole[:, None, None], probs, first.probs),
    )


def _where(held: Record, row: Ints) -> tuple[Ints, Ints]:
    """Which run of the record, and which of its turns, each row is."""
    place = np.full((len(held.steps), 2), -1)
    run, turn = np.nonzero(held.row >= 0)
    place[held.row[run, turn]] = np.column_stack([run, turn])
    return place[row, 0], place[row, 1]
