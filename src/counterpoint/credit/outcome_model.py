"""A model of the outcome on what a team chose, and what it says an act is worth under the policies.

The model is a ridge on every combination of choices up to an order: alone, in pairs, in threes. A
choice is (agent, how-manieth of its turns, label). Runs are those of one group, recorded or
branched; nothing is shared between groups but the order and the ridge.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from counterpoint import groups
from counterpoint.credit.interactions import (
    LADDER,
    MOST_ORDER,
    Choice,
    Fit,
    Sought,
    chosen,
    fit,
    held_out,
)
from counterpoint.groups import Bools, Floats, Ints

_UNTOLD = 1e-12
"""What a run that was not told to its end counts beside one that was."""


class Runs(NamedTuple):
    """Runs, T turns long at most; labels, L of them, are those of `Menu.label`.

    Attributes:
        outcome: (runs,).
        group: (runs,) code.
        origin: (runs,) the recorded run that it is, or that it left.
        turn: (runs,) the turn at which it left the record; −1 for the record itself.
        plain: (runs,) whether the act at which it left was drawn from the policy.
        whole: (runs,) whether all of its turns are known.
        agent: (runs, T) who acts, −1 after the end and where it is not known.
        label: (runs, T) what was chosen, −1 where it is not known.
        probs: (runs, T, L) what the policy gives each label, NaN where that is not known.
    """

    outcome: Floats
    group: Ints
    origin: Ints
    turn: Ints
    plain: Bools
    whole: Bools
    agent: Ints
    label: Ints
    probs: Floats

    def take(self, which: Ints) -> Runs:
        """Some of the runs."""
        return Runs(
            self.outcome[which],
            self.group[which],
            self.origin[which],
            self.turn[which],
            self.plain[which],
            self.whole[which],
            self.agent[which],
            self.label[which],
            self.probs[which],
        )


def joined(first: Runs, second: Runs) -> Runs:
    """Two sets of runs as one; the shorter and the narrower are filled up."""
    turns = max(each.agent.shape[1] for each in (first, second))
    labels = max(each.probs.shape[2] for each in (first, second))
    one, two = (filled(each, turns, labels) for each in (first, second))
    return Runs(*(np.concatenate(pair) for pair in zip(one, two, strict=True)))


def filled(runs: Runs, turns: int, labels: int) -> Runs:
    """The runs with more turns, of which nothing is known, and more labels, which nobody chose; as
    many as there are, if that is more.
    """
    more = max(turns - runs.agent.shape[1], 0)
    wide = max(labels - runs.probs.shape[2], 0)
    probs = np.pad(runs.probs, [(0, 0), (0, 0), (0, wide)])
    return runs._replace(
        agent=np.pad(runs.agent, [(0, 0), (0, more)], constant_values=-1),
        label=np.pad(runs.label, [(0, 0), (0, more)], constant_values=-1),
        probs=np.pad(probs, [(0, 0), (0, more), (0, 0)], constant_values=np.nan),
    )


def narrowed(runs: Runs) -> tuple[Runs, Ints]:
    """The runs with only those labels that one of them could have chosen, and which those are; one
    where there is none.
    """
    could = np.nonzero(np.nan_to_num(runs.probs))[2]
    used = np.unique(np.concatenate([could, runs.label[runs.label >= 0]]))
    used = used if len(used) else np.zeros(1, dtype=np.int64)
    back = np.full(runs.probs.shape[2] + 1, -1)
    back[used] = np.arange(len(used))
    return runs._replace(label=back[runs.label], probs=runs.probs[:, :, used]), used


# ---------------------------------------------------------------------------------------------
# What the runs of a group have in common


class Layout(NamedTuple):
    """Runs of one group laid out for the model: S slots, (agent, how-manieth of its turns).

    Attributes:
        slot: (runs, T) whose turn it is, −1 where nobody's.
        node: (runs, T) code of the history before the turn and whose turn it is, −1 likewise.
        took: (runs, T, S, L) the choice of each turn.
        expect: (runs, T, S, L) the same with the policy's probabilities in its place.
    """

    slot: Ints
    node: Ints
    took: Floats
    expect: Floats

    def take(self, which: Ints) -> Layout:
        """Some of the runs."""
        return Layout(self.slot[which], self.node[which], self.took[which], self.expect[which])


def layout(runs: Runs) -> Layout:
    """Lay the runs of one group out."""
    n, turns, labels = runs.probs.shape
    before = [np.sum(runs.agent[:, :t] == runs.agent[:, t : t + 1], axis=1) for t in range(turns)]
    key = runs.agent * (turns + 1) + np.stack(before, axis=1)
    there = runs.agent >= 0
    known, slot = np.unique(key[there], return_inverse=True)
    whose = np.full((n, turns), -1)
    whose[there] = slot
    own = np.zeros((n, turns, labels))
    row, turn = np.nonzero(runs.label >= 0)
    own[row, turn, runs.label[row, turn]] = 1.0
    blind = np.isnan(runs.probs).any(axis=2, keepdims=True)
    likely = np.where(blind, own, np.nan_to_num(runs.probs))
    own = np.where((runs.label < 0)[:, :, None], likely, own)
    place = (whose[:, :, None] == np.arange(len(known))).astype(np.float64)
    took, expect = (np.einsum("nts,ntl->ntsl", place, each) for each in (own, likely))
    return Layout(whose, _nodes(whose, runs.label, labels), took, expect)


def _nodes(slot: Ints, label: Ints, labels: int) -> Ints:
    """(runs, T) codes of histories; what nobody could read is unlike anything else."""
    n, turns = slot.shape
    out, past = np.full((n, turns), -1), np.zeros(n, dtype=np.int64)
    said = np.where(label >= 0, label, labels + np.arange(n)[:, None])
    for turn in range(turns):
        here = groups.pair(past, slot[:, turn] + 1)
        out[:, turn] = np.where(slot[:, turn] >= 0, here, -1)
        past = groups.pair(here, said[:, turn])
    return out


def later(group: Group, use: Bools | None = None) -> Floats:
    """(T + 1, S, L) what is to be expected of all turns from t on, in the group's whole runs."""
    expect = group.laid.expect[_used(group, use) & group.runs.whole]
    each = expect.mean(axis=0) if len(expect) else np.zeros(expect.shape[1:])
    out = np.zeros((len(each) + 1, *each.shape[1:]))
    out[:-1] = np.cumsum(each[::-1], axis=0)[::-1]
    return out


