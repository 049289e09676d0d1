"""The slow, obvious oracle for tests: play a task in every way that menus and draws allow."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from counterpoint.harness import Run, header_of, next_event, team_of
from counterpoint.policies import Output
from counterpoint.schema import Trace


class Way(NamedTuple):
    """One way: the trace, the probability of its draws, (role, anchor, label) of its choices."""

    trace: Trace
    p: float
    choices: tuple


class _Odometer:
    """Counts through all ways: each choice point is a wheel, met in the order of play."""

    def __init__(self):
        self.wheels, self.at = [], 0

    def turn(self, size):
        if self.at == len(self.wheels):
            self.wheels.append([0, size])
        self.at += 1
        return self.wheels[self.at - 1][0]

    def next(self):
        self.at = 0
        while self.wheels and self.wheels[-1][0] + 1 == self.wheels[-1][1]:
            self.wheels.pop()
        if self.wheels:
            self.wheels[-1][0] += 1
        return bool(self.wheels)


class _Dealt(Run):
    """A run whose tools draw what they are dealt."""

    def __init__(self, header, env, team, odometer):
        super().__init__(header, env, team)
        self.odometer, self.p = odometer, 1.0

    def draws(self, domain, owner, k, asked_at):
        return self if domain == "tool" else super().draws(domain, owner, k, asked_at)

    def choice(self, p):
        taken = self.odometer.turn(len(p))
        self.p *= p[taken]
        return taken


def every_way(env, group: int = 0, choose: Callable | None = None) -> Iterator[Way]:
    """All runs of a task; `choose(role, anchor, labels)` fixes choices, without it all are made."""
    odometer, choices = _Odometer(), []

    def play(observation, legal, draws):
        labels = list(legal)
        if choose is None:
            label = labels[odometer.turn(len(labels))]
        else:
            label = choose(observation.role, observation.anchor, labels)
        choices.append((observation.role, observation.anchor, label))
        return Output(legal[label])

    team = team_of(env, play)
    header = header_of(env, team, group=group, rollout=0, seed=0)
    more = True
    while more:
        choices.clear()
        env.reset(header.task_seed)
        run = _Dealt(header, env, team, odometer)
        while (event := next_event(run)) is not None:
            run.emit(event)
        yield Way(run.trace(), run.p, tuple(choices))
        more = odometer.next()


class _Open(Exception):
    """A choice that no table entry fixes yet."""


def ceiling(env, groups, fixed=None) -> tuple[float, dict]:
    """The best mean outcome over some tasks of any deterministic table (role, anchor) → label.

    Tables are listed lazily: an entry is branched on when play first meets it.
    """
    table = fixed or {}

    def choose(role, anchor, labels):
        if (role, anchor) not in table:
            raise _Open(role, anchor, labels)
        return table[role, anchor]

    try:
        worth = [sum(w.p * w.trace.outcome for w in every_way(env, g, choose)) for g in groups]
    except _Open as met:
        role, anchor, labels = met.args
        tables = [{**table, (role, anchor): label} for label in labels]
        return max((ceiling(env, groups, t) for t in tables), key=lambda found: found[0])
    return sum(worth) / len(worth), table