def rows_of(held: Layout, runs: Runs, rest: Floats) -> Floats:
    """(runs, S, L) the runs as rows of the model; of turns that nobody told, what is likely."""
    X = held.took.sum(axis=1)
    ended = np.count_nonzero(held.slot >= 0, axis=1)
    return np.where(runs.whole[:, None, None], X, _with_rest(X, rest[ended]))


def _with_rest(X: Floats, rest: Floats) -> Floats:
    """What is known, and `rest` for the slots of which nothing is."""
    return np.where(X.any(axis=-1, keepdims=True), X, rest)


class Asked(NamedTuple):
    """One turn in all histories that the runs met: N distinct ones.

    Attributes:
        run: (N,) the first run that met each.
        at: (runs,) which of them each run met, −1 for none.
        probs: (N, L) the policy there, as the mean over its runs; NaN where nobody knows it.
        X: (N, L, S, L) a row of the model for each label that might be chosen there.
    """

    run: Ints
    at: Ints
    probs: Floats
    X: Floats


def asked(held: Layout, runs: Runs, rest: Floats, turn: int) -> Asked:
    """The histories before one turn, and the rows that ask what each label is worth there."""
    n, labels = len(held.took), held.took.shape[3]
    there = np.flatnonzero(held.node[:, turn] >= 0)
    _, first, of = np.unique(held.node[there, turn], return_index=True, return_inverse=True)
    run, at = there[first], np.full(n, -1)
    at[there] = of.reshape(-1)
    blind = np.isnan(runs.probs[there, turn]).any(axis=1)
    probs = np.full((len(run), labels), np.nan)
    seen = at[there[~blind]]
    for label in range(labels):
        probs[:, label] = groups.mean(seen, runs.probs[there[~blind], turn, label], len(run))
    past = held.took[run, :turn].sum(axis=1)
    X = np.repeat(past[:, None], labels, axis=1)
    X[np.arange(len(run)), :, held.slot[run, turn]] = np.eye(labels)
    return Asked(run, at, probs, _with_rest(X, rest[turn + 1]))


# ---------------------------------------------------------------------------------------------
# Groups together


class Group(NamedTuple):
    """The runs of one group: its code, which of all runs they are, and how they are laid out; their
    labels are those of `labels`, in its order.
    """

    group: int
    which: Ints
    labels: Ints
    runs: Runs
    laid: Layout


def by_group(runs: Runs) -> list[Group]:
    """Every group that has runs."""
    order = np.argsort(runs.group, kind="stable")
    codes, begin = np.unique(runs.group[order], return_index=True)
    parts = np.split(order, begin[1:])
    out = []
    for code, which in zip(codes.tolist(), parts, strict=False):
        own, labels = narrowed(runs.take(which))
        out.append(Group(code, which, labels, own, layout(own)))
    return out


def fitted(group: Group, choice: Choice, use: Bools | None = None) -> Fit:
    """The model of one group, from all of its runs or from some."""
    on = _used(group, use)
    X = rows_of(group.laid, group.runs, later(group, use))[on]
    return fit(X, group.runs.outcome[on], choice.order, choice.penalty)


def choice_of(parts: list[Group], sought: Sought, use: list[Bools] | None = None) -> Choice:
    """Order and λ of all groups together, from all runs or from some."""
    slots = max((each.laid.took.shape[2] for each in parts), default=0)
    total, runs = np.zeros((min(slots, MOST_ORDER) + 1, len(LADDER))), 0
    for each, on in zip(parts, use or [_used(each, None) for each in parts], strict=True):
        if np.count_nonzero(on) > 1:
            X = rows_of(each.laid, each.runs, later(each, on))[on]
            total += held_out(X, each.runs.outcome[on], len(total) - 1)
            runs += len(X)
    return chosen(total, runs, sought)


def _used(group: Group, use: Bools | None) -> Bools:
    return np.ones(len(group.which), dtype=bool) if use is None else use


# ---------------------------------------------------------------------------------------------
# What acts are worth


def contrasts(model: Fit, group: Group) -> tuple[Floats, Floats]:
    """(runs, T) twice: Q(h, a) − V(h) and V(h), with what comes later drawn from the policies.

    From the last turn back, over all histories that the runs met, where the policies are known;
    beyond them the choices of later turns are taken as independent, with mean probabilities. NaN
    where the policy of a turn is not known, or its label.
    """
    runs, held, rest = group.runs, group.laid, later(group)
    value = model(rows_of(held, runs, rest))
    weight = np.where(runs.whole, 1.0, _UNTOLD)
    gain, level = np.full(held.slot.shape, np.nan), np.full(held.slot.shape, np.nan)
    for turn in reversed(range(held.slot.shape[1])):
        ask = asked(held, runs, rest, turn)
        n, labels = ask.probs.shape
        there = np.flatnonzero((ask.at >= 0) & (runs.label[:, turn] >= 0))
        cell = ask.at[there] * labels + runs.label[there, turn]
        often = groups.total(cell, weight[there], n * labels)
        met = groups.total(cell, weight[there] * value[there], n * labels)
        Q = model(ask.X.reshape(-1, *ask.X.shape[2:]))
        np.divide(met, often, out=Q, where=often > 0)
        V = np.sum(ask.probs * Q.reshape(n, labels), axis=1)
        gain[there, turn] = Q[cell] - V[ask.at[there]]
        on = np.flatnonzero(ask.at >= 0)
        mean = groups.total(ask.at[on], weight[on] * value[on], n)
        mean /= groups.total(ask.at[on], weight[on], n)
        V = np.where(np.isnan(V), mean, V)
        level[on, turn] = value[on] = V[ask.at[on]]
    return gain, level


def luck(model: Fit, held: Layout, runs: Runs, rest: Floats) -> Floats:
    """(runs, T) what each act added to what the model expects, beyond what acts add on average.

        D = m(h, a) − Σ_a' π(a' | h) m(h, a')

    Its mean given h is 0 whatever the model, as long as neither it nor `rest` saw the run. 0 where
    the policy is not known, or the label.
    """
    out = np.zeros(held.slot.shape)
    for turn in range(held.slot.shape[1]):
        ask = asked(held, runs, rest, turn)
        said = model(ask.X.reshape(-1, *ask.X.shape[2:])).reshape(ask.probs.shape)
        on = np.flatnonzero((ask.at >= 0) & (runs.label[:, turn] >= 0))
        here, own = said[ask.at[on]], runs.probs[on, turn]
        added = here[np.arange(len(on)), runs.label[on, turn]] - np.sum(own * here, axis=1)
        out[on, turn] = np.nan_to_num(added)
    return out
